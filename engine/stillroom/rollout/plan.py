"""The plan of a rollout run: resolves and checks everything that the request names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from stillroom.data.formats import Task, load_tasks
from stillroom.data.instruction import UNINSTRUCTED, Instruction, read_context
from stillroom.data.task_file import TaskFile
from stillroom.errors import InputError
from stillroom.files import content_hash, file_sha256
from stillroom.models.chat_template import TemplateSource, template_source
from stillroom.models.resolve import ModelLocation
from stillroom.rollout.refine_plan import FailedRollouts, RefinePlan, plan_refinement
from stillroom.rollout.request import NO_FILE, EpisodeOptions, GenerateRollouts, RolloutOptions
from stillroom.rollout.rewards.judge_plan import JudgePlan, plan_judge
from stillroom.secrecy.commands import redactor_for_commands, without_secrets
from stillroom.secrecy.redaction import Redactor
from stillroom.settings import Workspace
from stillroom.teachers.model_choice import ModelChoice
from stillroom.teachers.pricing import Price
from stillroom.teachers.providers import Endpoint
from stillroom.tools.user.file import UserFile, read_user_file
from stillroom.types import SamplingSettings


@dataclass(frozen=True, slots=True)
class ToolsPlan:
    """The options and files from which the tools and rewards of rollouts are opened."""

    workspace: Workspace
    options: EpisodeOptions
    """The options as the user gave them; the files that they name are in the other fields."""
    model: str
    """The model that uses the tools, as the user named it."""
    mcp_servers: tuple[str, ...]
    """The command lines or URLs of MCP servers whose tools are added to those of tools.py."""
    tools_file: UserFile | None
    """The user's tools.py; None if there is none."""
    rewards_file: UserFile | None
    """The user's rewards.py; None if there is none."""

    @property
    def code_files(self) -> list[Path]:
        """The paths of the user's tools.py and rewards.py, if any, and of their modules."""
        files = (self.tools_file, self.rewards_file)
        return list(dict.fromkeys(path for file in files if file for path in file.paths))

    @property
    def key_names(self) -> list[str | None]:
        """The environment variables with the API keys of the run's endpoints."""
        return []

    @property
    def redactor(self) -> Redactor:
        """A redactor that removes the endpoints' keys and the MCP servers' secrets from texts."""
        keys = self.workspace.read_keys(self.key_names)
        secrets = Redactor([*self.workspace.secrets.values(), *keys.values()])
        return secrets | redactor_for_commands(self.mcp_servers)

    @property
    def identity(self) -> str:
        """A hash that stays the same when the run is started again, but differs between runs."""
        named = {"root": str(self.workspace.root), "model": self.model}
        servers = [without_secrets(server) for server in self.mcp_servers]
        options = self.options.model_dump(mode="json")
        return content_hash({**options, **named, "mcp_servers": servers})


