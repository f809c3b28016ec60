"""The request for a rollout run, and its plan, in which all names are looked up and checked."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

import msgspec
from pydantic import Field, ModelWrapValidatorHandler, model_validator

from stillroom.data.formats import Task, load_tasks
from stillroom.data.instruction import UNINSTRUCTED, Instruction, read_context
from stillroom.data.task_file import TaskFile
from stillroom.errors import InputError
from stillroom.files import content_hash, file_sha256
from stillroom.models.resolve import ModelLocation, locate_model
from stillroom.rollout.entries import chosen_numbers, select_entries
from stillroom.rollout.rewards.judge_request import JudgeOptions, JudgePlan, plan_judge
from stillroom.rollout.students import (
    FailedRollouts,
    RefineOptions,
    RefinePlan,
    plan_refinement,
)
from stillroom.secrecy.commands import WITHOUT_SECRETS, secrets_in, without_secrets
from stillroom.secrecy.redaction import Redactor
from stillroom.settings import Workspace
from stillroom.teachers.pricing import FREE, Price, known_price, price_for
from stillroom.teachers.providers import (
    IN_PROCESS,
    PROFILES,
    Endpoint,
    ProviderName,
    endpoint_for,
    provider_of,
)
from stillroom.tools.user.file import UserFile, read_user_file
from stillroom.types import SamplingSettings
from stillroom.validation import PlacedRequest

TerminationPolicy = Literal["last_tool", "max_turns"]
"""When a rollout ends: with the first turn that calls no tool, or only after `max_turns` turns."""
DEFAULT_NUDGE = (
    "Check your work, with the tools where they help, then state your complete answer again."
)
"""It asks for the whole answer again, since only the last turn's answer counts and any turn may be
the last."""


def nudge_for(policy: TerminationPolicy, nudge: str) -> str | None:
    """Returns the user message after a turn without a tool call; None if that turn is the end."""
    return nudge if policy == "max_turns" else None


NO_FILE = "none"
_MAX_CONCURRENCY = 256


class RolloutOptions(JudgeOptions):
    """Options that every run of rollouts has: who answers, with which tools and limits."""

    model: Annotated[str, Field(description="At the provider; for hf a folder, hub id or run id")]
    provider: Annotated[
        ProviderName,
        Field(
            description="By the model's name, else hf (in-process, as demo); with base_url: openai"
        ),
    ] = "hf"
    base_url: Annotated[str | None, Field(description="Any OpenAI-compatible endpoint")] = None
    api_key_env: Annotated[
        str | None, Field(description="NAME of the environment variable with the key")
    ] = None
    tools: Annotated[
        str, Field(description="Python file with @tool functions, or none; tools.py is found")
    ] = NO_FILE
    mcp_servers: Annotated[
        tuple[str, ...],
        WITHOUT_SECRETS,
        Field(description="MCP servers: command lines or URLs"),
    ] = ()
    system: Annotated[
        str | None, Field(description='System message in place of the rows\' own; "": none')
    ] = None
    context_file: Annotated[
        str | None, Field(description="Text after the system message, e.g. a SKILL.md")
    ] = None
    browse: Annotated[bool, Field(description="More tools: a web browser")] = False
    browse_allow: Annotated[
        tuple[str, ...], Field(description="Private hosts (host:port, CIDR) it may open")
    ] = ()
    rewards: Annotated[
        str,
        Field(
            description="File with @reward functions (evaluations find it); else expected_answer"
        ),
    ] = NO_FILE
    n: Annotated[int | None, Field(ge=1, description="Only the first n")] = None
    entries: Annotated[str | None, Field(description="Only these, e.g. 0,2,5-9 (0-based)")] = None
    samples_per_prompt: Annotated[int, Field(ge=1, le=1024)] = 1
    concurrency: Annotated[int, Field(ge=1, le=4096, description="Conversations at once")] = 20
    max_concurrency: Annotated[
        int | None,
        Field(ge=1, le=4096, description="Endpoints: it may grow to"),
    ] = None
    max_tokens: Annotated[int, Field(ge=1, description="Per assistant turn")] = 2048
    max_turns: Annotated[int, Field(ge=1, le=1000)] = 10
    termination_policy: Annotated[
        TerminationPolicy, Field(description="max_turns: goes on without tool calls")
    ] = "last_tool"
    nudge: Annotated[str, Field(min_length=1, description="max_turns: what the user then says")] = (
        DEFAULT_NUDGE
    )
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: int | None = None
    reasoning_effort: Annotated[
        Literal["none", "minimal", "low", "medium", "high"] | None,
        Field(description="Endpoints: how much the model reasons"),
    ] = None
    include_thinking: Annotated[
        bool, Field(description="Endpoints: send earlier reasoning back")
    ] = False
    max_tool_response: Annotated[
        int | None, Field(ge=1, description="Characters kept of a tool's reply")
    ] = None
    request_timeout: Annotated[float, Field(gt=0, description="Seconds per call")] = 120.0
    tool_timeout: Annotated[float, Field(gt=0)] = 60.0
    reward_timeout: Annotated[float, Field(gt=0)] = 60.0
    rollout_timeout: Annotated[float | None, Field(gt=0)] = None

    @model_validator(mode="wrap")
    @classmethod
    def _provider_is_told_by_others(
        cls, given: Any, handler: ModelWrapValidatorHandler[Self]
    ) -> Self:
        """Sets a provider that is not given: of a base_url, or the only one with such a model."""
        if not isinstance(given, dict) or "provider" in given:
            return handler(given)
        fields = cast("dict[str, Any]", given)
        model, provider = fields.get("model"), None
        if fields.get("base_url") is not None:
            provider = "openai"
        elif isinstance(model, str):
            provider = provider_of(model)
        if provider is None:
            return handler(fields)
        request = handler({**fields, "provider": provider})
        request.model_fields_set.discard("provider")
        return request

    @model_validator(mode="after")
    def _nudge_is_said(self) -> "RolloutOptions":
        if self.nudge != DEFAULT_NUDGE and self.termination_policy == "last_tool":
            raise ValueError("nudge is said only with termination_policy max_turns")
        return self

    @property
    def nudge_to_send(self) -> str | None:
        """The user message after a turn without a tool call; None if such a turn is the end."""
        return nudge_for(self.termination_policy, self.nudge)

    @property
    def most_at_once(self) -> int:
        """The highest number of concurrent conversations with an endpoint."""
        return max(self.concurrency, self.max_concurrency or _MAX_CONCURRENCY)


class GenerateRollouts(PlacedRequest, RefineOptions, RolloutOptions):
    """Ask for rollouts: the model answers each prompt, using tools; every conversation is kept."""

    input: Annotated[str, Field(description="Prompts: .txt (one a line) or .jsonl")]
    output: Annotated[str, Field(description="Rows are appended")] = "rollouts/rollouts.jsonl"
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.7
    budget_usd: Annotated[
        float | None, Field(gt=0, description="Cap of this output, reruns included")
    ] = None
    max_total_tokens: Annotated[int | None, Field(ge=1, description="The same cap in tokens")] = (
        None
    )
    max_minutes: Annotated[float | None, Field(gt=0, description="Cap of this run")] = None
    dry_run: Annotated[
        bool, Field(description="Only forecast calls, tokens and cost; calls nothing")
    ] = False
    ray_address: Annotated[
        str | None, Field(description="Splits it over Ray: auto, local, an address")
    ] = None
    ray_workers: Annotated[int, Field(ge=1, le=999)] = 2


@dataclass(frozen=True, slots=True)
class ToolsPlan:
    """The options and files from which the tools and rewards of rollouts are opened."""

    workspace: Workspace
    options: RolloutOptions
    """The options as the user gave them; the files that they name are in the other fields."""
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
        """The variables with the keys that the run's endpoints are sent."""
        return []

    @property
    def redactor(self) -> Redactor:
        """Takes the keys of the endpoints and the MCP servers' secrets out of texts."""
        keys = self.workspace.read_keys(self.key_names)
        known = Redactor([*self.workspace.secrets.values(), *keys.values()])
        return known | secrets_in(self.options.mcp_servers)


