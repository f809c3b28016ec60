"""The history of a model, as its checkpoints and runs recorded it."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from stillroom.data.instruction import Instruction
from stillroom.errors import DataError, EngineError
from stillroom.evaluate.costs import compare_costs, display_name
from stillroom.evaluate.files import RESULT_FILE, Evaluation, other_measures
from stillroom.evaluate.intervals import Estimate
from stillroom.export.conversation import (
    EvaluatedConversation,
    TrainedConversation,
    evaluated_conversation,
    trained_conversation,
)
from stillroom.export.folder import read_export
from stillroom.export.provenance import (
    ROLLOUTS,
    DataStep,
    answering_models,
    data_steps,
    public_name,
)
from stillroom.files import read_json
from stillroom.lineage import FileRecord, Manifest, ModelRecord, read_manifest
from stillroom.models.resolve import CheckpointRecord, ModelLocation, locate_model
from stillroom.run_folder import RunFolder, RunState
from stillroom.settings import Workspace

_Kind = TypeVar("_Kind")
_MAX_STAGES = 12
_MAX_EVALUATIONS = 50


@dataclass(frozen=True, slots=True)
class TrainingStage:
    """One training run."""

    method: str
    run_id: str
    step: int
    started_from: str
    identity: str | None = None
    """The version of the initial model: a hub commit, or the hash of a folder."""
    train_file: str | None = None
    data: tuple[DataStep, ...] = ()
    """The operations that made the rows, latest first; empty if the rows have no manifest."""
    teacher: str | None = None
    """The teacher of on-policy distillation, or of soft targets for the rows."""
    instruction: str | None = None
    """A short description of the instruction that only the teacher read; None without one."""
    soft_targets: str | None = None
    """The loss against the teacher's probabilities; None without soft targets."""
    max_length: int | None = None
    """The maximum tokens of a row or rollout; None if only the model's context limited them."""
    conversation: TrainedConversation | None = None
    """The conversation format of its rows for the student; None if they have changed since."""
    answered_by: frozenset[str] | None = None
    """The models that answered its rows, according to the rollouts; None if unknown."""
    stated_licence: str | None = None
    """The licence of its starting model according to its config.yml."""
    eval_metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """The evaluation metrics during training at this step, by name."""


@dataclass(frozen=True, slots=True)
class RecordedEvaluation:
    """One evaluation of exactly this checkpoint."""

    run_id: str
    name: str
    data: str
    accuracy: Estimate
    teacher: str | None
    teacher_kl: Estimate | None
    conversation: EvaluatedConversation | None = None
    """The system message and questions of its prompts; None if its rollouts no longer exist."""
    other_measures: tuple[str, ...] = ()
    """Short descriptions of its other measurements."""
    temperature: float | None = None
    """The sampling temperature of its answers; None if it is unknown."""


@dataclass(frozen=True, slots=True)
class History:
    """The recorded history of a checkpoint: its training runs, data and evaluations."""

    base: ModelLocation | None
    """The model that the first training started from; None if it was moved or deleted."""
    base_name: str
    stages: tuple[TrainingStage, ...]
    """The training runs in order; empty for a model that Stillroom did not train."""
    evaluations: tuple[RecordedEvaluation, ...]
    """The evaluations, latest first."""
    num_evaluations: int = 0
    """The number of all evaluations, of which `evaluations` has the latest 50."""
    costs: str | None = None
    """The cost of a task with the model and with its teacher, if both were evaluated."""

    @property
    def conversation(self) -> TrainedConversation | None:
        """The conversation format of the last training; None if unknown."""
        return self.stages[-1].conversation if self.stages else None

    @property
    def stated_licence(self) -> str | None:
        """The licence of the base that a training's config.yml states; None if none does."""
        return next((s.stated_licence for s in self.stages if s.stated_licence), None)

    @property
    def stage_with_tools(self) -> TrainingStage | None:
        """The last training if its rows have tools; otherwise None.

        Prompts of on-policy distillation do not list tools, so the training before it is used.
        """
        for stage in reversed(self.stages):
            if stage.conversation is not None and stage.conversation.tool_schemas:
                return stage
            if stage.method != "distill":
                return None
        return None

    @property
    def is_synthetic(self) -> bool:
        """Whether a model is known to have written or scored training data."""
        authors = (step.authors for stage in self.stages for step in stage.data)
        scored = (stage.method == "distill" or stage.soft_targets for stage in self.stages)
        return any(authors) or any(scored) or self.is_instructed

    @property
    def is_instructed(self) -> bool:
        """Whether rows record an instruction that only their teacher read.

        Such rows were answered by a teacher, even if its name is unknown.
        """
        conversations = (stage.conversation for stage in self.stages)
        return any(
            conversation is not None and conversation.removed for conversation in conversations
        )

    @property
    def teachers(self) -> list[str]:
        """The models that wrote or scored the training data, without duplicates.

        Earlier stages of the model itself are included only if they scored its tokens.
        """
        students = {self.base_name, *(stage.run_id for stage in self.stages)}
        names: list[str | None] = []
        for stage in self.stages:
            answering_steps = (step for step in stage.data if step.teacher not in students)
            names += [
                name
                for step in answering_steps
                for name in _authors(step, stage.answered_by)
                if name not in students
            ]
            names.append(stage.teacher)
        return list(dict.fromkeys(name for name in names if name))

    @property
    def providers(self) -> list[str]:
        """The providers of teachers that answered, without duplicates."""
        names = (
            step.provider
            for stage in self.stages
            for step in stage.data
            if _authors(step, stage.answered_by)
        )
        return list(dict.fromkeys(name for name in names if name))