@dataclass(frozen=True, slots=True)
class RolloutPlan(ToolsPlan):
    """Checked options, with the files, the model or endpoint and the judge that they name."""

    options: RolloutOptions
    prompts_file: Path
    policy: Endpoint | ModelLocation
    """The model that answers: an endpoint, or the files of a model to load into the process."""
    judge: JudgePlan | None
    instruction: Instruction = UNINSTRUCTED
    """The system message and context that precede each conversation."""
    context_file: Path | None = None
    template: TemplateSource | None = None
    """The chat template of a model in this process; None: its own."""
    refine: RefinePlan | None = None
    """The student's rollouts to refine; None if the rollouts begin at the prompts."""

    @property
    def models_called(self) -> list[tuple[ModelChoice, Endpoint | ModelLocation]]:
        """The models that the run calls, each with its endpoint or its location."""
        models = list[tuple[ModelChoice, Endpoint | ModelLocation]]([(self.options, self.policy)])
        if self.judge is not None:
            models.append((self.judge.file, self.judge.endpoint))
        if self.refine is not None and (critic := self.refine.critic) is not None:
            models.append((critic.file, critic.policy))
        return models

    @property
    def key_names(self) -> list[str | None]:
        """The environment variables with the API keys of the rollouts' endpoints."""
        return [each.api_key_env for _, each in self.models_called if isinstance(each, Endpoint)]

    @property
    def files(self) -> list[Path]:
        """The files that the rollouts depend on, the prompts first."""
        context = [self.context_file] if self.context_file is not None else []
        template = self.template.files if self.template is not None else []
        judge = self.judge.inputs if self.judge is not None else []
        refine = self.refine.inputs if self.refine is not None else []
        return [self.prompts_file, *context, *self.code_files, *template, *judge, *refine]

    @property
    def inputs(self) -> list[Path]:
        """The paths in `files`, and the folders of the models in this process."""
        models = [self.policy, self.refine.student if self.refine else None]
        locations = [model for model in models if isinstance(model, ModelLocation)]
        return [*self.files, *(path for location in locations for path in location.inputs)]

    def load_tasks(self) -> list[Task]:
        """Returns the tasks of the prompts file that the options `n` and `entries` choose.

        They include the run's instruction but keep the ids of their rows, so that evaluations with
        different instructions can be compared.
        """
        tasks = [self.instruction.apply_to_task(task) for task in load_tasks(self.prompts_file)]
        return select_entries(tasks, n=self.options.n, entries=self.options.entries)


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """A checked `GenerateRollouts`: the rollouts, the output file and the price of tokens."""

    request: GenerateRollouts
    rollouts: RolloutPlan
    output: Path
    price: Price | None
    """The price of the model's tokens; None if it is unknown."""

    def open_failed(self) -> FailedRollouts | None:
        """Returns the student's failed rollouts; None if the run refines none."""
        return FailedRollouts(self.rollouts.refine.files) if self.rollouts.refine else None

    def open_tasks(self, failed: FailedRollouts | None = None) -> TaskFile:
        """Opens the run's tasks, with the request's instruction.

        A system message changes the tasks' ids; a context does not. A refinement gets the tasks
        that the student failed, with the ids in its rollouts, which may have been generated with
        the request's system message or with the rows' own. Raises InputError if there are none.
        """
        request = self.request
        if failed is None:
            failed = self.open_failed()
        if failed is None:
            tasks = TaskFile(self.rollouts.prompts_file, self._add_instruction)
            return tasks.select(chosen_indices(len(tasks), n=request.n, entries=request.entries))
        wanted = failed.task_ids if request.replays_student else failed.hard_task_ids

        def add_instruction(task: Task) -> Task:
            changed = self._add_instruction(task)
            if request.replays_student or changed.task_id in wanted or task.task_id not in wanted:
                return changed
            return msgspec.structs.replace(changed, task_id=task.task_id)

        tasks = TaskFile(self.rollouts.prompts_file, add_instruction)
        chosen = chosen_indices(len(tasks), n=None, entries=request.entries)
        numbers = [number for number in chosen if tasks.task_id(number) in wanted][: request.n]
        if not numbers:
            fix = "give the prompts and the system message that these rollouts were generated with"
            if request.replays_student and request.system is not None:
                fix += "; only takeover start allows a different system message for the teacher"
            raise InputError(
                f"no prompt of {request.input} has a failed rollout in {request.refine}",
                fix,
            )
        return tasks.select(numbers)

    def _add_instruction(self, task: Task) -> Task:
        """Returns a task with the run's instruction; a requested system message changes its id."""
        context = Instruction(context=self.rollouts.instruction.context)
        return context.apply_to_task(with_system(task, self.request.system))


def plan_rollouts(
    workspace: Workspace, options: RolloutOptions, *, prompts: Path, needs_keys: bool = True
) -> RolloutPlan:
    """Returns the plan of rollouts with these options, for the prompts in a file.

    Resolves names and reads small files, but loads no model and makes no call, so that the server
    process can check requests with it. A dry run, which makes no call either, needs no keys. Raises
    InputError for every error that can be found before a process is started.
    """
    context_file = context = None
    if options.context_file is not None:
        context = read_context(workspace, options.context_file, label="context_file")
        context_file = workspace.existing(options.context_file, label="context_file")
    policy = options.locate(workspace, needs_key=needs_keys)
    if options.chat_template is not None and isinstance(policy, Endpoint):
        raise InputError(
            "chat_template needs an in-process model: an endpoint uses its own",
            "leave chat_template out, or run the model's folder with provider hf",
        )
    return RolloutPlan(
        workspace=workspace,
        options=options,
        model=options.model,
        mcp_servers=options.mcp_servers,
        judge=plan_judge(workspace, options.judge, needs_key=needs_keys),
        tools_file=user_file(workspace, options.tools, kind="tools"),
        rewards_file=user_file(workspace, options.rewards, kind="rewards"),
        prompts_file=prompts,
        policy=policy,
        instruction=Instruction(options.system, context),
        context_file=context_file,
        template=template_source(workspace, options.chat_template),
    )


def plan_generation(workspace: Workspace, request: GenerateRollouts) -> GenerationPlan:
    """Returns the plan of a rollout run.

    Raises InputError for every error that can be found before a process is started, including
    budget_usd with an unknown price.
    """
    prompts = workspace.existing(request.input, label="input")
    output = workspace.output_file(request.output, label="output")
    plan = plan_rollouts(workspace, request, prompts=prompts, needs_keys=not request.dry_run)
    has_budget = request.budget_usd is not None
    refine = plan_refinement(
        workspace, request, needs_keys=not request.dry_run, has_budget=has_budget
    )
    plan = replace(plan, refine=refine)
    return GenerationPlan(request, plan, output, plan_price(plan, has_budget=has_budget))


def plan_price(plan: RolloutPlan, *, has_budget: bool) -> Price | None:
    """Returns the price of the policy's tokens; None if it is unknown.

    Raises InputError if budget_usd is set and a price, of the model or the judge, is unknown.
    """
    if plan.judge is not None:
        # Called for its InputError, which says where to write the price.
        plan.judge.file.price(plan.workspace, is_needed=has_budget)
    return plan.options.price(plan.workspace, is_needed=has_budget)


