import math
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.rollout_rows import rollout_row
from stillroom.data.formats import decode_trajectory, task_from_row
from stillroom.rollout.collect import specs_for
from stillroom.rollout.forecast import Forecast, Span, forecast
from stillroom.rollout.journal import RolloutStore
from stillroom.rollout.request import GenerateRollouts
from stillroom.teachers.pricing import FREE, Price

PRICE = Price(prompt=2, completion=10)
PROMPTS = ["a", "b" * 400]
Row = tuple[int, int, int]
"""Of a finished rollout: turns, prompt tokens and completion tokens."""


def told(
    folder: Path,
    prompts: list[str],
    rows: list[Row] | None = None,
    *,
    samples: int = 1,
    has_tools: bool = False,
    price: Price | None = PRICE,
    **changes: Any,
) -> Forecast:
    """The forecast where the first rollouts are rows that are there already."""
    given = {"input": "prompts.jsonl", "output": "out.jsonl", "model": "m", "provider": "openai"}
    given["tools"] = "tools.py" if has_tools else "none"
    request = GenerateRollouts(**{**given, "samples_per_prompt": samples, **changes})
    specs = specs_for([task_from_row({"prompt": prompt}) for prompt in prompts], samples)
    store = RolloutStore(folder / "out.jsonl", {})
    try:
        for spec, (turns, sent, written) in zip(specs, rows or [], strict=False):
            usage = {"prompt_tokens": sent, "completion_tokens": written}
            key = {"task_id": spec.key.task_id, "sample": spec.key.sample}
            row = rollout_row(**key, turns=turns, usage=usage)
            store.finish(decode_trajectory(msgspec.json.encode(row)))
        return forecast(request, specs, store.finished, price=price)
    finally:
        store.close(is_complete=False)


def is_ordered(span: Span) -> bool:
    return 0 <= span.low <= span.expected <= span.high < math.inf


def test_without_tools_a_rollout_is_one_call(tmp_path: Path) -> None:
    seen = told(tmp_path, PROMPTS, samples=3, max_tokens=100)

    assert seen.dry_run
    assert (seen.requested, seen.already_done, seen.todo) == (6, 0, 6)
    assert seen.calls == Span(6, 6, 6)
    assert seen.completion_tokens == Span(0, 300, 600)
    assert seen.based_on == "the lengths of the prompts"


def test_with_tools_a_rollout_may_take_every_turn_it_has(tmp_path: Path) -> None:
    seen = told(tmp_path, PROMPTS, has_tools=True, max_turns=10, max_tokens=100)
    short = told(tmp_path, PROMPTS, has_tools=True, max_turns=2, max_tokens=100)

    assert seen.calls == Span(2, 8, 20)
    assert seen.completion_tokens.high == 2000
    assert short.calls == Span(2, 4, 4)


def test_a_longer_prompt_and_more_turns_are_more_tokens_to_send(tmp_path: Path) -> None:
    short, long = (told(tmp_path, [text], has_tools=True) for text in ("a", "a" * 4000))
    once = told(tmp_path, ["a" * 4000])

    assert long.prompt_tokens.low - short.prompt_tokens.low == 3999 / 8
    assert long.prompt_tokens.expected > short.prompt_tokens.expected
    # English has about four bytes a token.
    assert once.prompt_tokens.expected == pytest.approx(1000, rel=0.05)
    assert once.prompt_tokens.high >= 4000
    assert long.prompt_tokens.expected > 4 * once.prompt_tokens.expected


def test_the_cost_is_that_of_the_tokens(tmp_path: Path) -> None:
    seen = told(tmp_path, PROMPTS, has_tools=True)

    assert seen.cost_usd is not None
    for name in ("low", "expected", "high"):
        sent, written = getattr(seen.prompt_tokens, name), getattr(seen.completion_tokens, name)
        assert getattr(seen.cost_usd, name) == pytest.approx(
            (2 * sent + 10 * written) / 1e6, abs=2e-5
        )


def test_an_unknown_price_is_an_unknown_cost_and_a_free_model_costs_nothing(
    tmp_path: Path,
) -> None:
    assert told(tmp_path, PROMPTS, price=None).cost_usd is None
    assert told(tmp_path, PROMPTS, price=FREE).cost_usd == Span(0, 0, 0)


def test_rows_that_are_there_already_are_not_counted_and_better_the_guess(tmp_path: Path) -> None:
    rows = [(3, 300, 30), (5, 500, 50)]

    seen = told(tmp_path, PROMPTS, rows, samples=3, has_tools=True, max_turns=10, max_tokens=100)

    assert (seen.requested, seen.already_done, seen.todo) == (6, 2, 4)
    assert seen.calls == Span(4, 16, 40)
    # Four turns a rollout, ten tokens a turn; without rows it would have been fifty.
    assert seen.completion_tokens == Span(0, 160, 4000)
    assert seen.based_on == "2 rows of out.jsonl"


def test_when_all_is_done_nothing_is_to_be_paid(tmp_path: Path) -> None:
    seen = told(tmp_path, PROMPTS, [(1, 10, 5)] * 2)

    assert (seen.requested, seen.already_done, seen.todo) == (2, 2, 0)
    nothing = Span(0, 0, 0)
    assert seen.calls == seen.prompt_tokens == seen.completion_tokens == nothing
    assert seen.cost_usd == nothing


@st.composite
def rows_within(draw: st.DrawFn, *, max_turns: int, max_tokens: int) -> Row:
    """A row of an endpoint that keeps to `max_tokens`."""
    turns = draw(st.integers(1, max_turns))
    return turns, draw(st.integers(0, 10_000)), draw(st.integers(0, turns * max_tokens))


@settings(deadline=None, max_examples=60)
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

    with tempfile.TemporaryDirectory() as folder:
        seen = told(
            Path(folder),
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


def test_rows_of_an_endpoint_that_ignores_max_tokens_keep_the_order(tmp_path: Path) -> None:
    seen = told(tmp_path, PROMPTS, [(1, 10, 500)], max_tokens=100)
    assert is_ordered(seen.completion_tokens)
