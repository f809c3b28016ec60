"""Exports of Langfuse; the samples hold what its SDK sent."""

import csv
import json

import pytest

from fakes.scripted_calls import assert_holds_conversation, calls_of, write_rows
from fakes.trace_files import SAMPLES, read, recognised_by, refusals, shown
from stillroom.importing.records import Feedback

LANGFUSE = SAMPLES / "langfuse"


def observation(given, said, **more):
    return {
        "id": "o1",
        "traceId": "t1",
        "type": "GENERATION",
        "name": "call",
        "startTime": "2026-03-01T10:00:00.000Z",
        "endTime": "2026-03-01T10:00:01.500Z",
        "model": "m",
        "input": given,
        "output": said,
    } | more


USER = [{"role": "user", "content": "Hi?"}]


def test_a_downloaded_trace_holds_its_observations_and_scores(tmp_path):
    trace = {
        "id": "t1",
        "timestamp": "2026-03-01T10:00:00.000Z",
        "name": "answer",
        "sessionId": "s1",
        "input": {"question": "Hi?"},
        "output": "Yes.",
        "observations": [
            observation(USER, {"role": "assistant", "content": "Yes."}),
            observation(None, None, id="o2", type="SPAN"),
        ],
        "scores": [
            {"id": "x", "name": "ok", "value": True, "dataType": "BOOLEAN", "traceId": "t1"}
        ],
    }
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace, indent=1), encoding="utf-8")
    older = {"trace": {**trace, "observations": None, "scores": None},
             "observations": trace["observations"]}  # fmt: skip
    assert recognised_by(path) == ["langfuse"]
    rows = read("langfuse", path)
    (call,) = calls_of(rows)
    assert (call.group, call.location.part, call.feedback_ids) == ("s1", "o1", ("t1",))
    assert [(row.target_id, row.value) for row in rows if isinstance(row, Feedback)] == [
        ("t1", 1.0)
    ]
    assert [row.location.part for row in rows if hasattr(row, "reason")] == ["", "o2"]
    again = read("langfuse", write_rows(tmp_path / "older.jsonl", older))
    assert calls_of(again)[0].messages == call.messages


def test_a_trace_without_generations_is_a_call_if_it_holds_messages(tmp_path):
    trace = {"id": "t1", "timestamp": "2026-03-01 10:00:00.5", "name": "chat", "userId": None,
             "input": USER, "output": {"role": "assistant", "content": "Yes."}, "tags": ["a"],
             "scores": {"helpful": ["1", "0"]}}  # fmt: skip
    function = trace | {"id": "t2", "input": {"a": 1, "b": 2}, "output": 3, "scores": None}
    rows = read("langfuse", write_rows(tmp_path / "traces.jsonl", trace, function))
    (call,) = calls_of(rows)
    assert (call.id, call.feedback_ids, call.metadata["tags"]) == ("t1", (), ["a"])
    assert call.started_at == "2026-03-01T10:00:00.500000Z"
    assert [row.value for row in rows if isinstance(row, Feedback)] == [1.0, 0.0]
    assert refusals(rows) == [(2, "no messages")]


@pytest.mark.parametrize(
    ("given", "said", "expected"),
    [
        ("Hi?", "Yes.", ["user Hi?", "assistant Yes."]),
        ('{"a": 1, "b": 2}', '{"sum": 3}', ['user {"a": 1, "b": 2}', 'assistant {"sum": 3}']),
        ("[1, 2]", "[3]", ["user [1, 2]", "assistant [3]"]),
        (json.dumps(USER), json.dumps("Yes."), ["user Hi?", 'assistant "Yes."']),
        ({"question": "Hi?"}, {"answer": "Yes.", "role": "assistant", "content": "Y"},
         ["user Hi?", "assistant Y"]),
        ({"args": [], "kwargs": {"messages": USER}}, {"content": "Yes."},
         ["user Hi?", "assistant Yes."]),
        (USER, [{"type": "text", "text": "Yes."},
                {"type": "tool_use", "id": "t", "name": "f", "input": {}}],
         ["user Hi?", "assistant Yes. f{}"]),
        ([{"role": "user", "content": "Hi?"}, {"type": "function_call", "call_id": "c", "name": "f",
                                               "arguments": "{}"}],
         [{"type": "message", "role": "assistant", "content": [
             {"type": "output_text", "text": "Yes."}]}], ["user Hi?", "assistant  f{}",
                                                          "assistant Yes."]),
        ({"messages": USER}, {"messages": [*USER, {"role": "assistant", "content": "Yes."}]},
         ["user Hi?", "assistant Yes."]),
    ],
)  # fmt: skip
def test_inputs_and_outputs_may_have_any_shape_that_holds_messages(given, said, expected, tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", observation(given, said))
    (call,) = calls_of(read("langfuse", path))
    assert shown(call.messages) == expected


def test_losses_failures_and_costs_are_named(tmp_path):
    cut = observation(
        [{"role": "user", "content": "<truncated due to size exceeding limit>"}],
        "Y",
        calculatedTotalCost=0.5,
        usage={"input": 5, "output": 2, "unit": "TOKENS"},
    )
    failed = observation(USER, None, level="ERROR", statusMessage="429")
    silent = observation(USER, None)
    rows = read("langfuse", write_rows(tmp_path / "rows.jsonl", cut, failed, silent))  # fmt: skip
    first, second = calls_of(rows)
    assert first.dropped == ("content truncated by the log",)
    assert (first.cost_usd, first.usage.prompt_tokens, first.usage.completion_tokens) == (0.5, 5, 2)
    assert (second.error, shown(second.messages)) == ("429", ["user Hi?"])
    assert refusals(rows) == [(3, "no reply")]


def test_broken_tables_and_rows_are_refused_by_line(tmp_path):
    path = tmp_path / "observations.csv"
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["id", "traceId", "type", "input", "output"])
        writer.writerow(["o1", "t1", "GENERATION", json.dumps(USER), "Yes."])
        writer.writerow(["o2", "t1"])
        writer.writerow(["o3", "t1", "GENERATION", "[{", ""])
    assert recognised_by(path)[0] == "langfuse"
    rows = read("langfuse", path)
    assert len(calls_of(rows)) == 1
    assert refusals(rows) == [(3, "the fields do not match the header"), (4, "no reply")]
    other = write_rows(tmp_path / "rows.jsonl", {"a": 1}, b"[[[", {"name": "x", "value": 1,
                                                                  "traceId": {}})  # fmt: skip
    assert refusals(read("langfuse", other)) == [
        (1, "neither an observation, a trace nor a score"),
        (2, "not a JSON object"),
        (3, "feedback without a target"),
    ]


def test_parquet_files_of_the_export_to_a_bucket_are_read(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = map(json.loads, (LANGFUSE / "bucket_observations.jsonl").read_text("utf-8").splitlines())
    texts = [{key: row[key] for key in row if key != "model_parameters"} for row in rows]
    for row in texts:
        row["usage_details"] = list(row["usage_details"].items())
    counts = pyarrow.map_(pyarrow.string(), pyarrow.int64())
    fields = [(name, counts if name == "usage_details" else pyarrow.string()) for name in texts[0]]
    path = tmp_path / "part-0.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(texts, pyarrow.schema(fields)), path)
    assert recognised_by(path)[0] == "langfuse"
    calls = calls_of(read("langfuse", path))
    assert_holds_conversation(calls, keeps_reasoning=False, loses_reasoning=True, has_finish=False)
