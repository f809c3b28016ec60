"""A project folder of a task, in which commands of stillroom run as a user's would."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from task import Task, prompt_row, write_rows

from stillroom.data.formats import load_tasks

NUM_PROMPTS, NUM_HELDOUT = 400, 200
COMMAND_LIMIT_S = 2 * 3600
FORMS = ("seen", "new")
CONTEXT_FILE = "policy.md"


class Project:
    """The folder of a task and seed."""

    def __init__(
        self, folder: Path, task: Task, seed: int, *, num_heldout: int = NUM_HELDOUT
    ) -> None:
        """num_heldout: the number of held-out tasks of the training forms, and of new forms."""
        self.folder, self.task, self.seed = folder, task, seed
        folder.mkdir(parents=True, exist_ok=True)
        seen = task.rows(seed, NUM_PROMPTS + num_heldout, is_new=False)
        files = {
            "prompts": seen[:NUM_PROMPTS],
            "seen": seen[NUM_PROMPTS:],
            "new": task.rows(seed, num_heldout, is_new=True),
        }
        for name, rows in files.items():
            write_rows(folder / f"{name}.jsonl", [prompt_row(task, row) for row in rows])
        if task.tools is not None:
            (folder / "tools.py").write_text(task.tools, encoding="utf-8")
        if task.context is not None:
            (folder / CONTEXT_FILE).write_text(task.context, encoding="utf-8")

    def commonest_answer(self) -> dict[str, str]:
        """Returns which held-out tasks the commonest answer to a training prompt solves.

        The tasks are in the order of `evaluate`.
        """
        answers = {
            name: [
                task.metadata["expected_answer"]
                for task in sorted(
                    load_tasks(self.folder / f"{name}.jsonl"), key=lambda task: task.task_id
                )
            ]
            for name in ("prompts", *FORMS)
        }
        [(commonest, _)] = Counter(answers["prompts"]).most_common(1)
        return {
            name: "".join(str(int(answer == commonest)) for answer in answers[name])
            for name in FORMS
        }

    def command(self, name: str, *args: object) -> dict[str, Any]:
        """Runs a command and returns its result. Raises RuntimeError if it fails."""
        program = str(Path(sys.executable).with_name("stillroom"))
        words = [program, name, *map(str, args), "--json", "--workspace", str(self.folder)]
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            timeout=COMMAND_LIMIT_S,
            check=False,
            env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
        )
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        return json.loads(done.stdout.splitlines()[-1])

    def acting(self, model: str, *, is_teacher: bool = False) -> list[object]:
        """Returns the options that name a model in this process and say how it acts."""
        task = self.task
        options = ["--provider", "hf", "--model", model, "--max-turns", task.max_turns]
        options += ["--max-tokens", task.max_tokens, "--concurrency", 16]
        if task.tools is not None:
            options += ["--tools", "tools.py"]
        if is_teacher and task.context is not None:
            options += ["--context-file", CONTEXT_FILE]
        return options

    def train(self, name: str, config: str) -> dict[str, Any]:
        """Trains as the text of a config says; returns the run's report, with its seconds."""
        (self.folder / f"{name}.yml").write_text(config, encoding="utf-8")
        begun = time.monotonic()
        run = self.command("start-training", f"{name}.yml", f"trainer.seed={self.seed}")
        return {**run, "seconds": round(time.monotonic() - begun, 1)}

    def evaluate(
        self, model: str, *extra: object, is_teacher: bool = False
    ) -> dict[str, dict[str, Any]]:
        """Returns the evaluation on held-out tasks of the training forms, and of new forms.

        Each has `accuracy` (an estimate) and `solved` (0 or 1 of each task, in the order of ids).
        extra: more options of evaluate-model.
        """
        scores: dict[str, dict[str, Any]] = {}
        for name in FORMS:
            acting = self.acting(model, is_teacher=is_teacher)
            run = self.command("evaluate-model", f"{name}.jsonl", *acting, *extra)
            file = self.folder / "runs" / run["run_id"] / "evaluation.json"
            report = json.loads(file.read_bytes())
            scores[name] = {
                "accuracy": report["result"]["accuracy"],
                "solved": [
                    task["success"]
                    for task in sorted(report["tasks"], key=lambda task: task["task_id"])
                ],
            }
        return scores
