"""Going on with a run that ended early: what a checkpoint knows of its run; needs no torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from stillroom.errors import DataError, InputError, RunError
from stillroom.lineage import FileRecord, ModelRecord
from stillroom.models.resolve import CHECKPOINTS
from stillroom.run_folder import RunFolder
from stillroom.settings import Workspace
from stillroom.tools.source import ToolResult
from stillroom.types import BegunTurn, RunStatus, SampledTurn

STATE = "training_state.json"
# These say how a run is kept and watched, or in how many passes and processes it computes the
# same.
FREE_KEYS = frozenset(
    {
        "description",
        "evals",
        "launcher.address",
        "launcher.kind",
        "launcher.main_address",
        "launcher.num_machines",
        "launcher.num_processes",
        "launcher.strategy",
        "model.description",
        "model.gradient_checkpointing",
        "model.microbatch_tokens",
        "model.name",
        "project_id",
        "project_name",
        "rollout.server.api_key_env",
        "rollout.server.base_url",
        "rollout.server.timeout",
        "teacher.api_key_env",
        "teacher.base_url",
        "teacher.concurrency",
        "teacher.timeout",
        "trainer.keep_checkpoints",
        "trainer.save_step",
        "trainer.tensorboard",
        "trainer.trackio_project",
        "trainer.wandb_project",
    }
)
"""Keys of config.yml that may be others when a run goes on."""


class Validation(msgspec.Struct, frozen=True, kw_only=True):
    """What the held-out rows have said so far."""

    best_loss: float | None = None
    best_step: int = 0
    num_worse: int = 0
    """Validations in a row since the best one."""

    def after(self, step: int, loss: float) -> "Validation":
        """Returns what is known once the rows' loss after a step is."""
        if self.best_loss is None or loss < self.best_loss:
            return Validation(best_loss=loss, best_step=step)
        return msgspec.structs.replace(self, num_worse=self.num_worse + 1)


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What a run computes from; all of it is the same when it goes on."""

    config: dict[str, Any]
    files: list[FileRecord]
    """The rows and the user's Python files."""
    models: list[ModelRecord]


class KnownTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A finished turn, and the tools' replies to it once they are there."""

    turn: SampledTurn
    replies: list[ToolResult] | None = None