def user_file(workspace: Workspace, name: str, *, kind: str) -> UserFile | None:
    """Reads a tools or rewards file; returns None if its name is `none`."""
    if name == NO_FILE:
        return None
    path = workspace.existing(name, label=f"{kind} file")
    if path.suffix != ".py" or not path.is_file():
        raise InputError(f"{kind} file {name!r} is not a Python file", "give a .py file, or none")
    return read_user_file(path)


def sampling_settings(options: RolloutOptions, *, temperature: float) -> SamplingSettings:
    """Returns the settings that the policy samples with."""
    return SamplingSettings(
        temperature=temperature,
        top_p=options.top_p,
        max_tokens=options.max_tokens,
        seed=options.seed,
        reasoning_effort=options.reasoning_effort,
    )


def with_system(task: Task, system: str | None) -> Task:
    """Returns the task with this system message in place of its own; None keeps its own.

    The message is part of the prompt, so a task whose message is set also gets another id.
    """
    if system is None:
        return task
    changed = Instruction(system).apply_to_task(task)
    identity = content_hash({"task": task.task_id, "system": system})
    return msgspec.structs.replace(changed, task_id=identity)


_NOT_SHAPING = frozenset({
    # where keys and hosts are, how long things may take, and how many run at once
    "api_key_env", "browse_allow", "where", "ray_address", "ray_workers",
    "tool_timeout", "reward_timeout", "rollout_timeout", "request_timeout",
    "concurrency", "max_concurrency",
    # how many rollouts there are, what they may cost, and where they are written
    "n", "entries", "samples_per_prompt", "output", "dry_run",
    "budget_usd", "max_total_tokens", "max_minutes",
    # `output_settings` records what these stand for: contents of files, the nudge that is sent
    "input", "tools", "rewards", "judge", "context_file", "mcp_servers", "nudge",
    "termination_policy", "refine", "takeover", "turns", "critic", "train_turns",
})  # fmt: skip
"""The options that may change before an output is resumed, or are recorded by their contents."""


def output_settings(
    plan: RolloutPlan, weights: str | None, chat_templates: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Returns the settings that shape a rollout; resuming an output requires the same ones.

    They include all other options of the plan's request, such as those of an evaluation.

    `weights` identifies the weights of a model in this process; it is None if they are not known.
    `chat_templates` has the hashes of chat templates' texts.
    """
    options = plan.options
    shaping: dict[str, Any] = {
        name: getattr(options, name)
        for name in type(options).model_fields
        if name not in _NOT_SHAPING
    }
    tools, rewards, judge = plan.tools_file, plan.rewards_file, plan.judge
    if (context := plan.instruction.context) is not None:
        shaping["context"] = content_hash(context)
    if plan.template is not None:
        shaping["chat_template_sha256"] = [file_sha256(file) for file in plan.template.files]
    return {
        **shaping,
        "mcp_servers": [without_secrets(server) for server in options.mcp_servers],
        "nudge": options.nudge_to_send,
        "tools_sha256": tools.sha256 if tools else None,
        "rewards_sha256": rewards.sha256 if rewards else None,
        "tools_modules": tools.modules_sha256 if tools else None,
        "rewards_modules": rewards.modules_sha256 if rewards else None,
        "judge": judge and judge.file.model_dump(mode="json"),
        "input_sha256": file_sha256(plan.prompts_file),
        "weights": weights,
        **({"chat_templates": chat_templates} if chat_templates else {}),
        **({"refine": plan.refine.settings} if plan.refine is not None else {}),
    }


def select_entries(tasks: list[Task], *, n: int | None, entries: str | None) -> list[Task]:
    """Returns the tasks that `entries` (e.g. "0,2,5-9", 0-based) and `n` choose."""
    return [tasks[number] for number in chosen_indices(len(tasks), n=n, entries=entries)]


def chosen_indices(length: int, *, n: int | None, entries: str | None) -> Sequence[int]:
    """Returns the 0-based indices of the chosen prompts among `length`."""
    return (range(length) if entries is None else _indices(entries, length))[:n]


def _indices(entries: str, length: int) -> list[int]:
    """Returns the indices in text such as "0,2,5-9". Raises InputError if they are invalid."""
    indices: list[int] = []
    for part in entries.split(","):
        begin, dash, last = part.strip().partition("-")
        try:
            start, end = int(begin), int(last) if dash else int(begin)
        except ValueError:
            raise InputError(
                f"entries {entries!r}: {part.strip()!r} is not a number or a range",
                "write numbers and ranges such as 0,2,5-9 (0 is the first prompt)",
            ) from None
        if not 0 <= start <= end < length:
            raise InputError(
                f"entries {entries!r}: {part.strip()!r} is out of range: the file has "
                f"prompts 0-{length - 1}",
                f"choose among 0-{length - 1}",
            )
        indices += range(start, end + 1)
    return indices
