from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.foreign_rollouts import GYM_ROW
from fakes.mangling import mangled
from stillroom.data.checks import message_problems
from stillroom.data.formats import CHECKS, RowFormat, task_from_row
from stillroom.data.layouts.responses import (
    flat_tool_problems,
    item_problems,
    messages_from_items,
    schemas_from_flat,
)

CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "7"}
THOUGHT = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}


def said(text: str) -> dict[str, Any]:
    return {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text"} | {"text": text}],
    }


def shape(*items: dict[str, Any]) -> list[str]:
    """Each message as one word: its role's letter, its text, and * for each call."""
    return [
        f"{m['role'][0]}:{m['content']}{'*' * len(m.get('tool_calls', []))}"
        + (f"({m['reasoning_content']})" if "reasoning_content" in m else "")
        for m in messages_from_items(items)
    ]


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ([said("a")], ["a:a"]),
        ([CALL, OUTPUT, said("a")], ["a:*", "t:7", "a:a"]),
        ([CALL, {**CALL, "call_id": "d"}, OUTPUT], ["a:**", "t:7"]),
        ([THOUGHT, said("a"), CALL, OUTPUT], ["a:a*(hm)", "t:7"]),
        ([THOUGHT, THOUGHT, CALL], ["a:*(hm\nhm)"]),
        ([CALL, said("a"), OUTPUT], ["a:a*", "t:7"]),
        ([said("a"), said("b")], ["a:a", "a:b"]),
        ([said("a"), THOUGHT, said("b")], ["a:a", "a:b(hm)"]),
        ([said("a"), said("")], ["a:a"]),
        ([CALL, OUTPUT, said("")], ["a:*", "t:7", "a:"]),
        ([said("")], ["a:"]),
        ([THOUGHT], ["a:(hm)"]),
        ([said("a"), {"role": "user", "content": "b"}, said("c")], ["a:a", "u:b", "a:c"]),
        ([{"role": "developer", "content": "b"}], ["s:b"]),
        ([{**OUTPUT, "output": [{"type": "input_text", "text": "x"}]}], ["t:x"]),
        ([], []),
    ],
)
def test_items_are_gathered_into_turns(items: list, messages: list[str]) -> None:
    assert list(item_problems(items, "output")) == []
    assert shape(*items) == messages


def test_pictures_are_kept_in_the_chat_form() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "data:x"}]
    [message] = messages_from_items([{"role": "user", "content": parts}])

    assert message["content"] == [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {"url": "data:x"}},
    ]


def test_whole_chat_messages_may_stand_among_items() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    talk = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "7"},
        {"role": "assistant", "content": "b"},
    ]

    assert messages_from_items(talk) == talk


def test_tools_are_read_in_both_forms() -> None:
    flat = GYM_ROW["responses_create_params"]["tools"]
    nested = schemas_from_flat(flat)

    assert [schema["function"]["name"] for schema in nested] == [tool["name"] for tool in flat]
    assert schemas_from_flat(nested) == nested
    assert schemas_from_flat(None) == []
    for tools in ([{"type": "web_search"}], [{"type": "function"}], "price", [5]):
        assert [problem.field.partition("[")[0] for problem in flat_tool_problems(tools, "tools")]


PROMPT: dict[str, Any] = {
    "responses_create_params": {
        **GYM_ROW["responses_create_params"],
        "instructions": "Be brief.",
    },
    "expected_answer": "7",
    "verifier_metadata": {"a": 1},
    "agent_ref": {"name": "shop"},
    "metadata": {"task_type": "price"},
}


def test_a_prompt_of_nemo_gym_becomes_a_task_with_all_it_says() -> None:
    assert list(CHECKS[RowFormat.PROMPTS](PROMPT)) == []

    task = task_from_row(PROMPT)

    assert [message["content"] for message in task.messages] == [
        *("Be brief.", "You mind a shop.", "What is a lamp?")
    ]
    assert task.tool_names == ["price", "stock"]
    assert task.tool_schemas == schemas_from_flat(GYM_ROW["responses_create_params"]["tools"])
    assert task.metadata == {
        "expected_answer": "7",
        "verifier_metadata": {"a": 1},
        "agent_ref": {"name": "shop"},
        "task_type": "price",
        "responses_create_params": {
            "temperature": 1.0,
            "parallel_tool_calls": True,
            "instructions": "Be brief.",
        },
    }
    assert task_from_row({**PROMPT, "extra": 1}).task_id != task.task_id
    plain = task_from_row({"responses_create_params": {"input": "What?", "tools": []}})
    assert (plain.tool_names, plain.tool_schemas, plain.metadata) == (None, None, {})


@pytest.mark.parametrize(
    "items",
    [
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        [{"type": "computer_call"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": "a", "tool_calls": 5}],
        [OUTPUT],
        5,
    ],
)
def test_a_prompt_that_cannot_be_answered_is_refused(items: Any) -> None:
    assert list(CHECKS[RowFormat.PROMPTS]({"responses_create_params": {"input": items}}))


@given(mangled([PROMPT]))
def test_a_prompt_is_either_a_task_or_refused(row: dict[str, Any]) -> None:
    if not list(CHECKS[RowFormat.PROMPTS](row)):
        assert list(message_problems(task_from_row(row).messages)) == []


@given(st.lists(st.sampled_from([CALL, OUTPUT, THOUGHT, said("a"), said("")]), max_size=8))
def test_no_call_and_no_reply_is_lost(items: list[dict[str, Any]]) -> None:
    messages = messages_from_items(items)

    assert sum(len(m.get("tool_calls", [])) for m in messages) == items.count(CALL)
    assert sum(m["role"] == "tool" for m in messages) == items.count(OUTPUT)
    assert sum(m["content"] == "a" for m in messages) == items.count(said("a"))
