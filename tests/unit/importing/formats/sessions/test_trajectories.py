"""Trajectories: ATIF (Harbor), mini-swe-agent, SWE-agent, and OpenAI's Agents SDK."""

import json

import pytest

from fakes.trace_files import (
    SAMPLES,
    compared,
    conversations,
    read,
    refusals,
    seen_calls,
    shown,
    write_lines,
)
from stillroom.importing.records import LoggedConversation
from stillroom.types import Usage


def trajectory(*steps, **more):
    agent = {"name": "a", "version": "1", "model_name": "m"}
    return (
        {"schema_version": "ATIF-v1.7", "session_id": "s", "agent": agent}
        | more
        | {"steps": [{"step_id": number} | step for number, step in enumerate(steps, 1)]}
    )


def test_a_trajectory_that_harbor_wrote_of_a_session_holds_what_the_endpoint_saw():
    (row,) = conversations(read("atif", SAMPLES / "atif" / "claude_code.json"))
    calls = seen_calls("claude_code", "session.seen.json")
    answered = [m for m in calls[3]["messages"] if m["role"] == "assistant"]
    replies = [m for m in row.messages if m["role"] == "assistant" and "weight" not in m]
    assert compared(replies[:3]) == compared(answered)
    assert shown(replies[3:]) == [shown(calls[-1]["messages"])[-1]]
    own = [calls[number] for number in (0, 1, 3, 5)]
    assert row.usage == Usage(
        prompt_tokens=sum(call["prompt_tokens"] for call in own),
        completion_tokens=sum(call["completion_tokens"] for call in own),
    )


def test_a_trajectory_that_harbor_wrote_of_a_thread_holds_what_the_endpoint_saw():
    (row,) = conversations(read("atif", SAMPLES / "atif" / "codex.json"))
    calls = seen_calls("codex", "rollout-thread.seen.json")
    # Harbor leaves the base instructions and the request for a summary out.
    assert compared(row.messages[:7]) == compared(calls[1]["messages"][1:])
    assert shown(row.messages[7:]) == [
        shown(calls[2]["messages"])[-1],
        *shown(calls[3]["messages"])[-2:],
    ]


def test_the_rewards_of_the_trial_are_its_scores(tmp_path):
    result = {"verifier_result": {"rewards": {"reward": 1, "tests": 0.5}}}
    (tmp_path / "result.json").write_text(json.dumps(result))
    (tmp_path / "agent").mkdir()
    steps = ({"source": "user", "message": "Hi"}, {"source": "agent", "message": "Hello."})
    path = write_lines(tmp_path / "agent" / "trajectory.json", trajectory(*steps))
    (row,) = conversations(read("atif", path))
    assert row.scores == {"reward": 1.0, "tests": 0.5}


def test_sub_agents_without_ids_have_places_of_their_own_and_not_the_trials_rewards(tmp_path):
    result = {"verifier_result": {"rewards": {"reward": 1}}}
    (tmp_path / "result.json").write_text(json.dumps(result))
    (tmp_path / "agent").mkdir()
    steps = ({"source": "user", "message": "Hi"}, {"source": "agent", "message": "Hello."})
    inner = trajectory(*steps, session_id=None)
    middle = trajectory(*steps, session_id=None, subagent_trajectories=[inner, inner])
    root = trajectory(*steps, session_id=None, subagent_trajectories=[inner, middle])
    path = write_lines(tmp_path / "agent" / "trajectory.json", root)
    rows = conversations(read("atif", path))
    assert [(row.location.part, row.scores) for row in rows] == [
        ("", {"reward": 1.0}),
        ("sub-agent 1", {}),
        ("sub-agent 2", {}),
        ("sub-agent 2.1", {}),
        ("sub-agent 2.2", {}),
    ]


def test_trajectories_that_cannot_be_read_are_refused(tmp_path):
    user, agent = {"source": "user", "message": "Hi"}, {"source": "agent", "message": "Hello."}
    nested = trajectory(user, agent)
    for _ in range(40):
        nested = trajectory(user, agent, subagent_trajectories=[nested])
    call = {"tool_call_id": "c", "function_name": 5, "arguments": {}}
    rows = read(
        "atif",
        write_lines(
            tmp_path / "x.jsonl",
            trajectory(user),
            trajectory(user, {"source": "judge", "message": "Fine."}),
            trajectory(user, agent | {"tool_calls": [call]}),
            {"schema_version": "ATIF-v1.7", "steps": 5},
            nested,
        ),
    )
    assert refusals(rows) == [
        (1, "no reply from the model"),
        (2, "a step has an unknown source"),
        (3, "a tool call has no name"),
        (4, "no reply from the model"),
        (5, "sub-agents are nested too deeply"),
    ]
    assert len([row for row in rows if hasattr(row, "messages")]) == 21


