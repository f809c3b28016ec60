"""Forecasts the calls, tokens and cost of a rollout run, without making a call."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import msgspec

from stillroom.rollout.journal.records import FinishedRow
from stillroom.rollout.rewards.judge import MAX_TRIES
from stillroom.teachers.pricing import Price
from stillroom.types import Usage

_BYTES_PER_TOKEN = 4.0
"""Expected bytes per token of English text."""
_MAX_BYTES_PER_TOKEN = 8.0
"""Upper bound on bytes per token, which gives the lower bound on a prompt's tokens."""
_EXPECTED_TURNS_WITH_TOOLS = 4.0
_EXPECTED_REPLY_TOKENS = 200.0
TEMPLATE_TOKENS = 512
"""The maximum number of tokens that a chat template adds to a call, for system texts, tool
instructions and headers."""
FRAME_TOKENS = 64
"""The maximum number of tokens that a chat template adds for a turn and the messages after it."""
ASSUMED_REPLY_TOKENS = 16_384
"""The assumed upper bound on the tokens of the tools' replies to one turn, if nothing truncates
them."""
_CUT_NOTE_BYTES = 80
"""The bytes allowed for the note that marks a reply as cut."""
_MAX_BYTES_PER_CHARACTER = 4
_CORRECTION_BYTES = 400
"""The bytes allowed for the message that asks a judge to correct its reply."""


class ForecastRange(msgspec.Struct, frozen=True):
    """An expected number, with the lowest and the highest possible one."""

    low: float
    expected: float
    high: float


class GraderForecast(msgspec.Struct, frozen=True, kw_only=True):
    """The forecast of a grader's (a judge's or critic's) calls, tokens and cost."""

    calls: ForecastRange
    prompt_tokens: ForecastRange
    completion_tokens: ForecastRange
    cost_usd: ForecastRange | None
    """The cost in USD; None if the price of the model is unknown."""


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a dry run: the rollouts still to do, with their calls, tokens and cost."""

    dry_run: bool
    """Always true: no model was called and nothing was written."""
    requested: int
    already_done: int
    todo: int
    calls: ForecastRange
    """The model's calls, without the judge's; likewise the two token fields."""
    prompt_tokens: ForecastRange
    completion_tokens: ForecastRange
    judge: GraderForecast | None
    """The forecast for the judge; None if the run has no judge."""
    cost_usd: ForecastRange | None
    """The cost in USD of model, judge and critic together; None if a price is unknown."""
    based_on: str
    """The source of the expected numbers: rows of the output or of the log that the prompts were
    imported from, or the lengths of the prompts."""
    assumes: list[str]
    """The assumptions under which low and high hold."""
    terms: str | None = None
    """The provider's page on whether its outputs may train other models, for the user to read
    before the first paid call; None if no such page is known."""
    critic: GraderForecast | None = None
    """The forecast for the critic; None if the run has no critic."""


@dataclass(frozen=True, slots=True)
class GraderSize:
    """The size of a judge's or critic's prompt about one rollout, as far as known in advance."""

    text_bytes: int
    """The bytes of the prompt's text alone, without the answer and the conversation."""
    request_bytes: int
    """The bytes of the prompt as sent, in JSON."""
    is_certain: bool
    """Whether the judge or critic is certain to be called."""


@dataclass(frozen=True, slots=True)
class RolloutSize:
    """The size of one rollout that is still to run, as far as known in advance."""

    text_bytes: int
    """The bytes of the prompt's text alone."""
    request_bytes: int
    """The bytes of the prompt's messages and tool schemas as each call sends them, in JSON."""
    max_turns: int
    """The maximum number of turns of the rollout; 1 if nothing can follow the first turn."""
    num_recorded: int = 0
    """The number of recorded turns, which are not sampled again."""
    judge: GraderSize | None = None
    """The size of the judge's prompt; None if no judge is called."""
    critic: GraderSize | None = None
    """The size of the critic's prompt about a student's rollout; None if no critic is called."""
    is_certain: bool = True
    """Whether the model is certain to be called."""

    @property
    def max_calls(self) -> int:
        """The highest number of turns that still have to be sampled."""
        return max(self.max_turns - self.num_recorded, 0)


@dataclass(frozen=True, slots=True)
class CallRules:
    """The limits of every rollout of a run."""

    max_turns: int
    max_tokens: int
    has_tools: bool
    max_tool_response: int | None
    nudge: str | None
    judge_max_tokens: int = 0
    judge_sees_conversation: bool = False
    critic_max_tokens: int = 0
    critic_tries: int = 1

    @property
    def max_reply_tokens(self) -> int:
        """The maximum number of tokens after a turn, of the nudge or of the tools' replies."""
        nudge = len((self.nudge or "").encode())
        return max(nudge, self.max_tool_tokens if self.has_tools else 0)

    @property
    def max_tool_tokens(self) -> int:
        """The maximum number of tokens of the tools' replies to a turn.

        It is an assumption if nothing truncates the replies.
        """
        if self.max_tool_response is None:
            return ASSUMED_REPLY_TOKENS
        return _MAX_BYTES_PER_CHARACTER * self.max_tool_response + _CUT_NOTE_BYTES

    @property
    def expected_reply_tokens(self) -> float:
        """The number of tokens expected to follow a turn."""
        expected = _EXPECTED_REPLY_TOKENS if self.has_tools else len(self.nudge or "") / 4
        return min(expected, float(self.max_reply_tokens))


