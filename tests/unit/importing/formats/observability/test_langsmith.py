"""Exports of LangSmith; the samples hold what its SDK and LangChain sent."""

import json

import pytest

from fakes.scripted_calls import assert_holds_conversation, calls_of, write_rows
from fakes.trace_files import SAMPLES, read, recognised_by, refusals, shown
from stillroom.importing.records import Feedback

LANGSMITH = SAMPLES / "langsmith"


def run(run_id="r1", run_type="llm", **more):
    return {
        "id": run_id,
        "name": "ChatOpenAI",
        "run_type": run_type,
        "inputs": {"messages": [{"role": "user", "content": "Hi?"}]},
        "outputs": {"choices": [{"message": {"role": "assistant", "content": "Yes."}}]},
        "start_time": "2026-03-01T10:00:00.000000",
        "end_time": "2026-03-01T10:00:01.500000",
        "trace_id": "t1",
        "extra": {"metadata": {"ls_provider": "openai", "ls_model_name": "m"}},
    } | more


def constructor(name, **fields):
    return {"lc": 1, "type": "constructor", "id": ["langchain", "schema", "messages", name],
            "kwargs": fields}  # fmt: skip


CALL = {"name": "add", "args": {"a": 1}, "id": "c", "type": "tool_call"}


@pytest.mark.parametrize(
    "messages",
    [
        [[constructor("SystemMessage", content="S"), constructor("HumanMessage", content="Hi?"),
          constructor("AIMessage", content="", tool_calls=[CALL]),
          constructor("ToolMessage", content="1", tool_call_id="c")]],
        [{"type": "system", "data": {"content": "S", "type": "system"}},
         {"type": "human", "data": {"content": "Hi?", "type": "human"}},
         {"type": "ai", "data": {"content": "", "tool_calls": [CALL], "type": "ai"}},
         {"type": "tool", "data": {"content": "1", "tool_call_id": "c", "type": "tool"}}],
        [{"type": "system", "content": "S"}, {"type": "human", "content": "Hi?"},
         {"type": "ai", "content": "", "additional_kwargs": {"tool_calls": [
             {"id": "c", "function": {"name": "add", "arguments": '{"a": 1}'}}]}},
         {"type": "tool", "content": "1", "tool_call_id": "c"}],
        [{"role": "system", "content": "S"}, ["human", "Hi?"],
         {"role": "assistant", "content": None, "tool_calls": [
             {"id": "c", "type": "function", "function": {"name": "add",
                                                          "arguments": '{"a": 1}'}}]},
         {"role": "tool", "tool_call_id": "c", "content": "1"}],
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "outputs",
    [
        {
            "generations": [
                [{"text": "One.", "message": constructor("AIMessageChunk", content="One.")}]
            ]
        },
        {"generations": [[{"text": "One."}]], "llm_output": {"model_name": "m-1"}},
        {"output": {"type": "ai", "content": "One."}},
        {"messages": [constructor("AIMessage", content="One.")]},
        {"role": "assistant", "content": [{"type": "text", "text": "One."}]},
        {"output": "One."},
    ],
)
def test_messages_of_langchain_are_read_in_all_their_shapes(messages, outputs, tmp_path):
    path = write_rows(tmp_path / "runs.jsonl", run(inputs={"messages": messages}, outputs=outputs))
    (call,) = calls_of(read("langsmith", path))
    assert shown(call.messages) == [
        "system S",
        "user Hi?",
        'assistant  add{"a": 1}',
        "tool 1",
        "assistant One.",
    ]
    assert call.messages[2]["tool_calls"][0]["id"] == call.messages[3]["tool_call_id"] == "c"


def test_feedback_is_a_score_of_its_run_and_of_the_runs_within_it(tmp_path):
    order = "20260301T100000000000Zt1"
    stats = {"helpful": {"n": 2, "avg": 0.5, "values": {}}, "tone": {"n": 1, "avg": None}}
    path = write_rows(
        tmp_path / "runs.jsonl",
        run("t1", "chain", dotted_order=order, feedback_stats=stats),
        run("r1", dotted_order=f"{order}.20260301T100001000000Zc1.20260301T100002000000Zr1",
            feedback_stats={"exact": {"avg": 1}}, parent_run_id="c1"),
        {"id": "f1", "run_id": "c1", "key": "ok", "score": True, "value": None},
        {"id": "f2", "run_id": "c1", "key": "note", "score": None, "value": "fine"},
        {"id": "f3", "run_id": None, "key": "ok", "score": 1},
    )  # fmt: skip
    rows = read("langsmith", path)
    (call,) = calls_of(rows)
    assert (call.feedback_ids, call.scores) == (("t1", "c1"), {"exact": 1.0})
    judged = [(row.target_id, row.name, row.value) for row in rows if isinstance(row, Feedback)]
    assert judged == [("t1", "helpful", 0.5), ("c1", "ok", 1.0)]
    assert refusals(rows) == [
        (1, "no model call"),
        (4, "feedback without a number"),
        (5, "feedback without a target"),
    ]


def test_runs_nested_in_their_trace_are_read_with_its_feedback(tmp_path):
    middle = run("c1", "chain", child_runs=[run("r1"), run("r2", "tool", child_runs=None)])
    stats = {"thumbs": {"n": 1, "avg": 0.0}}
    root = run("t1", "chain", child_runs=[middle, run("r3"), 5], feedback_stats=stats)
    path = write_rows(tmp_path / "runs.jsonl", {"runs": [root]})

    rows = read("langsmith", path)

    calls = calls_of(rows)
    assert [call.location.part for call in calls] == ["run 1 child 1 child 1", "run 1 child 2"]
    assert [call.id for call in calls] == ["r1", "r3"]
    (thumb,) = [row for row in rows if isinstance(row, Feedback)]
    assert all(thumb.target_id in call.feedback_ids for call in calls)
    assert [reason for _, reason in refusals(rows)] == [
        "no model call",
        "no model call",
        "no model call",
        "neither a run nor feedback",
    ]


def test_the_thread_of_a_trace_may_stand_in_another_run(tmp_path):
    root = run("t1", "chain", extra={"metadata": {"conversation_id": "thread"}})
    path = write_rows(tmp_path / "runs.jsonl", run(), root)
    (call,) = calls_of(read("langsmith", path))
    assert call.group == "thread"
    assert (call.started_at, call.duration_s) == ("2026-03-01T10:00:00Z", 1.5)


def test_failed_runs_keep_the_error_and_runs_without_messages_are_refused(tmp_path):
    path = write_rows(
        tmp_path / "runs.jsonl",
        run(outputs=None, error="RateLimitError('429')"),
        run(outputs={}),
        run(inputs={"a": 1, "b": 2}),
        run(outputs={"a": 1}),
        {"id": "x"},
        b"{",
    )
    rows = read("langsmith", path)
    (call,) = calls_of(rows)
    assert (call.error, shown(call.messages)) == ("RateLimitError('429')", ["user Hi?"])
    assert refusals(rows) == [
        (2, "no reply"),
        (3, "no messages"),
        (4, "no reply"),
        (5, "neither a run nor feedback"),
        (6, "not a JSON object"),
    ]


def test_the_parquet_files_of_the_bulk_export_are_read(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    lines = (LANGSMITH / "langchain_openai.jsonl").read_text("utf-8").splitlines()
    names = ("id", "run_type", "trace_id", "dotted_order", "inputs", "outputs", "extra")
    rows = [
        {name: v if isinstance(v := row[name], str) else json.dumps(v) for name in names}
        for row in map(json.loads, lines)
    ]
    path = tmp_path / "runs.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert recognised_by(path)[0] == "langsmith"
    calls = calls_of(read("langsmith", path))
    assert_holds_conversation(calls, keeps_reasoning=False, loses_reasoning=True)
