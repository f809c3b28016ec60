"""kill -9 at random points of one run, then going on: what is lost, doubled or billed again. kills.py [--kills 100]

One run of 4 calls a rollout, 15 rollouts a kill and 32 at once is killed again and again, each time within 100 ms of its first new
request, and started anew with the same command; after the last kill it may finish. That is work for about twice the kills. Exits with 1 if
a row is lost or doubled, a rollout fails, a kill did not happen, or more was billed again than was in flight at the kills: as the
endpoint saw it (`billed_again`: calls that it answered twice) and in the most there can have been (`extra_requests`).
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from common import HERE, endpoint, report, write_project

CALLS, AT_ONCE, ROLLOUTS_PER_KILL = 4, 32, 15
SETTLED_S = 0.1
"""For the endpoint to see that the connections are gone."""


def kill_once(command: list[str], folder: Path, counters: Callable[[], dict], wait_s: float) -> bool:  # fmt: skip
    """Starts the run and kills it `wait_s` after its first request; False if it had ended by then."""
    before = counters().get("requests", 0)
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while counters().get("requests", 0) == before and process.poll() is None:
        time.sleep(0.005)
    time.sleep(wait_s)
    if process.poll() is not None:
        return False
    process.send_signal(signal.SIGKILL)
    process.wait()
    time.sleep(SETTLED_S)
    return True


def finish(command: list[str], folder: Path) -> dict:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("@@")]
    return json.loads(lines[-1][2:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    options = parser.parse_args()
    draw, num, kills = random.Random(0), ROLLOUTS_PER_KILL * options.kills, 0
    with (
        tempfile.TemporaryDirectory() as name,
        endpoint("--latency", "0.05", "--sigma", "0.5") as (url, counters),
    ):
        folder = Path(name)
        write_project(folder, num)
        requested = json.dumps({"concurrency": AT_ONCE, "max_concurrency": AT_ONCE})
        command = [sys.executable, str(HERE / "ours.py"), str(folder), url, requested]
        while kills < options.kills and kill_once(command, folder, counters, draw.uniform(0, 0.1)):
            kills += 1
        in_flight, at_last_kill = counters().get("hung_up", 0), counters()["answered"]
        figures = finish(command, folder)
        rows = Counter(
            json.loads(line)["task_id"] for line in (folder / "rollouts/rollouts.jsonl").open()
        )
        seen = counters()
    lost, doubled = num - len(rows), rows.total() - len(rows)
    again, extra = seen["answered_again"], seen["requests"] - num * CALLS
    kept = (
        kills == options.kills
        and lost == doubled == figures["failed"] == 0
        and figures["succeeded"] == num
        and again <= in_flight
        and extra <= kills * AT_ONCE
    )
    report(
        kills=kills, kept=kept, rollouts=num, rows=rows.total(), lost=lost, doubled=doubled,
        needed=num * CALLS, answered_in_all=seen["answered"], answered_at_the_last_kill=at_last_kill,
        billed_again=again, in_flight_at_the_kills=in_flight,
        extra_requests=extra, most_extra_allowed=kills * AT_ONCE, succeeded=figures["succeeded"],
    )  # fmt: skip
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
