"""What a rollout run will take, told without making a call."""

from collections.abc import Mapping, Sequence

import msgspec

from stillroom.rollout.collect import RolloutSpec
from stillroom.rollout.records import FinishedRow, RolloutKey
from stillroom.rollout.request import NO_FILE, GenerateRollouts
from stillroom.teachers.pricing import Price
from stillroom.types import Usage

_BYTES_PER_TOKEN = 4.0
"""Of English text; what is expected, where the upper bound counts a token a byte."""
_EXPECTED_TURNS_WITH_TOOLS = 4.0


class Span(msgspec.Struct, frozen=True):
    """What is expected, between the least and the most that is possible."""

    low: float
    expected: float
    high: float


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a dry run."""

    dry_run: bool
    """Always true: nothing was called or written."""
    requested: int
    already_done: int
    todo: int
    calls: Span
    prompt_tokens: Span
    completion_tokens: Span
    cost_usd: Span | None
    """None where the price is unknown."""
    based_on: str
    """Where the expectation comes from."""


def forecast(
    request: GenerateRollouts,
    specs: Sequence[RolloutSpec],
    finished: Mapping[RolloutKey, FinishedRow],
    *,
    price: Price | None,
) -> Forecast:
    """Returns what the rollouts that are still to do will take.

    Rows that are there already give the best guess; else each call is taken to use half of what it
    may write. Without tools a rollout is one call, so their number is exact. What tools will reply
    is not known: with tools the most is one without long replies.
    """
    todo = [spec for spec in specs if spec.key not in finished]
    seen = list(finished.values())
    has_tools = (
        request.tools != NO_FILE
        or request.browse
        or bool(request.mcp_servers)
        or any(spec.task.docker for spec in todo)
    )
    sizes = [len(msgspec.json.encode(spec.task.messages)) for spec in todo]
    goes_on = has_tools or request.nudge_to_send is not None
    most_turns = request.max_turns if goes_on else 1
    turns = _expected_turns(seen, most_turns)
    completion = _expected_completion(seen, request.max_tokens, turns)
    prompt = sum(_prompt_tokens(size / _BYTES_PER_TOKEN, completion, turns) for size in sizes)
    most_prompt = sum(_prompt_tokens(size, request.max_tokens, most_turns) for size in sizes)
    calls = Span(len(todo), len(todo) * turns, len(todo) * most_turns)
    completions = Span(0, calls.expected * completion, calls.high * request.max_tokens)
    prompts = Span(sum(sizes) / _BYTES_PER_TOKEN / 2, prompt, most_prompt)
    return Forecast(
        dry_run=True,
        requested=len(specs),
        already_done=len(specs) - len(todo),
        todo=len(todo),
        calls=calls,
        prompt_tokens=prompts,
        completion_tokens=completions,
        cost_usd=price and _cost(price, prompts, completions),
        based_on=f"{len(seen)} rows of {request.output}" if seen else "the lengths of the prompts",
    )


def _expected_turns(seen: Sequence[FinishedRow], most: int) -> float:
    if seen:
        return min(most, sum(row.turns for row in seen) / len(seen))
    return min(float(most), _EXPECTED_TURNS_WITH_TOOLS)


def _expected_completion(seen: Sequence[FinishedRow], max_tokens: int, turns: float) -> float:
    """Returns the tokens that a call is expected to write."""
    if seen:
        per_call = sum(row.usage.completion_tokens for row in seen) / len(seen) / turns
        # Some endpoints do not keep to it.
        return min(float(max_tokens), per_call)
    return max_tokens / 2


def _prompt_tokens(first: float, per_turn: float, turns: float) -> float:
    """Returns the tokens that a rollout sends: each call has all that came before it."""
    return first * turns + per_turn * turns * (turns - 1) / 2


def _cost(price: Price, prompts: Span, completions: Span) -> Span:
    def of(prompt: float, completion: float) -> float:
        usage = Usage(prompt_tokens=round(prompt), completion_tokens=round(completion))
        return round(price.of(usage), 6)

    return Span(
        of(prompts.low, completions.low),
        of(prompts.expected, completions.expected),
        of(prompts.high, completions.high),
    )
