"""A project folder of a task, in which commands of stillroom run as a user's would."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from tasks import Task, prompt_row, write_rows

NUM_PROMPTS, NUM_HELDOUT = 400, 200
COMMAND_LIMIT_S = 2 * 3600


class Project:
    """The folder of a task and seed."""

    def __init__(self, folder: Path, task: Task, seed: int) -> None:
        self.folder, self.task, self.seed = folder, task, seed
        folder.mkdir(parents=True, exist_ok=True)
        seen = task.rows(seed, NUM_PROMPTS + NUM_HELDOUT, is_new=False)
        files = {
            "prompts": seen[:NUM_PROMPTS],
            "seen": seen[NUM_PROMPTS:],
            "new": task.rows(seed, NUM_HELDOUT, is_new=True),
        }
        for name, rows in files.items():
            write_rows(folder / f"{name}.jsonl", [prompt_row(task, row) for row in rows])

    def command(self, name: str, *args: object) -> dict:
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

    def train(self, name: str, config: str) -> dict:
        """Trains as the text of a config says; returns the run's report, with its seconds."""
        (self.folder / f"{name}.yml").write_text(config, encoding="utf-8")
        begun = time.monotonic()
        run = self.command("start-training", f"{name}.yml", f"trainer.seed={self.seed}")
        return {**run, "seconds": round(time.monotonic() - begun, 1)}

    def evaluate(self, model: str) -> dict[str, dict]:
        """Returns the accuracy on held-out tasks of the training forms, and of new forms."""
        acting = ["--provider", "hf", "--model", model, "--max-turns", 1, "--concurrency", 16]
        scores = {}
        for name in ("seen", "new"):
            run = self.command(
                "evaluate-model", f"{name}.jsonl", *acting, "--max-tokens", self.task.max_tokens
            )
            file = self.folder / "runs" / run["run_id"] / "evaluation.json"
            scores[name] = json.loads(file.read_bytes())["result"]["accuracy"]
        return scores
