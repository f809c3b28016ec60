"""The most memory that a rollout run takes. memory.py [--rollouts 200000]

The run answers that many prompts in one call each, from an endpoint on this machine that answers at once; the same call again finds all of
them done. Prints one JSON line and exits with 1 if either took more than 150 MB.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "rollouts"))

from common import endpoint, ours, write_project

LIMIT_MB = 150


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=200_000)
    num = parser.parse_args().rollouts
    with (
        tempfile.TemporaryDirectory() as name,
        endpoint("--latency", "0", "--turns", "0") as (url, _),
    ):
        write_project(Path(name), num)
        figures = ours(Path(name), url, concurrency=64, tools="none")
        again = ours(Path(name), url, concurrency=64, tools="none")
    if figures["succeeded"] != num or again["calls"]:
        raise SystemExit(f"{num} rollouts: {figures}, again: {again}")
    most = max(figures["rss_mb"], again["rss_mb"])
    print(
        json.dumps(
            {
                "promise": "constant memory",
                "figure": f"{most} MB at {num:,} rollouts, {again['rss_mb']} MB when all are done",
                "mb": most,
                "s": figures["wall_s"],
                "passed": most <= LIMIT_MB,
            }
        )
    )
    sys.exit(most > LIMIT_MB)


if __name__ == "__main__":
    main()
