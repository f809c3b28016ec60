"""What a rollout run is asked to do; the server, the command line and the worker share it."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from stillroom.data.formats import Task
from stillroom.errors import InputError
from stillroom.files import file_sha256
from stillroom.models.resolve import ModelLocation, locate_model
from stillroom.rollout.rewards.judge_request import (
    JudgeFile,
    JudgeOptions,
    check_judge,
    judge_price,
)
from stillroom.settings import Workspace
from stillroom.teachers.pricing import FREE, Price, known_price, price_for
from stillroom.teachers.providers import IN_PROCESS, PROFILES, ProviderName, endpoint_for
from stillroom.types import SamplingSettings

TerminationPolicy = Literal["last_tool", "max_turns"]
"""When a rollout ends: with the first turn that calls no tool, or only after `max_turns` turns."""
DEFAULT_NUDGE = (
    "Check your work, with the tools where they help, then state your complete answer again."
)
"""Asks for the whole answer: nobody knows which of the answers will be the last."""


def nudge_for(policy: TerminationPolicy, nudge: str) -> str | None:
    """Returns what the user says after a turn without a tool call; None: that turn is the end."""
    return nudge if policy == "max_turns" else None


NO_FILE = "none"
_MAX_CONCURRENCY = 256


class RolloutOptions(JudgeOptions):
    """Options that every run of rollouts has: who answers, with which tools and limits."""

    model: Annotated[
        str, Field(description="Model name at the provider; for hf a folder, hub id or run id")
    ]
    provider: Annotated[
        ProviderName,
        Field(description="demo and hf run in-process; openai with base_url is any endpoint"),
    ] = "hf"
    base_url: Annotated[str | None, Field(description="OpenAI-compatible endpoint")] = None
    api_key_env: Annotated[
        str | None, Field(description="NAME of the environment variable with the key")
    ] = None
    tools: Annotated[str, Field(description="Python file with @tool functions, or none")] = NO_FILE
    mcp_servers: Annotated[
        tuple[str, ...], Field(description="More tools: MCP servers, each a command line or a URL")
    ] = ()
    browse: Annotated[bool, Field(description="More tools: a web browser")] = False
    browse_allow: Annotated[
        tuple[str, ...], Field(description="Private hosts (host:port, CIDR) the browser may open")
    ] = ()
    rewards: Annotated[
        str,
        Field(description="Python file with @reward functions; none: match expected_answer"),
    ] = NO_FILE
    n: Annotated[int | None, Field(ge=1, description="Only the first n prompts")] = None
    entries: Annotated[
        str | None, Field(description="Only these prompts, e.g. 0,2,5-9 (0-based)")
    ] = None
    samples_per_prompt: Annotated[int, Field(ge=1, le=1024)] = 1
    concurrency: Annotated[
        int, Field(ge=1, le=4096, description="Conversations at once, to begin with")
    ] = 20
    max_concurrency: Annotated[
        int | None,
        Field(ge=1, le=4096, description="Endpoints: grows to this while none is refused"),
    ] = None
    max_tokens: Annotated[int, Field(ge=1, description="Per assistant turn")] = 2048
    max_turns: Annotated[int, Field(ge=1, le=1000)] = 10
    termination_policy: Annotated[
        TerminationPolicy, Field(description="max_turns: goes on after a turn without a tool call")
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
        bool, Field(description="Endpoints: earlier reasoning goes back with each turn")
    ] = False
    max_tool_response: Annotated[
        int | None, Field(ge=1, description="Characters of a tool's reply; the rest is cut")
    ] = None
    request_timeout: Annotated[float, Field(gt=0, description="Seconds per call")] = 120.0
    tool_timeout: Annotated[float, Field(gt=0)] = 60.0
    reward_timeout: Annotated[float, Field(gt=0)] = 60.0
    rollout_timeout: Annotated[float | None, Field(gt=0)] = None

    @model_validator(mode="after")
    def _nudge_is_said(self) -> "RolloutOptions":
        if self.nudge != DEFAULT_NUDGE and self.termination_policy == "last_tool":
            raise ValueError("nudge is said only with termination_policy max_turns")
        return self

    @property
    def nudge_to_send(self) -> str | None:
        """What the user says after a turn without a tool call; None: such a turn is the end."""
        return nudge_for(self.termination_policy, self.nudge)

    @property
    def most_at_once(self) -> int:
        """How many conversations with an endpoint there may be."""
        return max(self.concurrency, self.max_concurrency or _MAX_CONCURRENCY)


class GenerateRollouts(RolloutOptions):
    """Ask for rollouts: the model answers each prompt, using tools; every conversation is kept."""

    input: Annotated[str, Field(description="Prompts: .txt (one a line) or .jsonl")]
    output: Annotated[
        str, Field(description="Where rows are appended; the same command again resumes")
    ] = "rollouts/rollouts.jsonl"
    system: Annotated[str | None, Field(description="System message put first")] = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.7
    budget_usd: Annotated[
        float | None, Field(gt=0, description="Never spends more for this output, reruns included")
    ] = None
    max_total_tokens: Annotated[int | None, Field(ge=1, description="The same in tokens")] = None
    max_minutes: Annotated[float | None, Field(gt=0, description="Of this run")] = None
    dry_run: Annotated[
        bool, Field(description="Only tell calls, tokens and cost to expect; calls nothing")
    ] = False
    ray_address: Annotated[
        str | None, Field(description="Splits the run over Ray: auto, local or an address")
    ] = None
    ray_workers: Annotated[int, Field(ge=1, le=999)] = 2


def check_rollout_options(workspace: Workspace, options: RolloutOptions) -> JudgeFile | None:
    """Returns the judge that is asked for, if one is.

    Raises InputError for what can be known to be wrong before a process is started.
    """
    judge = check_judge(workspace, options)
    for field in ("tools", "rewards"):
        user_file(workspace, getattr(options, field), what=field)
    if options.provider in IN_PROCESS:
        if options.base_url is not None:
            raise InputError(
                f"base_url does not go with provider {options.provider!r}",
                "use provider openai for an endpoint, or leave base_url out",
            )
    else:
        endpoint_for(
            workspace, options.provider, base_url=options.base_url, api_key_env=options.api_key_env
        )
    return judge


def check_rollouts(workspace: Workspace, request: GenerateRollouts) -> None:
    """Raises InputError for what can be known to be wrong before a process is started."""
    judge = check_rollout_options(workspace, request)
    price_of(workspace, request)
    if judge is not None:
        judge_price(workspace, judge, is_needed=request.budget_usd is not None)


def price_of(workspace: Workspace, options: GenerateRollouts) -> Price | None:
    """Returns the price of the model's tokens, or None where it is unknown.

    Raises InputError for a budget in dollars without a price.
    """
    if options.provider in IN_PROCESS or PROFILES[options.provider].is_local:
        return FREE
    if options.budget_usd is not None:
        return known_price(workspace, options.model)
    return price_for(workspace, options.model)


def user_file(workspace: Workspace, name: str, *, what: str) -> Path | None:
    """Returns the path of a tools or rewards file, or None for `none`."""
    if name == NO_FILE:
        return None
    path = workspace.existing(name, what=f"{what} file")
    if path.suffix != ".py" or not path.is_file():
        raise InputError(f"{what} file {name!r} is not a Python file", "give a .py file, or none")
    return path


def locate_policy(workspace: Workspace, options: RolloutOptions) -> ModelLocation:
    """Returns where an in-process model is; provider demo knows `teacher` and `student`."""
    name = options.model
    if options.provider == "demo" and not name.startswith("demo/"):
        name = f"demo/{name}"
    return locate_model(workspace, name)


def sampling_settings(options: RolloutOptions, *, temperature: float) -> SamplingSettings:
    """Returns how the policy samples."""
    return SamplingSettings(
        temperature=temperature,
        top_p=options.top_p,
        max_tokens=options.max_tokens,
        seed=options.seed,
        reasoning_effort=options.reasoning_effort,
    )


def select_entries(tasks: list[Task], *, n: int | None, entries: str | None) -> list[Task]:
    """Returns the prompts that `entries` (e.g. "0,2,5-9", 0-based) and `n` choose."""
    chosen = tasks if entries is None else [tasks[i] for i in _indices(entries, len(tasks))]
    return chosen[:n]


def _indices(entries: str, length: int) -> list[int]:
    indices: list[int] = []
    for part in entries.split(","):
        first, dash, last = part.strip().partition("-")
        try:
            start, end = int(first), int(last) if dash else int(first)
        except ValueError:
            raise InputError(
                f"entries {entries!r}: {part.strip()!r} is not a number or a range",
                "write numbers and ranges such as 0,2,5-9 (0 is the first prompt)",
            ) from None
        if not 0 <= start <= end < length:
            raise InputError(
                f"entries {entries!r}: {part.strip()!r} is outside the file's 0-{length - 1}",
                f"choose among 0-{length - 1}",
            )
        indices += range(start, end + 1)
    return indices


Fingerprint = dict[str, Any]
_SHAPING = (
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
    "mcp_servers",
    "browse",
    "answer_match",
)


def fingerprint(
    workspace: Workspace,
    options: RolloutOptions,
    judge: JudgeFile | None,
    *,
    prompts: Path,
    **more: Any,
) -> Fingerprint:
    """Returns all that shapes what a rollout becomes; a resumed run must have the same."""
    shaping: Fingerprint = {name: getattr(options, name) for name in _SHAPING}
    shaping["nudge"] = options.nudge_to_send
    for kind in ("tools", "rewards"):
        path = user_file(workspace, getattr(options, kind), what=kind)
        shaping[f"{kind}_sha256"] = file_sha256(path) if path else None
    shaping["judge"] = judge and judge.model_dump(mode="json")
    return {**shaping, "input_sha256": file_sha256(prompts), **more}
