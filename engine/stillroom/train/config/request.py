"""The request for a training run, and all checks that need no loaded model."""

import importlib.util
import itertools
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from pydantic import Field

from stillroom.data.formats import (
    DpoRow,
    RowFormat,
    SftRow,
    load_dpo_rows,
    load_sft_rows,
    read_rows,
)
from stillroom.data.instruction import (
    UNCHANGED,
    UNINSTRUCTED,
    Instruction,
    PromptViews,
    read_context,
)
from stillroom.data.layouts.detect import layout_of
from stillroom.data.tool_names import NamedTools, has_tool_names
from stillroom.errors import ConfigError, DataError, missing_extra
from stillroom.models.chat_template import TemplateSource, template_source
from stillroom.models.pairing import refuse_api_teacher
from stillroom.models.precision import check_quantization
from stillroom.models.resolve import ModelLocation, locate_model
from stillroom.run_folder import RunFolder, given_config
from stillroom.settings import Workspace
from stillroom.tools.mcp.spec import parse_spec
from stillroom.tools.user.file import UserFile, read_user_file
from stillroom.tools.user.pool import TOOLS_FILE, schemas_in
from stillroom.train.config.distill_sections import served_teacher
from stillroom.train.config.file import config_notes, load_config, read_config
from stillroom.train.config.resume import TrainingState, find_resume_point, read_resumable_request
from stillroom.train.config.schema import DistillConfig, TrainConfig
from stillroom.train.config.sections import EvalSection, LauncherSection, split_address
from stillroom.validation import PlacedRequest, StrictModel, Where

_CHECKED_ROWS = 1000
_CONNECT_S = 3.0
_FORMATS = {
    "sft": RowFormat.SFT,
    "dpo": RowFormat.DPO,
    "distill": RowFormat.PROMPTS,
}


class PlanTraining(StrictModel):
    """The request of `plan_training`: a config.yml (method, data, models) and overrides."""

    config: str = "config.yml"
    overrides: Annotated[tuple[str, ...], Field(description="e.g. trainer.num_epochs=3")] = ()
    where: Where = None


class StartTraining(PlacedRequest, PlanTraining):
    """The request of `start_training`."""

    resume: Annotated[str | None, Field(description="Id of the run to resume")] = None
    budget_usd: Annotated[float | None, Field(gt=0, exclude=True)] = None


def resolve_resume(workspace: Workspace, request: StartTraining) -> StartTraining:
    """Returns the request with the configuration of the run that it resumes, if any.

    The request's own overrides are applied after those of that run.
    Raises EngineError if that run cannot be resumed.
    """
    if request.resume is None:
        return request
    before = read_resumable_request(workspace, request.resume)
    point = find_resume_point(workspace, request.resume)
    config = request.config if "config" in request.model_fields_set else before.config
    overrides = (*before.overrides, *request.overrides)
    group_size = _group_size_override(workspace, point.state, config, overrides)
    return request.model_copy(update={"config": config, "overrides": (*overrides, *group_size)})


def _group_size_override(
    workspace: Workspace, state: TrainingState, config: str, overrides: tuple[str, ...]
) -> tuple[str, ...]:
    """Returns the override that keeps the group size of the run's state, if config.yml has none.

    Earlier versions had a different default. The result is () if no override is needed.
    """
    recorded = state.inputs.config["data"].get("group_size") if state.inputs is not None else None
    current = load_config(workspace.existing(config, label="config"), overrides)
    if current.dataset_type != "distill" or recorded in (None, current.data.group_size):
        return ()
    if "group_size" in current.data.model_fields_set:
        return ()
    return (f"data.group_size={recorded}",)


_Request = TypeVar("_Request", bound=PlanTraining)


def requests_per_model(workspace: Workspace, request: _Request) -> list[_Request]:
    """Returns the request itself, or one request for each model if model.path is a list.

    Each of several requests sets its model by an override. Raises ConfigError for a list with
    anything but names, or with duplicates.
    """
    config_file = workspace.existing(request.config, label="config")
    paths = _model_paths(config_file, request.overrides)
    if paths is None:
        return [request]
    return [
        request.model_copy(
            update={"overrides": (*request.overrides, f"model.path={_quoted_yaml(path)}")}
        )
        for path in paths
    ]


def _quoted_yaml(path: str) -> str:
    """Returns the quoted path; JSON strings are valid YAML."""
    return msgspec.json.encode(path).decode()


