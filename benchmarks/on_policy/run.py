"""On-policy distillation on a CPU, ours beside TRL's DistillationTrainer, in turns.

    python benchmarks/on_policy/run.py --peers-python PYTHON [--works generate-tools,…] [--repeats 3]

PYTHON has trl, datasets and what ours needs; both sides run in it, one thread each.
Prints a JSON line a measurement, then one a row of the table: medians, and ours over TRL's.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from work import WORKS, save_models

HERE = Path(__file__).parent
ENGINE = HERE.parents[1] / "engine"
SIDES = ("ours", "trl")
LIMIT_S = 1800


def measured(
    python: str, who: str, work: str, folders: tuple[Path, Path], steps: int
) -> dict[str, Any]:
    """Returns what one process measured. Raises CalledProcessError with what it said."""
    command = [python, str(HERE / "measure.py"), who, work, *map(str, folders)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONPATH": str(ENGINE),
    }
    done = subprocess.run(
        [*command, "--steps", str(steps)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    # TRL tells its own figures on the same stream.
    return json.loads(done.stdout.splitlines()[-1])


def table_row(work: str, lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns medians of both sides; where the tokens are given, how far the losses are apart."""
    middle = {
        who: {
            key: statistics.median(line[key] for line in lines if line["who"] == who)
            for key in ("tokens_per_cpu_s", "peak_mb")
        }
        for who in SIDES
    }
    ours, theirs = middle["ours"], middle["trl"]
    row = {
        "table": work,
        "ours": ours,
        "trl": theirs,
        "faster": round(ours["tokens_per_cpu_s"] / theirs["tokens_per_cpu_s"], 2),
        "memory": round(ours["peak_mb"] / theirs["peak_mb"], 2),
    }
    if WORKS[work].phase == "update":
        both = [next(line["losses"] for line in lines if line["who"] == who) for who in SIDES]
        gaps = [abs(a - b) for a, b in zip(*both, strict=True)]
        row["largest_loss_gap"] = round(max(gaps), 6)
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peers-python", required=True)
    parser.add_argument("--works", default=",".join(WORKS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="after one of warm-up")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        for work in args.works.split(","):
            folders = save_models(WORKS[work].shape, Path(root))
            lines: list[dict[str, Any]] = []
            for _ in range(args.repeats):
                for who in SIDES:
                    lines.append(measured(args.peers_python, who, work, folders, args.steps))
                    print(json.dumps(lines[-1]), flush=True)
            print(json.dumps(table_row(work, lines)), flush=True)


if __name__ == "__main__":
    main()
