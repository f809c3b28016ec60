"""The job of logs.py done without Stillroom: what a capable agent writes with PyTorch.

    script_logs.py FOLDER/job --minutes 40

Reads the two logs and the thumbs, leaves out failed calls and disliked answers, takes a label out of
each answer, leaves out those that a cross-fitted classifier doubts, and trains as script.py does.
Leaves FOLDER/job/model and prints a JSON line.
"""

import argparse
import json
import random
import time
from pathlib import Path

import torch
from script import TRAINED_BY, cross_fitted, deliver, features, label_in, read_csv


def logged(job):
    """Yields the id, text and answer of each call that succeeded."""
    for path in sorted((job / "logs").glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            call = json.loads(line)
            text, response = call["request"]["messages"][-1]["content"], call["response"]
            if "choices" in response:
                yield call["id"], text, response["choices"][0]["message"]["content"]
            elif "content" in response:
                yield call["id"], text, response["content"][0]["text"]


def labelled_rows(job, labels):
    """Returns different texts, each with the label in its answer, unless users disliked it."""
    thumbs = {row["call_id"]: row["thumb"] for row in read_csv(job / "logs" / "thumbs.csv")}
    rows = {}
    for call_id, text, answer in logged(job):
        label = label_in(answer, labels)
        if label is not None and thumbs.get(call_id) != "down":
            rows.setdefault(text, label)
    return list(rows.items())


def trusted_rows(rows, labels):
    """Returns the rows without those whose label a classifier of the others does not give."""
    targets = torch.tensor([labels.index(label) for _, label in rows])
    matrix = features([text for text, _ in rows])
    trusted = torch.ones(len(rows), dtype=torch.bool)
    for _ in range(2):
        trusted = cross_fitted(matrix, targets, trusted, len(labels)) == targets
    return [row for row, is_trusted in zip(rows, trusted.tolist(), strict=True) if is_trusted]


def main():
    begun = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", type=Path)
    parser.add_argument("--minutes", type=float, default=40)
    options = parser.parse_args()
    random.seed(0)
    job, facts = options.job, json.loads((options.job / "job.json").read_text(encoding="utf-8"))
    labels = facts["labels"]
    found = labelled_rows(job, labels)
    rows = trusted_rows(found, labels)
    trained = deliver(job, facts, rows, begun + TRAINED_BY * 60 * options.minutes)
    report = {
        "labelled": len(found), "kept": len(rows), **trained,
        "minutes": round((time.monotonic() - begun) / 60, 1),
    }  # fmt: skip
    print(json.dumps(report))


if __name__ == "__main__":
    main()