def _model_paths(config_file: Path, overrides: Sequence[str]) -> list[str] | None:
    """Returns the models in model.path, or None if model.path is not a list."""
    section: Any = read_config(config_file, overrides).get("model")
    value: Any = section.get("path") if isinstance(section, dict) else None
    if not isinstance(value, list):
        return None
    paths: list[Any] = value
    if not paths or not all(isinstance(path, str) for path in paths):
        raise ConfigError(
            f"{config_file}: model.path is {paths!r}, not a list of model names",
            "list hub ids or folders",
        )
    if len(set(paths)) < len(paths):
        raise ConfigError(
            f"{config_file}: model.path lists a model twice: {', '.join(paths)}",
            "list each once; for a second run call start_training with another trainer.seed",
        )
    return paths


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """A validated request for training: the configuration and the paths of its files."""

    config: TrainConfig
    config_file: Path
    config_source: Path
    """The file that was read as config.yml: the run's copy, or config.yml itself."""
    train_files: tuple[Path, ...]
    """The files of rows to train on: one, or for distill several."""
    tools_file: UserFile | None
    """tools.py next to config.yml; None if there is none, or if the run neither samples (sft and
    dpo sample only for evals) nor has rows that name tools."""
    rewards_file: UserFile | None
    eval_files: Mapping[str, Path]
    """The prompt file of each evaluation, by the evaluation's name."""
    cold_start_file: Path | None = None
    mixed_rows_file: Path | None = None
    """The file of rows mixed into the student's rollouts."""
    models: tuple[ModelLocation, ...] = ()
    """The student, then the teachers that this run loads."""
    context_file: Path | None = None
    """The file that is appended to the teacher's system message."""
    views: PromptViews = UNCHANGED
    template: TemplateSource | None = None
    """The chat template for the student; None: its own."""
    notes: tuple[str, ...] = ()
    """Notes for the user on ignored keys and defaults of config.yml."""

    @property
    def code_files(self) -> list[Path]:
        """The paths of the user's tools.py and rewards.py, if used, and of their modules."""
        files = (self.tools_file, self.rewards_file)
        return list(dict.fromkeys(path for file in files if file for path in file.paths))

    @property
    def inputs(self) -> list[Path]:
        """All files and model folders that the run reads, except config.yml."""
        models = (path for model in self.models for path in model.inputs)
        return [
            *self.train_files,
            *self.rows_files,
            *self.context_files,
            *self.eval_files.values(),
            *self.code_files,
            *self.template_files,
            *models,
        ]

    @property
    def rows_instruction(self) -> Instruction:
        """The teacher's system message and context for supervised rows with soft targets."""
        return self.views.teacher if self.config.soft_targets is not None else UNINSTRUCTED

    @property
    def rows_files(self) -> list[Path]:
        """The files of supervised rows other than the training files, without duplicates."""
        files = (self.cold_start_file, self.mixed_rows_file)
        return list(dict.fromkeys(file for file in files if file is not None))

    def load_rows(self, path: Path) -> list[SftRow]:
        """Returns the supervised rows of a file, with the schemas of the tools that they name.

        Raises DataError at the first bad row, or the first with a tool that is not in tools.py.
        """
        return load_sft_rows(path, self._named_tools(path))

    def load_pairs(self, path: Path) -> list[DpoRow]:
        """Loads the preference pairs of a file (`load_rows` loads supervised rows)."""
        return load_dpo_rows(path, self._named_tools(path))

    def _named_tools(self, path: Path) -> NamedTools | None:
        """Returns the schemas of tools.py; None without it, or if the file's rows name no tools."""
        if self.tools_file is None or not has_tool_names(path):
            return None
        return schemas_in(self.tools_file)

    @property
    def context_files(self) -> list[Path]:
        """The file that is appended to the teacher's system message, or []."""
        return [self.context_file] if self.context_file is not None else []

    @property
    def template_files(self) -> list[Path]:
        """The user's own file with the student's chat template, or []."""
        return self.template.files if self.template is not None else []

    @property
    def key_names(self) -> list[str | None]:
        """The environment variables with the keys of the servers that the run calls."""
        config = self.config
        if not config.teachers:
            return []
        servers = (config.teacher, config.rollout.server)
        return [server.api_key_env for server in servers if server is not None]

    @property
    def train_file(self) -> Path:
        """The first training file; sft and dpo have only one."""
        return self.train_files[0]