@dataclass(frozen=True, slots=True)
class RolloutPlan(ToolsPlan):
    """Checked options, with the files, the model or endpoint and the judge that they name."""

    prompts_file: Path
    policy: Endpoint | ModelLocation
    """The model that answers: an endpoint, or the files of a model to load into the process."""
    judge: JudgePlan | None
    instruction: Instruction = UNINSTRUCTED
    """What the model reads before each conversation."""
    context_file: Path | None = None
    refine: RefinePlan | None = None
    """What the rollouts refine; None if they begin at the prompts."""

    @property
    def key_names(self) -> list[str | None]:
        """The variables with the keys that the rollouts' endpoints are sent."""
        critic = self.refine.critic.policy if self.refine and self.refine.critic else None
        endpoints = [self.policy, self.judge.endpoint if self.judge else None, critic]
        return [one.api_key_env for one in endpoints if isinstance(one, Endpoint)]

    @property
    def inputs(self) -> list[Path]:
        """The files and the model's folder that the rollouts depend on."""
        judge = self.judge.inputs if self.judge is not None else []
        model = self.policy.inputs if isinstance(self.policy, ModelLocation) else []
        refine = self.refine.inputs if self.refine is not None else []
        return [self.prompts_file, *self.texts, *self.code_files, *judge, *model, *refine]

    @property
    def texts(self) -> list[Path]:
        """The file that the model reads before each conversation, if there is one."""
        return [self.context_file] if self.context_file is not None else []

    def load_tasks(self) -> list[Task]:
        """Returns the tasks of the prompts file that the options `n` and `entries` choose.

        The model reads them with its instruction, and their ids are those of their rows, so that
        evaluations with different instructions can be compared.
        """
        tasks = [self.instruction.put_before_task(task) for task in load_tasks(self.prompts_file)]
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
        """Reads which rollouts the student failed; None if none are refined."""
        return FailedRollouts(self.rollouts.refine.files) if self.rollouts.refine else None

    def open_tasks(self, failed: FailedRollouts | None = None) -> TaskFile:
        """Opens the run's tasks, with the instruction that the request gives.

        A system message changes their ids; a context does not. If a student's rollouts are
        refined, these are the tasks that it failed, with the ids that they have there: it may have
        read that system message, or the rows' own. Raises InputError if it failed none of them.
        """
        request = self.request
        if failed is None:
            failed = self.open_failed()
        if failed is None:
            tasks = TaskFile(self.rollouts.prompts_file, self._instructed)
            return tasks.chosen(chosen_numbers(len(tasks), n=request.n, entries=request.entries))
        wanted = failed.tasks if request.begins_inside else failed.hard_tasks

        def instructed(task: Task) -> Task:
            changed = self._instructed(task)
            if request.begins_inside or changed.task_id in wanted or task.task_id not in wanted:
                return changed
            return msgspec.structs.replace(changed, task_id=task.task_id)

        tasks = TaskFile(self.rollouts.prompts_file, instructed)
        chosen = chosen_numbers(len(tasks), n=None, entries=request.entries)
        numbers = [number for number in chosen if tasks.id_of(number) in wanted][: request.n]
        if not numbers:
            fix = (
                "give the prompts that its rollouts were made of, with the system message they have"
            )
            if request.begins_inside and request.system is not None:
                fix += "; another one for the teacher goes with takeover start alone"
            raise InputError(
                f"the student failed none of the prompts of {request.input} in {request.refine}",
                fix,
            )
        return tasks.chosen(numbers)

    def _instructed(self, task: Task) -> Task:
        """Returns a task as the model reads it; a system message of the request changes its id."""
        context = Instruction(context=self.rollouts.instruction.context)
        return context.put_before_task(with_system(task, self.request.system))


