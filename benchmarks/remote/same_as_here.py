"""The demo's chain with training and evaluation on a machine behind sshd, beside the same chain here: is anything different?

    .venv/bin/python benchmarks/remote/same_as_here.py [--smoke]

Both are driven by the demo's MCP client. Weights, evaluations, comparisons and the names in the lineage must be the same; what a run recorded
of itself may differ in times, sizes of logs and ids only. Prints a JSON line; exits with 1 if anything else differs.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from scene import machine, report

from stillroom import api
from stillroom.run_folder import all_runs
from stillroom.settings import Workspace


def demo(folder: Path, *, is_smoke: bool, where: str | None) -> str:
    command = [sys.executable, "-P", "-m", "stillroom_mcp", "demo", str(folder)]
    command += ["--smoke"] if is_smoke else []
    command += ["--where", where] if where else []
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)  # fmt: skip
    if done.returncode:
        raise SystemExit(f"the demo ended with {done.returncode}:\n{done.stdout[-4000:]}")
    return done.stdout


def named_runs(root: Path) -> dict[str, Path]:
    """The runs of a project by what they are, which is the same in both."""
    found = {}
    for folder in all_runs(Workspace(root)):
        request = folder.read_request()
        config = request.request.get("config") or ""
        found[f"{request.kind} {request.request.get('name') or config}"] = folder.path
    return found


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


def lineage(root: Path, run: Path) -> Any:
    shown = api.show_lineage(Workspace(root), api.ShowLineage(path=run.name))
    import msgspec

    return msgspec.to_builtins(shown)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    differences, figures = [], {}
    with machine() as scene:
        roots = {"here": scene.space.root / "demo-here", "there": scene.space.root / "demo-there"}
        for name, root in roots.items():
            began = time.monotonic()
            demo(root, is_smoke=options.smoke, where="box" if name == "there" else None)
            figures[f"{name}_s"] = round(time.monotonic() - began)
        runs = {name: named_runs(root) for name, root in roots.items()}
        if runs["here"].keys() != runs["there"].keys():
            differences.append(f"runs: {sorted(runs['here'].keys() ^ runs['there'].keys())}")
        same_weights = 0
        for key in sorted(runs["here"].keys() & runs["there"].keys()):
            here, there = runs["here"][key], runs["there"][key]
            if weights(here) != weights(there):
                differences.append(f"{key}: weights")
            same_weights += weights(here) is not None and weights(here) == weights(there)
            for file in (
                "evaluation.json",
                "evaluation.json.manifest.json",
                "rollouts.jsonl.manifest.json",
                "checkpoints/final/stillroom.json",
                "checkpoints/final/stillroom.manifest.json",
                "config.json",
            ):
                if not (here / file).exists() and not (there / file).exists():
                    continue
                pair = [
                    without_ids(json.loads((run / file).read_bytes()), roots[side], runs[side])
                    for side, run in (("here", here), ("there", there))
                ]
                if pair[0] != pair[1]:
                    differences.append(f"{key}: {file}")
                    print(
                        key,
                        file,
                        json.dumps(pair[0])[:3000],
                        json.dumps(pair[1])[:3000],
                        sep="\n",
                        file=sys.stderr,
                    )
        last = next(key for key in runs["here"] if key.startswith("distill"))
        lines = [
            without_ids(lineage(roots[side], runs[side][last]), roots[side], runs[side])
            for side in roots
        ]
        if lines[0] != lines[1]:
            differences.append("lineage")
            print(
                json.dumps(lines[0], indent=1)[:3000],
                json.dumps(lines[1], indent=1)[:3000],
                file=sys.stderr,
            )
        figures |= {"same_weights": same_weights, "runs": len(runs["here"])}
        has_report = [(root / "report.html").exists() for root in roots.values()]
        if not all(has_report):
            differences.append("a report is missing")
    return report("same as here", passed=not differences, differences=differences, **figures)


if __name__ == "__main__":
    sys.exit(main())