def plan_request(
    workspace: Workspace, request: PlanTraining, *, run: RunFolder | None = None
) -> TrainingPlan:
    """Validates a training request's settings and files and returns its plan; loads no model.

    With `run`, that run's copy of config.yml is read, which later edits do not affect.
    Raises EngineError, which says what is wrong and how to fix it.
    """
    config_file = workspace.existing(request.config, label="config")
    copy = run.path / given_config(config_file) if run is not None else config_file
    source = copy if copy.is_file() else config_file
    config = load_config(config_file, request.overrides, source=source)
    folder = config_file.parent
    kind = _FORMATS[config.dataset_type]
    train_files = [
        _rows_file(workspace, config_file, name, key="data.train_file", kind=kind)
        for name in config.data.train_files
    ]
    cold_start_file, mixed_rows_file = _supervised_files(workspace, config_file, config)
    # A run on another machine checks its own packages and devices.
    is_on_this_machine = request.where is None
    models = _checked_models(workspace, config, is_on_this_machine=is_on_this_machine)
    for server in config.rollout.mcp_servers:
        parse_spec(server)
    context_file = None
    if config.teacher is not None and config.teacher.context_file is not None:
        context_file = workspace.path(folder / config.teacher.context_file)
    if is_on_this_machine:
        _check_trackers(config)
        check_launcher(config.launcher)
    is_sampled = config.dataset_type == "distill" or bool(config.evals)
    supervised = [cold_start_file, mixed_rows_file]
    supervised += train_files if config.dataset_type == "sft" else []
    pairs = train_files if config.dataset_type == "dpo" else []
    tool_names_file = _file_with_tool_names(folder, [*supervised, *pairs])
    notes = config_notes(config_file, request.overrides, source=source)
    notes += _row_notes(supervised, tool_names_file)
    return TrainingPlan(
        config,
        config_file,
        source,
        tuple(train_files),
        tools_file=_user_file(folder, TOOLS_FILE)
        if is_sampled or tool_names_file is not None
        else None,
        rewards_file=_user_file(folder, "rewards.py") if is_sampled else None,
        eval_files={
            section.name: _eval_file(workspace, folder, section) for section in config.evals
        },
        cold_start_file=cold_start_file,
        mixed_rows_file=mixed_rows_file,
        models=models,
        context_file=context_file,
        views=_prompt_views(workspace, config, context_file),
        template=template_source(
            workspace, config.model.chat_template, option="model.chat_template"
        ),
        notes=tuple(notes),
    )


def _supervised_files(
    workspace: Workspace, config_file: Path, config: TrainConfig
) -> tuple[Path | None, Path | None]:
    """Returns the files of the cold start's rows and of the rows mixed into the rollouts."""

    def checked(name: str, key: str) -> Path:
        return _rows_file(workspace, config_file, name, key=key, kind=RowFormat.SFT)

    cold_start_file = None
    if not isinstance(config, DistillConfig):
        return None, None
    if config.cold_start is not None:
        cold_start_file = checked(config.cold_start.train_file, "cold_start.train_file")
    if config.rollout.on_policy_share is None:
        return cold_start_file, None
    if (name := config.rollout.rows_file) is None:
        return cold_start_file, cold_start_file
    return cold_start_file, checked(name, "rollout.rows_file")


def _checked_models(
    workspace: Workspace, config: TrainConfig, *, is_on_this_machine: bool
) -> tuple[ModelLocation, ...]:
    """Returns the student, then the teachers that the run loads; also checks the servers."""
    models = [locate_model(workspace, config.model.path)]
    sections = (config.model, *(teacher.section for teacher in config.teachers))
    if is_on_this_machine and any(section.quantization is not None for section in sections):
        check_quantization()
    for teacher in config.teachers:
        refuse_api_teacher(teacher.path)
        if teacher.section.is_served:
            served_teacher(workspace, teacher)
        else:
            models.append(locate_model(workspace, teacher.path))
    return tuple(models)


def _row_notes(supervised: Sequence[Path | None], tool_names_file: Path | None) -> list[str]:
    """Returns notes on files with unfiltered rollouts, and on a file whose rows name tools."""
    notes = [
        f"{file.name} holds unfiltered rollouts: unsuccessful ones are trained on too "
        "(convert_rollouts leaves them out)"
        for file in supervised
        if file is not None and _holds_rollouts(file)
    ]
    if tool_names_file is not None:
        notes.append(
            f"rows of {tool_names_file.name} name their tools: the schemas are taken from "
            f"{TOOLS_FILE}"
        )
    return notes


