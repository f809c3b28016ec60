"""Exports of Phoenix, and spans as rows of Logfire's records and of ClickHouse's otel_traces."""

import csv
import json

from fakes.scripted_calls import calls_of, write_rows
from fakes.trace_files import SAMPLES, read, recognised_by, refusals, shown
from stillroom.importing.records import Feedback

PHOENIX = SAMPLES / "phoenix"


def test_rows_that_are_neither_are_refused(tmp_path):
    context = {"span_id": "s", "trace_id": "t"}
    plain = {"context": context, "attributes": {}, "span_kind": "CHAIN", "name": "chain"}
    llm = plain | {"span_kind": "LLM", "attributes": {"llm": {"input_messages": [
        {"message": {"role": "user", "content": "Hi?"}}], "output_messages": [
        {"message": {"role": "assistant", "content": "Yes."}}]}}}  # fmt: skip
    judged = {"name": "x", "result": {"score": 0.5}}
    path = write_rows(
        tmp_path / "spans.jsonl", plain, {"data": [llm | {"annotations": [judged]}, {}]}, b"{"
    )
    rows = read("phoenix", path)
    assert [call.messages[1]["content"] for call in calls_of(rows)] == ["Yes."]
    assert [(row.target_id, row.value) for row in rows if isinstance(row, Feedback)] == [("s", 0.5)]
    assert sorted(refusals(rows)) == [
        (1, "no model call"),
        (2, "neither a span nor an annotation"),
        (3, "not a JSON object"),
    ]


def test_rows_of_a_csv_file_and_failures_are_read(tmp_path):
    messages = json.dumps([{"role": "user", "parts": [{"type": "text", "content": "Hi?"}]}])
    attributes = {"gen_ai.request.model": "m", "gen_ai.input.messages": messages}
    path = tmp_path / "records.csv"
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(
            ["trace_id", "span_id", "attributes", "otel_status_code", "otel_status_message"]
        )
        writer.writerow(["t", "s", json.dumps(attributes), "ERROR", "Timed out"])
        writer.writerow(["t", "s2", "[", "", ""])
    assert recognised_by(path)[0] == "span_table"
    rows = read("span_table", path)
    (call,) = calls_of(rows)
    assert (call.error, shown(call.messages)) == ("Timed out", ["user Hi?"])
    assert refusals(rows) == [(3, "no model call")]


def test_rows_without_a_span_are_refused(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", {"rows": [{"a": 1}]}, {"trace_id": "t"}, b"[")
    assert refusals(read("span_table", path)) == [
        (1, "not a span"),
        (2, "not a span"),
        (3, "not a JSON object"),
    ]
