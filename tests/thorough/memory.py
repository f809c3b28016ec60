"""The most memory that a rollout run takes, by its number of rollouts. memory.py [--rollouts 5000 20000] [--at 200000]

Each run answers that many prompts in one call each, from an endpoint on this machine that answers at once. From the two largest runs the
memory at --at rollouts is extrapolated, unless one of them has as many. Prints one JSON line and exits with 1 if that is over 150 MB.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "rollouts"))

from common import endpoint, ours, write_project

LIMIT_MB = 150


def run_of(num: int) -> dict[str, float]:
    with (
        tempfile.TemporaryDirectory() as name,
        endpoint("--latency", "0", "--turns", "0") as (url, _),
    ):
        write_project(Path(name), num)
        figures = ours(Path(name), url, concurrency=64, tools="none")
        # The same call again, which finds all of them done.
        again = ours(Path(name), url, concurrency=64, tools="none")
    if figures["succeeded"] != num or again["calls"]:
        raise SystemExit(f"{num} rollouts: {figures}, again: {again}")
    return {
        "rollouts": num,
        "mb": figures["rss_mb"],
        "mb_again": again["rss_mb"],
        "s": figures["wall_s"],
    }


def at(runs: list[dict[str, float]], key: str, num: int) -> float:
    """Returns the memory at `num` rollouts, on the line through the two largest runs."""
    (x0, y0), (x1, y1) = [(run["rollouts"], run[key]) for run in runs[-2:]]
    return round(y1 + (y1 - y0) / (x1 - x0) * (num - x1), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, nargs="+", default=[5000, 20_000])
    parser.add_argument("--at", type=int, default=200_000)
    options = parser.parse_args()
    runs = [run_of(num) for num in sorted(options.rollouts)]
    most = max(at(runs, key, options.at) for key in ("mb", "mb_again"))
    kind = "measured" if runs[-1]["rollouts"] == options.at else "extrapolated"
    print(
        json.dumps(
            {
                "promise": "constant memory",
                "figure": f"{most} MB at {options.at:,} rollouts ({kind})",
                "mb": most,
                "runs": runs,
                "passed": most <= LIMIT_MB,
            }
        )
    )
    sys.exit(most > LIMIT_MB)


if __name__ == "__main__":
    main()
