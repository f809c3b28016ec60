"""What a rollout run will take, told without making a call."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from stillroom.rollout.journal.records import FinishedRow
from stillroom.rollout.rewards.judge import MAX_TRIES
from stillroom.teachers.pricing import Price
from stillroom.types import Usage

_BYTES_PER_TOKEN = 4.0
"""Of English text; what is expected."""
_MOST_BYTES_PER_TOKEN = 8.0
_EXPECTED_TURNS_WITH_TOOLS = 4.0
_EXPECTED_REPLY_TOKENS = 200.0
TEMPLATE_TOKENS = 512
"""What a chat template may add to a call: default system texts, how to call tools, headers."""
FRAME_TOKENS = 64
"""What it may add for a turn and for what follows it."""
ASSUMED_REPLY_TOKENS = 16_384
"""Of the tools' replies to one turn, where nothing cuts them."""
_CUT_NOTE_BYTES = 80
_MOST_BYTES_PER_CHARACTER = 4
_CORRECTION_BYTES = 400


class ForecastRange(msgspec.Struct, frozen=True):
    """What is expected, between the least and the most that is possible."""

    low: float
    expected: float
    high: float


class JudgeForecast(msgspec.Struct, frozen=True, kw_only=True):
    """What the judge will take."""

    calls: ForecastRange
    prompt_tokens: ForecastRange
    completion_tokens: ForecastRange
    cost_usd: ForecastRange | None
    """None where the price is unknown."""


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a dry run."""

    dry_run: bool
    """Always true: no model was called and nothing was written."""
    requested: int
    already_done: int
    todo: int
    calls: ForecastRange
    """Of the model, as are the tokens."""
    prompt_tokens: ForecastRange
    completion_tokens: ForecastRange
    judge: JudgeForecast | None
    """None where no judge is given."""
    cost_usd: ForecastRange | None
    """Of model and judge together; None where a price is unknown."""
    based_on: str
    """Where the expectation comes from."""
    assumes: list[str]
    """What low and high hold under."""
    terms: str | None = None
    """Where the provider says whether its outputs may train other models; the user should know
    before the first paid call."""


@dataclass(frozen=True, slots=True)
class JudgeLoad:
    """What a judge is sent for one rollout, as far as that is known before."""

    text_bytes: int
    """Of the question's text alone, without the answer and the conversation."""
    request_bytes: int
    """Of the question as it is sent."""
    is_certain: bool
    """Whether it is asked in any case."""


@dataclass(frozen=True, slots=True)
class RolloutLoad:
    """What is known before of one rollout that is to be done."""

    text_bytes: int
    """Of the prompt's text alone."""
    request_bytes: int
    """Of the messages and tool schemas as they are sent, which each call does."""
    max_turns: int
    """One where nothing can follow the first turn."""
    num_known: int = 0
    """Turns that are on record and not sampled again."""
    judge: JudgeLoad | None = None
    """None where no judge is asked."""

    @property
    def most_calls(self) -> int:
        """The most turns that are still to be sampled."""
        return max(self.max_turns - self.num_known, 0)


@dataclass(frozen=True, slots=True)
class CallRules:
    """What bounds every rollout of a run."""

    max_turns: int
    max_tokens: int
    has_tools: bool
    max_tool_response: int | None
    nudge: str | None
    judge_max_tokens: int = 0
    judge_sees_conversation: bool = False

    @property
    def most_reply_tokens(self) -> int:
        """The most that follows a turn: a user's nudge, or the tools' replies."""
        nudge = len((self.nudge or "").encode())
        return max(nudge, self.most_tool_tokens if self.has_tools else 0)

    @property
    def most_tool_tokens(self) -> int:
        """The most that the tools reply to a turn; assumed where nothing cuts them."""
        if self.max_tool_response is None:
            return ASSUMED_REPLY_TOKENS
        return _MOST_BYTES_PER_CHARACTER * self.max_tool_response + _CUT_NOTE_BYTES

    @property
    def expected_reply_tokens(self) -> float:
        """What is expected to follow a turn."""
        told = _EXPECTED_REPLY_TOKENS if self.has_tools else len(self.nudge or "") / 4
        return min(told, float(self.most_reply_tokens))


@dataclass(frozen=True, slots=True)
class Prices:
    """Of model and judge; None where unknown."""

    model: Price | None
    judge: Price | None = None


@dataclass(frozen=True, slots=True)
class RequestedRollouts:
    """Which rollouts are asked for, and where rows of some are."""

    requested: int
    output: str


def forecast(
    loads: Sequence[RolloutLoad],
    finished: Sequence[FinishedRow],
    rules: CallRules,
    prices: Prices,
    counts: RequestedRollouts,
) -> Forecast:
    """Returns what the rollouts that are still to do will take; `finished` are rows that are there.

    Such rows give the best guess; else each call is taken to use half of what it may write.
    Without tools a rollout is one call, so their number is exact. The most holds under what
    `assumes` says.
    """
    turns = _expected_turns(finished, rules)
    completion = _expected_completion(finished, rules.max_tokens, turns)
    fresh = [load for load in loads if not load.num_known]
    calls = _span(
        len(fresh),
        sum(min(turns, load.most_calls) for load in loads),
        sum(load.most_calls for load in loads),
    )
    completions = _span(0, calls.expected * completion, calls.high * rules.max_tokens)
    prompts = _span(
        sum(load.text_bytes for load in fresh) / _MOST_BYTES_PER_TOKEN,
        _expected_prompt(loads, finished, rules, turns, completion),
        sum(_most_prompt(load, rules) for load in loads),
    )
    judge = _judge_forecast(loads, rules, prices.judge, completion)
    cost = _cost(prices.model, prompts, completions)
    return Forecast(
        dry_run=True,
        requested=counts.requested,
        already_done=counts.requested - len(loads),
        todo=len(loads),
        calls=calls,
        prompt_tokens=prompts,
        completion_tokens=completions,
        judge=judge,
        cost_usd=_sum(cost, judge.cost_usd) if judge else cost,
        based_on=(
            f"{len(finished)} rows of {counts.output}" if finished else "the lengths of the prompts"
        ),
        assumes=_assumptions(rules),
    )


