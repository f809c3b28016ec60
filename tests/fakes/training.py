"""Training projects in a test's folder, and students to train by hand."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from fakes.reporters import KeptReporter
from fakes.tiny_models import TinyModels
from stillroom.files import write_json
from stillroom.lineage import now
from stillroom.models.resolve import CHECKPOINTS
from stillroom.run_folder import RunFolder, RunRequest, RunState
from stillroom.settings import Workspace
from stillroom.train.config.request import StartTraining
from stillroom.train.config.sections import ModelSection
from stillroom.train.loop.session import TrainResult
from stillroom.train.run import train
from stillroom.train.student.model import Student, load_student
from stillroom.types import RunKind, RunStatus

PRICE_TOOL = """
from stillroom.tools import tool

@tool
def price(item: str) -> str:
    "The price of an item."
    return "12"
"""


@dataclass(frozen=True, slots=True)
class OneByOne(Student):
    """A student that runs every sequence in a forward pass of its own."""

    @property
    def max_microbatch_tokens(self) -> int:
        return 1

    def pack_tokens(self, longest: int) -> int:
        return 1


def make_student(models: TinyModels, folder: Path, *, rank: int = 0, seed: int = 0) -> Student:
    section = ModelSection(path=str(folder), qlora_rank=rank)
    if folder.parent != models.root:
        return load_student(models.workspace, section, seed=seed)
    load = partial(load_student, models.workspace, section, seed=seed)
    return models.copy_of((folder, rank, seed), load)


def one_by_one(student: Student) -> Student:
    return OneByOne(**{f.name: getattr(student, f.name) for f in fields(student)})


def gradients(student: Student) -> dict[str, Any]:
    """Returns the gradients there are, by parameter, and clears them."""
    named = student.module.named_parameters()
    found = {name: p.grad.clone() for name, p in named if p.grad is not None}
    student.module.zero_grad(set_to_none=True)
    return found


def largest_gap(ours: dict[str, Any], reference: dict[str, Any]) -> float:
    """Returns the largest difference of the gradients, as a share of the largest of them."""
    assert ours.keys() == reference.keys()
    largest = max(gradient.abs().max().item() for gradient in reference.values())
    gaps = [(ours[name].double() - reference[name].double()).abs().max().item() for name in ours]
    return max(gaps) / max(largest, 1e-12)


def write_run_files(folder: Path, request: StartTraining, status: RunStatus) -> None:
    """Writes what a run's folder holds once its process has started."""
    root, run = folder.parents[1], RunFolder(folder)
    details = request.model_dump(mode="json")
    write_json(run.request_file, RunRequest(kind=RunKind.SFT, workspace=str(root), request=details))
    run.write(RunState(run_id=run.run_id, kind=RunKind.SFT, status=status, created_at=now()))


@dataclass
class Project:
    """A workspace with a config.yml that tests change piece by piece."""

    root: Path
    config: dict[str, Any]
    reporter: KeptReporter = field(default_factory=KeptReporter)
    clock: Callable[[], float] = time.monotonic

    @property
    def workspace(self) -> Workspace:
        return Workspace(self.root)

    def write(self, rows: Sequence[Any], *, name: str = "train.jsonl") -> None:
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (self.root / name).write_text(lines, encoding="utf-8")

    def write_config(self) -> None:
        text = yaml.safe_dump(self.config)
        (self.root / "config.yml").write_text(text, encoding="utf-8")

    def train(self, run: str = "run-1", *overrides: str, resume: str | None = None) -> TrainResult:
        self.write_config()
        folder = self.root / "runs" / run
        folder.mkdir(parents=True, exist_ok=True)
        request = StartTraining(config="config.yml", overrides=overrides, resume=resume)
        write_run_files(folder, request, RunStatus.RUNNING)
        return train(
            self.workspace, request, folder=folder, reporter=self.reporter, clock=self.clock
        )

    def checkpoints(self, run: str = "run-1") -> list[str]:
        folder = self.root / "runs" / run / CHECKPOINTS
        return sorted(entry.name for entry in folder.iterdir()) if folder.exists() else []

    def checkpoint(self, name: str = "final", run: str = "run-1") -> Path:
        return self.root / "runs" / run / CHECKPOINTS / name


def make_project(root: Path, method: str, start: Path, **sections: dict[str, Any]) -> Project:
    """Returns a project that trains the model in the folder `start`."""
    config: dict[str, Any] = {
        "dataset_type": method,
        "data": {"batch_size": 4},
        "model": {"path": str(start), "qlora_rank": 0},
        "trainer": {"num_epochs": 1, "learning_rate": 1e-3, "warmup_steps": 0},
    }
    for name, values in sections.items():
        config[name] = {**config.get(name, {}), **values}
    return Project(root, config)
