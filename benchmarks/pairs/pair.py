"""Does a job with run_recipe and with the script, both at once on a core each, and judges both.

    pair.py FOLDER [--job texts] [--world tickets] [--seed 1] [--budget-usd 0.40] [--minutes 40]

job: `texts` for a teacher to answer (script.py), or `logs` with its answers (script_logs.py).

Prints a JSON line: for each side the accuracy on the hidden texts, what its teacher has billed, its
minutes, and the paired difference in accuracy (ours less the script's) with a 95 % interval.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from worlds import NUM_HIDDEN, WORLDS

from stillroom.evaluate.intervals import mean_estimate
from stillroom.processes import end_process

HERE = Path(__file__).parent
SIDES = ("recipe", "script")
PINNED = shutil.which("taskset") or "taskset"
SPARE_MINUTES = 30
"""How much longer than its minutes a side may take before it is stopped."""


@contextmanager
def teacher_of(job: Path) -> Iterator[str]:
    """Serves the teacher of a job for the block; yields its base_url."""
    command = [sys.executable, str(HERE / "teacher.py"), str(job)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["base_url"]
    finally:
        end_process(process)


def command_of(side: str, job: Path, base_url: str, options: argparse.Namespace) -> list[str]:
    """Returns the command that does a job."""
    minutes = ["--minutes", str(options.minutes)]
    limits = [*minutes, "--budget-usd", str(options.budget_usd)]
    is_logs = options.job == "logs"
    if side == "script" and is_logs:
        return [sys.executable, str(HERE / "script_logs.py"), str(job), *minutes]
    if side == "script":
        return [sys.executable, str(HERE / "script.py"), str(job), "--base-url", base_url, *limits]
    settings = json.loads((job / "job.json").read_text(encoding="utf-8"))
    price = {
        "input": settings["prices"]["input_usd_per_million"],
        "output": settings["prices"]["output_usd_per_million"],
    }
    (job / "prices.yml").write_text(json.dumps({settings["teacher"]: price}), encoding="utf-8")
    program = str(Path(sys.executable).with_name("stillroom"))
    common = [
        "--labelled", "labelled.csv", "--student", settings["student"], "--output", "out", "--json",
        "--workspace", str(job),
    ]  # fmt: skip
    if is_logs:
        return [program, "distil", "--input", "logs", *common, *minutes]
    teacher = ["--teacher", settings["teacher"], "--base-url", base_url]
    system = ["--system", settings["system"]]
    return [program, "distil", "--input", "inputs.csv", *teacher, *system, *common, *limits]


def start(side: str, command: list[str], job: Path) -> subprocess.Popen[bytes]:
    """Starts a side on a processor of its own."""
    core = str(SIDES.index(side) % (os.cpu_count() or 1))
    environment = {
        **os.environ, "OPENAI_API_KEY": "none", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"
    }  # fmt: skip
    with (job / "stdout.txt").open("wb") as out, (job / "stderr.txt").open("wb") as errors:
        return subprocess.Popen(
            [PINNED, "-c", core, *command], env=environment, stdout=out, stderr=errors
        )


def judged(side: str, job: Path) -> dict[str, Any]:
    """Returns what the judge says of a side's model."""
    if side == "recipe":
        lines = (job / "stdout.txt").read_text(encoding="utf-8").splitlines()
        result = json.loads(lines[-1])["result"]
        model = {"path": str(job / result["folder"])}
        if result["system"] == "":
            model["system"] = None
        elif result["system"] is not None:
            model["system"] = (job / "out" / "system.txt").read_text(encoding="utf-8")
        (job / "model.json").write_text(json.dumps(model), encoding="utf-8")
    command = [sys.executable, str(HERE / "judge.py"), str(job)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=True)
    return json.loads(done.stdout)


def billed(base_url: str) -> dict[str, Any]:
    """Returns what a teacher has billed."""
    with urllib.request.urlopen(f"{base_url.removesuffix('/v1')}/billed", timeout=60) as reply:
        return json.load(reply)


def main() -> None:
    """Does the job twice and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--job", default="texts", choices=("texts", "logs"))
    parser.add_argument("--world", default="tickets", choices=WORLDS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--budget-usd", type=float, default=0.40)
    parser.add_argument("--minutes", type=float, default=40)
    options = parser.parse_args()
    figures: dict[str, Any] = {"job": options.job, "world": options.world, "seed": options.seed}
    figures |= {"budget_usd": options.budget_usd, "minutes": options.minutes}
    with ExitStack() as stack:
        jobs, urls, processes = dict[str, Path](), dict[str, str](), {}
        for side in SIDES:
            folder = options.folder.resolve() / side
            make = [sys.executable, str(HERE / "worlds.py"), str(folder), "--world", options.world]
            subprocess.run(
                [*make, "--seed", str(options.seed)], check=True, stdout=subprocess.DEVNULL
            )
            jobs[side] = folder / "job"
            if options.job == "logs":
                subprocess.run([sys.executable, str(HERE / "logs.py"), str(jobs[side])], check=True)
            urls[side] = stack.enter_context(teacher_of(jobs[side]))
        begun = time.monotonic()
        for side in SIDES:
            command = command_of(side, jobs[side], urls[side], options)
            processes[side] = start(side, command, jobs[side])
            stack.callback(end_process, processes[side])
        deadline, ended = begun + 60 * (options.minutes + SPARE_MINUTES), dict[str, float]()
        while len(ended) < len(SIDES) and time.monotonic() < deadline:
            for side, process in processes.items():
                if side not in ended and process.poll() is not None:
                    ended[side] = time.monotonic() - begun
            time.sleep(1)
        for side in SIDES:
            figures[side] = {
                "minutes": round(ended.get(side, float("inf")) / 60, 1),
                "billed": billed(urls[side]),
                **judged(side, jobs[side]),
            }
    for kind in NUM_HIDDEN:
        ours, theirs = (figures[side][kind]["solved"] for side in SIDES)
        gaps = [int(a) - int(b) for a, b in zip(ours, theirs, strict=True)]
        estimate = mean_estimate(gaps, limits=(-1.0, 1.0))
        figures[f"difference on {kind}"] = [
            round(value or 0.0, 4) for value in (estimate.value, estimate.low, estimate.high)
        ]
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
