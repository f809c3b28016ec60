"""The types that all layers share: messages, tool calls, turns, rollouts, usage."""

from collections.abc import Iterable
from decimal import Decimal
from enum import StrEnum
from typing import Annotated, Any, Literal, Required, TypedDict

import msgspec

from stillroom.errors import FailureClass

OTHERS_WROTE = msgspec.Meta(extra={"others wrote this": True})
OthersText = Annotated[str, OTHERS_WROTE]
"""The type of a result's field with untrusted text: of rows, pages or models. Agents see it between
marks."""

OWN_TEXT = msgspec.Meta(extra={"Stillroom wrote this": True})
OwnText = Annotated[str, OWN_TEXT]
"""The type of a result's field with Stillroom's own sentences; names in them have passed through
`fences.safe_name`. Strings of other types are shown between marks unless they are names."""

Role = Literal["system", "user", "assistant", "tool"]


class _FunctionCall(TypedDict, total=False):
    """The function of a tool call; `arguments` is the JSON string that the model wrote."""

    name: Required[str]
    arguments: Required[str]


class ToolCall(TypedDict, total=False):
    """One tool call of an assistant message, in the OpenAI format."""

    id: Required[str]
    type: Literal["function"]
    function: Required[_FunctionCall]
    extra_content: Any
    """Data that must be sent back to the endpoint with the call, unchanged."""


class Message(TypedDict, total=False):
    """One chat message in the OpenAI format. Other keys are kept unchanged."""

    role: Required[Role]
    content: str | list[dict[str, Any]] | None
    tool_calls: list[ToolCall]
    tool_call_id: str
    name: str
    reasoning_content: str
    weight: Literal[0, 1]
    """Whether an assistant message is trained (1, or absent) or only context (0)."""


def is_trained_turn(message: Message) -> bool:
    """Returns whether an assistant message is trained, according to its `weight`."""
    return message.get("weight") != 0


class ToolSchema(TypedDict):
    """A tool as a model sees it: `{"type": "function", "function": {name, description, ...}}`."""

    type: Literal["function"]
    function: dict[str, Any]


class StopReason(StrEnum):
    """Why a rollout ended."""

    ANSWERED = "answered"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    CONTEXT_WINDOW = "context_window"
    CONTENT_FILTER = "content_filter"
    """The endpoint's filter blocked the rest of the turn."""
    ERROR = "error"

    @property
    def cuts_off(self) -> bool:
        """Whether a limit or the endpoint's filter cut off the last turn."""
        return self in (
            StopReason.MAX_TOKENS,
            StopReason.CONTEXT_WINDOW,
            StopReason.CONTENT_FILTER,
        )


class RunKind(StrEnum):
    """The kind of work that a run does."""

    ROLLOUTS = "rollouts"
    SFT = "sft"
    DPO = "dpo"
    DISTILL = "distill"
    EVALUATE = "evaluate"
    SCORE = "score"
    EXPORT = "export"
    VALIDATE = "validate"
    REVIEW = "review"
    FILTER = "filter"
    CONVERT = "convert"
    PAIRS = "pairs"
    INSPECT = "inspect"
    LINEAGE = "lineage"
    IMPORT = "import"
    PLAN = "plan"
    RECIPE = "recipe"


WaitReason = Literal["ended", "alarm", "budget", "progress", "time"]
"""Why a call that waits for a run returned: the run ended, a new alarm, 80 % of the budget spent,
another 10 % done, or the time limit of the call."""


class RunStatus(StrEnum):
    """The state of a run."""

    STARTING = "starting"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    INTERRUPTED = "interrupted"
    """Its process ended without a report, e.g. it was killed or the machine went down."""

    @property
    def is_final(self) -> bool:
        """Whether the status can no longer change."""
        return self not in (RunStatus.STARTING, RunStatus.RUNNING)


