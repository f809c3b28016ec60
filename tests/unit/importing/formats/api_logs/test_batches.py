"""Batches of OpenAI and Anthropic, whose requests and results stand in two files."""

import pytest

from fakes.scripted_calls import assert_holds_conversation, calls_of, write_rows
from fakes.trace_files import SAMPLES, read, refusals


def asked(custom_id, text, url="/v1/chat/completions"):
    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def answered(custom_id, text, status=200, error=None):
    message = {"role": "assistant", "content": text}
    body = {"id": "c", "model": "m-1", "choices": [{"message": message, "finish_reason": "stop"}]}
    response = {"status_code": status, "request_id": "r", "body": body}
    return {"id": "b", "custom_id": custom_id, "response": response, "error": error}


@pytest.mark.parametrize("name", ["openai_batch", "anthropic_batch"])
def test_the_two_files_of_a_batch_are_joined(name):
    folder = SAMPLES / name
    paths = (folder / "requests.jsonl", folder / "results.jsonl")
    for order in (paths, paths[::-1]):
        calls = calls_of(read(name, *order))
        assert_holds_conversation(calls, keeps_reasoning=name == "anthropic_batch")
        assert [call.metadata["custom_id"] for call in calls] == ["task-3", "task-1", "task-2"]
        assert [call.merged_from[0].line for call in calls] == [3, 1, 2]
        assert {call.merged_from[0].path.name for call in calls} == {"requests.jsonl"}


@pytest.mark.parametrize("name", ["openai_batch", "anthropic_batch"])
def test_one_file_of_a_batch_is_refused_row_by_row(name):
    folder = SAMPLES / name
    assert refusals(read(name, folder / "requests.jsonl")) == [
        (line, "no result for this request") for line in (1, 2, 3)
    ]
    assert refusals(read(name, folder / "results.jsonl")) == [
        (line, "no request") for line in (1, 2, 3)
    ]


def test_batches_with_the_same_ids_are_told_apart_by_folder_or_refused(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_rows(tmp_path / name / "in.jsonl", asked("request-1", f"ask {name}"))
        write_rows(tmp_path / name / "out.jsonl", answered("request-1", f"say {name}"))
    files = sorted(tmp_path.glob("*/*.jsonl"))
    calls = calls_of(read("openai_batch", *files))
    assert [[m["content"] for m in call.messages] for call in calls] == [
        ["ask a", "say a"],
        ["ask b", "say b"],
    ]
    again = write_rows(tmp_path / "a" / "more.jsonl", asked("request-1", "ask c"))
    rows = read("openai_batch", *files, again)
    assert sorted(reason for _, reason in refusals(rows)) == [
        "no result for this request",
        "no result for this request",
        "several request files have this custom_id",
    ]
    assert len(calls_of(rows)) == 1


def test_results_of_the_output_and_the_error_file_find_their_requests(tmp_path):
    requests = write_rows(
        tmp_path / "in.jsonl", asked("a", "1"), asked("b", "2"), asked("a", "3"), asked("c", "4")
    )
    results = write_rows(tmp_path / "out.jsonl", answered("a", "one"), answered("a", "again"))
    refusal = {"message": "Too long", "code": "context_length_exceeded"}
    failed = answered("b", "", status=400)
    failed["response"]["body"] = {"error": refusal}
    expired = {"id": "x", "custom_id": "c", "response": None, "error": {"code": "batch_expired"}}
    errors = write_rows(tmp_path / "errors.jsonl", failed, expired)
    rows = read("openai_batch", requests, results, errors)
    calls = calls_of(rows)
    assert [call.error for call in calls] == [
        None,
        "context_length_exceeded: Too long",
        "batch_expired",
    ]
    assert refusals(rows) == [
        (3, "a custom_id that is not unique"),
        (2, "a second result of the same request"),
    ]


def test_a_pair_that_is_no_chat_is_refused_with_both_its_rows(tmp_path):
    request = {"custom_id": "a", "url": "/v1/embeddings", "body": {"input": "x", "model": "e"}}
    result = answered("a", "")
    result["response"]["body"] = {"object": "list", "data": [{"embedding": [0.1]}]}
    requests, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = read("openai_batch", write_rows(requests, request), write_rows(results, result))
    assert [(row.location.path, row.reason) for row in rows] == [
        (results, "no reply"),
        (requests, "no reply"),
    ]


def test_every_choice_of_a_result_is_a_call_and_the_request_counts_once(tmp_path):
    result = answered("a", "one")
    choices = result["response"]["body"]["choices"]
    choices.append({"message": {"role": "assistant", "content": "two"}, "finish_reason": "length"})
    requests = write_rows(tmp_path / "in.jsonl", asked("a", "1"))
    calls = calls_of(read("openai_batch", requests, write_rows(tmp_path / "out.jsonl", result)))
    assert [call.messages[-1]["content"] for call in calls] == ["one", "two"]
    assert [call.location.part for call in calls] == ["", "choice 1"]
    assert [len(call.merged_from) for call in calls] == [1, 0]


def test_requests_as_anthropics_api_takes_them_are_one_by_one(tmp_path):
    params = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
    body = {"requests": [{"custom_id": name, "params": params} for name in ("a", "b")]}
    result = {"custom_id": "b", "result": {"type": "expired"}}
    rows = read(
        "anthropic_batch",
        write_rows(tmp_path / "in.json", body),
        write_rows(tmp_path / "out.jsonl", result),
    )
    assert [call.error for call in calls_of(rows)] == ["expired"]
    assert [(str(row.location.part), row.reason) for row in rows[1:]] == [
        ("request 1", "no result for this request")
    ]
