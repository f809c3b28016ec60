"""Training steps on a CPU, ours beside TRL's trainers, on the same tokens in the same batches.

    python benchmarks/training/run.py --peers-python PYTHON [--works sft-32k,…] [--repeats 3]

PYTHON has trl, datasets and what ours needs; both sides run in it, in turns, one thread each.
Prints a JSON line a measurement, then one a row of the table: medians, and ours over TRL's.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from beside_trl.turns import Bench, run
from work import WORKS, model_folder

BENCH = Bench(
    script=Path(__file__).with_name("measure.py"),
    works=WORKS,
    save_models=lambda work, root: [model_folder(WORKS[work].shape, root)],
    has_same_tokens=lambda _work: True,
    limit_s=900,
)

if __name__ == "__main__":
    run(BENCH)