def read_history(
    workspace: Workspace, checkpoint: ModelLocation, base: ModelLocation | None
) -> History:
    """Returns the history of a checkpoint; `base` is the base model of an adapter."""
    stages: list[TrainingStage] = []
    name = (base or checkpoint).name
    for location in models_behind(workspace, checkpoint):
        if (record := location.record) is not None and len(stages) < _MAX_STAGES:
            config = _config(workspace, record)
            name = _starting_model(config, record)
            stages.insert(0, _stage(workspace, record, config, location, name))
            base = None
        elif stages:
            base = location
    evaluations = _evaluations(workspace, checkpoint)
    history = History(
        base=base,
        base_name=public_name(workspace, name),
        stages=tuple(stages),
        evaluations=evaluations[:_MAX_EVALUATIONS],
        num_evaluations=len(evaluations),
    )
    return replace(history, costs=cost_comparison(workspace, history))


def models_behind(workspace: Workspace, checkpoint: ModelLocation) -> Iterator[ModelLocation]:
    """Yields a checkpoint and the models that it was trained from, latest first, its base last.

    A model that was moved or deleted ends the sequence.
    """
    location, seen = checkpoint, set[str]()
    while location is not None and location.location not in seen and len(seen) <= _MAX_STAGES:
        seen.add(location.location)
        yield location
        if (record := location.record) is None:
            return
        location = _find_model(workspace, _starting_model(_config(workspace, record), record))


def cost_comparison(workspace: Workspace, history: History) -> str | None:
    """Returns a sentence that compares the model's cost per task with its teacher's.

    It compares the latest evaluation with one of a teacher on the same data. Returns None without
    such an evaluation or known costs.
    """
    if not history.evaluations or not history.teachers:
        return None
    latest_run = workspace.runs / history.evaluations[0].run_id
    latest = optional_document(latest_run / RESULT_FILE, Evaluation)
    for file in sorted(workspace.runs.glob(f"*/{RESULT_FILE}")):
        other = optional_document(file, Evaluation)
        if latest is None or other is None or other.result.data != latest.result.data:
            continue
        if public_name(workspace, other.result.model) in history.teachers:
            try:
                costs = compare_costs(
                    workspace, latest.result, other.result, format_name=display_name
                )
            except EngineError:
                return None  # prices.yml is malformed
            return costs.sentence if costs is not None else None
    return None


def _find_model(workspace: Workspace, name: str) -> ModelLocation | None:
    try:
        return locate_model(workspace, name)
    except EngineError:
        return None  # the model was moved or deleted


def _config(workspace: Workspace, record: CheckpointRecord) -> dict[str, Any]:
    path = workspace.runs / record.run_id / "config.json"
    return optional_document(path, dict[str, Any]) or {}


def _starting_model(config: dict[str, Any], record: CheckpointRecord) -> str:
    """Returns the name of the model that a training with this configuration started from."""
    return (config.get("model") or {}).get("path") or record.base_model


def _stage(
    workspace: Workspace,
    record: CheckpointRecord,
    config: dict[str, Any],
    checkpoint: ModelLocation,
    started_from: str,
) -> TrainingStage:
    manifest = optional_manifest(checkpoint.path)
    models = {model.role: model for model in manifest.models} if manifest else {}
    # The first input is config.yml, the second the rows.
    rows = manifest.inputs[1] if manifest and len(manifest.inputs) > 1 else None
    is_distill = record.method == "distill"
    section, key = ("rollout", "max_context_window") if is_distill else ("model", "max_length")
    teacher = models.get("teacher")
    conversation = _conversation(workspace, rows, config) if rows else None
    ids = conversation.rollout_ids if conversation is not None else frozenset[str]()
    return TrainingStage(
        method=record.method,
        run_id=record.run_id,
        step=record.step,
        started_from=public_name(workspace, started_from),
        identity=_identity(models.get("student")),
        train_file=public_name(workspace, rows.path) if rows else None,
        data=tuple(data_steps(workspace, rows)) if rows else (),
        teacher=public_name(workspace, teacher.name) if teacher else None,
        soft_targets=_soft_targets(config),
        max_length=(config.get(section) or {}).get(key),
        instruction=_instruction(config, manifest),
        conversation=conversation,
        answered_by=answering_models(workspace, rows, ids) if rows else None,
        stated_licence=(config.get("model") or {}).get("license"),
        eval_metrics=_eval_metrics(workspace, record),
    )


