"""Training steps on a CPU, ours beside TRL's trainers, on the same tokens in the same batches.

    python benchmarks/training/run.py --peers-python PYTHON [--works sft-32k,…] [--repeats 3]

PYTHON has trl, datasets and what ours needs; both sides run in it, in turns, one thread each.
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

from work import WORKS, save_model

HERE = Path(__file__).parent
ENGINE = HERE.parents[1] / "engine"
SIDES = ("ours", "trl")
LIMIT_S = 900


def measured(python: str, who: str, work: str, folder: Path, steps: int) -> dict[str, Any]:
    """Returns what one process measured. Raises CalledProcessError with what it said."""
    command = [python, str(HERE / "measure.py"), who, work, str(folder), "--steps", str(steps)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONPATH": str(ENGINE),
    }
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, check=True
    )
    # TRL tells its own figures on the same stream.
    return json.loads(done.stdout.splitlines()[-1])


def table_row(work: str, lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns medians of both sides, and the largest gap of the losses of the same step."""
    by_side = {who: [line for line in lines if line["who"] == who] for who in SIDES}
    middle = {
        who: {
            key: statistics.median(line[key] for line in found)
            for key in ("tokens_per_cpu_s", "peak_mb")
        }
        for who, found in by_side.items()
    }
    losses = zip(by_side["ours"][0]["losses"], by_side["trl"][0]["losses"], strict=True)
    ours, theirs = middle["ours"], middle["trl"]
    return {
        "table": work,
        "ours": ours,
        "trl": theirs,
        "faster": round(ours["tokens_per_cpu_s"] / theirs["tokens_per_cpu_s"], 2),
        "memory": round(ours["peak_mb"] / theirs["peak_mb"], 2),
        "largest_loss_gap": round(max(abs(a - b) for a, b in losses), 6),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peers-python", required=True)
    parser.add_argument("--works", default=",".join(WORKS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="after one of warm-up")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        for work in args.works.split(","):
            folder = save_model(WORKS[work].shape, Path(root))
            lines: list[dict[str, Any]] = []
            for _ in range(args.repeats):
                for who in SIDES:
                    lines.append(measured(args.peers_python, who, work, folder, args.steps))
                    print(json.dumps(lines[-1]), flush=True)
            print(json.dumps(table_row(work, lines)), flush=True)


if __name__ == "__main__":
    main()
