"""Spans as rows of Logfire's records and of ClickHouse's otel_traces."""

import csv
import json

from fakes.scripted_calls import calls_of, write_rows
from fakes.trace_files import SAMPLES, read, recognised_by, refusals, shown


def test_rows_of_logfire_and_clickhouse_hold_the_calls():
    for name in ("logfire.json", "clickhouse.jsonl"):
        rows = read("span_table", SAMPLES / "span_table" / name)
        (call,) = calls_of(rows)
        assert shown(call.messages) == ["system Be brief.", "user Hi?", "assistant Yes."]
        assert (call.group, call.model, call.provider) == ("thread-1", "m-1", "openai")
        assert (call.usage.prompt_tokens, call.usage.completion_tokens) == (7, 2)
        assert (call.started_at, call.duration_s) == ("2026-03-01T10:00:00Z", 1.5)
        assert (call.id, call.judged_as, call.finish_reason) == ("b" * 16, ("a" * 32,), "stop")
        assert [reason for _, reason in refusals(rows)] == ["no model call"]


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
        (1, "no span"),
        (2, "no span"),
        (3, "not a JSON object"),
    ]
