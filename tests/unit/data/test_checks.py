from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given

from fakes.mangling import mangled
from fakes.rollout_rows import assistant, rollout_row, tool_call, tool_reply, user
from stillroom.data.checks import (
    Problem,
    decode_row,
    describe,
    message_problems,
    tool_schema_problems,
)
from stillroom.data.formats import CHECKS

SCHEMA = {"type": "function", "function": {"name": "price", "parameters": {"type": "object"}}}
TALK = [
    {"role": "system", "content": "Be brief."},
    user("How much is the lamp?"),
    assistant(None, tool_call(call_id="a", arguments='{"item": "lamp"}')),
    tool_reply("7", "a"),
    assistant("7"),
]
ROWS: list[dict[str, Any]] = [
    {"prompt": "hello", "metadata": {"task_type": "x"}, "tools": ["price"], "rewards": ["a"]},
    {"messages": TALK[:2], "variables": {"a": 1}, "docker": "local/x"},
    {"messages": TALK, "tools": [SCHEMA], "metadata": {}, "reward": 0.5},
    {"prompt": TALK[:2], "chosen": TALK[2:], "rejected": [assistant("8")], "tools": [SCHEMA]},
    rollout_row(messages=TALK, tools=[SCHEMA], metadata={"task_type": "x"}),
]


def fields(problems: Iterator[Problem]) -> list[str]:
    return [problem.field for problem in problems]


def test_a_whole_conversation_with_tools_has_no_problem() -> None:
    assert list(message_problems(TALK)) == []
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    assert list(message_problems(parts)) == []


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hello", "messages"),
        ({"role": "user"}, "messages"),
        (["hello"], "messages[0]"),
        ([{"role": "User", "content": "x"}], "messages[0].role"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([user("x"), {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content"),
        ([{"role": "user", "content": [{"text": "x"}]}], "messages[0].content"),
        ([assistant(None, "price")], "messages[0].tool_calls[0]"),  # type: ignore[arg-type]
        ([{"role": "assistant", "tool_calls": "price"}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": {"a": 1}}], "messages[0].tool_calls"),
        ([assistant(None, {"id": "a", "function": {}})], "messages[0].tool_calls[0]"),
        (
            [assistant(None, {"id": "a", "function": {"name": "f", "arguments": {}}})],
            "messages[0].tool_calls[0].function.arguments",
        ),
        ([assistant("7") | {"weight": 0.5}], "messages[0].weight"),
        ([assistant("7") | {"weight": True}], "messages[0].weight"),
        ([assistant("7") | {"weight": "1"}], "messages[0].weight"),
        ([user("7") | {"weight": 1}], "messages[0].weight"),
        ([tool_reply("7", "a")], "messages[0].tool_call_id"),
        ([tool_reply("7", ["a"])], "messages[0].tool_call_id"),  # type: ignore[arg-type]
        ([tool_reply("7", {"a": 1})], "messages[0].tool_call_id"),  # type: ignore[arg-type]
    ],
)
def test_what_is_wrong_with_a_message_is_told_with_its_place(messages: Any, field: str) -> None:
    assert fields(message_problems(messages)) == [field]


def test_every_problem_of_a_conversation_is_told() -> None:
    bad = [{"role": "x", "content": 1}, 2, {"role": "tool", "tool_call_id": "z"}]

    assert fields(message_problems(bad, "chosen")) == [
        "chosen[0].role",
        "chosen[0].content",
        "chosen[1]",
        "chosen[2].content",
        "chosen[2].tool_call_id",
    ]


@pytest.mark.parametrize(
    ("tools", "field"),
    [("price", "tools"), ([SCHEMA, "price"], "tools[1]"), ([{"name": "price"}], "tools[0]")],
)
def test_a_wrong_tool_schema_is_told_with_its_place(tools: Any, field: str) -> None:
    assert fields(tool_schema_problems(tools)) == [field]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": 1}, "object {'a': 1}"),
        ([1], "list [1]"),
        ("x", "string 'x'"),
        (True, "boolean True"),
        (None, "null None"),
        (1.5, "number 1.5"),
        ("x" * 99, "string '" + "x" * 36 + "…"),
    ],
)
def test_a_value_is_described_by_its_kind_and_a_short_view(value: Any, text: str) -> None:
    assert describe(value) == text


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{",
        b"[1]",
        b'"x"',
        b"1 2",
        b"\x00",
        b'{"a": "\xff"}',
        b'{"a": "\\ud800"}',
        b'{"a": NaN}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a": 1e999}',
        b"{'a': 1}",
        b"[" * 10_000 + b"]" * 10_000,
        b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
        b"\xff\xfe{\x00}\x00",
    ],
)
def test_a_line_that_is_no_json_object_is_a_problem(line: bytes) -> None:
    problem = decode_row(line)

    assert isinstance(problem, Problem)
    assert problem.message
    assert problem.fix


@pytest.mark.parametrize("row_format", list(CHECKS))
@given(mangled(ROWS))
def test_no_row_of_any_shape_makes_a_check_fail(row_format: Any, row: dict[str, Any]) -> None:
    decoded = decode_row(msgspec.json.encode(row))

    assert isinstance(decoded, dict)
    for problem in CHECKS[row_format](decoded):
        assert problem.message
        assert problem.fix


def test_a_row_whose_turns_all_have_weight_0_has_nothing_to_train() -> None:
    unread = assistant("7") | {"weight": 0}

    [problem] = CHECKS["sft"]({"messages": [user("a"), unread]})
    assert problem.message == "has no trained turn: all assistant messages have weight 0"
    [problem] = CHECKS["dpo"](
        {"prompt": [user("a")], "chosen": [unread], "rejected": [assistant("8")]}
    )
    assert problem.field == "chosen"
    weights = [assistant("6") | {"weight": weight} for weight in (0, 1, None, 1.0)]
    assert not list(CHECKS["sft"]({"messages": [user("a") | {"weight": 0}, *weights]}))