def test_a_trajectory_that_mini_swe_agent_wrote_holds_what_the_endpoint_saw():
    (row,) = conversations(read("swe_agent", SAMPLES / "swe_agent" / "mini.traj.json"))
    *_, last = seen_calls("swe_agent", "mini.seen.json")
    assert compared(row.messages) == compared(last["messages"])


def test_replies_of_the_responses_api_and_broken_trajectories(tmp_path):
    call = {"type": "function_call", "call_id": "c", "name": "bash", "arguments": "{}"}
    usage = {"input_tokens": 3, "output_tokens": 2}
    reply = {"object": "response", "output": [call], "extra": {"response": {"usage": usage}}}
    result = {"type": "function_call_output", "call_id": "c", "output": "x", "extra": {}}
    named = {"trajectory_format": "mini-swe-agent-1.1", "info": {"config": 5}}
    rows = read(
        "swe_agent",
        write_lines(
            tmp_path / "x.jsonl",
            named | {"messages": [{"role": "user", "content": "Hi"}, reply, result]},
            named | {"messages": [{"role": "user", "content": "Hi"}]},
            named | {"messages": 5},
            {"trajectory": [], "history": [{"role": 5}], "replay_config": "{"},
        ),
    )
    assert [(line, reason) for line, reason in refusals(rows)] == [
        (2, "no reply from the model"),
        (3, "no reply from the model"),
        (4, "a message has no role"),
    ]
    assert shown(rows[0].messages) == ["user Hi", "assistant  bash{}", "tool x"]
    assert rows[0].usage == Usage(prompt_tokens=3, completion_tokens=2)


def test_a_reply_that_is_a_plain_string_is_the_models(tmp_path):
    reply = {"object": "response", "output": "It is done."}
    trajectory = {
        "trajectory_format": "mini-swe-agent-1.1",
        "info": {},
        "messages": [{"role": "user", "content": "Hi"}, reply],
    }
    [row] = read("swe_agent", write_lines(tmp_path / "x.jsonl", trajectory))
    assert shown(row.messages) == ["user Hi", "assistant It is done."]


def span(kind, **data):
    times = {"started_at": "2026-03-01T10:00:00Z", "ended_at": "2026-03-01T10:00:02Z"}
    named = {"object": "trace.span", "id": f"span_{kind}", "trace_id": "trace_1"}
    return named | times | {"span_data": {"type": kind, **data}}


def calls_of(rows):
    return [row for row in rows if isinstance(row, LoggedConversation)]


@pytest.mark.parametrize("api", ["responses", "chat"])
def test_traces_that_the_sdk_wrote_hold_what_the_endpoint_saw(api):
    rows = read("openai_agents", SAMPLES / "openai_agents" / f"{api}.jsonl")
    calls, seen = calls_of(rows), seen_calls("openai_agents", f"{api}.seen.json")
    assert len(calls) == len(seen) == 3
    for call, sent in zip(calls, seen, strict=True):
        assert compared(call.messages) == compared(sent["messages"])
        assert call.usage == Usage(
            prompt_tokens=sent["prompt_tokens"], completion_tokens=sent["completion_tokens"]
        )


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
    assert [(row.location.part, row.reason) for row in rows if not hasattr(row, "messages")] == [
        ("1", "no model call"),
        ("3", "a response span without its messages"),
        ("5", "no messages"),
        ("6", "no model call"),
    ]


def test_a_response_that_goes_on_from_another_lacks_its_beginning(tmp_path):
    output = [{"type": "message", "role": "assistant", "content": [
        {"type": "output_text", "text": "Hello.", "annotations": []}]}]  # fmt: skip
    response = {"id": "r", "output": output, "previous_response_id": "q", "model": "m"}
    row = span("response", input="Hi", response=response)
    (call,) = calls_of(read("openai_agents", write_lines(tmp_path / "x.jsonl", row)))
    assert call.dropped == ("earlier messages are not in the file",)
    assert json.dumps(call.metadata)
