"""2,000 rollouts of 4 calls, 50 ms each, 256 at once, beside a hand loop and inspect_ai in one run.

throughput.py [--peers PYTHON] [--n 2000]: PYTHON is an interpreter with `openai` and `inspect-ai` installed. The ideal
is calls x latency / 256. Peers call a function of their own process as the tool; ours goes through tools.py and the
journal as always. inspect_ai does a tenth of the work, its rate is compared.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path

from common import HERE, endpoint, ours, report, write_project

LATENCY_S, CALLS, AT_ONCE = 0.05, 4, 256


def peer(python: str, script: str, folder: Path, num: int) -> dict:
    with endpoint("--latency", str(LATENCY_S), "--turns", str(CALLS - 1)) as (url, _):
        command = [python, str(HERE / script), url, str(num), str(AT_ONCE)]
        environment = os.environ | {"PYTHONPATH": str(HERE)}
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=folder, env=environment
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith("@@")]
    return json.loads(lines[-1][2:]) | {"num": num} if lines else {"failed": done.stderr[-500:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", help="interpreter with openai and inspect-ai")
    parser.add_argument("--n", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    ideal_s = options.n * CALLS * LATENCY_S / AT_ONCE
    runs = []
    for _ in range(options.repeats):
        with tempfile.TemporaryDirectory() as folder:
            write_project(Path(folder), options.n)
            with endpoint("--latency", str(LATENCY_S), "--turns", str(CALLS - 1)) as (
                url,
                counters,
            ):
                runs.append(
                    ours(Path(folder), url, concurrency=AT_ONCE) | {"span_s": counters()["span_s"]}
                )
    wall_s = statistics.median(run["wall_s"] for run in runs)
    report(
        who="stillroom", share_of_ideal=round(ideal_s / wall_s, 3), wall_s=wall_s, ideal_s=ideal_s,
        rollouts_per_s=round(options.n / wall_s, 1), rss_mb=max(run["rss_mb"] for run in runs),
        share_of_ideal_seen_by_the_endpoint=round(ideal_s / statistics.median(run["span_s"] for run in runs), 3),
        all_succeeded=all(run["succeeded"] == options.n for run in runs),
    )  # fmt: skip
    for script, share in (("peer_openai.py", 1), ("peer_inspect.py", 0.1)) if options.peers else ():
        with tempfile.TemporaryDirectory() as folder:
            num = int(options.n * share)
            found = peer(options.peers, script, Path(folder), num)
        ratio = {}
        if "wall_s" in found:
            ratio = {"ours_is_times_faster": round(options.n / wall_s / (num / found["wall_s"]), 1)}
        report(who=script.removeprefix("peer_").removesuffix(".py"), **found, **ratio)


main()
