"""Runs the tests many times, in random orders, on a machine that is kept busy.

    stress.py [--times 10] [--no-load] [--seed N] [--workers 2] [what pytest takes]

Prints a line for each round, whose seed repeats its order, and each test that failed once, with
the rounds in which it did. The busy machine is stress-ng's work if it is installed, else that of
processes of our own. Exits with 1 if a test has failed in any round.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from stillroom.processes import end_process

ROOT = Path(__file__).parents[1]
ROUND_LIMIT_S = 4 * 3600
HDD_BYTES = 64 << 20
BURN = "import os\nwhile os.getppid() == {parent}:\n    sum(range(100_000))"
WRITE = """
import os, tempfile
while os.getppid() == {parent}:
    with tempfile.TemporaryFile() as file:
        file.write(bytes({size}))
        file.flush()
        os.fsync(file.fileno())
"""


@dataclass
class Failures:
    """The tests that failed, with the numbers of their rounds and the last message."""

    rounds: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    messages: dict[str, str] = field(default_factory=dict)

    def read(self, report: Path, number: int) -> str:
        """Adds the failures of a round's report; returns how many tests it names by outcome."""
        num = dict.fromkeys(("passed", "failed", "skipped"), 0)
        for case in ET.parse(report).iter("testcase"):  # noqa: S314 - pytest wrote it
            failure = case.find("failure")
            failure = case.find("error") if failure is None else failure
            if failure is None:
                num["passed" if case.find("skipped") is None else "skipped"] += 1
                continue
            num["failed"] += 1
            test = f"{case.get('file') or case.get('classname', '')}::{case.get('name')}"
            self.rounds[test].append(number)
            self.messages[test] = (failure.get("message") or "").split("\n")[0]
        return ", ".join(f"{count} {outcome}" for outcome, count in num.items() if count)


def load_commands() -> list[list[str]]:
    """Returns the commands of processes that keep all processors and the disk busy."""
    if (program := shutil.which("stress-ng")) is not None:
        work = ["--cpu", "0", "--hdd", "1", "--hdd-bytes", str(HDD_BYTES)]
        return [
            [program, *work, "--timeout", str(ROUND_LIMIT_S), "--temp-path", tempfile.gettempdir()]
        ]
    burn = BURN.format(parent=os.getpid())
    write = WRITE.format(parent=os.getpid(), size=HDD_BYTES)
    programs = [*[burn] * (os.cpu_count() or 1), write]
    return [[sys.executable, "-S", "-c", program] for program in programs]


@contextmanager
def busy_machine(*, is_busy: bool) -> Iterator[None]:
    """Keeps the machine busy for the block."""
    with ExitStack() as stack:
        for command in load_commands() if is_busy else ():
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            stack.callback(end_process, subprocess.Popen(command, **quiet))
        yield


def run_round(folder: Path, seed: int, options: argparse.Namespace, rest: list[str]) -> int | None:
    """Runs the tests once; returns pytest's exit code, or None if it took too long."""
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--dist", "worksteal",
        "-n", str(options.workers), f"--random-order-seed={seed}", "--random-order",
        "-o", "junit_family=xunit1", f"--junitxml={folder / 'report.xml'}", *rest,
    ]  # fmt: skip
    with (folder / "output.txt").open("wb") as output:
        pytest = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        try:
            return pytest.wait(ROUND_LIMIT_S)
        except subprocess.TimeoutExpired:
            return None
        finally:
            end_process(pytest)


def main() -> int:
    """Runs the rounds, prints what failed, and returns the exit code."""
    # What it has started ends with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--no-load", action="store_true", help="leave the machine as it is")
    parser.add_argument("--seed", type=int, help="of the first round; each next one has the next")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    options, rest = parser.parse_known_args()
    first = random.randrange(1 << 30) if options.seed is None else options.seed
    folder, failures, is_whole = Path(tempfile.mkdtemp(prefix="stress-")), Failures(), True
    with busy_machine(is_busy=not options.no_load):
        for number in range(1, options.times + 1):
            place, seed = folder / f"round-{number}", first + number - 1
            place.mkdir()
            started = time.monotonic()
            code = run_round(place, seed, options, rest)
            report = place / "report.xml"
            counts = failures.read(report, number) if report.exists() else "no report"
            # 1: tests failed, which the report says.
            is_whole = is_whole and code in (0, 1) and report.exists()
            took_min = (time.monotonic() - started) / 60
            sys.stdout.write(
                f"round {number} of {options.times}: seed {seed}: {counts} in {took_min:.1f} min"
                f"{'' if code in (0, 1) else f' (pytest ended with {code})'}\n"
            )
            sys.stdout.flush()
    for test, rounds in sorted(failures.rounds.items()):
        sys.stdout.write(f"failed in round {rounds}: {test}\n  {failures.messages[test]}\n")
    sys.stdout.write(f"outputs: {folder}\n")
    return 0 if is_whole and not failures.rounds else 1


if __name__ == "__main__":
    sys.exit(main())