def _file_with_tool_names(folder: Path, files: Sequence[Path | None]) -> Path | None:
    """Returns the first file whose rows name tools, which tools.py in the folder defines.

    Raises DataError if there is no tools.py.
    """
    first = next((file for file in files if file and has_tool_names(file)), None)
    if first is not None and not (folder / TOOLS_FILE).is_file():
        raise DataError(
            f"rows of {first} name their tools, but there is no {TOOLS_FILE} in {folder}",
            f"put {TOOLS_FILE} next to config.yml, or write the tools' schemas into the rows",
        )
    return first


def _prompt_views(
    workspace: Workspace, config: TrainConfig, context_file: Path | None
) -> PromptViews:
    """Returns the student's and the teacher's instructions. Raises EngineError for a bad file."""
    label, context = "teacher.context_file", None
    if context_file is not None:
        context = read_context(workspace, context_file, label=label)
    teacher_system = config.teacher.system if config.teacher is not None else None
    student_system = config.model.system if isinstance(config, DistillConfig) else None
    return PromptViews(Instruction(student_system), Instruction(teacher_system, context))


def _rows_file(
    workspace: Workspace, config_file: Path, name: str, *, key: str, kind: RowFormat
) -> Path:
    """Returns the path of a file that config.yml names, after checking its first rows."""
    folder = config_file.parent
    path = workspace.path(folder / name)
    if "@" in path.name:
        path = workspace.existing(path, label=key)
    if not path.is_file():
        raise ConfigError(
            f"{config_file}: {key} {name!r} does not exist in {folder}",
            f"create it, or set {key} (a path relative to config.yml)",
        )
    rows = read_rows(path, kind)
    if not sum(1 for _ in itertools.islice(rows, _CHECKED_ROWS)):
        raise DataError(f"{path} has no rows", "write one row per line")
    return path


def _holds_rollouts(path: Path) -> bool:
    """Returns whether the first row of a file with supervised rows is a rollout."""
    row = next(read_rows(path, RowFormat.SFT), None)
    return row is not None and layout_of(row) is not None


def _eval_file(workspace: Workspace, folder: Path, section: EvalSection) -> Path:
    """Returns the path of an evaluation's prompts. Raises EngineError if there are none."""
    path = workspace.path(folder / section.prompts_file)
    if not path.is_file():
        raise ConfigError(
            f"the prompts file {section.prompts_file!r} of the evaluation {section.name!r} does "
            f"not exist in {folder}",
            "create it, or set `file` of this evaluation (a path relative to config.yml)",
        )
    rows = read_rows(path, RowFormat.PROMPTS)
    if not sum(1 for _ in itertools.islice(rows, _CHECKED_ROWS)):
        raise DataError(f"{path} has no prompts", "write one row per line")
    return path


def _check_trackers(config: TrainConfig) -> None:
    """Raises MissingExtraError if a tracker that config.yml enables is not installed."""
    trainer = config.trainer
    trackers = {
        "tensorboard": trainer.tensorboard,
        "wandb": trainer.wandb_project is not None,
        "trackio": trainer.trackio_project is not None,
    }
    for package, is_wanted in trackers.items():
        if is_wanted and importlib.util.find_spec(package) is None:
            raise missing_extra("track", f"metrics to {package}")


def _user_file(folder: Path, name: str) -> UserFile | None:
    """Returns a Python file of the user in a folder; None if there is none."""
    path = folder / name
    return read_user_file(path) if path.is_file() else None


def check_launcher(section: LauncherSection) -> None:
    """Raises EngineError if the launcher's package or cluster is missing; starts nothing."""
    if section.kind == "accelerate":
        if importlib.util.find_spec("accelerate") is None:
            raise missing_extra("train", "launcher: accelerate")
        if section.main_address is not None:
            _check_host(section.main_address)
    elif section.kind == "ray":
        if importlib.util.find_spec("ray") is None:
            raise missing_extra("ray", "launcher: ray")
        if section.address is not None:
            _check_ray_cluster(section.address)


def _check_host(address: str) -> None:
    """Raises ConfigError if the host of launcher.main_address has no IP address."""
    host = address.rpartition(":")[0]
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise ConfigError(
            f"launcher.main_address: cannot resolve the host {host!r}: {error}",
            "give a name or IP address at which the other machines can reach this one",
        ) from error


def _check_ray_cluster(address: str) -> None:
    """Raises ConfigError if nothing accepts a connection at a host:port address."""
    host_and_port = split_address(address)
    if host_and_port is None:
        return
    try:
        socket.create_connection(host_and_port, timeout=_CONNECT_S).close()
    except OSError as error:
        raise ConfigError(
            f"no Ray cluster responds at launcher.address {address!r}: {error}",
            "start one on that host with `ray start --head`, or set launcher.address to local to "
            "start one on this machine",
        ) from error
