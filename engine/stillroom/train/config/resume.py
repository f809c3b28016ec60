"""The state from which an interrupted run is resumed; needs no torch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
from pydantic import BaseModel

from stillroom.errors import DataError, InputError, RunError
from stillroom.files import read_json
from stillroom.lineage import FileRecord, ModelRecord
from stillroom.models.resolve import CHECKPOINTS
from stillroom.run_folder import RunFolder
from stillroom.settings import Workspace
from stillroom.tools.source import ToolResult
from stillroom.train.config.schema import CONFIGS, keys_of_other_types, section_of
from stillroom.types import PartialTurn, RunStatus, SampledTurn

STATE = "training_state.json"
# These keys affect how a run is stored, watched, and split over passes and processes, not what it
# computes; max_minutes changes only the decay of the learning rate.
_CHANGEABLE_KEYS = frozenset(
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
        "model.license",
        "model.microbatch_tokens",
        "model.name",
        "project_id",
        "project_name",
        "rollout.server.api_key_env",
        "rollout.server.base_url",
        "rollout.server.timeout",
        "soft_targets.store",
        "teacher.api_key_env",
        "teacher.base_url",
        "teacher.concurrency",
        "teacher.timeout",
        "trainer.keep_checkpoints",
        "trainer.max_minutes",
        "trainer.save_step",
        "trainer.tensorboard",
        "trainer.trackio_project",
        "trainer.wandb_name",
        "trainer.wandb_project",
    }
)
"""Keys of config.yml that may change when a run is resumed."""


class BestValidation(msgspec.Struct, frozen=True, kw_only=True):
    """The lowest validation loss so far, its step, and the number of validations since."""

    best_loss: float | None = None
    best_step: int = 0
    num_worse: int = 0
    """The number of validations since the best one."""

    def with_validation(self, step: int, loss: float) -> "BestValidation":
        """Returns the state after one more validation, with its step and loss."""
        if self.best_loss is None or loss < self.best_loss:
            return BestValidation(best_loss=loss, best_step=step)
        return msgspec.structs.replace(self, num_worse=self.num_worse + 1)


class RunInputs(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs of a run, which must be unchanged when the run is resumed."""

    config: dict[str, Any]
    files: list[FileRecord]
    """The files of rows and the user's Python files."""
    models: list[ModelRecord]
    modules: dict[str, str] = {}
    """The SHA-256 of each module that the user's Python files import from their own folder."""


class RecordedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A finished turn, and the tools' replies to it (None while the tools are running)."""

    turn: SampledTurn
    replies: list[ToolResult] | None = None


class CarriedRollout(msgspec.Struct, frozen=True, kw_only=True):
    """An unfinished rollout to continue with newer weights: exact tokens, without a KV cache."""

    iteration: int
    """The iteration in which the rollout began, counted from 0."""
    index: int
    """Its index among the rollouts of that iteration."""
    turns: list[RecordedTurn]
    begun: PartialTurn | None = None
    """The partial turn that was being sampled; None between turns."""


