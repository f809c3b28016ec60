"""The options of rollouts: those of a request, and those that config.yml's `rollout` shares."""

from typing import Annotated, Any, Literal, Self, cast, get_args

from pydantic import Field, model_validator

from stillroom.secrecy.commands import WITHOUT_SECRETS
from stillroom.teachers.model_choice import ModelChoice
from stillroom.teachers.providers import ProviderName
from stillroom.validation import PlacedRequest, StrictModel

TerminationPolicy = Literal["last_tool", "max_turns"]
"""When a rollout ends: with the first turn that calls no tool, or only after `max_turns` turns."""
DEFAULT_NUDGE = (
    "Check your work, with the tools where they help, then state your complete answer again."
)
"""Asks for the whole answer again, since only the last turn's answer counts and any turn may be the
last."""
NO_FILE = "none"
_MAX_CONCURRENCY = 256
Takeover = Literal["start", "first_difference", "critic"]
TrainedTurns = Literal["all", "teacher"]


class EpisodeOptions(StrictModel):
    """The options of a rollout that requests and config.yml's `rollout` section share.

    An option added here is available in all of them, and a request takes its default from the
    config.yml in the folder of its prompts.
    """

    max_tokens: Annotated[int, Field(ge=1, description="Per assistant turn")] = 2048
    max_turns: Annotated[int, Field(ge=1, le=1000)] = 10
    browse: Annotated[bool, Field(description="More tools: a web browser")] = False
    browse_allow: Annotated[
        tuple[str, ...], Field(description="Private hosts it may open (host:port, CIDR)")
    ] = ()
    termination_policy: Annotated[
        TerminationPolicy, Field(description="max_turns: continues without tool calls")
    ] = "last_tool"
    nudge: Annotated[
        str, Field(min_length=1, description="User message after a turn without calls")
    ] = DEFAULT_NUDGE
    include_thinking: Annotated[
        bool, Field(description="Endpoints: send earlier reasoning back")
    ] = False
    tool_timeout: Annotated[float, Field(gt=0)] = 60.0
    reward_timeout: Annotated[float, Field(gt=0)] = 60.0
    rollout_timeout: Annotated[float | None, Field(gt=0)] = None
    """The time limit of a rollout and its rewards, in seconds; None: no limit."""

    @model_validator(mode="after")
    def _check_nudge(self) -> Self:
        if self.nudge != DEFAULT_NUDGE and self.nudge_to_send is None:
            raise ValueError("nudge requires termination_policy: max_turns")
        return self

    @property
    def nudge_to_send(self) -> str | None:
        """The user message after a turn without a tool call; None if this turn ends the rollout."""
        return self.nudge if self.termination_policy == "max_turns" else None


class JudgeOptions(StrictModel):
    """How final answers are judged if rewards.py does not: by comparison, or by a model."""

    answer_match: Annotated[
        Literal["contained", "exact", "normalised", "numeric", "choice"],
        Field(description="How expected_answer is compared; metadata.answer_match wins"),
    ] = "contained"
    judge: Annotated[str, Field(description="judge.yml: a model and its rubric; or none")] = NO_FILE


class RolloutOptions(JudgeOptions, EpisodeOptions, ModelChoice):
    """Options that every run of rollouts has: who answers, with which tools and limits."""

    model: Annotated[str, Field(description="Name at the provider; hf: folder, hub id or run id")]
    provider: Annotated[
        ProviderName,
        Field(description="Default: by model, else hf (in-process); with base_url openai"),
    ] = "hf"
    base_url: Annotated[str | None, Field(description="Any OpenAI-compatible endpoint")] = None
    api_key_env: Annotated[
        str | None, Field(description="NAME of the key's environment variable")
    ] = None
    chat_template: Annotated[
        str | None, Field(description="hf: instead of its own, e.g. chatml")
    ] = None
    tools: Annotated[
        str, Field(description="File with @tool functions, or none; default: tools.py")
    ] = NO_FILE
    mcp_servers: Annotated[
        tuple[str, ...],
        WITHOUT_SECRETS,
        Field(description="Command lines or URLs"),
    ] = ()
    system: Annotated[
        str | None, Field(description='Replaces the rows\' system messages; "" removes them')
    ] = None
    context_file: Annotated[
        str | None, Field(description="Text after the system message, e.g. a SKILL.md")
    ] = None
    rewards: Annotated[
        str,
        Field(description="@reward functions (.py; evaluations: rewards.py), else expected_answer"),
    ] = NO_FILE
    n: Annotated[int | None, Field(ge=1, description="Only the first n")] = None
    entries: Annotated[str | None, Field(description="Only these, e.g. 0,2,5-9 (0-based)")] = None
    samples_per_prompt: Annotated[int, Field(ge=1, le=1024)] = 1
    concurrency: Annotated[int, Field(ge=1, le=4096, description="Conversations at once")] = 20
    max_concurrency: Annotated[
        int | None,
        Field(ge=1, le=4096, description="Endpoints: may grow to this"),
    ] = None
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: int | None = None
    reasoning_effort: Annotated[
        Literal["none", "minimal", "low", "medium", "high"] | None,
        Field(description="Endpoints: how much the model reasons"),
    ] = None
    max_tool_response: Annotated[
        int | None, Field(ge=1, description="Characters kept of a tool's reply")
    ] = None
    request_timeout: Annotated[float, Field(gt=0, description="Seconds per call")] = 120.0

    @property
    def has_tools(self) -> bool:
        """Whether the model may call tools."""
        return bool(self.tools != NO_FILE or self.mcp_servers or self.browse)

    @property
    def highest_concurrency(self) -> int:
        """The highest number of concurrent conversations with an endpoint."""
        return max(self.concurrency, self.max_concurrency or _MAX_CONCURRENCY)


