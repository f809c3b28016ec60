"""Exports of Phoenix, written by a Phoenix server and its client."""

from fakes.scripted_calls import assert_holds_conversation, calls_of, write_rows
from fakes.trace_files import SAMPLES, read, refusals
from stillroom.importing.records import Feedback

PHOENIX = SAMPLES / "phoenix"


def test_spans_of_the_api_and_of_the_clients_table_hold_the_calls():
    for name in ("spans.json", "table.jsonl"):
        calls = calls_of(read("phoenix", PHOENIX / name))
        assert_holds_conversation(calls, keeps_reasoning=False)
        assert {call.group for call in calls} == {"shop-1"}
        assert all(call.duration_s < 10 and call.started_at.startswith("2026-") for call in calls)


def test_annotations_are_feedback_about_their_spans():
    rows = read("phoenix", PHOENIX / "annotations.json", PHOENIX / "spans.json")
    (judgement,) = (row for row in rows if isinstance(row, Feedback))
    assert (judgement.name, judgement.value) == ("helpful", 1.0)
    assert judgement.about in {call.id for call in calls_of(rows)}
    assert refusals(rows) == [(1, "feedback without a number")]


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
    assert [(row.about, row.value) for row in rows if isinstance(row, Feedback)] == [("s", 0.5)]
    assert sorted(refusals(rows)) == [
        (1, "no model call"),
        (2, "neither a span nor an annotation"),
        (3, "not a JSON object"),
    ]