class CarriedRollout(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout that goes on under newer weights, as exact tokens; no cache of older weights."""

    iteration: int
    """In which it began, from 0."""
    index: int
    """Its place among that iteration's rollouts."""
    turns: list[KnownTurn]
    begun: BegunTurn | None = None
    """Of the turn that was being sampled."""


class TrainingState(msgspec.Struct, frozen=True, kw_only=True):
    """All of training_state.json in a checkpoint; its tensors lie beside it."""

    step: int
    trained_tokens: int
    seconds: float
    validation: Validation
    asked: Asked | None
    carried: list[CarriedRollout] = []
    """Rollouts that are under way (distill)."""


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The checkpoint a run goes on from."""

    run_id: str
    checkpoint: Path
    state: TrainingState

    def recorded_metrics(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Yields the steps that the run has recorded, with the values that were finite."""
        for step, values in RunFolder(self.checkpoint.parents[1]).read_metrics():
            yield step, {name: value for name, value in values.items() if value is not None}


class RunToResume(msgspec.Struct, frozen=True, kw_only=True):
    """The request of a training run, as its folder keeps it."""

    config: str
    overrides: list[str] = []
    resume: str | None = None


def run_to_resume(workspace: Workspace, run_id: str) -> RunToResume:
    """Returns what a training run was asked to do. Raises an EngineError if it can't go on."""
    run = RunFolder(_run_folder(workspace, run_id))
    try:
        status = run.read().status
        request = msgspec.convert(run.read_request().request, type=RunToResume)
    except (OSError, msgspec.DecodeError) as error:
        raise RunError(
            f"{run_id!r} is not a training run that can go on: {error}",
            "give the id of an sft, dpo or distill run (list_runs)",
        ) from error
    if status is RunStatus.SUCCEEDED:
        raise RunError(
            f"run {run_id!r} is finished, so there is nothing left to go on with",
            f"start a new run from its model with the override model.path={run_id}",
        )
    return request


def find_resume_point(workspace: Workspace, run_id: str) -> ResumePoint:
    """Returns the latest checkpoint of a run, or of the run that it went on from itself."""
    seen: list[str] = []
    following: str | None = run_id
    while following is not None and following not in seen:
        seen.append(following)
        folder = _run_folder(workspace, following)
        if (checkpoint := latest_checkpoint(folder)) is not None:
            return ResumePoint(folder.name, checkpoint, read_state(checkpoint))
        following = run_to_resume(workspace, following).resume
    raise RunError(
        f"run {run_id!r} has no checkpoint to go on from",
        "start it anew; trainer.save_step writes a checkpoint every so many steps",
    )


def latest_checkpoint(run: Path) -> Path | None:
    """Returns the newest checkpoint of a run's folder that a run can go on from, or None."""
    found = sorted((run / CHECKPOINTS).glob(f"step_*/{STATE}"))
    return found[-1].parent if found else None


def read_state(checkpoint: Path) -> TrainingState:
    """Returns what a checkpoint knows of its run. Raises DataError if it is damaged."""
    path = checkpoint / STATE
    try:
        return msgspec.json.decode(path.read_bytes(), type=TrainingState)
    except msgspec.DecodeError as error:
        raise DataError(
            f"{path} is damaged: {error}",
            f"delete {checkpoint.name}, and the checkpoint before it is taken",
        ) from error


def check_unchanged(before: Asked | None, after: Asked, *, run_id: str) -> None:
    """Raises RunError that names what is not as it was when the run began."""
    if before is None:
        return
    told = [
        *_config_changes(before.config, after.config),
        *_file_changes(before.files, after.files),
        *_model_changes(before.models, after.models),
    ]
    if told:
        raise RunError(
            f"run {run_id!r} cannot go on, for what it is made of has changed: {'; '.join(told)}",
            "put it back as it was, or start a new run from its last checkpoint with the override "
            "model.path=<that folder>",
        )


def _config_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    old, new = dict(_leaves(before)), dict(_leaves(after))
    for key in sorted(old.keys() | new.keys()):
        # A key that one of the two versions of stillroom doesn't know says nothing in the other.
        if key not in FREE_KEYS and old.get(key) != new.get(key):
            yield f"{key} was {old.get(key)!r} and is {new.get(key)!r}"


def _leaves(section: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield above + key, value


def _file_changes(before: list[FileRecord], after: list[FileRecord]) -> Iterator[str]:
    now = {Path(file.path).name: file.sha256 for file in after}
    then = {Path(file.path).name: file.sha256 for file in before}
    for name in sorted(now.keys() | then.keys()):
        if now.get(name) != then.get(name):
            what = "is new" if name not in then else "is gone" if name not in now else "differs"
            yield f"{name} {what} (SHA-256 {_short(then.get(name))} → {_short(now.get(name))})"


def _model_changes(before: list[ModelRecord], after: list[ModelRecord]) -> Iterator[str]:
    now = {model.role: model.sha256 or model.revision for model in after}
    for model in before:
        then = model.sha256 or model.revision
        if now.get(model.role) != then:
            yield (
                f"the files of the {model.role} {model.name!r} (weights, tokenizer or chat "
                f"template) differ ({_short(then)} → {_short(now.get(model.role))})"
            )


def _short(digest: str | None) -> str:
    return digest[:12] if digest else "none"


def _run_folder(workspace: Workspace, run_id: str) -> Path:
    folder = workspace.runs / run_id
    if not run_id or "/" in run_id or run_id.startswith(".") or not folder.is_dir():
        raise InputError(
            f"there is no run {run_id!r} in {workspace.runs}",
            "list the runs with `stillroom list-runs` (tool list_runs)",
        )
    return folder