def _assumptions(rules: CallRules) -> list[str]:
    frame = (
        f"high: a token is at least a byte, a chat template adds at most {TEMPLATE_TOKENS} tokens "
        f"to a call and {FRAME_TOKENS} to a turn, and no call that broke off is billed"
    )
    told = ["low: no rollout fails, and 8 bytes of text are at least a token", frame]
    if rules.has_tools and rules.max_turns > 1:
        reason = (
            "set max_tool_response to bound each reply"
            if rules.max_tool_response is None
            else "one reply of max_tool_response characters at 4 bytes each"
        )
        told.append(
            f"high: the tools' replies to one turn take at most {rules.most_tool_tokens} tokens "
            f"together ({reason})"
        )
    return told


def _expected_turns(seen: Sequence[FinishedRow], rules: CallRules) -> float:
    most = float(rules.max_turns)
    if seen:
        return min(most, sum(row.turns for row in seen) / len(seen))
    return most if rules.nudge is not None else min(most, _EXPECTED_TURNS_WITH_TOOLS)


def _expected_completion(seen: Sequence[FinishedRow], max_tokens: int, turns: float) -> float:
    """Returns the tokens that a call is expected to write."""
    if seen:
        per_call = sum(row.usage.completion_tokens for row in seen) / len(seen) / turns
        # Some endpoints do not keep to it.
        return min(float(max_tokens), per_call)
    return max_tokens / 2


def _expected_prompt(
    loads: Sequence[RolloutLoad],
    seen: Sequence[FinishedRow],
    rules: CallRules,
    turns: float,
    completion: float,
) -> float:
    told = sum(row.usage.prompt_tokens for row in seen)
    if told:
        return len(loads) * told / len(seen)
    growth = completion + rules.expected_reply_tokens
    return sum(
        _grown(load.request_bytes / _BYTES_PER_TOKEN, growth, min(turns, load.most_calls))
        for load in loads
    )


def _most_prompt(load: RolloutLoad, rules: CallRules) -> float:
    if not load.most_calls:
        return 0.0
    growth = rules.max_tokens + rules.most_reply_tokens + FRAME_TOKENS
    return _grown(load.request_bytes + TEMPLATE_TOKENS, growth, load.max_turns)


def _grown(first: float, growth: float, turns: float) -> float:
    """Returns the tokens that a rollout sends: each call has all that came before it."""
    return first * turns + growth * turns * (turns - 1) / 2


def _judge_forecast(
    loads: Sequence[RolloutLoad], rules: CallRules, price: Price | None, answer: float
) -> JudgeForecast | None:
    if not rules.judge_max_tokens:
        return None
    asked = [load.judge for load in loads if load.judge is not None]
    certain = [judge for judge in asked if judge.is_certain]
    said = rules.judge_max_tokens
    shown = rules.max_tokens + FRAME_TOKENS
    if rules.judge_sees_conversation:
        shown += rules.max_turns * (rules.max_tokens + rules.most_reply_tokens + FRAME_TOKENS)
    again = said + _CORRECTION_BYTES + FRAME_TOKENS
    prompts = _span(
        sum(judge.text_bytes for judge in certain) / _MOST_BYTES_PER_TOKEN,
        sum(judge.request_bytes / _BYTES_PER_TOKEN + answer for judge in asked),
        sum(
            _grown(judge.request_bytes + shown + TEMPLATE_TOKENS, again, MAX_TRIES)
            for judge in asked
        ),
    )
    calls = _span(len(certain), len(asked), MAX_TRIES * len(asked))
    completions = _span(0, len(asked) * said / 4, calls.high * said)
    return JudgeForecast(
        calls=calls,
        prompt_tokens=prompts,
        completion_tokens=completions,
        cost_usd=_cost(price, prompts, completions),
    )


def _span(low: float, expected: float, high: float) -> ForecastRange:
    return ForecastRange(low, min(max(low, expected), high), high)


def _cost(
    price: Price | None, prompts: ForecastRange, completions: ForecastRange
) -> ForecastRange | None:
    if price is None:
        return None

    def of(prompt: float, completion: float, to_int: Callable[[float], int]) -> float:
        usage = Usage(prompt_tokens=to_int(prompt), completion_tokens=to_int(completion))
        return price.of(usage)

    return ForecastRange(
        of(prompts.low, completions.low, math.floor),
        of(prompts.expected, completions.expected, round),
        of(prompts.high, completions.high, math.ceil),
    )


def _sum(one: ForecastRange | None, other: ForecastRange | None) -> ForecastRange | None:
    if one is None or other is None:
        return None
    return ForecastRange(one.low + other.low, one.expected + other.expected, one.high + other.high)