class TrainingState(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a checkpoint's training_state.json; the tensors are in a file next to it."""

    step: int
    trained_tokens: int
    seconds: float
    validation: BestValidation
    inputs: RunInputs | None = msgspec.field(name="asked")
    carried: list[CarriedRollout] = []
    """The unfinished rollouts that continue in a later iteration (distill)."""
    phase_seconds: float | None = None
    """None in older checkpoints; see `seconds_of_phase`."""

    @property
    def seconds_of_phase(self) -> float:
        """The seconds since the phase's first step or, in older checkpoints, since the start."""
        return self.seconds if self.phase_seconds is None else self.phase_seconds


def step_name(step: int) -> str:
    """Returns the folder name of a step's checkpoint; names sort in the order of steps."""
    return f"step_{step:06d}"


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The checkpoint that a run is resumed from."""

    run_id: str
    checkpoint: Path
    state: TrainingState

    @property
    def best_checkpoint(self) -> Path | None:
        """The checkpoint with the lowest val_loss; None without early_stop."""
        best = self.state.validation.best_step
        return self.checkpoint.with_name(step_name(best)) if best else None

    def recorded_metrics(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Yields each step recorded by the run, with its finite metrics."""
        for step, values in RunFolder(self.checkpoint.parents[1]).read_metrics():
            yield step, {name: value for name, value in values.items() if value is not None}


class ResumableRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request of a run that can be resumed, as stored in the run's folder."""

    config: str
    overrides: list[str] = []


def read_resumable_request(workspace: Workspace, run_id: str) -> ResumableRequest:
    """Returns a training run's request. Raises an EngineError if the run can't be resumed."""
    run = RunFolder(_run_folder(workspace, run_id))
    try:
        state = run.read()
        request = msgspec.convert(run.read_request().request, type=ResumableRequest)
    except (OSError, DataError, msgspec.ValidationError) as error:
        raise RunError(
            f"{run_id!r} is not a training run that can be resumed: {error}",
            "give the id of an sft, dpo or distill run (list_runs)",
        ) from error
    is_complete = not (state.result or {}).get("stopped_by")
    if state.status is RunStatus.SUCCEEDED and is_complete:
        raise RunError(
            f"run {run_id!r} is finished, so there is nothing left to resume",
            f"start a new run from its model with the override model.path={run_id}",
        )
    return request


def find_resume_point(workspace: Workspace, run_id: str) -> ResumePoint:
    """Returns the newest checkpoint of a run, of the run that it was resumed from, and so on."""
    checkpoint = newest_checkpoint(RunFolder(_run_folder(workspace, run_id)))
    if checkpoint is None:
        raise RunError(
            f"run {run_id!r} has no checkpoint to resume from",
            "start a new run; trainer.save_step sets after how many steps a checkpoint is written",
        )
    return ResumePoint(checkpoint.parents[1].name, checkpoint, read_state(checkpoint))


def newest_checkpoint(resumed: RunFolder) -> Path | None:
    """Returns the checkpoint that a run is resumed from: its own, or one of an earlier run.

    With early_stop, a resumed run begins with a copy of the best checkpoint, which may be older
    than the latest one of the earlier run.
    """
    runs = chain([resumed], resumed.earlier_runs())
    checkpoints = [found for run in runs if (found := _latest_checkpoint(run.path)) is not None]
    return max(checkpoints, key=lambda checkpoint: checkpoint.name, default=None)


def _latest_checkpoint(run: Path) -> Path | None:
    """Returns the newest checkpoint in a run's folder that can be resumed from, or None."""
    states = sorted((run / CHECKPOINTS).glob(f"step_*/{STATE}"))
    return states[-1].parent if states else None


def read_state(checkpoint: Path) -> TrainingState:
    """Returns a checkpoint's training state. Raises DataError if its file is damaged."""
    path = checkpoint / STATE
    fix = f"delete {checkpoint.name} to resume from the previous checkpoint"
    return read_json(path, TrainingState, fix=fix)


def check_unchanged(before: RunInputs | None, after: RunInputs, *, run_id: str) -> None:
    """Raises RunError, listing all inputs that have changed since the run began."""
    if before is None:
        return
    changes = [
        *_config_changes(before.config, after.config),
        *_file_changes(before.files, after.files),
        *_module_changes(before.modules, after.modules),
        *_model_changes(before.models, after.models),
    ]
    if changes:
        raise RunError(
            f"run {run_id!r} cannot be resumed, because its inputs have changed: "
            + "; ".join(changes),
            "restore them, or start a new run from the last checkpoint with the override "
            "model.path=<that folder>",
        )


def _config_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    old, new = dict(_leaves(before)), dict(_leaves(after))
    # Earlier versions recorded the keys of all dataset_types.
    others = keys_of_other_types(after["dataset_type"])
    for key in sorted(old.keys() | new.keys()):
        if key in _CHANGEABLE_KEYS or key in others or key.partition(".")[0] in others:
            continue
        # A key unknown to the recording version had its default; one unknown to this version
        # counts as None.
        recorded = old[key] if key in old else _default_of(key, before)
        if recorded != new.get(key) and old.get(key) != new.get(key):
            yield f"{key} was {recorded!r} and is {new.get(key)!r}"


def _default_of(key: str, before: Mapping[str, Any]) -> Any:
    """Returns the default of a key of config.yml; None if it has none.

    Keys of an optional section that `before` lacks have no default.
    """
    model: type[BaseModel] | None = CONFIGS.get(before["dataset_type"])
    section: Any = before
    *parents, name = key.split(".")
    for parent in parents:
        field = model.model_fields.get(parent) if model is not None else None
        section = section.get(parent) if isinstance(section, Mapping) else None
        if field is None or (section is None and field.default is None):
            return None
        model = section_of(model, parent) if model is not None else None
    field = model.model_fields.get(name) if model is not None else None
    return None if field is None or field.is_required() else field.get_default()


def _leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted key and the value of each setting that is not a section."""
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _file_changes(before: list[FileRecord], after: list[FileRecord]) -> Iterator[str]:
    old, new = _by_name(before), _by_name(after)
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            change = "is new" if name not in old else "is gone" if name not in new else "differs"
            yield f"{name} {change} (SHA-256 {_short(old.get(name))} → {_short(new.get(name))})"


def _by_name(files: Sequence[FileRecord]) -> dict[str, str]:
    """Returns the hashes by file name; equal names are numbered in the order of config.yml.

    Folders are ignored, because the workspace may have been moved.
    """
    hashes: dict[str, str] = {}
    for file in files:
        name = Path(file.path).name
        num = sum(other == name or other.startswith(f"{name} (") for other in hashes)
        hashes[f"{name} ({num + 1})" if num else name] = file.sha256
    return hashes


def _module_changes(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[str]:
    # A new module is imported by a file that is compared itself.
    for name, old in sorted(before.items()):
        if (new := after.get(name)) != old:
            change = "differs" if new else "is gone"
            yield f"{name} {change} (SHA-256 {_short(old)} → {_short(new)})"


def _model_changes(before: list[ModelRecord], after: list[ModelRecord]) -> Iterator[str]:
    new = {model.role: model.sha256 or model.revision for model in after}
    for model in before:
        old = model.sha256 or model.revision
        if new.get(model.role) != old:
            yield (
                f"the files of the {model.role} {model.name!r} (weights, tokenizer or chat "
                f"template) differ ({_short(old)} → {_short(new.get(model.role))})"
            )


def _short(digest: str | None) -> str:
    return digest[:12] if digest else "none"


def _run_folder(workspace: Workspace, run_id: str) -> Path:
    """Returns the folder of a run. Raises InputError if there is none."""
    folder = workspace.runs / run_id
    if not run_id or "/" in run_id or run_id.startswith(".") or not folder.is_dir():
        raise InputError(
            f"there is no run {run_id!r} in {workspace.runs}",
            "list the runs with `stillroom list-runs` (tool list_runs)",
        )
    return folder