def plan_rollouts(
    workspace: Workspace, options: RolloutOptions, *, prompts: Path, needs_keys: bool = True
) -> RolloutPlan:
    """Returns the plan of rollouts with these options, for the prompts in a file.

    Names are looked up and small files read, but no model is loaded and no call made, so that the
    server process can check requests with it. A dry run, which makes no call either, needs no keys.
    Raises InputError for everything that can be found wrong before a process is started.
    """
    judge = plan_judge(workspace, options, needs_key=needs_keys)
    tools_file = user_file(workspace, options.tools, kind="tools")
    rewards_file = user_file(workspace, options.rewards, kind="rewards")
    if options.provider in IN_PROCESS and options.base_url is not None:
        raise InputError(
            f"base_url does not go with provider {options.provider!r}",
            "use provider openai for an endpoint, or leave base_url out",
        )
    policy = (
        _locate_policy(workspace, options)
        if options.provider in IN_PROCESS
        else endpoint_for(
            workspace,
            options.provider,
            base_url=options.base_url,
            api_key_env=options.api_key_env,
            needs_key=needs_keys,
        )
    )
    context_file = context = None
    if options.context_file is not None:
        context = read_context(workspace, options.context_file, label="context_file")
        context_file = workspace.existing(options.context_file, label="context_file")
    return RolloutPlan(
        workspace,
        options,
        tools_file,
        rewards_file,
        prompts,
        policy,
        judge,
        Instruction(options.system, context),
        context_file,
    )


