"""2,000 rollouts of 4 calls, 50 ms each, 256 at once, beside a hand loop, inspect_ai and verifiers, one after the other.

throughput.py [--peers-python PYTHON] [--n 2000] [--peer-n N]: PYTHON is an interpreter with `openai`, `inspect-ai` and
`verifiers`, or some of them; those it has are run, each in a process of its own against a fresh endpoint. Peers do as many
rollouts as ours unless --peer-n says fewer; ratios are of calls per second, with and without the time before the first. The ideal is calls x latency / 256. Peers call a
function of their own process as the tool; ours goes through tools.py and the journal as always. A line is `valid` if every
rollout has its answer and the endpoint has answered 4 different calls for each, no more; without that there is no ratio.
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
SETTINGS = ("--latency", str(LATENCY_S), "--turns", str(CALLS - 1))
PEERS = {
    "openai": "peer_openai.py",
    "inspect_ai": "peer_inspect.py",
    "verifiers": "peer_verifiers.py",
}
VERSIONS = """
import importlib.metadata, importlib.util, json, sys
print(json.dumps({name: importlib.metadata.version(name) for name in sys.argv[1:] if importlib.util.find_spec(name)}))
"""


def figures(run: dict, num: int, seen: dict) -> dict:
    """Adds what the endpoint saw, and whether it was the work that was asked for."""
    wanted = num * CALLS
    return run | {
        "num": num,
        "calls_per_s": round(wanted / run["wall_s"], 1),
        "share_of_ideal": round(wanted * LATENCY_S / AT_ONCE / run["wall_s"], 4),
        "share_of_ideal_seen_by_the_endpoint": round(wanted * LATENCY_S / AT_ONCE / seen["span_s"], 4),
        "most_at_once": seen["most_in_flight"],
        "valid": run["succeeded"] == num and seen["answered"] == seen["unique"] == wanted,
    }  # fmt: skip


def our_run(num: int) -> dict:
    with tempfile.TemporaryDirectory() as folder, endpoint(*SETTINGS) as (url, counters):
        write_project(Path(folder), num)
        return figures(ours(Path(folder), url, concurrency=AT_ONCE), num, counters())


def peer_run(python: str, script: str, num: int, timeout_s: float) -> dict:
    with tempfile.TemporaryDirectory() as folder, endpoint(*SETTINGS) as (url, counters):
        command = [python, str(HERE / script), url, str(num), str(AT_ONCE)]
        environment = os.environ | {"PYTHONPATH": str(HERE)}
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, cwd=folder, env=environment,
                timeout=timeout_s,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"failed": f"not done within {timeout_s:g} s", "answered": counters()["answered"]}  # fmt: skip
        lines = [line for line in done.stdout.splitlines() if line.startswith("@@")]
        if not lines:
            return {"failed": done.stderr[-500:]}
        return figures(json.loads(lines[-1][2:]), num, counters())


def installed(python: str) -> dict[str, str]:
    done = subprocess.run(
        [python, "-c", VERSIONS, *PEERS], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers-python", help="interpreter with openai, inspect-ai, verifiers")
    parser.add_argument("--n", type=int, default=2000)
    parser.add_argument("--peer-n", type=int, help="rollouts of each peer; as many as ours")
    parser.add_argument("--peer-timeout-s", type=float, default=580.0)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    runs = [our_run(options.n) for _ in range(options.repeats)]
    rate = statistics.median(run["calls_per_s"] for run in runs)
    share_seen = statistics.median(run["share_of_ideal_seen_by_the_endpoint"] for run in runs)
    report(
        who="stillroom", runs=len(runs), calls_per_s=rate, num=options.n,
        wall_s=statistics.median(run["wall_s"] for run in runs), ideal_s=options.n * CALLS * LATENCY_S / AT_ONCE,
        share_of_ideal=statistics.median(run["share_of_ideal"] for run in runs),
        share_of_ideal_seen_by_the_endpoint=share_seen,
        rss_mb=max(run["rss_mb"] for run in runs), most_at_once=max(run["most_at_once"] for run in runs),
        valid=all(run["valid"] for run in runs),
    )  # fmt: skip
    for name, version in installed(options.peers_python).items() if options.peers_python else ():
        num = options.peer_n or options.n
        found = peer_run(options.peers_python, PEERS[name], num, options.peer_timeout_s)
        ratio = ratio_seen = None
        if found.get("valid"):
            ratio = round(rate / found["calls_per_s"], 1)
            ratio_seen = round(share_seen / found["share_of_ideal_seen_by_the_endpoint"], 1)
        report(who=name, version=version, ours_is_times_faster=ratio, from_first_to_last_request=ratio_seen, of_as_many_rollouts=num == options.n, **found)  # fmt: skip


if __name__ == "__main__":
    main()
