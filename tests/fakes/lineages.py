"""A project from prompts to a checkpoint, as the operations leave it; the models are made up."""

import json
from pathlib import Path
from typing import Any

from fakes.rollout_rows import assistant, rollout_row, user, write_rows
from stillroom.curate.convert import ConvertRollouts, convert_rollouts
from stillroom.curate.filter.request import FilterDataset
from stillroom.curate.filter.run import filter_dataset
from stillroom.curate.pairs import MakeDpoPairs, make_dpo_pairs
from stillroom.data.formats import load_tasks
from stillroom.lineage import ModelRecord, record_folder, write_manifest
from stillroom.models.resolve import ModelLocation, identify
from stillroom.settings import Workspace

NUM_PROMPTS = 4
RUN = "sft-run"


class Lineages:
    """The steps of a distillation, each with its manifest."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.workspace = Workspace(root)
        self.ids: list[str] = []

    def write_prompts(self) -> None:
        rows = [{"prompt": f"What is {i} + 1?", "metadata": {"n": i}} for i in range(NUM_PROMPTS)]
        write_rows(self.root / "prompts.jsonl", rows)

    def rollouts(self, name: str = "rollouts.jsonl", *, model: str = "m") -> Path:
        """Writes two rollouts of each prompt; the second one is wrong."""
        tasks = load_tasks(self.root / "prompts.jsonl")
        rows: list[dict[str, Any]] = []
        for number, task in enumerate(tasks):
            for sample in (0, 1):
                right = sample == 0
                text = str(number + 1) if right else f"{model} says no"
                changes: dict[str, Any] = {
                    "messages": [user(f"What is {number} + 1?"), assistant(text)],
                    "metadata": task.metadata,
                    "reward": float(right),
                    "success": right,
                }
                row = rollout_row(task_id=task.task_id, sample=sample, **changes)
                rows.append(row)
        self.ids = [row["id"] for row in rows]
        path = write_rows(self.root / name, rows)
        write_manifest(
            path,
            operation="generate_rollouts",
            inputs=[
                self.root / "prompts.jsonl",
                ModelRecord(role="policy", name=model, location="openai"),
            ],
            request={"input": "prompts.jsonl", "output": name, "system": None},
            counts={"rows": len(rows)},
            run_id="rollouts-run",
        )
        return path

    def filter(
        self,
        source: str | tuple[str, ...] = "rollouts.jsonl",
        output: str = "good.jsonl",
        **given: Any,
    ):
        return filter_dataset(self.workspace, FilterDataset(input=source, output=output, **given))

    def convert(self, source: str = "good.jsonl", output: str = "sft.jsonl", **given: Any):
        return convert_rollouts(
            self.workspace, ConvertRollouts(input=source, output=output, **given)
        )

    def pairs(self, source: str = "rollouts.jsonl", output: str = "pairs.jsonl"):
        return make_dpo_pairs(self.workspace, MakeDpoPairs(input=source, output=output))

    def checkpoint(self, train_file: str = "sft.jsonl", *, base: Path | None = None) -> Path:
        """Writes what start_training leaves: a run with a final checkpoint."""
        config = self.root / "config.yml"
        config.write_text("dataset_type: sft\n", encoding="utf-8")
        run = self.root / "runs" / RUN
        folder = run / "checkpoints" / "final"
        folder.mkdir(parents=True)
        (run / "run.json").write_text("{}", encoding="utf-8")
        (folder / "config.json").write_text("{}", encoding="utf-8")
        (folder / "model.safetensors").write_bytes(b"weights")
        start = base or self.model("base")
        location = ModelLocation("base", str(start), is_local=True)
        student = identify(self.workspace, location, role="student")
        write_manifest(
            folder,
            written=record_folder(folder),
            operation="start_training",
            inputs=[config, self.root / train_file, student],
            request={"config": "config.yml"},
            counts={"step": 3},
            run_id=RUN,
        )
        return folder

    def export(self, name: str = "exported") -> Path:
        """Writes what export_model leaves of the checkpoint: a folder with a manifest."""
        checkpoint = self.root / "runs" / RUN / "checkpoints" / "final"
        folder = self.model(name)
        location = ModelLocation(RUN, str(checkpoint), is_local=True)
        source = identify(self.workspace, location, role="checkpoint")
        write_manifest(
            folder,
            written=record_folder(folder),
            operation="export_model",
            inputs=[source],
            request={"model": RUN, "output": name},
            counts={},
        )
        return folder

    def model(self, name: str) -> Path:
        folder = self.root / name
        folder.mkdir()
        (folder / "config.json").write_text("{}", encoding="utf-8")
        return folder

    def all(self) -> Path:
        """Does everything; returns the checkpoint."""
        self.write_prompts()
        self.rollouts()
        self.filter(min_reward=1)
        self.convert()
        return self.checkpoint()

    def rows(self, name: str) -> list[dict[str, Any]]:
        lines = (self.root / name).read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]
