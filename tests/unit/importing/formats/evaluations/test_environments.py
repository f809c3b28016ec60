"""Rollouts of verifiers, rnow and NeMo Gym."""

import pytest

from fakes.foreign_rollouts import RNOW_ROW
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

CHAT = [{"role": "user", "content": "Hi"}]
REPLY = [{"role": "assistant", "content": "Hello."}]


def test_results_that_an_old_version_wrote_hold_what_the_endpoint_saw():
    (row,) = conversations(read("verifiers", SAMPLES / "verifiers" / "results.jsonl"))
    *_, last = seen_calls("verifiers", "results.seen.json")
    # This version leaves the thoughts out of its results.
    expected = [{k: v for k, v in m.items() if k != "reasoning_content"} for m in last["messages"]]
    assert compared(row.messages) == compared(expected)


def test_traces_that_a_new_version_wrote_hold_what_the_endpoint_saw():
    rows = conversations(read("verifiers_traces", SAMPLES / "verifiers_traces" / "traces.jsonl"))
    calls = seen_calls("verifiers_traces", "traces.seen.json")
    assert len(rows) == len(calls)
    by_question = {call["messages"][0]["content"]: call for call in calls}
    for row in rows:
        call = by_question[row.messages[0]["content"]]
        assert compared(row.messages) == compared(call["messages"])
        assert row.usage == Usage(
            prompt_tokens=call["prompt_tokens"], completion_tokens=call["completion_tokens"]
        )


def test_results_of_later_versions_name_their_metrics_tools_and_tokens(tmp_path):
    tool = {"name": "price", "description": "Returns a price.", "parameters": {"type": "object"}}
    path = write_lines(
        tmp_path / "results.jsonl",
        {
            "example_id": 3,
            "prompt": "Two plus two?",
            "completion": "4",
            "reward": 0.5,
            "task": "sums",
            "metrics": {"exact": 1, "note": "fine"},
            "tool_defs": [tool],
            "token_usage": {"input_tokens": 7, "output_tokens": 2},
            "timing": {"total_ms": 1500},
            "is_truncated": True,
            "error": None,
        },
        {"example_id": 4, "prompt": CHAT, "completion": [], "reward": 0, "error": "it broke"},
        {"example_id": 5, "prompt": CHAT, "completion": REPLY, "reward": None, "error": {"a": 1}},
    )
    rows = read("verifiers", path)
    assert refusals(rows) == [(2, "no reply from the model")]
    sums, failed = (row for row in rows if hasattr(row, "messages"))
    assert shown(sums.messages) == ["user Two plus two?", "assistant 4"]
    assert sums.scores == {"reward": 0.5, "exact": 1.0}
    assert (sums.usage, sums.duration_s) == (Usage(prompt_tokens=7, completion_tokens=2), 1.5)
    assert (sums.finish_reason, sums.tools[0]["function"]["name"]) == ("length", "price")
    assert (failed.error, failed.scores) == ('{"a":1}', {})


def test_branches_of_a_trace_are_conversations_and_context_is_not_trained(tmp_path):
    def node(parent, role, text, *, is_sampled=False):
        return {
            "parent": parent,
            "message": {"role": role, "content": text},
            "sampled": is_sampled,
        }

    nodes = [
        node(None, "user", "Hi"),
        node(0, "assistant", "An example."),
        node(1, "user", "Price?"),
        node(2, "assistant", "12.", is_sampled=True),
        node(2, "assistant", "It is 12.", is_sampled=True),
        node(99, "user", "Lost"),
    ]
    used = {"prompt_tokens": 5, "completion_tokens": 2}
    calls = [{"node": 3, "usage": used}, {"node": 4, "usage": used | {"cached_input_tokens": 4}}]
    trace = {"id": "t", "nodes": nodes, "calls": calls, "rewards": {"ok": {"score": 1}}}
    failed = {"id": "u", "nodes": [], "errors": [{"message": "it broke"}]}
    row = {"id": "e", "env": {"id": "shop"}, "task": {}, "ok": True}
    path = write_lines(
        tmp_path / "traces.jsonl",
        row | {"traces": [trace]},
        row | {"traces": [failed], "errors": [{"message": "it broke"}]},
    )
    rows = read("verifiers_traces", path)
    assert refusals(rows) == [(2, "no reply from the model")]
    first, second = (row for row in rows if hasattr(row, "messages"))
    assert shown(second.messages)[-1] == "assistant It is 12."
    assert [m.get("weight") for m in first.messages] == [None, 0, None, None]
    assert (first.usage, second.usage) == (
        Usage(prompt_tokens=5, completion_tokens=2),
        Usage(prompt_tokens=9, completion_tokens=2),
    )
    assert (first.id, second.id, second.parent) == ("t", "t/4", "t")
    assert str(second.location).endswith("traces.jsonl:1#t/4")


def test_rows_that_are_no_rollouts_are_refused_and_failed_ones_keep_their_error(tmp_path):
    failed = RNOW_ROW | {"completed": "error", "total_reward": 0}
    broken = RNOW_ROW | {"conversation": [{"role": "user"}]}
    rows = read("rnow", write_lines(tmp_path / "x.jsonl", {"a": 1}, failed, broken))
    assert refusals(rows) == [(1, "not a rollout of rnow"), (3, "the rollout cannot be read")]
    assert (rows[1].error, "reward" in rows[1].scores) == ("the rollout failed", False)


@pytest.mark.parametrize(
    ("changes", "scores"),
    [
        ({"success": False}, {"total_reward": 0.75, "reward": 0.0}),
        ({"success": False, "total_reward": None}, {"reward": 0.0}),
        ({"success": None, "completed": False}, {"total_reward": 0.75, "reward": 0.0}),
    ],
)
def test_what_rnow_says_of_the_success_goes_before_the_reward(tmp_path, changes, scores):
    row = {key: value for key, value in (RNOW_ROW | changes).items() if value is not None}
    (read_row,) = conversations(read("rnow", write_lines(tmp_path / "x.jsonl", row)))
    parts = {"accuracy": 0.5, "brevity": 0.25}
    assert read_row.scores == parts | scores


def test_a_row_of_messages_with_a_top_level_success_or_reward_is_judged(tmp_path):
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    marks = ({"success": False}, {"reward": 0.5, "success": True}, {"metadata": {"success": False}})
    path = write_lines(tmp_path / "x.jsonl", *({"messages": talk} | mark for mark in marks))
    rows = conversations(read("openai_fine_tuning", path))
    assert [row.scores for row in rows] == [{"reward": 0.0}, {"reward": 0.5}, {}]
    assert [row.metadata for row in rows] == [{}, {"success": True}, {"success": False}]
