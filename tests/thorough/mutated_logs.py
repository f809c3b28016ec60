"""Samples of all trace formats with broken rows: does an import account for every row, and is what it keeps sound? mutated_logs.py [--seeds 20]

Values are replaced, taken out, copied elsewhere and cut off; twelve files of a format are imported together, once for each seed. Every row is
kept, merged or refused with a reason, and validate_dataset finds nothing wrong with what is kept.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from scenes import report

from fakes.mutated_logs import MUTATED_FORMATS, check_mutated

NUM_FILES = 12


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    seeds = parser.parse_args().seeds
    num_rows, failures = 0, list[str]()
    for name in MUTATED_FORMATS:
        for seed in range(1, seeds + 1):
            with tempfile.TemporaryDirectory() as folder:
                try:
                    num_rows += check_mutated(Path(folder), name, seed, NUM_FILES)
                except Exception as error:
                    failures.append(f"{name} {seed}: {type(error).__name__}: {error}")
    figure = f"{num_rows} rows of {len(MUTATED_FORMATS)} formats: {len(failures)} imports failed"
    return report(37, figure, not failures, failures=failures[:10])


if __name__ == "__main__":
    sys.exit(main())
