"""What the fuzzers share: seeds for a number of cases or minutes, what was found, and the memory.

A case is made from its seed alone: `--first SEED --cases 1` makes it again.
"""

import argparse
import itertools
import json
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

MAX_GROWTH_BYTES = 300 << 20
_MAX_SHOWN = 20
HOSTILE = [
    b"", b"\0", b"\r\n", b"\n", b"\r\n\r\n", b" ", b":", b"-1", b"9" * 30, b"\xff\xfe", b"\xed\xa0\x80",
    b"[" * 5000, b'{"a":' * 2000, b'"', b"\\ud800", b"0\r\n\r\n", b"fffffffffffffffff\r\n", b"a" * 70_000,
    b"\x1f\x8b\x08", b"\x80", b"data: [DONE]\n\n", b"%00", b"/../", b"null", b"1e999", b"NaN",
]  # fmt: skip


def damaged(data: bytes, draw: random.Random) -> bytes:
    """Returns the bytes changed at a few places: some replaced, taken out, inserted or repeated."""
    broken = bytearray(data)
    for _ in range(draw.randrange(1, 4)):
        at = draw.randrange(len(broken) + 1)
        length = draw.choice((1, 1, 2, 20, 200))
        match draw.randrange(6):
            case 0 if at < len(broken):
                broken[at] = draw.randrange(256)
            case 1:
                del broken[at : at + length]
            case 2:
                broken[at : at + draw.randrange(3)] = draw.choice(HOSTILE)
            case 3:
                other = draw.randrange(len(broken) + 1)
                broken[at:at] = broken[other : other + length]
            case 4 if draw.random() < 0.3:
                del broken[at:]
            case _:
                broken[at : at + 1] = draw.randbytes(draw.randrange(1, 9))
    return bytes(broken)


def arguments(text: str, cases: int) -> argparse.Namespace:
    """Returns how many cases are made, for how many minutes instead, and the first one's seed."""
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("--cases", type=int, default=cases)
    parser.add_argument("--minutes", type=float, help="instead of a number of cases")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first case")
    return parser.parse_args()


def peak_bytes(pid: int) -> int:
    """Returns the most memory that a process has held."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


class Fuzzing:
    """Checks case after case. A check raises for what should not happen; `pid` is watched."""

    def __init__(self, options: argparse.Namespace, pid: int) -> None:
        self._options, self._pid = options, pid
        self._base = self._peak = peak_bytes(pid)
        self._began = time.monotonic()
        self.num_cases, self.slowest_s = 0, 0.0
        self.findings: dict[str, str] = {}
        self._kinds = Counter[str]()

    def _seeds(self) -> Iterator[int]:
        options = self._options
        for seed in itertools.count(options.first):
            if options.minutes is None and seed - options.first >= options.cases:
                return
            if options.minutes is not None and self.minutes >= options.minutes:
                return
            yield seed

    @property
    def minutes(self) -> float:
        return (time.monotonic() - self._began) / 60

    @property
    def growth_bytes(self) -> int:
        """The most memory by which the process has grown, also once it has ended."""
        with suppress(FileNotFoundError):
            self._peak = peak_bytes(self._pid)
        return self._peak - self._base

    def check_all(self, check: Callable[[int], Any], workers: int = 1) -> None:
        """Checks the cases, so many at once."""
        seeds = self._seeds()
        with ThreadPoolExecutor(workers) as pool:
            while batch := list(itertools.islice(seeds, workers * 8)):
                list(pool.map(lambda seed: self._check(check, seed), batch))

    def _check(self, check: Callable[[int], Any], seed: int) -> None:
        began = time.monotonic()
        try:
            check(seed)
        # Whatever a case sets off is what a fuzzer looks for.
        except BaseException as error:
            self.note(str(seed), error)
        self.num_cases += 1
        self.slowest_s = max(self.slowest_s, time.monotonic() - began)

    def note(self, case: str, error: BaseException) -> None:
        """Notes a finding, and prints the first ones of a place with their traces."""
        place = traceback.extract_tb(error.__traceback__)[-1:]
        kind = f"{type(error).__name__} {place[0].filename}:{place[0].lineno}" if place else "?"
        self.findings[case] = f"{type(error).__name__}: {error}"[:300]
        self._kinds[kind] += 1
        if self._kinds[kind] <= _MAX_SHOWN:
            trace = "".join(traceback.format_exception(error))[-3000:]
            print(json.dumps({"seed": case, "found": trace}), file=sys.stderr, flush=True)

    def figures(self) -> dict[str, Any]:
        """Returns what goes into the script's line."""
        return {
            "cases": self.num_cases,
            "minutes": round(self.minutes, 1),
            "growth_mb": self.growth_bytes >> 20,
            "slowest_s": round(self.slowest_s, 1),
            "findings": dict(itertools.islice(self.findings.items(), _MAX_SHOWN)),
        }

    @property
    def passed(self) -> bool:
        return not self.findings and self.growth_bytes <= MAX_GROWTH_BYTES

    def sentence(self, cases: str) -> str:
        """Returns the figure, in which the cases are called so."""
        return (
            f"{self.num_cases} {cases}: {len(self.findings)} findings, at most "
            f"{self.growth_bytes >> 20} MB more memory"
        )
