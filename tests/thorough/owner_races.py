"""Two servers and one run: how often has it more or fewer than one owner? owner_races.py [--races 1000] [--workers 3]

In each race two processes take the lock of the same run at the same moment. In the last few, two
real workers are started for the same run, and exactly one may do it.
"""

import argparse
import subprocess
import sys

from scenes import report, workspace

from stillroom.run_folder import RunFolder, create_run
from stillroom.types import RunKind

RACER = """
import sys
from pathlib import Path
from stillroom.run_folder import RunFolder
for line in sys.stdin:
    lock = RunFolder(Path(line.rstrip())).owner_lock()
    print(int(lock.try_acquire()), flush=True)
    sys.stdin.readline()
    lock.release()
    print("free", flush=True)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--races", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=3)
    options = parser.parse_args()
    wrong = wins = 0
    with workspace() as space:
        folder = create_run(space, RunKind.ROLLOUTS, {})
        command = [sys.executable, "-c", RACER]
        racers = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        for race in range(options.races):
            # Each begins first in half of the races.
            order = racers if race % 2 else racers[::-1]
            for text in (f"{folder.path}\n", "release\n"):
                for racer in order:
                    racer.stdin.write(text)
                    racer.stdin.flush()
                answers = [racer.stdout.readline().strip() for racer in racers]
                if text != "release\n":
                    wrong += answers.count("1") != 1
                    wins += answers[0] == "1"
        for racer in racers:
            racer.stdin.close()
            racer.wait(10)
        codes = [race_of_workers(create_run(space, RunKind.ROLLOUTS, {})) for _ in range(options.workers)]  # fmt: skip
    wrong += sum(2 not in pair or pair.count(2) != 1 for pair in codes)
    total = options.races + options.workers
    return report(
        6,
        f"{total} races of two: {wrong} with another number of owners than one",
        wrong == 0,
        races=options.races, of_workers=options.workers, won_by_the_first=wins,
    )  # fmt: skip


def race_of_workers(folder: RunFolder) -> list[int]:
    """Returns the exit codes of two workers of one run; 2 is that of a worker that gave up."""
    command = [sys.executable, "-P", "-m", "stillroom.api.worker", str(folder.path)]
    workers = [subprocess.Popen(command, stdout=-3, stderr=-3) for _ in range(2)]
    return [worker.wait(60) for worker in workers]


if __name__ == "__main__":
    sys.exit(main())
