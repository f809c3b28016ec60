"""What a student learns from logs as they are, cleaned, and asked again. raw_or_cleaned.py [--seeds 1 2 3] [--on-policy 1]

The logs of the project template `traces`, of which a quarter, the newest conversations, is held out. Each arm trains the demo's student on
rows of the rest for the same number of epochs, and is measured on the held-out prompts by what the logs answered. `raw`: all rows. `clean`:
those that call only today's tools, without an error of a tool, with a final answer, no twins. `again`: the teacher answers the same prompts anew
with today's tools, and what agrees with the logs is kept. `distilled`: `clean`, then on-policy on the same prompts; `longer` has the same
further seconds as more SFT. Prints a JSON line for each arm and seed, and the paired differences.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TOOLS = ("price", "stock", "calculator")
TALK = ("--tools", "tools.py", "--max-turns", "5", "--max-tokens", "48", "--concurrency", "64")


class Project:
    """A project made from the template, driven by the command line."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self("create-project", ".", "--template", "traces")

    def __call__(self, *words: str) -> dict[str, Any]:
        command = [sys.executable, "-P", "-m", "stillroom_mcp", *words, "--json"]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{words}: {done.stderr[-2000:]}")
        return json.loads(done.stdout.splitlines()[-1])

    def measured(self, model: str, name: str) -> str:
        run = self(
            "evaluate-model",
            "rollouts/app.heldout.prompts.jsonl",
            "--model",
            model,
            "--name",
            name,
            *TALK,
        )
        return run["run_id"]

    def trained(self, rows: str, seed: int, *more: str) -> str:
        overrides = (f"data.train_file={rows}", f"trainer.seed={seed}", *more)
        return self("start-training", "sft.yml", *overrides)["run_id"]


def rows_of_arms(project: Project) -> dict[str, str]:
    """Returns the SFT rows of each arm; prints how many there are."""
    project(
        "import-rollouts",
        "traces",
        "--output",
        "rollouts/app.jsonl",
        "--split-heldout",
        "0.25",
        "--prompts",
    )
    project("filter-dataset", "rollouts/app.jsonl", "--output", "rollouts/clean.jsonl", "--only-tools", *TOOLS,
            "--require-final-answer", "--not-contains", "error: ", "--match", "conversation", "--dedupe", "exact")  # fmt: skip
    project("generate-rollouts", "rollouts/app.prompts.jsonl", "--output", "rollouts/asked.jsonl", "--provider", "demo",
            "--model", "teacher", "--temperature", "1.15", "--seed", "5", *TALK)  # fmt: skip
    project(
        "filter-dataset",
        "rollouts/asked.jsonl",
        "--output",
        "rollouts/again.jsonl",
        "--min-reward",
        "1",
    )
    sources = {"raw": "app", "clean": "clean", "again": "again"}
    for arm, name in sources.items():
        made = project(
            "convert-rollouts",
            f"rollouts/{name}.jsonl",
            "--output",
            f"{arm}.jsonl",
            "--include-failed",
        )
        print(json.dumps({"arm": arm, "rows": made["converted"]}), flush=True)
    return {arm: f"{arm}.jsonl" for arm in sources}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument(
        "--on-policy", type=int, default=1, help="seeds that have the last two arms"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        project = Project(Path(folder))
        arms = rows_of_arms(project)
        before = project.measured("demo/student", "before")
        for seed in options.seeds:
            runs, seconds = {}, {}
            for arm, rows in arms.items():
                began = time.monotonic()
                runs[arm] = project.trained(rows, seed)
                seconds[arm] = time.monotonic() - began
            pairs = [("raw", "before"), ("clean", "raw"), ("again", "raw"), ("again", "clean")]
            if options.seeds.index(seed) < options.on_policy:
                began = time.monotonic()
                start = (f"model.path={runs['clean']}", f"trainer.seed={seed}")
                runs["distilled"] = project("start-training", "distill.yml", *start)["run_id"]
                epochs = round(6 * (time.monotonic() - began) / seconds["clean"])
                more = (f"model.path={runs['clean']}", f"trainer.num_epochs={epochs}")
                runs["longer"] = project.trained(arms["clean"], seed, *more)
                pairs += [("distilled", "clean"), ("distilled", "longer")]
            measured = {arm: project.measured(run, f"{arm}-{seed}") for arm, run in runs.items()}
            measured["before"] = before
            for arm, baseline in pairs:
                found = project("compare-evaluations", measured[baseline], measured[arm])[
                    "comparisons"
                ]
                print(
                    json.dumps(
                        {"seed": seed, "arm": arm, "than": baseline, "comparison": found[0]}
                    ),
                    flush=True,
                )


if __name__ == "__main__":
    main()
