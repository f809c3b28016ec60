"""On-policy distillation on a CPU, ours beside TRL's DistillationTrainer, in turns.

    python benchmarks/on_policy/run.py --peers-python PYTHON [--works generate-tools,…] [--repeats 3]

PYTHON has trl, datasets and what ours needs; both sides run in it, one thread each.
Prints a JSON line a measurement, then one a row of the table: medians, and ours over TRL's.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from beside_trl.turns import Bench, run
from work import WORKS, save_models

BENCH = Bench(
    script=Path(__file__).with_name("measure.py"),
    works=WORKS,
    save_models=lambda work, root: save_models(WORKS[work].shape, root),
    has_same_tokens=lambda work: WORKS[work].phase == "update",
    limit_s=1800,
)

if __name__ == "__main__":
    run(BENCH)
