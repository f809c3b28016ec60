"""Wrong labels: how many planted ones `doubtful_labels` finds in two worlds of classified texts.

usage: label_check.py [--rows 500] [--seeds 1 2 3]
Prints a JSON line for each world, share of planted errors and seed: recall (the share of planted
errors that are doubted), precision (the share of doubts that are planted errors), likely_right
(the share of found errors whose likely label is the true one), and the share of the rows with a
right label that are doubted. The worlds are the queues of support tickets, and the subjects of app
reviews, most of whose sentences are about something else. An error is another label, drawn evenly.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

from stillroom.recipe.label_check import doubtful_labels

sys.path.append(str(Path(__file__).parents[1] / "real"))

from reviews import make_review
from tickets import TICKETS_TASK

SHARES = (0.0, 0.03, 0.07, 0.15)


def tickets(seed: int, num_rows: int) -> tuple[list[str], list[str]]:
    rows = TICKETS_TASK.rows(seed, num_rows, is_new=False)
    return [row["prompt"] for row in rows], [row["group"] for row in rows]


def reviews(seed: int, num_rows: int) -> tuple[list[str], list[str]]:
    rng = Random(f"reviews {seed}")
    rows = [make_review(rng) for _ in range(num_rows)]
    return [text for text, _ in rows], [subject for _, subject in rows]


def plant(labels: Sequence[str], share: float, rng: Random) -> tuple[list[str], set[int]]:
    """Gives a share of the rows another label; returns the labels and the changed rows."""
    names, planted = (
        sorted(set(labels)),
        set(rng.sample(range(len(labels)), round(share * len(labels)))),
    )
    noisy = [
        rng.choice([name for name in names if name != label]) if row in planted else label
        for row, label in enumerate(labels)
    ]
    return noisy, planted


def measure(texts: Sequence[str], labels: Sequence[str], share: float, seed: int) -> dict:
    noisy, planted = plant(labels, share, Random(seed))
    started = time.perf_counter()
    doubts = doubtful_labels(texts, noisy)
    seconds = time.perf_counter() - started
    found = [doubt for doubt in doubts if doubt.index in planted]
    return {
        "recall": round(len(found) / len(planted), 3) if planted else None,
        "precision": round(len(found) / len(doubts), 3) if planted and doubts else None,
        "likely_right": round(sum(d.likely == labels[d.index] for d in found) / len(found), 3)
        if found
        else None,
        "clean_doubted": round((len(doubts) - len(found)) / (len(texts) - len(planted)), 4),
        "seconds": round(seconds, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    options = parser.parse_args()
    for name, world in (("tickets", tickets), ("reviews", reviews)):
        for share in SHARES:
            for seed in options.seeds:
                texts, labels = world(seed, options.rows)
                figures = measure(texts, labels, share, seed)
                print(
                    json.dumps(
                        {
                            "benchmark": "label_check",
                            "world": name,
                            "rows": len(texts),
                            "planted": share,
                            "seed": seed,
                            **figures,
                        }
                    ),
                    flush=True,
                )


if __name__ == "__main__":
    main()