class RowReason(StrEnum):
    """The reasons by which results count rows that a run left out or could not use."""

    NOT_A_ROLLOUT = "not a rollout row"
    FAILED = "ended by an infrastructure failure"
    UNJUDGED = "nothing judges it"
    SAME_REWARD = "same reward"
    TOO_LONG = "longer than max_length"
    NOTHING_TRAINED = "no assistant token to train"
    REFUSED = "refused by the chat template (inspect_examples with the model shows why)"
    """The template's own message is left out, since reasons are shown as Stillroom's text."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """An infrastructure failure of one rollout, recorded on its trajectory."""

    kind: FailureClass = msgspec.field(name="class")
    message: str


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt and completion tokens of a rollout or call."""

    prompt_tokens: int = 0
    completion_tokens: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            completion_tokens=self.completion_tokens + other.completion_tokens,
        )


def total_usd(costs: Iterable[float | None]) -> float | None:
    """Returns the sum of costs in US dollars; None if one of them is unknown (None)."""
    all_costs = list(costs)
    return None if None in all_costs else sum(cost for cost in all_costs if cost is not None)


def dollars(usd: float) -> str:
    """Returns an amount to the cent, and below a dollar with up to three significant digits."""
    digits = f"{Decimal(f'{usd:.3g}'):f}" if 0 < usd < 1 else ""
    return f"${max(f'{usd:,.2f}', digits, key=len)}"


class Answerer(msgspec.Struct, frozen=True, kw_only=True):
    """The model that answered a call, as the endpoint names it."""

    model: str
    fingerprint: str | None = None
    """The endpoint's system fingerprint."""


class CallTotals(msgspec.Struct, frozen=True, kw_only=True):
    """The number of calls, their tokens and their cost."""

    calls: int = 0
    usage: Usage = Usage()
    cost_usd: float | None = 0.0
    """The cost of the calls in US dollars; None if a price is unknown."""
    answered_by: tuple[Answerer, ...] = ()
    """The models that answered; more than one if the endpoint changed its model."""

    @classmethod
    def of(cls, turn: "SampledTurn") -> "CallTotals":
        """Returns the totals of a turn's call and of the unused calls before it."""
        answerers = () if turn.answered_by is None else (turn.answered_by,)
        origin = turn.origin
        calls = 0 if origin is not None and origin.is_given else 1
        totals = cls(calls=calls, usage=turn.usage, cost_usd=turn.cost_usd, answered_by=answerers)
        return totals if origin is None or origin.unused is None else totals + origin.unused

    def __add__(self, other: "CallTotals") -> "CallTotals":
        return CallTotals(
            calls=self.calls + other.calls,
            usage=self.usage + other.usage,
            cost_usd=total_usd((self.cost_usd, other.cost_usd)),
            answered_by=tuple(dict.fromkeys(self.answered_by + other.answered_by)),
        )


class TokenTrace(msgspec.Struct, frozen=True, kw_only=True):
    """The exact tokens of an in-process rollout, both given and sampled.

    `sampled[i]` is True if the policy sampled `ids[i]`; `logprobs[i]` is its log-probability in
    nats under the policy at temperature 1 (0.0 if it was not sampled).
    """

    ids: list[int]
    sampled: list[bool]
    logprobs: list[float]

    @property
    def sampled_logprobs(self) -> list[float]:
        """The log-probabilities of the sampled tokens only, in order (nats)."""
        pairs = zip(self.sampled, self.logprobs, strict=True)
        return [logprob for is_sampled, logprob in pairs if is_sampled]


class SamplingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling settings of a policy. `max_tokens` is the limit of one assistant turn.

    With a seed, a conversation's random draws depend on the seed, its task and its sample number.
    """

    temperature: float = 0.7
    top_p: float = 1.0
    max_tokens: int = 2048
    seed: int | None = None
    reasoning_effort: str | None = None
    """How much the model should reason, if the endpoint supports this setting."""


Author = Literal["student", "teacher"]
"""The author of a turn in a refined rollout."""


class TurnOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """The origin of a turn in a refined rollout."""

    author: Author
    is_given: bool = False
    """Whether the turn was copied from the student's rollout instead of sampled."""
    unused: CallTotals | None = None
    """The teacher's call whose turn was not used because it does the same as the student's."""


