import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from stillroom.rollout.forecast import (
    ASSUMED_REPLY_TOKENS,
    CallRules,
    Forecast,
    ForecastRange,
    GraderSize,
    Prices,
    RequestedRollouts,
    RolloutSize,
    forecast,
)
from stillroom.rollout.journal.records import FinishedRow
from stillroom.teachers.pricing import FREE, Price
from stillroom.types import Usage

PRICE = Price(prompt=2, completion=10)
PROMPTS = ["a", "b" * 400]
Row = tuple[int, int, int]
"""Of a finished rollout: turns, prompt tokens and completion tokens."""


def reported(
    prompts: list[str],
    rows: list[Row] | None = None,
    *,
    samples: int = 1,
    has_tools: bool = False,
    price: Price | None = PRICE,
    **changes: Any,
) -> Forecast:
    """The forecast where the first rollouts are rows that are there already."""
    given: dict[str, Any] = {"max_turns": 10, "max_tokens": 2048, "max_tool_response": None}
    rules = CallRules(has_tools=has_tools, **{**given, "nudge": None, **changes})
    goes_on = has_tools or rules.nudge is not None
    texts = [prompt for prompt in prompts for _ in range(samples)]
    sizes = [
        RolloutSize(
            text_bytes=len(text.encode()),
            request_bytes=len(text.encode()) + 30,
            max_turns=rules.max_turns if goes_on else 1,
        )
        for text in texts
    ]
    seen = [
        FinishedRow(
            *("task", 0, None, None, False, turns),
            usage=Usage(prompt_tokens=sent, completion_tokens=written),
        )
        for turns, sent, written in (rows or [])[: len(sizes)]
    ]
    counts = RequestedRollouts(len(sizes), "out.jsonl")
    return forecast(sizes[len(seen) :], seen, rules, Prices(price), counts)


def is_ordered(bounds: ForecastRange) -> bool:
    return 0 <= bounds.low <= bounds.expected <= bounds.high < math.inf


def test_without_tools_a_rollout_is_one_call() -> None:
    seen = reported(PROMPTS, samples=3, max_tokens=100)

    assert seen.dry_run
    assert (seen.requested, seen.already_done, seen.todo) == (6, 0, 6)
    assert seen.calls == ForecastRange(6, 6, 6)
    assert seen.completion_tokens == ForecastRange(0, 300, 600)
    assert "half of max_tokens" in seen.based_on


def test_with_tools_a_rollout_may_take_every_turn_it_has() -> None:
    seen = reported(PROMPTS, has_tools=True, max_turns=10, max_tokens=100)
    short = reported(PROMPTS, has_tools=True, max_turns=2, max_tokens=100)

    assert seen.calls == ForecastRange(2, 8, 20)
    assert seen.completion_tokens.high == 2000
    assert short.calls == ForecastRange(2, 4, 4)


def test_an_unknown_price_is_an_unknown_cost_and_a_free_model_costs_nothing() -> None:
    assert reported(PROMPTS, price=None).cost_usd is None
    assert reported(PROMPTS, price=FREE).cost_usd == ForecastRange(0, 0, 0)


def test_rows_that_are_there_already_are_not_counted_and_better_the_guess() -> None:
    rows = [(3, 300, 30), (5, 500, 50)]

    seen = reported(PROMPTS, rows, samples=3, has_tools=True, max_turns=10, max_tokens=100)

    assert (seen.requested, seen.already_done, seen.todo) == (6, 2, 4)
    assert seen.calls == ForecastRange(4, 16, 40)
    # Four turns a rollout, ten tokens a turn; without rows it would have been fifty.
    assert seen.completion_tokens == ForecastRange(0, 160, 4000)
    assert seen.based_on == "2 rows of out.jsonl"


def test_when_all_is_done_nothing_is_to_be_paid() -> None:
    seen = reported(PROMPTS, [(1, 10, 5)] * 2)

    assert (seen.requested, seen.already_done, seen.todo) == (2, 2, 0)
    nothing = ForecastRange(0, 0, 0)
    assert seen.calls == seen.prompt_tokens == seen.completion_tokens == nothing
    assert seen.cost_usd == nothing


@st.composite
def rows_within(draw: st.DrawFn, *, max_turns: int, max_tokens: int) -> Row:
    """A row of an endpoint that keeps to `max_tokens`."""
    turns = draw(st.integers(1, max_turns))
    return turns, draw(st.integers(0, 10_000)), draw(st.integers(0, turns * max_tokens))


@settings(max_examples=60)
@given(st.data(), st.lists(st.text(min_size=1, max_size=60), min_size=1, max_size=8))
def test_what_is_expected_lies_between_the_least_and_the_most(
    data: st.DataObject, prompts: list[str]
) -> None:
    has_tools = data.draw(st.booleans())
    max_turns, max_tokens = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 4000))
    rows = data.draw(
        st.lists(
            rows_within(max_turns=max_turns if has_tools else 1, max_tokens=max_tokens), max_size=6
        )
    )

    seen = reported(
        [f"p{prompt}" for prompt in prompts],
        rows,
        samples=data.draw(st.integers(1, 3)),
        has_tools=has_tools,
        max_turns=max_turns,
        max_tokens=max_tokens,
    )

    assert seen.cost_usd is not None
    assert seen.todo + seen.already_done == seen.requested
    spans = (seen.calls, seen.prompt_tokens, seen.completion_tokens, seen.cost_usd)
    assert all(map(is_ordered, spans)), spans


def test_rows_of_an_endpoint_that_ignores_max_tokens_keep_the_order() -> None:
    seen = reported(PROMPTS, [(1, 10, 500)], max_tokens=100)
    assert is_ordered(seen.completion_tokens)


def test_the_most_grows_with_what_the_tools_may_reply_and_says_how_much_that_is() -> None:
    two = {"has_tools": True, "max_turns": 2, "max_tokens": 100}
    none, short = (
        reported(["a"], **two, max_tool_response=None),
        reported(["a"], **two, max_tool_response=5),
    )

    assumed = none.prompt_tokens.high - short.prompt_tokens.high
    assert 0 < assumed < ASSUMED_REPLY_TOKENS
    assert f"at most {ASSUMED_REPLY_TOKENS} tokens" in none.assumes[-1]
    assert f"at most {ASSUMED_REPLY_TOKENS - assumed:.0f} tokens" in short.assumes[-1]


def test_an_unknown_price_of_the_judge_is_an_unknown_cost() -> None:
    sizes = [RolloutSize(8, 40, max_turns=1, judge=GraderSize(80, 120, is_certain=True))]
    rules = CallRules(1, 50, False, None, None, judge_max_tokens=64)
    seen = forecast(sizes, [], rules, Prices(FREE, None), RequestedRollouts(1, "out.jsonl"))
    assert seen.cost_usd is None