@dataclass(frozen=True, slots=True)
class Prices:
    """The prices of the tokens of the model, judge and critic; None for an unknown price."""

    model: Price | None
    judge: Price | None = None
    critic: Price | None = None


@dataclass(frozen=True, slots=True)
class RequestedRollouts:
    """The number of requested rollouts, and the file of the rows that the forecast is based on."""

    requested: int
    rows_file: str


def forecast(
    sizes: Sequence[RolloutSize],
    finished: Sequence[FinishedRow],
    rules: CallRules,
    prices: Prices,
    counts: RequestedRollouts,
) -> Forecast:
    """Returns the calls, tokens and cost of the rollouts that are still to do.

    `finished` are the rows of the output, or of the log that the prompts were imported from, that
    the expected numbers are based on; without rows, a call is expected to use half of its token
    limit. Without tools and nudge a rollout is one call, so the number of calls is exact. The
    lowest and highest numbers hold under the result's `assumes`.
    """
    turns = _expected_turns(finished, rules)
    completion = _expected_completion(finished, rules.max_tokens, turns)
    certain = [size for size in sizes if not size.num_recorded and size.is_certain]
    calls = _range(
        len(certain),
        sum(min(turns, size.max_calls) for size in sizes),
        sum(size.max_calls for size in sizes),
    )
    completions = _range(0, calls.expected * completion, calls.high * rules.max_tokens)
    prompts = _range(
        sum(size.text_bytes for size in certain) / _MAX_BYTES_PER_TOKEN,
        _expected_prompt(sizes, finished, rules, turns, completion),
        sum(_max_prompt(size, rules) for size in sizes),
    )
    judge = _judge_forecast(sizes, rules, prices.judge, completion)
    critic = _critic_forecast(sizes, rules, prices.critic)
    cost = _cost(prices.model, prompts, completions)
    for other in filter(None, (judge, critic)):
        cost = _total_cost(cost, other.cost_usd)
    return Forecast(
        dry_run=True,
        requested=counts.requested,
        already_done=counts.requested - len(sizes),
        todo=len(sizes),
        calls=calls,
        prompt_tokens=prompts,
        completion_tokens=completions,
        judge=judge,
        critic=critic,
        cost_usd=cost,
        based_on=(
            f"{len(finished)} rows of {counts.rows_file}"
            if finished
            else "the lengths of the prompts, and half of max_tokens for each call"
        ),
        assumes=_assumptions(rules),
    )


def _assumptions(rules: CallRules) -> list[str]:
    """Returns the assumptions under which the low and high numbers hold."""
    frame = (
        f"high: a token is at least a byte, a chat template adds at most {TEMPLATE_TOKENS} tokens "
        f"to a call and {FRAME_TOKENS} to a turn, and no interrupted call is billed"
    )
    assumptions = ["low: no rollout fails, and a token is at most 8 bytes of text", frame]
    if rules.has_tools and rules.max_turns > 1:
        reason = (
            "set max_tool_response to bound each reply"
            if rules.max_tool_response is None
            else "one reply of max_tool_response characters at 4 bytes each"
        )
        assumptions.append(
            f"high: the tools' replies to one turn take at most {rules.max_tool_tokens} tokens "
            f"together ({reason})"
        )
    return assumptions


def _expected_turns(finished: Sequence[FinishedRow], rules: CallRules) -> float:
    """Returns the expected number of turns per rollout."""
    max_turns = float(rules.max_turns)
    if finished:
        return min(max_turns, fmean(row.turns for row in finished))
    return max_turns if rules.nudge is not None else min(max_turns, _EXPECTED_TURNS_WITH_TOOLS)


def _expected_completion(finished: Sequence[FinishedRow], max_tokens: int, turns: float) -> float:
    """Returns the expected completion tokens per call."""
    if finished:
        per_call = sum(row.usage.completion_tokens for row in finished) / len(finished) / turns
        # The limit is needed because some endpoints write more than max_tokens.
        return min(float(max_tokens), per_call)
    return max_tokens / 2


