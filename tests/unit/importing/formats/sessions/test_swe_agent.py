"""Trajectories of mini-swe-agent, written by itself, and of SWE-agent, from its documentation."""

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

_FOLDER = SAMPLES / "swe_agent"


def test_a_trajectory_that_mini_swe_agent_wrote_holds_what_the_endpoint_saw():
    (row,) = conversations(read("swe_agent", _FOLDER / "mini.traj.json"))
    *_, last = seen_calls("swe_agent", "mini.seen.json")
    assert compared(row.messages) == compared(last["messages"])
    assert row.model == f"openai/{last['model']}"
    assert row.metadata["exit_status"] == "Submitted"


def test_a_trajectory_of_swe_agent_is_read_from_its_history():
    (row,) = conversations(read("swe_agent", _FOLDER / "lamp-1.traj"))
    assert shown(row.messages) == [
        "system You mend shops.",
        "user An example follows.",
        "assistant ls",
        "user What does a lamp cost?",
        'assistant I look. bash{"command":"cat prices.txt"}',
        "tool lamp 12\nchair 30",
        "assistant 12.",
    ]
    assert [m.get("weight") for m in row.messages if m["role"] == "assistant"] == [0, None, None]
    assert row.messages[4]["reasoning_content"] == "A file."
    assert row.messages[5]["tool_call_id"] == "toolu_1"
    assert (row.model, row.cost_usd) == ("scripted-1", 0.25)
    assert row.usage == Usage(prompt_tokens=500, completion_tokens=40)


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
        (2, "holds no reply of the model"),
        (3, "holds no reply of the model"),
        (4, "a message has no role"),
    ]
    assert shown(rows[0].messages) == ["user Hi", "assistant  bash{}", "tool x"]
    assert rows[0].usage == Usage(prompt_tokens=3, completion_tokens=2)
