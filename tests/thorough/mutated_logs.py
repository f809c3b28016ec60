"""Samples of all trace formats with broken rows: does an import account for every row, and is what it keeps sound? mutated_logs.py [--cases 500] [--minutes 20]

Values are replaced, taken out, copied elsewhere and cut off; twelve files of a format are imported together, once for each seed. Every row is
kept, merged or refused with a reason, and validate_dataset finds nothing wrong with what is kept. Each third seed damages the bytes of the
files instead, also of those that are archives or packed; then an error that says what to do is an answer too.
"""

import gzip
import os
import random
import sys
import tempfile
from pathlib import Path

from fuzz import Fuzzing, arguments, damaged
from scenes import report

from fakes.mutated_logs import MUTATED_FORMATS, check_import, check_mutated
from fakes.trace_files import SAMPLES, sample_files
from stillroom.errors import EngineError
from stillroom.importing.formats.table import FORMATS

NUM_FILES = 12
NAMES = [form.name for form in FORMATS]


def check_damaged(root: Path, name: str, draw: random.Random) -> int:
    """Imports samples of a format whose bytes are damaged, and returns how many rows they have."""
    files = [path for path in sample_files() if path.is_relative_to(SAMPLES / name)]
    for number in range(NUM_FILES):
        path = draw.choice(files)
        copied = root / "logs" / str(number) / path.relative_to(SAMPLES / name)
        copied.parent.mkdir(parents=True)
        data = path.read_bytes()
        if draw.random() < 0.2:
            copied, data = copied.with_name(f"{copied.name}.gz"), gzip.compress(data)
        copied.write_bytes(damaged(data, draw))
    try:
        return check_import(root, draw.choice((name, name, "auto")))
    except EngineError:
        return 0


def check(seed: int) -> int:
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        if seed % 3 == 0:
            return check_damaged(Path(folder), NAMES[seed // 3 % len(NAMES)], draw)
        name = MUTATED_FORMATS[seed % len(MUTATED_FORMATS)]
        return check_mutated(Path(folder), name, seed, NUM_FILES)


def main() -> int:
    options = arguments(__doc__, cases=500)
    for number in range(3):  # what is loaded once is no growth
        check(number)
    fuzzing, num_rows = Fuzzing(options, os.getpid()), 0

    def counted(seed: int) -> None:
        nonlocal num_rows
        num_rows += check(seed)

    fuzzing.check_all(counted)
    figure = (
        f"{fuzzing.sentence('imports of broken logs')}, {num_rows} rows of {len(NAMES)} formats"
    )
    return report(37, figure, fuzzing.passed, **fuzzing.figures())


if __name__ == "__main__":
    sys.exit(main())