def _expected_prompt(
    sizes: Sequence[RolloutSize],
    finished: Sequence[FinishedRow],
    rules: CallRules,
    turns: float,
    completion: float,
) -> float:
    """Returns the expected prompt tokens of all rollouts, summed over their calls."""
    num_recorded_tokens = sum(row.usage.prompt_tokens for row in finished)
    if num_recorded_tokens:
        return len(sizes) * num_recorded_tokens / len(finished)
    growth = completion + rules.expected_reply_tokens
    return sum(
        _summed_prompts(size.request_bytes / _BYTES_PER_TOKEN, growth, min(turns, size.max_calls))
        for size in sizes
    )


def _max_prompt(size: RolloutSize, rules: CallRules) -> float:
    """Returns the maximum number of prompt tokens of a rollout, summed over its calls."""
    if not size.max_calls:
        return 0.0
    growth = rules.max_tokens + rules.max_reply_tokens + FRAME_TOKENS
    return _summed_prompts(size.request_bytes + TEMPLATE_TOKENS, growth, size.max_turns)


def _summed_prompts(prompt: float, growth: float, turns: float) -> float:
    """Returns the prompt tokens of a rollout, summed over its calls.

    Each call sends the whole conversation so far, which grows by `growth` tokens with each turn.
    """
    return prompt * turns + growth * turns * (turns - 1) / 2


def _judge_forecast(
    sizes: Sequence[RolloutSize], rules: CallRules, price: Price | None, answer_tokens: float
) -> GraderForecast | None:
    """Returns the forecast of the judge's calls; None if the run has no judge."""
    if not rules.judge_max_tokens:
        return None
    judged = [size.judge for size in sizes if size.judge is not None]
    max_tokens = rules.judge_max_tokens
    shown_tokens = rules.max_tokens + FRAME_TOKENS
    if rules.judge_sees_conversation:
        shown_tokens += rules.max_turns * (rules.max_tokens + rules.max_reply_tokens + FRAME_TOKENS)
    return _grader_forecast(
        judged, _GraderLimits(max_tokens, MAX_TRIES, shown_tokens, answer_tokens), price
    )


def _critic_forecast(
    sizes: Sequence[RolloutSize], rules: CallRules, price: Price | None
) -> GraderForecast | None:
    """Returns the forecast of the critic's calls; None if the run has no critic."""
    criticised = [size.critic for size in sizes if size.critic is not None]
    if not criticised:
        return None
    limits = _GraderLimits(rules.critic_max_tokens, rules.critic_tries, 0, 0)
    return _grader_forecast(criticised, limits, price)


@dataclass(frozen=True, slots=True)
class _GraderLimits:
    """The limits of a judge's or critic's calls."""

    max_tokens: int
    tries: int
    max_rollout_tokens: int
    """The maximum number of the rollout's tokens in the prompt, beyond those known in advance."""
    expected_rollout_tokens: float


def _grader_forecast(
    sizes: Sequence[GraderSize], limits: _GraderLimits, price: Price | None
) -> GraderForecast:
    """Returns the forecast of a grader's (a judge's or critic's) calls."""
    certain = [size for size in sizes if size.is_certain]
    # An upper bound: a token is at least one byte, so bytes count as tokens.
    growth_per_try = limits.max_tokens + _CORRECTION_BYTES + FRAME_TOKENS
    prompts = _range(
        sum(size.text_bytes for size in certain) / _MAX_BYTES_PER_TOKEN,
        sum(
            size.request_bytes / _BYTES_PER_TOKEN + limits.expected_rollout_tokens for size in sizes
        ),
        sum(
            _summed_prompts(
                size.request_bytes + limits.max_rollout_tokens + TEMPLATE_TOKENS,
                growth_per_try,
                limits.tries,
            )
            for size in sizes
        ),
    )
    calls = _range(len(certain), len(sizes), limits.tries * len(sizes))
    # A judgement is short, so a quarter of the token limit is expected.
    completions = _range(0, len(sizes) * limits.max_tokens / 4, calls.high * limits.max_tokens)
    return GraderForecast(
        calls=calls,
        prompt_tokens=prompts,
        completion_tokens=completions,
        cost_usd=_cost(price, prompts, completions),
    )


def _range(low: float, expected: float, high: float) -> ForecastRange:
    return ForecastRange(low, min(max(low, expected), high), high)


def _cost(
    price: Price | None, prompts: ForecastRange, completions: ForecastRange
) -> ForecastRange | None:
    """Returns the cost of tokens; None if the price is unknown."""
    if price is None:
        return None

    def usd(prompt: float, completion: float, to_int: Callable[[float], int]) -> float:
        usage = Usage(prompt_tokens=to_int(prompt), completion_tokens=to_int(completion))
        return price.of(usage)

    return ForecastRange(
        usd(prompts.low, completions.low, math.floor),
        usd(prompts.expected, completions.expected, round),
        usd(prompts.high, completions.high, math.ceil),
    )


def _total_cost(first: ForecastRange | None, second: ForecastRange | None) -> ForecastRange | None:
    if first is None or second is None:
        return None
    return ForecastRange(
        first.low + second.low, first.expected + second.expected, first.high + second.high
    )
