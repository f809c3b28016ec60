"""What a run reads, writes and calls on another machine, for each kind of request."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from stillroom.errors import DataError
from stillroom.evaluate.request import EvaluationPlan
from stillroom.export.request import ExportModel, ExportPlan
from stillroom.models.chat_template import TemplateSource
from stillroom.models.resolve import ModelLocation
from stillroom.rollout.plan import GenerationPlan, RolloutPlan
from stillroom.rollout.rescore.request import ScoreRollouts, ScoringPlan
from stillroom.run_folder import RunFolder, RunState, all_runs
from stillroom.teachers.providers import Endpoint
from stillroom.tools.user.file import UserFile
from stillroom.train.config.request import StartTraining, TrainingPlan
from stillroom.train.config.schema import TrainConfig
from stillroom.types import RunKind, RunStatus


@dataclass(frozen=True, slots=True)
class Address:
    """A URL that a run calls, and its label in error messages."""

    label: str
    url: str
    is_loadable: bool = False
    """Whether the model at this URL could be loaded in the run's process instead (provider hf)."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a run reads, writes and calls."""

    files: Sequence[Path] = ()
    """Files and folders that it reads."""
    reusable: Sequence[Path] = ()
    """Files that it reads unless they are deleted before they are sent."""
    prompts: Sequence[Path] = ()
    """The files whose rows may name containers."""
    models: Sequence[ModelLocation] = ()
    tokenizers: Sequence[str] = ()
    """Models that are served elsewhere, of which the run reads only the tokenizer."""
    code: Sequence[UserFile] = ()
    servers: Sequence[str] = ()
    """The command lines and URLs of MCP servers."""
    addresses: Sequence[Address] = ()
    outputs: Sequence[str] = ()
    """Files and folders that it writes outside of its own folder, as named in the request."""
    key_names: Sequence[str | None] = ()
    """The environment variables of API keys; None for an endpoint without a key."""
    tracker_keys: Sequence[str] = ()
    """Keys that libraries read from the environment."""
    extras: Sequence[str] = ()
    """Extras of Stillroom's package, without `gguf`, which depends on the models."""
    config: Path | None = None
    """The config.yml of a training run; the run's own copy of it is sent."""
    resume: str | None = None
    """The id of the run that is resumed."""
    exported: ModelLocation | None = None
    """The checkpoint whose history the model card describes."""
    records: Sequence[str] = ()
    """Names in the request that may be ids of runs, whose records are read."""


def needs_of_training(request: StartTraining, plan: TrainingPlan) -> Needs:
    """Returns what a training run needs."""
    config, trainer = plan.config, plan.config.trainer
    soft = config.soft_targets
    store = soft.store if soft is not None and soft.top_k is not None else None
    return Needs(
        files=[path for path in plan.inputs if path not in _model_paths(plan.models)],
        prompts=[*plan.train_files, *plan.eval_files.values()],
        models=plan.models,
        tokenizers=[
            teacher.tokenizer or teacher.path
            for teacher in config.teachers
            if teacher.section.is_served
        ]
        + _template_models(plan.template),
        code=_without_none(plan.tools_file, plan.rewards_file),
        servers=config.rollout.mcp_servers,
        addresses=list(_addresses_of_training(plan)),
        outputs=[store] if store is not None else [],
        key_names=plan.key_names,
        tracker_keys=["WANDB_API_KEY"] if trainer.wandb_project is not None else [],
        extras=training_extras(config),
        config=plan.config_file,
        resume=request.resume,
    )


def training_extras(config: TrainConfig) -> list[str]:
    """Returns the extras of Stillroom's package that a training needs, without `gguf`."""
    sections = (config.model, *(teacher.section for teacher in config.teachers))
    extras = {
        "train": True,
        "qlora": any(section.quantization is not None for section in sections),
        "browse": config.rollout.browse,
        "track": config.trainer.tensorboard or config.trainer.wandb_project is not None,
    }
    return _enabled(extras)


def needs_of_generation(plan: GenerationPlan) -> Needs:
    """Returns what a rollout run needs."""
    return _needs_of_rollouts(plan.rollouts, outputs=[plan.request.output])


def needs_of_evaluation(plan: EvaluationPlan) -> Needs:
    """Returns what an evaluation needs, and the answers that it may reuse."""
    return replace(_needs_of_measuring(plan), reusable=list(_unfinished_answers(plan)))


def _needs_of_measuring(plan: EvaluationPlan) -> Needs:
    """Returns what an evaluation needs, also as a part of another run."""
    guard = [plan.guard.prompts_file] if plan.guard is not None else []
    teachers = [plan.kl_models.teacher] if plan.kl_models is not None else []
    return _needs_of_rollouts(plan.rollouts, prompts=guard, models=teachers)


