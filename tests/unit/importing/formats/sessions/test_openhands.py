"""Conversations of OpenHands: written by its SDK, and of its older versions and benchmarks."""

from fakes.trace_files import (
    SAMPLES,
    compared,
    conversations,
    read,
    recognised_by,
    refusals,
    seen_calls,
    shown,
    write_lines,
)
from stillroom.types import Usage

_FOLDER = SAMPLES / "openhands" / "shop"


def joined(messages):
    """The messages with successive ones of the user as one, as the SDK sends them."""
    result = []
    for message in messages:
        if result and message["role"] == result[-1]["role"] == "user":
            text = result[-1]["content"] + message["content"]
            result[-1] = result[-1] | {"content": text}
        else:
            result.append(message)
    return result


def without_thoughts(messages):
    return [{k: v for k, v in m.items() if k != "reasoning_content"} for m in messages]


def old(number, **event):
    return {"id": number, "timestamp": "2026-03-01T10:00:00", "source": "agent", **event}


def made(response, calls, call_id, text=""):
    """What an action's or a result's event says of the call that it is of."""
    tool_calls = [
        {"id": one, "type": "function", "function": {"name": "run", "arguments": "{}"}}
        for one in calls
    ]
    message = {"role": "assistant", "content": text, "tool_calls": tool_calls}
    usage = {"prompt_tokens": 9, "completion_tokens": 2}
    reply = {"id": response, "model": "m", "choices": [{"message": message}], "usage": usage}
    return {"function_name": "run", "tool_call_id": call_id, "model_response": reply}


def old_events():
    run = {"args": {"command": "ls"}, "action": "run"}
    return [
        old(0, action="system", args={"content": "You mend shops."}, source="agent"),
        old(1, action="message", args={"content": "Look", "image_urls": ["x"]}, source="user"),
        old(2, observation="agent_state_changed", content="", extras={}, source="environment"),
        old(3, **run, tool_call_metadata=made("r1", ["a", "b"], "a", "I look.")),
        old(4, observation="run", content="x", tool_call_metadata=made("r1", ["a", "b"], "a")),
        old(5, **run, tool_call_metadata=made("r1", ["a", "b"], "b", "I look.")),
        old(6, observation="run", content="y", tool_call_metadata=made("r1", ["a", "b"], "b")),
        old(7, action="message", args={"content": "x and y."}),
    ]


def test_events_that_the_sdk_wrote_hold_what_the_endpoint_saw():
    files = [*(_FOLDER / "events").iterdir(), _FOLDER / "base_state.json"]
    rows = conversations(read("openhands", *files))
    calls = seen_calls("openhands", "shop.seen.json")
    # The last call before each condensation, and the last of all.
    for row, call in zip(rows, (calls[2], calls[5], calls[8]), strict=True):
        # The SDK sends no thoughts back, so that the endpoint saw them in replies alone.
        assert without_thoughts(joined(compared(row.messages))) == without_thoughts(
            compared(call["messages"])
        )


def test_events_of_older_versions_are_read_from_the_models_own_replies(tmp_path):
    path = write_lines(tmp_path / "trajectory.json", old_events())
    assert recognised_by(path) == ["openhands"]
    (row,) = conversations(read("openhands", path))
    assert shown(row.messages) == [
        "system You mend shops.",
        "user Look",
        "assistant I look. run{} run{}",
        "tool x",
        "tool y",
        "assistant x and y.",
    ]
    assert (row.usage, row.model) == (Usage(prompt_tokens=9, completion_tokens=2), "m")
    assert row.dropped == ("images left out",)


def test_results_of_benchmarks_are_read_by_row_with_their_outcome(tmp_path):
    pairs = [[old_events()[1], old_events()[2]], [old_events()[7], {}]]
    path = write_lines(
        tmp_path / "output.jsonl",
        {"instance_id": "i-1", "history": old_events(), "test_result": {"report": {"resolved": 1}}},
        {"instance_id": "i-2", "history": pairs, "test_result": {"report": {"resolved": True}}},
        {"instance_id": "i-3", "history": [old_events()[1]]},
        {
            "instance_id": "i-4",
            "history": [old_events()[1], old(8, action="run", args={"command": "ls"})],
        },
    )
    rows = read("openhands", path)
    assert refusals(rows) == [
        (3, "no reply from the model"),
        (4, "actions without the model's tool calls"),
    ]
    first, second = (row for row in rows if hasattr(row, "messages"))
    assert (first.scores, second.scores) == ({}, {"resolved": 1.0})
    assert (second.id, shown(second.messages)) == ("i-2", ["user Look", "assistant x and y."])


def test_a_condensation_of_an_older_version_forgets_events_and_puts_a_summary_in_their_place(
    tmp_path,
):
    more = [
        old(8, action="condensation", args={
            "forgotten_events_start_id": 3, "forgotten_events_end_id": 10**9,
            "summary": "They looked.", "summary_offset": 2}),
        old(9, action="message", args={"content": "More?"}, source="user"),
        old(10, action="finish", args={"final_thought": "No more."}),
    ]  # fmt: skip
    path = write_lines(tmp_path / "trajectory.json", [*old_events(), *more])
    _, later = conversations(read("openhands", path))
    assert shown(later.messages) == [
        "system You mend shops.",
        "user Look",
        "user They looked.",
        "user More?",
        "assistant No more.",
    ]


def test_rejected_and_failed_calls_and_broken_files_are_kept_apart(tmp_path):
    def event(kind, **fields):
        return {"id": kind, "timestamp": "t", "source": "agent", "kind": kind, **fields}

    call = {"id": "c", "name": "run", "arguments": "{}"}
    action = event("ActionEvent", tool_call=call, thought=[], llm_response_id="r")
    talk = [{"type": "text", "text": "Hi"}]
    path = write_lines(
        tmp_path / "events.jsonl",
        event("MessageEvent", llm_message={"role": "user", "content": talk}),
        action,
        event("UserRejectObservation", tool_call_id="c", rejection_reason="no"),
        b"{broken",
        action | {"llm_response_id": "s"},
        event("AgentErrorEvent", tool_call_id="c", error="no such tool"),
        event("ConversationErrorEvent", code="x", detail="it broke"),
        event("NewKindEvent"),
    )
    rows = read("openhands", path)
    assert refusals(rows) == [(4, "not a JSON object")]
    (row,) = (row for row in rows if hasattr(row, "messages"))
    assert shown(row.messages) == [
        "user Hi",
        "assistant  run{}",
        "tool no",
        "assistant  run{}",
        "tool no such tool",
    ]
    assert row.error == "it broke"
