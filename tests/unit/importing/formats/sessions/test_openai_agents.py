"""Traces of OpenAI's Agents SDK: written by the SDK itself over both APIs, and odd ones."""

import json

import pytest

from fakes.trace_files import SAMPLES, compared, read, refusals, seen_calls, shown, write_lines
from stillroom.importing.records import LoggedConversation
from stillroom.types import Usage

_FOLDER = SAMPLES / "openai_agents"


def span(kind, **data):
    times = {"started_at": "2026-03-01T10:00:00Z", "ended_at": "2026-03-01T10:00:02Z"}
    named = {"object": "trace.span", "id": f"span_{kind}", "trace_id": "trace_1"}
    return named | times | {"span_data": {"type": kind, **data}}


def calls_of(rows):
    return [row for row in rows if isinstance(row, LoggedConversation)]


@pytest.mark.parametrize("api", ["responses", "chat"])
def test_traces_that_the_sdk_wrote_hold_what_the_endpoint_saw(api):
    rows = read("openai_agents", _FOLDER / f"{api}.jsonl")
    calls, seen = calls_of(rows), seen_calls("openai_agents", f"{api}.seen.json")
    assert len(calls) == len(seen) == 3
    for call, sent in zip(calls, seen, strict=True):
        assert compared(call.messages) == compared(sent["messages"])
        assert call.usage == Usage(
            prompt_tokens=sent["prompt_tokens"], completion_tokens=sent["completion_tokens"]
        )
        assert call.model == sent["model"]
        assert call.losses == ("images left out",)
    assert len({call.group for call in calls}) == 1
    assert {reason for _, reason in refusals(rows)} == {"no model call"}
    lines = (_FOLDER / f"{api}.jsonl").read_text().count("\n")
    assert [row.place.line for row in rows] == list(range(1, lines + 1))


def test_a_batch_as_the_sdk_sends_it_is_read_by_item(tmp_path):
    messages = [{"role": "user", "content": "Hi"}]
    path = write_lines(
        tmp_path / "x.jsonl",
        {
            "data": [
                {"object": "trace", "id": "trace_1", "workflow_name": "w", "group_id": "thread"},
                span(
                    "generation",
                    input=messages,
                    output=[{"role": "assistant", "content": "Hello."}],
                    model="m",
                    usage={"input_tokens": 3, "output_tokens": 1},
                ),
                span("response", response_id="resp_1"),
                span("generation", input=messages, output=None)
                | {"error": {"message": "it broke", "data": None}},
                span("generation", input=None),
                5,
            ]
        },
    )
    rows = read("openai_agents", path)
    call, failed = calls_of(rows)
    assert (call.group, call.duration_s, call.model) == ("thread", 2.0, "m")
    assert shown(call.messages) == ["user Hi", "assistant Hello."]
    assert failed.error == "it broke"
    assert [(row.place.part, row.reason) for row in rows if not hasattr(row, "messages")] == [
        ("1", "no model call"),
        ("3", "the span of a response lacks its messages"),
        ("5", "holds no messages"),
        ("6", "no model call"),
    ]


def test_a_response_that_goes_on_from_another_lacks_its_beginning(tmp_path):
    output = [{"type": "message", "role": "assistant", "content": [
        {"type": "output_text", "text": "Hello.", "annotations": []}]}]  # fmt: skip
    response = {"id": "r", "output": output, "previous_response_id": "q", "model": "m"}
    row = span("response", input="Hi", response=response)
    (call,) = calls_of(read("openai_agents", write_lines(tmp_path / "x.jsonl", row)))
    assert call.losses == ("earlier messages are not in the file",)
    assert json.dumps(call.metadata)
