"""A review in which one of 50 rows is marked drop, on files whose rows have no ids of their own. review_verdicts.py [--rows 2000]

Files of NeMo Gym (no id), rnow (ids that start anew in each run), ours (a teacher's and a student's rollouts of the same prompts) and SFT
rows, each with equal rows among them. Every one of the 50 sampled rows is marked in turn. Prints one JSON line and exits with 1 unless each
review drops exactly the marked row and, when copies are asked for, exactly the rows with its conversation.
"""

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from stillroom import api
from stillroom.settings import Workspace

LAYOUTS = ("nemo_gym", "rnow", "stillroom", "sft")


def row_of(layout: str, number: int, sample: int) -> dict[str, Any]:
    asked, said = f"What is {number}?", str(number)
    talk = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
    reward = number % 11 / 10
    match layout:
        case "nemo_gym":
            items = [{"type": "message", "role": "assistant", "content": said}]
            request = {"input": asked}
            return {"responses_create_params": request, "response": {"output": items}, "reward": reward}  # fmt: skip
        case "rnow":
            return {"id": f"sample_{sample}", "completed": True, "success": True, "total_reward": reward,
                    "rewards": {}, "conversation": talk}  # fmt: skip
        case "stillroom":
            return {"id": f"t{number}-0", "task_id": f"t{number}", "messages": talk, "reward": reward,
                    "stop_reason": "answered"}  # fmt: skip
        case _:
            return {"messages": talk}


def review(folder: Path, lines: list[str]) -> Counter[str]:
    """Reviews a file 50 times, and counts the reviews that dropped what they should."""
    (folder / "rows.jsonl").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    workspace, counts = Workspace(folder), Counter[str]()
    sample = api.SampleForReview(input="rows.jsonl", output="review.jsonl", counts=(20, 20, 10))
    api.sample_for_review(workspace, sample)
    text = (folder / "review.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    for marked in rows:
        verdicts = [{"id": r["id"], "verdict": "drop" if r is marked else "keep"} for r in rows]
        (folder / "judged.jsonl").write_text(
            "".join(json.dumps(v) + "\n" for v in verdicts), encoding="utf-8"
        )
        place = int(marked["where"].rpartition(":")[2])
        asked = {"input": "rows.jsonl", "output": "kept.jsonl", "verdicts": "judged.jsonl"}
        api.filter_dataset(workspace, api.FilterDataset(**asked))
        kept = (folder / "kept.jsonl").read_text(encoding="utf-8").splitlines()
        counts["reviews"] += 1
        counts["dropped_it_alone"] += kept == lines[: place - 1] + lines[place:]
        api.filter_dataset(workspace, api.FilterDataset(**asked, verdicts_for_copies=True))
        side = (folder / "kept.jsonl.dropped").read_text(encoding="utf-8").splitlines()
        # The other sampled rows were kept by name, though their conversation may be the same.
        named = {int(r["where"].rpartition(":")[2]) for r in rows if r is not marked}
        said = [m["content"] for m in marked["messages"]]
        same = {n for n, line in enumerate(lines, 1) if all(json.dumps(s) in line for s in said)}
        counts["dropped_copies"] += {json.loads(line)["line"] for line in side} == same - named
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance, total = random.Random(options.seed), Counter[str]()
    for layout in LAYOUTS:
        numbers = [chance.randrange(options.rows // 2) for _ in range(options.rows)]
        lines = [json.dumps(row_of(layout, n, sample % 8)) for sample, n in enumerate(numbers)]
        with tempfile.TemporaryDirectory() as name:
            total.update(review(Path(name), lines))
    passed = total["reviews"] == total["dropped_it_alone"] == total["dropped_copies"]
    print(
        json.dumps(
            {
                "promise": "review",
                "figure": f"{total['reviews']} reviews of {len(LAYOUTS)} layouts: {total['dropped_it_alone']} dropped the marked "
                f"row alone, {total['dropped_copies']} its copies where they were asked for",
                "seed": options.seed,
                **total,
                "passed": passed,
            }
        )
    )
    sys.exit(not passed)


if __name__ == "__main__":
    main()
