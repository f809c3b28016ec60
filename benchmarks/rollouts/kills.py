"""kill -9 at random points of one run, then going on: what is lost, doubled or billed again. kills.py [--kills 100]

One run of 500 rollouts x 4 calls is killed again and again, each time after a random wait, and started anew with the
same command until it has had its kills; then it may finish.
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
from pathlib import Path

from common import HERE, endpoint, report, write_project

NUM, AT_ONCE = 500, 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    options = parser.parse_args()
    draw = random.Random(0)
    with (
        tempfile.TemporaryDirectory() as name,
        endpoint("--latency", "0.05", "--sigma", "0.5") as (url, counters),
    ):
        folder = Path(name)
        write_project(folder, NUM)
        asked = json.dumps({"concurrency": AT_ONCE, "max_concurrency": AT_ONCE})
        command = [sys.executable, str(HERE / "ours.py"), str(folder), url, asked]
        kills = in_flight = 0
        while kills < options.kills:
            process = subprocess.Popen(
                command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            before = counters().get("requests", 0)
            while counters().get("requests", 0) == before and process.poll() is None:
                time.sleep(0.01)
            time.sleep(draw.uniform(0, 0.05))
            if process.poll() is not None:
                break
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
            time.sleep(0.3)
        in_flight = counters().get("hung_up", 0)
        last = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
        figures = json.loads(
            next(line for line in last.stdout.splitlines() if line.startswith("@@"))[2:]
        )
        rows = Counter(
            json.loads(line)["task_id"] for line in (folder / "rollouts/rollouts.jsonl").open()
        )
        seen = counters()
    report(
        kills=kills, rollouts=NUM, rows=rows.total(), lost=NUM - len(rows), doubled=rows.total() - len(rows),
        answered_in_all=seen["answered"], needed=NUM * 4, billed_again=seen["answered_again"],
        in_flight_at_the_kills=in_flight, succeeded=figures["succeeded"],
    )  # fmt: skip


main()