def plan_generation(workspace: Workspace, request: GenerateRollouts) -> GenerationPlan:
    """Returns the plan of a rollout run.

    Raises InputError for everything that can be found wrong before a process is started, including
    a budget in dollars while a price is unknown.
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

    Raises InputError if there is a budget in dollars and a price, the judge's too, is unknown.
    """
    workspace, options = plan.workspace, plan.options
    if plan.judge is not None and plan.judge.price is None and has_budget:
        # Called only for its InputError, which says where to write the price.
        known_price(workspace, plan.judge.file.model)
    if options.provider in IN_PROCESS or PROFILES[options.provider].is_local:
        return FREE
    return (known_price if has_budget else price_for)(workspace, options.model)


def user_file(workspace: Workspace, name: str, *, kind: str) -> UserFile | None:
    """Returns a tools or rewards file as it is now, or None if its name is `none`."""
    if name == NO_FILE:
        return None
    path = workspace.existing(name, label=f"{kind} file")
    if path.suffix != ".py" or not path.is_file():
        raise InputError(f"{kind} file {name!r} is not a Python file", "give a .py file, or none")
    return read_user_file(path)


def _locate_policy(workspace: Workspace, options: RolloutOptions) -> ModelLocation:
    """Returns the location of the model; for provider demo, `teacher` stands for `demo/teacher`."""
    name = options.model
    if options.provider == "demo" and not name.startswith("demo/"):
        name = f"demo/{name}"
    return locate_model(workspace, name)


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
    """Returns the task with this system message in place of its own; None changes nothing.

    The message is part of the prompt, so a task whose message is set also gets another id.
    """
    if system is None:
        return task
    changed = Instruction(system).put_before_task(task)
    identity = content_hash({"task": task.task_id, "system": system})
    return msgspec.structs.replace(changed, task_id=identity)


# The options that shape a rollout as they are; `output_settings` adds the rest.
_SHAPING_OPTIONS = (
    "model",
    "provider",
    "base_url",
    "max_tokens",
    "max_turns",
    "top_p",
    "seed",
    "reasoning_effort",
    "include_thinking",
    "max_tool_response",
    "browse",
    "answer_match",
)


def output_settings(plan: GenerationPlan, weights: str | None) -> dict[str, Any]:
    """Returns the settings that shape a rollout; a run that resumes an output must have the same.

    `weights` identifies the weights of a model in this process; it is None if they are not known.
    """
    request, files = plan.request, plan.rollouts
    shaping: dict[str, Any] = {name: getattr(request, name) for name in _SHAPING_OPTIONS}
    tools, rewards, judge = files.tools_file, files.rewards_file, files.judge
    if (context := files.instruction.context) is not None:
        shaping["context"] = content_hash(context)
    return {
        **shaping,
        "mcp_servers": [without_secrets(server) for server in request.mcp_servers],
        "nudge": request.nudge_to_send,
        "tools_sha256": tools.sha256 if tools else None,
        "rewards_sha256": rewards.sha256 if rewards else None,
        "tools_modules": tools.modules_sha256 if tools else None,
        "rewards_modules": rewards.modules_sha256 if rewards else None,
        "judge": judge and judge.file.model_dump(mode="json"),
        "input_sha256": file_sha256(files.prompts_file),
        "system": request.system,
        "temperature": request.temperature,
        "weights": weights,
        **({"refine": files.refine.settings} if files.refine is not None else {}),
    }
