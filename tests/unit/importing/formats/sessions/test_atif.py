"""Trajectories in ATIF: written by Harbor itself, and odd ones."""

import json

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
from stillroom.types import Usage

_FOLDER = SAMPLES / "atif"


def trajectory(*steps, **more):
    agent = {"name": "a", "version": "1", "model_name": "m"}
    return (
        {"schema_version": "ATIF-v1.7", "session_id": "s", "agent": agent}
        | more
        | {"steps": [{"step_id": number} | step for number, step in enumerate(steps, 1)]}
    )


def test_a_trajectory_that_harbor_wrote_of_a_session_holds_what_the_endpoint_saw():
    (row,) = conversations(read("atif", _FOLDER / "claude_code.json"))
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
    assert row.model == calls[0]["model"]


def test_a_trajectory_that_harbor_wrote_of_a_thread_holds_what_the_endpoint_saw():
    (row,) = conversations(read("atif", _FOLDER / "codex.json"))
    calls = seen_calls("codex", "rollout-thread.seen.json")
    # Harbor leaves the base instructions and the request for a summary out.
    assert compared(row.messages[:7]) == compared(calls[1]["messages"][1:])
    assert shown(row.messages[7:]) == [
        shown(calls[2]["messages"])[-1],
        *shown(calls[3]["messages"])[-2:],
    ]


def test_steps_of_every_kind_become_messages_and_sub_agents_conversations():
    row, helper = conversations(read("atif", _FOLDER / "every_kind.json"))
    assert shown(row.messages)[:3] == [
        "system You help in a shop. Use the tools.",
        "assistant Earlier.",
        "user This one?",
    ]
    assert [m.get("weight") for m in row.messages if m["role"] == "assistant"] == [
        0,
        None,
        None,
        0,
    ]
    assert [m.get("tool_call_id") for m in row.messages[4:6]] == ["call_p1", "call_s1"]
    assert shown(row.messages)[6:] == ["assistant ls", "user 30", "assistant done"]
    assert row.usage == Usage(prompt_tokens=140, completion_tokens=35)
    assert (row.cost_usd, row.losses, len(row.tools)) == (1.0, ("images left out",), 2)
    assert (helper.id, helper.parent, helper.model) == ("helper", "run", "helper-1")
    assert str(helper.place).endswith("every_kind.json:1#helper")


def test_the_rewards_of_the_trial_are_its_scores(tmp_path):
    result = {"verifier_result": {"rewards": {"reward": 1, "tests": 0.5}}}
    (tmp_path / "result.json").write_text(json.dumps(result))
    (tmp_path / "agent").mkdir()
    steps = ({"source": "user", "message": "Hi"}, {"source": "agent", "message": "Hello."})
    path = write_lines(tmp_path / "agent" / "trajectory.json", trajectory(*steps))
    (row,) = conversations(read("atif", path))
    assert row.scores == {"reward": 1.0, "tests": 0.5}


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
        (1, "holds no reply of the model"),
        (2, "a step is from nobody known"),
        (3, "a tool call has no name"),
        (4, "holds no reply of the model"),
        (5, "sub-agents are nested too deeply"),
    ]
    assert len([row for row in rows if hasattr(row, "messages")]) == 21
