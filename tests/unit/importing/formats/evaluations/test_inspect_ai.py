"""Logs of inspect_ai: written by the package itself in both formats, and odd ones."""

import json
import sys
import zipfile

import pytest

from fakes.trace_files import (
    SAMPLES,
    compared,
    conversations,
    read,
    recognised_by,
    refusals,
    seen_calls,
    shown,
)
from stillroom.errors import MissingExtraError
from stillroom.types import Usage

_FOLDER = SAMPLES / "inspect_ai"


def log(*samples, **more):
    task = {"task": "t", "model": "openai/m"}
    return {"version": 2, "status": "success", "eval": task, "samples": list(samples)} | more


def sample(**fields):
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
    ]
    return {"id": "a", "epoch": 1, "messages": messages} | fields


def written(tmp_path, *samples):
    path = tmp_path / "log.json"
    path.write_text(json.dumps(log(*samples)))
    return read("inspect_ai", path)


@pytest.mark.parametrize("kind", ["eval", "json"])
def test_a_log_that_inspect_wrote_holds_what_the_endpoint_saw(kind):
    rows = conversations(read("inspect_ai", _FOLDER / f"shop.{kind}"))
    by_sample = {row.metadata["sample_id"]: row for row in rows}
    calls = seen_calls("inspect_ai", f"{kind}.seen.json")
    longest = sorted(calls, key=lambda call: len(call["messages"]))
    last_calls = {call["messages"][1]["content"]: call["messages"] for call in longest}
    lamp, two = by_sample["lamp"], by_sample["sum"]
    for row in (lamp, two):
        assert compared(row.messages) == compared(last_calls[row.messages[1]["content"]])
    of_lamp = [call for call in calls if call["messages"][1]["content"] == "What of this lamp?"]
    assert lamp.usage == Usage(
        prompt_tokens=sum(call["prompt_tokens"] for call in of_lamp),
        completion_tokens=sum(call["completion_tokens"] for call in of_lamp),
    )


def test_long_texts_that_the_log_keeps_apart_are_put_back(tmp_path):
    long = "x" * 200
    (row,) = conversations(
        written(
            tmp_path,
            sample(
                messages=[
                    {"role": "user", "content": "attachment://abc"},
                    {"role": "assistant", "content": [{"type": "text", "text": "Hello."}]},
                ],
                attachments={"abc": long},
            ),
        )
    )
    assert shown(row.messages)[0] == f"user {long}"


def test_scores_of_all_kinds_become_numbers(tmp_path):
    scores = {
        "grade": {"value": "P"},
        "word": {"value": "No"},
        "number": {"value": 0.25},
        "flag": {"value": True},
        "parts": {"value": {"depth": 3, "style": "C", "note": "fine"}},
        "text": {"value": "rather good"},
    }
    (row,) = conversations(written(tmp_path, sample(scores=scores)))
    assert row.scores == {
        "grade": 0.5,
        "word": 0.0,
        "number": 0.25,
        "flag": 1.0,
        "parts.depth": 3.0,
        "parts.style": 1.0,
    }


def test_failed_tools_redacted_thoughts_and_failures_are_kept_as_such(tmp_path):
    call = {"id": "c", "function": "look", "arguments": {"at": 1}, "type": "function"}
    thought = {"type": "reasoning", "reasoning": "gAAA", "redacted": True}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [thought], "tool_calls": [call]},
        {"role": "tool", "content": "", "tool_call_id": "c", "error": {"message": "no such thing"}},
    ]
    (row,) = conversations(
        written(tmp_path, sample(messages=messages, error={"message": "it broke"}))
    )
    assert shown(row.messages) == ["user Hi", 'assistant  look{"at": 1}', "tool no such thing"]
    assert (row.error, row.dropped) == ("it broke", ("reasoning is encrypted or redacted",))


def test_samples_are_read_from_a_zip_without_zstandard_and_broken_ones_are_refused(tmp_path):
    path = tmp_path / "log.eval"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("_journal/start.json", json.dumps({"eval": {"task": "t"}}))
        archive.writestr("samples/a_epoch_1.json", json.dumps(sample()))
        archive.writestr("samples/b_epoch_1.json", b"{broken")
        archive.writestr("samples/c_epoch_1.json", json.dumps(sample(messages=[])))
        archive.writestr("summaries.json", b"[]")
    assert recognised_by(path) == ["inspect_ai"]
    rows = read("inspect_ai", path)
    assert refusals(rows) == [(2, "not a JSON object"), (3, "no messages")]
    (row,) = (row for row in rows if hasattr(row, "messages"))
    assert str(row.location).endswith("log.eval:1#samples/a_epoch_1.json")
    assert row.metadata["task"] == "t"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert refusals(read("inspect_ai", path)) == [(1, "not a complete zip file")]


def test_a_log_packed_with_zstandard_needs_an_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"stillroom\[traces\]"):
        read("inspect_ai", _FOLDER / "shop.eval")


def test_the_samples_of_a_json_log_are_read_one_by_one_though_it_was_cut_off(tmp_path):
    tail = {"plan": {"samples": [1]}, "note": "samples", "list": [{}]}
    text = json.dumps(tail)[:-1] + "," + json.dumps(log(sample(), sample(id="b")))[1:]
    path = tmp_path / "log.json"
    path.write_text(text[: text.index('"b"')])
    rows = read("inspect_ai", path)
    assert [row.metadata["sample_id"] for row in rows if hasattr(row, "messages")] == ["a"]
    assert refusals(rows) == [(2, "the file is cut off here")]
    path.write_text(text[:-1] + ', "stats": {"model_usage": ')
    assert refusals(read("inspect_ai", path)) == [(3, "the file is cut off here")]