class SampledTurn(msgspec.Struct, frozen=True, kw_only=True):
    """One assistant turn as a policy or teacher returned it.

    `token_ids` and `logprobs` (nats, temperature 1) are None unless the policy is in-process.
    """

    message: Message
    finish_reason: Literal["stop", "length", "context", "filter"]
    usage: Usage
    cost_usd: float | None = None
    """The cost of the call in US dollars; None if the price is unknown."""
    token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    answered_by: Answerer | None = None
    """The model that answered; None for in-process models, or if the endpoint does not name it."""
    origin: TurnOrigin | None = None
    """The origin of a turn in a refined rollout; None in other rollouts."""


class PartialTurn(msgspec.Struct, frozen=True, kw_only=True):
    """The sampled tokens of an unfinished turn, with their log-probabilities (nats)."""

    ids: list[int]
    logprobs: list[float]


class TeacherRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The model that produced a rollout, and its sampling settings."""

    provider: str
    model: str
    settings: SamplingSettings
    chat_template: str | None = None
    """The chat template that the request named; None: the model's own."""


class Refinement(msgspec.Struct, frozen=True, kw_only=True):
    """How a student's failed rollout was refined, and who wrote which turn."""

    rollout: str
    """The id of the student's rollout."""
    where: str
    """How the teacher's first turn was chosen."""
    turn: int | None
    """The index of that turn among the assistant turns, from 0; None if there is none."""
    authors: list[Author]
    """The author of each assistant turn."""
    critic: CallTotals | None = None
    """The totals of the critic's calls; None without a critic."""
    unused: CallTotals | None = None
    """The totals of the teacher's unused calls; None if there are none."""


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """One finished rollout: a line of a rollouts file.

    The rollout used the tokens of `usage`, `judge` and `dropped` together; `cost_usd` is the cost
    of all three in US dollars, or None if a price is unknown.
    """

    id: str
    task_id: str
    sample: int
    """The number of this rollout among the rollouts of its task, from 0."""
    messages: list[Message]
    tools: list[ToolSchema]
    metadata: dict[str, Any]
    """The metadata of the task's row."""
    reward: float | None
    """The total reward; None if no reward function, judge or expected answer applies."""
    rewards: dict[str, float]
    """The individual rewards by name."""
    success: bool | None
    """Whether the rewards other than preconditions sum to 0.5 or more; None without a reward."""
    stop_reason: StopReason
    turns: int
    """The number of assistant turns that were sampled."""
    truncated: bool
    """Whether a limit or the endpoint's content filter cut off its last turn."""
    tool_errors: int
    """The number of tool calls whose result was an error."""
    error: Failure | None
    usage: Usage
    """The tokens of the turns in `messages`."""
    cost_usd: float | None
    teacher: TeacherRecord
    """The model that was called."""
    started_at: str
    duration_s: float
    judge: CallTotals | None = None
    """The totals of the judge's calls; None without a judge."""
    dropped: CallTotals | None = None
    """The totals of calls that are not in the messages: calls before the rollout was restarted
    because its tools had lost their state, and calls of `refined`; None if there are none."""
    tokens: TokenTrace | None = None
    """The exact tokens; None for a policy behind an endpoint."""
    variables: dict[str, Any] = {}
    """The variables of the task's row, which its rewards may read in addition to the metadata."""
    answered_by: tuple[Answerer, ...] = ()
    """The models that answered; more than one if the endpoint changed its model."""
    refined: Refinement | None = None
    """How the student's failed rollout was refined; None for other rollouts."""
