"""The demo's models trained and evaluated on a machine behind sshd, beside the same here: is anything different?

    .venv/bin/python benchmarks/remote/same_as_here.py [--smoke]

The demo is run here; then each of its trainings and evaluations is done again on the machine, from the same rows. Weights, evaluations, manifests
and the names in the lineage must be the same, and a comparison of the two evaluations must find nothing; times, speeds and ids may differ. The
demo itself is then run with `--where`, whose own rollouts come in another order. Prints a JSON line; exits with 1 if anything else differs.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
from scene import Scene, machine, report

from stillroom import api
from stillroom.run_folder import RunFolder, all_runs, find_run
from stillroom.settings import Workspace


def demo(folder: Path, *, is_smoke: bool, where: str | None) -> str:
    command = [sys.executable, "-P", "-m", "stillroom_mcp", "demo", str(folder)]
    command += ["--smoke"] if is_smoke else []
    command += ["--where", where] if where else []
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)  # fmt: skip
    if done.returncode:
        raise SystemExit(f"the demo ended with {done.returncode}:\n{done.stdout[-4000:]}")
    return done.stdout


def named_runs(space: Workspace) -> dict[str, RunFolder]:
    """The runs of a project by what they are: the kind, and the name or config."""
    found = {}
    for folder in all_runs(space):
        request = folder.read_request()
        found[f"{request.kind} {request.request.get('name') or request.request.get('config')}"] = (
            folder
        )
    return found


def again_there(scene: Scene, space: Workspace, here: dict[str, RunFolder]) -> dict[str, RunFolder]:
    """Does every training and evaluation again on the machine, each on what was made there before."""
    # What a teacher's probabilities are kept in would be sent along; they are to be computed there.
    shutil.rmtree(space.root / "teacher_probabilities", ignore_errors=True)
    there = dict[str, RunFolder]()
    names = [name for name in here if name.startswith("sft")]
    names += [name for name in here if name.startswith("distill")]
    names += [name for name in here if name.startswith("evaluate")]
    for name in names:
        text = json.dumps(here[name].read_request().request)
        for done, folder in there.items():
            text = text.replace(here[done].run_id, folder.run_id)
        request = json.loads(text)
        if name.startswith("evaluate"):
            begun = api.evaluate_model(space, api.EvaluateModel(**request, where="box"))
        else:
            begun = api.start_training(space, api.StartTraining(**request, where="box"))
        ended = scene.wait_for_end(begun.run_id, 900)
        if ended.status != "succeeded":
            raise SystemExit(f"{name} there: {ended.status}: {ended.error}")
        there[name] = find_run(space, begun.run_id)
    return there


def weights(run: Path) -> str | None:
    files = sorted((run / "checkpoints/final").glob("*model*.safetensors"))
    return (
        hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest() if files else None
    )


def without_ids(value: Any, root: Path, runs: dict[str, Path]) -> Any:
    """A document with each run's id replaced by its name, without times and what hashes hold times."""
    text = json.dumps(value, sort_keys=True).replace(str(root), "ROOT")
    for name, path in runs.items():
        text = text.replace(path.name, name)
    document = json.loads(text)
    return stripped(document)


TIMES = {
    "created_at",
    "seconds",
    "duration_s",
    "started_at",
    "ended_at",
    "sha256",
    "num_bytes",
    "tokens_per_second",
    "folder",
    "elapsed_s",
}


def stripped(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            k: stripped(v)
            for k, v in value.items()
            if k not in TIMES and not k.endswith(("_s", "_seconds", "per_second"))
        }
    return [stripped(item) for item in value] if isinstance(value, list) else value


def lineage(space: Workspace, run: Path) -> Any:
    return msgspec.to_builtins(api.show_lineage(space, api.ShowLineage(path=run.name)))


FILES = (
    "evaluation.json", "evaluation.json.manifest.json", "rollouts.jsonl.manifest.json", "config.json",
    "checkpoints/final/stillroom.json", "checkpoints/final/stillroom.manifest.json",
)  # fmt: skip


def differences_of(
    space: Workspace, here: dict[str, RunFolder], there: dict[str, RunFolder]
) -> list[str]:
    found = []
    named = [
        {name: folder.path for name, folder in runs.items()} for runs in (here, {**here, **there})
    ]
    for name, folder in there.items():
        pair = here[name].path, folder.path
        if weights(pair[0]) != weights(pair[1]):
            found.append(f"{name}: weights")
        for file in FILES:
            if any((run / file).exists() for run in pair):
                one, other = (
                    without_ids(json.loads((run / file).read_bytes()), space.root, names)
                    for run, names in zip(pair, named, strict=True)
                )
                if one != other:
                    found.append(f"{name}: {file}")
                    print(
                        name,
                        file,
                        json.dumps(one)[:2000],
                        json.dumps(other)[:2000],
                        sep="\n",
                        file=sys.stderr,
                    )
        if name.startswith("distill"):
            one, other = (
                without_ids(lineage(space, runs[name].path), space.root, names)
                for runs, names in zip((here, there), named, strict=True)
            )
            if one != other:
                found.append("lineage")
                print(json.dumps(one)[:3000], json.dumps(other)[:3000], sep="\n", file=sys.stderr)
        if name.startswith("evaluate"):
            request = api.CompareEvaluations(
                baseline=here[name].run_id, candidates=(folder.run_id,)
            )
            compared = api.compare_evaluations(space, request).comparisons[0]
            if compared.difference.value != 0:
                found.append(f"{name}: {compared.difference}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    # As many threads here as a program gets there: they decide how sums are rounded.
    os.environ.pop("OMP_NUM_THREADS", None)
    with machine() as scene:
        seconds = {}
        for where, name in ((None, "here"), ("box", "there")):
            began = time.monotonic()
            demo(scene.space.root / name, is_smoke=options.smoke, where=where)
            seconds[f"demo_{name}_s"] = round(time.monotonic() - began)
        scene.space = Workspace(scene.space.root / "here")
        here = named_runs(scene.space)
        there = again_there(scene, scene.space, here)
        differences = differences_of(scene.space, here, there)
        num_weights = sum(weights(folder.path) is not None for folder in there.values())
    return report(
        "same as here", passed=not differences, differences=differences,
        trainings=num_weights, evaluations=len(there) - num_weights, **seconds,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