def _conversation(
    workspace: Workspace, rows: FileRecord, config: dict[str, Any]
) -> TrainedConversation | None:
    """Returns the conversation format of training rows or prompts for the student."""
    conversation = trained_conversation(workspace, rows)
    system = (config.get("model") or {}).get("system")
    if conversation is None or system is None:
        return conversation
    return replace(conversation, systems=Counter({system: conversation.num_rows}))


def _instruction(config: dict[str, Any], manifest: Manifest | None) -> str | None:
    """Returns a short description of the instruction that only the teacher read in training."""
    teacher, student = (config.get(name) or {} for name in ("teacher", "model"))
    system, name = teacher.get("system"), teacher.get("context_file")
    parts = [] if system is None else [Instruction(system).describe()]
    if name is not None:
        records = manifest.inputs if manifest else []
        digest = next((r.sha256 for r in records if Path(r.path).name == Path(name).name), None)
        parts.append(f"the text of {Path(name).name} (sha256 {(digest or 'unknown')[:16]})")
    if not parts and student.get("system") is not None:
        return "the prompts' own system messages"
    return " and ".join(parts) or None


def _soft_targets(config: dict[str, Any]) -> str | None:
    """Returns a description of the loss of soft targets; None without soft targets."""
    if not (settings := config.get("soft_targets")):
        return None
    k, weight = settings.get("top_k"), settings.get("label_coef")
    targets = f"its {k} most probable tokens" if k else "its whole vocabulary"
    labels = f", and the tokens themselves with weight {weight:g}" if weight else ""
    loss = str(settings.get("loss")).replace("_kl", " KL").replace("jsd", "JSD")
    return f"{loss} at temperature {settings.get('temperature'):g} over {targets}{labels}"


def _eval_metrics(workspace: Workspace, record: CheckpointRecord) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for step, values in RunFolder(workspace.runs / record.run_id).read_metrics():
        if step == record.step:
            metrics |= {n: v for n, v in values.items() if n.startswith("eval/") and v is not None}
    return metrics


def _authors(step: DataStep, answered_by: frozenset[str] | None) -> list[str]:
    """Returns the names of the models that wrote a step's rows.

    If the endpoint reported other models than the requested teacher, the teacher's name includes
    them. If `answered_by` is known, only models in it are returned.
    """
    if step.teacher is None or step.operation != ROLLOUTS:
        return [name for name in step.authors if answered_by is None or name in answered_by]
    others = [a.model for a in step.answered_by if not step.teacher.endswith(a.model)]
    if answered_by is not None:
        others = [name for name in others if name in answered_by]
        if not others and not any(step.teacher.endswith(name) for name in answered_by):
            return []
    return [f"{step.teacher} (answered as {', '.join(others)})" if others else step.teacher]


def optional_manifest(path: Path) -> Manifest | None:
    """Returns the manifest of a file or folder; None if it is missing or damaged."""
    try:
        return read_manifest(path)
    except EngineError:
        return None  # the card is then less complete


def _identity(model: ModelRecord | None) -> str | None:
    """Returns the commit or hash of a model as text; None if neither is known."""
    if model is None:
        return None
    if model.revision:
        return f"commit {model.revision[:12]}"
    return f"sha256 {model.sha256[:12]}" if model.sha256 else None


def _evaluations(workspace: Workspace, checkpoint: ModelLocation) -> tuple[RecordedEvaluation, ...]:
    dated: list[tuple[str, RecordedEvaluation]] = []
    for file in workspace.runs.glob(f"*/{RESULT_FILE}"):
        evaluation = optional_document(file, Evaluation)
        state = optional_document(RunFolder(file.parent).state_file, RunState)
        if evaluation is None or state is None:
            continue
        result = evaluation.result
        if evaluated_model(workspace, evaluation, checkpoint) is not None:
            recorded = RecordedEvaluation(
                file.parent.name,
                public_name(workspace, result.name),
                public_name(workspace, result.data),
                result.accuracy,
                public_name(workspace, result.teacher) if result.teacher else None,
                result.teacher_kl,
                evaluated_conversation(workspace.path(result.rollouts)),
                tuple(other_measures(result)),
                result.temperature,
            )
            dated.append((state.created_at, recorded))
    dated.sort(key=lambda item: item[0], reverse=True)
    return tuple(entry for _, entry in dated)


def evaluated_model(
    workspace: Workspace, evaluation: Evaluation, checkpoint: ModelLocation
) -> ModelLocation | None:
    """Returns the evaluated model if it is this checkpoint or an earlier export of it, or None."""
    location = _find_model(workspace, evaluation.result.model)
    if location is None or not location.is_local:
        return None
    export, record = read_export(location.path), checkpoint.record
    is_export = export and record and (export.run_id, export.step) == (record.run_id, record.step)
    return location if is_export or location.location == checkpoint.location else None


def optional_document(path: Path, kind: type[_Kind]) -> _Kind | None:
    """Returns a JSON document, or None if it is missing or malformed."""
    try:
        return read_json(path, kind)
    except (OSError, DataError):
        return None
