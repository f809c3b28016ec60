import json
from typing import Any

import pytest

from stillroom.teachers.endpoint.replies import (
    MAX_TOOL_CALLS,
    UnreadableTurnError,
    read_turn,
    readable_arguments,
    retry_after,
)


def message_of(**message: Any) -> Any:
    return read_turn(json.dumps({"choices": [{"message": message}]}).encode()).message


def call(arguments: Any = "{}", **more: Any) -> dict[str, Any]:
    return {"function": {"name": "price", "arguments": arguments}, **more}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"a": 1}', '{"a": 1}'),
        ('{"a": ', '{"a": '),
        ({"a": "é"}, '{"a":"é"}'),
        ([1], "[1]"),
        (None, "{}"),
        ("", "{}"),
    ],
)
def test_arguments_are_a_json_text_in_whatever_form_they_came(arguments: Any, text: str) -> None:
    [made] = message_of(content=None, tool_calls=[call(arguments, id="a")])["tool_calls"]

    assert made == {
        "id": "a",
        "type": "function",
        "function": {"name": "price", "arguments": text},
    }


@pytest.mark.parametrize(
    ("given", "made"),
    [
        (["a", "b"], ["a", "b"]),
        ([7, 8], ["7", "8"]),
        ([None, ""], ["call_0", "call_1"]),
        (["a", "a", "a"], ["a", "a_1", "a_2"]),
        (["a", "a_1", "a"], ["a", "a_1", "a_2"]),
        (["call_1", None], ["call_1", "call_1_1"]),
    ],
)
def test_each_call_of_a_turn_has_an_id_of_its_own(given: list[Any], made: list[str]) -> None:
    calls = message_of(tool_calls=[call(id=one) for one in given])["tool_calls"]

    assert [one["id"] for one in calls] == made


@pytest.mark.parametrize(
    ("message", "content"),
    [
        ({}, ""),
        ({"content": None}, ""),
        ({"content": None, "refusal": "I will not"}, "I will not"),
        ({"content": "7", "refusal": "I will not"}, "7"),
        ({"content": "7", "refusal": None, "tool_calls": []}, "7"),
    ],
)
def test_a_turn_without_calls_says_something(message: dict[str, Any], content: str) -> None:
    assert message_of(**message) == {"role": "assistant", "content": content}


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "7", "retry-after-ms": "250"}, 0.25),
        ({"retry-after": "7", "retry-after-ms": "soon"}, 7.0),
        ({"retry-after": "Mon, 01 Jan 0001 00:00:00 -0000"}, 0.0),
        ({"retry-after": "Mon, 01 Jan 99999 00:00:00 GMT"}, None),
        ({}, None),
    ],
)
def test_how_long_to_wait_is_read_in_all_its_forms(
    headers: dict[str, str], seconds: float | None
) -> None:
    assert retry_after(headers) == seconds


@pytest.mark.parametrize("written", ['{"a": 1}', " {} ", '{"a":{"b":[1e3]}}'])
def test_arguments_that_are_an_object_go_back_as_they_were_written(written: str) -> None:
    assert readable_arguments(written) == written


@pytest.mark.parametrize(
    "written", ['{"a": "cut', '{"a": NaN}', "[1]", '"text"', "null", "", "[" * 5000, "ü{"]
)
def test_other_arguments_go_back_inside_an_object(written: str) -> None:
    assert json.loads(readable_arguments(written)) == {"malformed": written}


@pytest.mark.parametrize("cost", ["9" * 400, "9" * 5000, "1e400"])
def test_a_cost_that_is_no_amount_of_money_does_not_lose_a_paid_answer(cost: str) -> None:
    reply = '{"choices": [{"message": {"content": "hi"}}], "usage": {"cost": %s}}' % cost  # noqa: UP031
    turn = read_turn(reply.encode())
    assert (turn.message.get("content"), turn.reported_usd, turn.usage) == ("hi", None, None)


def test_half_a_surrogate_pair_is_replaced_and_the_answer_kept() -> None:
    reply = rb'{"choices": [{"message": {"content": "\ud83d\ude00 \\ud800 \udc00 \ud800"}}]}'
    assert read_turn(reply).message.get("content") == "\U0001f600 \\ud800 \ufffd \ufffd"


def test_a_turn_with_endless_tool_calls_is_not_read() -> None:
    calls = b",".join([b'{"function": {"name": "f"}}'] * (MAX_TOOL_CALLS + 1))
    reply = b'{"choices": [{"message": {"content": null, "tool_calls": [%b]}}]}' % calls
    with pytest.raises(UnreadableTurnError, match="length <= 1024"):
        read_turn(reply)
