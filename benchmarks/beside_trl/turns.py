"""Both sides measured in turns, each time in a process of its own, and the table that follows."""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENGINE = Path(__file__).parents[2] / "engine"
SIDES = ("ours", "trl")


@dataclass(frozen=True)
class Bench:
    """What is measured beside TRL."""

    script: Path
    """Measures one side: `script {ours,trl} WORK FOLDERS… --steps N`."""
    works: Mapping[str, Any]
    save_models: Callable[[str, Path], Sequence[Path]]
    """Returns the folders of a work's models; the same for the same work."""
    has_same_tokens: Callable[[str], bool]
    """Whether both sides learn the same tokens in a work, so that their losses must agree."""
    limit_s: float


def measured(bench: Bench, python: str, who: str, work: str, more: Sequence[str]) -> dict[str, Any]:
    """Returns what one process measured. Raises CalledProcessError with what it said."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONPATH": str(ENGINE),
    }
    done = subprocess.run(
        [python, str(bench.script), who, work, *more],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=bench.limit_s,
        check=True,
    )
    # TRL tells its own figures on the same stream.
    return json.loads(done.stdout.splitlines()[-1])


def table_row(work: str, lines: list[dict[str, Any]], *, has_same_tokens: bool) -> dict[str, Any]:
    """Returns medians of both sides; where the tokens are the same, how far the losses differ."""
    middle = {
        who: {
            key: statistics.median(line[key] for line in lines if line["who"] == who)
            for key in ("tokens_per_cpu_s", "peak_mb")
        }
        for who in SIDES
    }
    ours, reference = middle["ours"], middle["trl"]
    row = {
        "table": work,
        "ours": ours,
        "trl": reference,
        "faster": round(ours["tokens_per_cpu_s"] / reference["tokens_per_cpu_s"], 2),
        "memory": round(ours["peak_mb"] / reference["peak_mb"], 2),
    }
    if has_same_tokens:
        both = [next(line["losses"] for line in lines if line["who"] == who) for who in SIDES]
        gaps = [abs(a - b) for a, b in zip(*both, strict=True)]
        row["largest_loss_gap"] = round(max(gaps), 6)
    return row


def run(bench: Bench) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peers-python", required=True)
    parser.add_argument("--works", default=",".join(bench.works))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="after one of warm-up")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        for work in args.works.split(","):
            folders = bench.save_models(work, Path(root))
            more = [*map(str, folders), "--steps", str(args.steps)]
            lines: list[dict[str, Any]] = []
            for _ in range(args.repeats):
                for who in SIDES:
                    lines.append(measured(bench, args.peers_python, who, work, more))
                    print(json.dumps(lines[-1]), flush=True)
            row = table_row(work, lines, has_same_tokens=bench.has_same_tokens(work))
            print(json.dumps(row), flush=True)