def _unfinished_answers(plan: EvaluationPlan) -> Iterator[Path]:
    """Yields the answers, with their run.json, of evaluations elsewhere that this one may continue.

    These are the ones of the same model and data that were unfinished when they were downloaded,
    from the last finished one with the same request on.
    """
    request = plan.request.model_dump(mode="json", exclude={"budget_usd", "name"})
    runs = list[tuple[RunState, bool, RunFolder]]()
    for run in all_runs(plan.rollouts.workspace):
        with suppress(OSError, DataError):
            sent = run.read_request()
            is_evaluation = run.is_remote and sent.kind is RunKind.EVALUATE
            if is_evaluation and all(sent.request.get(n) == request[n] for n in ("model", "data")):
                runs.append((run.read(), request.items() <= sent.request.items(), run))
    for state, is_same, run in sorted(runs, key=lambda each: each[0].created_at, reverse=True):
        if state.status is RunStatus.SUCCEEDED and not (state.result or {}).get("stopped_by"):
            if is_same:
                return
            continue
        answers = [path for path in run.path.glob("answers-*/**/*") if path.is_file()]
        if state.status.is_final and answers:
            yield from (run.state_file, *answers)


def needs_of_scoring(request: ScoreRollouts, plan: ScoringPlan) -> Needs:
    """Returns what a scoring run needs."""
    judge = plan.judge
    return Needs(
        files=plan.inputs,
        code=_without_none(plan.rewards),
        addresses=[Address("the judge", judge.endpoint.base_url)] if judge is not None else [],
        outputs=[request.output],
        key_names=[judge.endpoint.api_key_env] if judge is not None else [],
    )


def needs_of_export(request: ExportModel, plan: ExportPlan) -> Needs:
    """Returns what an export needs."""
    evaluation = plan.verification.plan if plan.verification is not None else None
    needs = _needs_of_measuring(evaluation) if evaluation is not None else Needs()
    base = [plan.base] if plan.base is not None else []
    models = [plan.checkpoint, *base, *needs.models]
    return replace(
        needs,
        models=models,
        outputs=[request.output],
        extras=sorted({"train", *needs.extras}),
        exported=plan.checkpoint,
    )


def _needs_of_rollouts(
    plan: RolloutPlan,
    *,
    prompts: Sequence[Path] = (),
    models: Sequence[ModelLocation] = (),
    outputs: Sequence[str] = (),
) -> Needs:
    """Returns what rollouts need, plus the given prompts, models and outputs."""
    refine = plan.refine
    critic = refine.critic.policy if refine and refine.critic else None
    loaded = [policy for policy in (plan.policy, critic) if isinstance(policy, ModelLocation)]
    loaded += [refine.student] if refine is not None and refine.student is not None else []
    loaded += models
    # The model and the critic may also be local models, and all but the model may be absent.
    endpoints = [
        ("the model", plan.policy, True),
        ("the judge", plan.judge.endpoint if plan.judge is not None else None, False),
        ("the critic", critic, True),
    ]
    extras = {
        "train": bool(loaded),
        "browse": plan.options.browse,
    }
    return Needs(
        files=[*(p for p in plan.inputs if p not in _model_paths(loaded)), *prompts],
        prompts=[plan.prompts_file, *prompts],
        models=loaded,
        tokenizers=_template_models(plan.template, refine.student_template if refine else None),
        code=_without_none(plan.tools_file, plan.rewards_file),
        servers=plan.options.mcp_servers,
        addresses=[
            Address(label, endpoint.base_url, is_loadable=is_loadable)
            for label, endpoint, is_loadable in endpoints
            if isinstance(endpoint, Endpoint)
        ],
        outputs=outputs,
        key_names=plan.key_names,
        extras=_enabled(extras),
        records=[refine.options.refine] if refine is not None and refine.options.refine else [],
    )


def _addresses_of_training(plan: TrainingPlan) -> Iterator[Address]:
    """Yields the servers that a training run calls."""
    config = plan.config
    for teacher in config.teachers:
        if teacher.section.is_served and teacher.base_url is not None:
            yield Address("teacher.base_url", teacher.base_url, is_loadable=True)
        elif teacher.section.is_served:
            # The default address of such a server is on localhost.
            yield Address("teacher.base_url", "http://localhost", is_loadable=True)
    if config.rollout.server is not None:
        yield Address("rollout.server.base_url", str(config.rollout.server.base_url))


def _model_paths(models: Sequence[ModelLocation]) -> set[Path]:
    """Returns the files and folders of models, which are not uploaded again as input files."""
    return {folder for model in models for folder in model.inputs}


def _without_none(*files: UserFile | None) -> list[UserFile]:
    """Returns the files that are not None."""
    return [file for file in files if file is not None]


def _template_models(*templates: TemplateSource | None) -> list[str]:
    """Returns the names of the models whose chat templates are used."""
    return [name for template in templates if template is not None for name in template.models]


def _enabled(extras: dict[str, bool]) -> list[str]:
    """Returns the extras that are needed."""
    return [extra for extra, is_needed in extras.items() if is_needed]