class RefineOptions(StrictModel):
    """Which of a student's failed rollouts a teacher refines, and where in them it takes over."""

    refine: Annotated[
        str | None, Field(description="A student's rollouts: redo the failed ones")
    ] = None
    takeover: Annotated[
        Takeover,
        Field(description="Where, e.g. at the first differing action"),
    ] = "first_difference"
    turns: Annotated[
        Literal["rest", "one"], Field(description="one: then the student continues")
    ] = "rest"
    critic: Annotated[str, Field(description="critic.yml: another model; none: the teacher")] = (
        "none"
    )
    train_turns: Annotated[TrainedTurns, Field(description="Turns to train on")] = "all"

    @model_validator(mode="before")
    @classmethod
    def _accept_old_takeover_name(cls, value: Any) -> Any:
        """Accepts `where`, the old name of takeover, in a refinement; otherwise it is a machine."""
        if not isinstance(value, dict):
            return value
        fields = dict(cast("dict[str, Any]", value))
        is_old = fields.get("refine") is not None and "takeover" not in fields
        if is_old and fields.get("where") in get_args(Takeover):
            fields["takeover"] = fields.pop("where")
        return fields

    @model_validator(mode="after")
    def _check_refine_options(self) -> Self:
        """Rejects options that need `refine` or another `takeover`."""
        # By value, since a recorded request sets every option; `start` was once the default.
        fields = type(self).model_fields
        names = ("turns", "critic", "train_turns")
        changed = [name for name in names if getattr(self, name) != fields[name].default]
        if self.refine is None and (changed or self.takeover == "critic"):
            option = min(changed, default="takeover")
            raise ValueError(f"{option} requires refine, which names a student's rollouts")
        if self.takeover == "start" and changed:
            raise ValueError(
                f"{min(changed)} requires takeover: first_difference or critic; with takeover: "
                "start the teacher writes every turn"
            )
        if self.critic != "none" and self.takeover != "critic":
            raise ValueError("critic requires takeover: critic")
        if not self.replays_student:
            return self
        if getattr(self, "context_file", None) is not None:
            raise ValueError(
                "context_file requires takeover: start, since otherwise the student's prompt would "
                "include it too"
            )
        if getattr(self, "samples_per_prompt", 1) > 1:
            raise ValueError(
                "samples_per_prompt must be 1 unless takeover is start: each failed rollout is "
                "refined once"
            )
        if getattr(self, "ray_address", None) is not None:
            raise ValueError(
                "ray_address requires takeover: start; rollouts are refined in one process"
            )
        return self

    @property
    def replays_student(self) -> bool:
        """Whether the student's turns are replayed up to the one where the teacher takes over."""
        return self.refine is not None and self.takeover != "start"


class GenerateRollouts(PlacedRequest, RefineOptions, RolloutOptions):
    """The request for rollouts: the model answers each prompt, using tools."""

    input: Annotated[str, Field(description="Prompts: .txt (one per line) or .jsonl")]
    output: Annotated[str, Field(description="Rows are appended")] = "rollouts/rollouts.jsonl"
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.7
    budget_usd: Annotated[
        float | None, Field(gt=0, description="Cap of this output, reruns included")
    ] = None
    max_total_tokens: Annotated[int | None, Field(ge=1, description="Cap in tokens")] = None
    max_minutes: Annotated[float | None, Field(gt=0, description="Cap of this run")] = None
    dry_run: Annotated[bool, Field(description="Only forecast calls, tokens and cost")] = False
    ray_address: Annotated[str | None, Field(description="auto, local or an address")] = None
    ray_workers: Annotated[int, Field(ge=1, le=999)] = 2
