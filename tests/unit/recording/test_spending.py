"""What recorded calls cost stays within a budget, whatever passes through at once."""

import gzip
import json
import threading

import pytest

from fakes.raw_endpoint import RawEndpoint, json_reply, stream_reply
from fakes.recording import CHAT, RawClient, calls_in, recording, request, wait_until
from stillroom.importing.formats.api_logs.recorded import recorded_calls, usage_of_call
from stillroom.recording.journal import journals_in
from stillroom.recording.spending import CallBudget
from stillroom.teachers.pricing import Price

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
A_DOLLAR_A_TOKEN = Price(prompt=0.0, completion=1e6)


def budget_of(usd: float, price: Price = A_DOLLAR_A_TOKEN) -> CallBudget:
    return CallBudget(usd, price_of={"m": price}.get, usage_of=usage_of_call)


def body(max_tokens: int | None = 4, **more) -> bytes:
    limit = {} if max_tokens is None else {"max_tokens": max_tokens}
    return json.dumps({"model": "m", "messages": [], **limit, **more}).encode()


def completion(written: int | None, prompt: int = 5) -> bytes:
    usage = {"prompt_tokens": prompt, "completion_tokens": written}
    choice = {"message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}
    return json_reply(
        json.dumps({"choices": [choice], **({"usage": usage} if written else {})}).encode()
    )


def events(*rows: dict) -> list:
    return stream_reply(*(b"data: %b\n\n" % json.dumps(row).encode() for row in rows))


def after(folder, budget, script, *calls, path=CHAT):
    """The replies to calls, one after another, and the requests that reached the endpoint."""
    answer = script if callable(script) else lambda _: script
    with RawEndpoint(answer) as endpoint, recording(folder, endpoint.url, budget=budget) as url:
        return [request(url, "POST", path, call) for call in calls], endpoint.requests


def test_calls_are_refused_once_the_next_one_might_exceed_the_budget(tmp_path):
    budget = budget_of(10)
    replies, sent = after(tmp_path, budget, completion(3), *[body(4)] * 5)
    # After three calls $9 are spent, and a fourth may cost $4.
    assert [reply.status for reply in replies] == [200, 200, 200, 402, 402]
    assert len(sent) == len(calls_in(tmp_path)) == 3
    assert budget.budget.spent.usd == pytest.approx(9)
    error = json.loads(replies[-1].body)["error"]
    assert error["code"] == "budget_spent"
    assert (
        "budget of $10 does not cover this call: $9 is spent, and it may cost $4"
        in error["message"]
    )
    assert "--budget-usd" in error["message"]


OPENAI_STREAM = [
    {"choices": [{"index": 0, "delta": {"content": "yes"}, "finish_reason": "stop"}]},
    {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}},
]
ANTHROPIC_STREAM = [
    {
        "type": "message_start",
        "message": {"content": [], "usage": {"input_tokens": 5, "output_tokens": 1}},
    },
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": "yes"}},
    {"type": "content_block_stop", "index": 0},
    {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 3}},
    {"type": "message_stop"},
]
RESPONSE = {"output": [], "usage": {"input_tokens": 5, "output_tokens": 3}, "status": "completed"}


@pytest.mark.parametrize(
    ("path", "script", "usd"),
    [
        (CHAT, completion(3), 3),
        (CHAT, events(*OPENAI_STREAM), 3),
        (MESSAGES, events(*ANTHROPIC_STREAM), 3),
        (RESPONSES, json_reply(json.dumps(RESPONSE).encode()), 3),
        # What does not say its tokens, or says none, counts at its worst: max_tokens.
        (CHAT, completion(None), 4),
        (CHAT, events(OPENAI_STREAM[0]), 4),
        (CHAT, json_reply(b"no JSON"), 4),
        (CHAT, [*events(*OPENAI_STREAM)[:2], None], 4),
        # What the endpoint refused is not billed.
        (CHAT, json_reply(b"{}", status=b"429 Too Many Requests"), 0),
        (CHAT, json_reply(b"{}", status=b"500 Internal Server Error"), 0),
    ],
)
def test_a_call_costs_what_its_reply_reports(tmp_path, path, script, usd):
    budget = budget_of(10)
    after(tmp_path, budget, script, body(4), path=path)
    assert budget.budget.spent.usd == pytest.approx(usd)
    assert budget.budget.num_reserved == 0
    # The same from the journal, as the next start counts it.
    again = budget_of(10)
    for recorded in recorded_calls(journals_in(tmp_path)):
        again.add_cost_of(recorded)
    assert (again.budget.spent.usd, again.num_unpriced) == (pytest.approx(usd), 0)


@pytest.mark.parametrize(
    ("call", "usd"),
    [
        (body(4, n=2), 8),
        (body(None, max_completion_tokens=6), 6),
        (body(None, max_output_tokens=7), 7),
        (body(None), 4096),
    ],
)
def test_what_a_call_may_cost_is_what_its_request_allows(tmp_path, call, usd):
    budget = budget_of(1e6)
    after(tmp_path, budget, completion(None), call)
    assert budget.budget.spent.usd == usd


def test_the_bytes_of_a_prompt_are_the_most_tokens_that_it_may_have(tmp_path):
    budget = budget_of(1, Price(prompt=1e4, completion=0))
    long = body(messages=[{"role": "user", "content": "x" * 200}])
    (short_reply, long_reply), sent = after(tmp_path, budget, completion(3), body(), long)
    assert (short_reply.status, long_reply.status, len(sent)) == (200, 402, 1)
    assert budget.budget.spent.usd == pytest.approx(0.05)


def test_a_call_that_takes_more_than_it_might_is_a_warning_for_the_next(tmp_path):
    budget = budget_of(20)
    replies, _ = after(tmp_path, budget, completion(10), *[body(4)] * 3)
    # The second might take as many as the first, and the third no longer fits.
    assert [reply.status for reply in replies] == [200, 200, 402]
    assert budget.budget.spent.usd == pytest.approx(20)


def test_calls_at_once_wait_for_one_another_where_the_budget_is_near(tmp_path):
    budget, held, was_held = budget_of(6), threading.Event(), []

    def script(sent):
        if sent.first_line.startswith("POST"):
            was_held.append(not held.is_set())
            held.wait(10)
        return completion(1)

    with (
        RawEndpoint(script) as endpoint,
        recording(tmp_path, endpoint.url, budget=budget) as url,
        RawClient(url) as first,
        RawClient(url) as second,
    ):
        first.send("POST", CHAT, body(4))
        wait_until(lambda: was_held)
        second.send("POST", CHAT, body(4))
        # By its reply the proxy has read the second call too.
        assert request(url, "GET", "/v1/models").status == 200
        held.set()
        assert [first.read().status, second.read().status] == [200, 200]
    assert was_held == [True, False]
    assert budget.budget.spent.usd == pytest.approx(2)


@pytest.mark.parametrize("call", [b"{}", b"", b"no JSON", body(model="unknown")])
def test_what_cannot_be_priced_is_not_forwarded(tmp_path, call):
    (reply,), sent = after(tmp_path, budget_of(10), completion(3), call)
    assert (reply.status, sent) == (402, [])
    assert "the price of its model is unknown" in json.loads(reply.body)["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v1/embeddings", 402),
        ("POST", "/v1/batches", 402),
        ("POST", "/v1/messages/count_tokens?beta=true", 200),
        ("GET", "/v1/models", 200),
    ],
)
def test_what_is_not_recorded_is_forwarded_only_if_it_costs_nothing(tmp_path, method, path, status):
    with (
        RawEndpoint(lambda _: json_reply(b"{}")) as endpoint,
        recording(tmp_path, endpoint.url, budget=budget_of(10)) as url,
    ):
        assert request(url, method, path, body() if method == "POST" else b"").status == status


def test_an_endpoint_that_is_down_costs_nothing(tmp_path, free_tcp_port):
    budget = budget_of(10)
    with recording(tmp_path, f"http://127.0.0.1:{free_tcp_port}", budget=budget) as url:
        assert request(url, "POST", CHAT, body()).status == 502
    assert (budget.budget.spent.usd, budget.budget.num_reserved) == (0, 0)


def test_an_encoded_request_is_priced_as_what_it_holds_and_one_too_long_is_refused(tmp_path):
    budget = budget_of(10)
    packed = gzip.compress(body(4))
    with (
        RawEndpoint(lambda _: completion(3)) as endpoint,
        recording(tmp_path, endpoint.url, budget=budget, max_recorded_bytes=len(packed)) as url,
    ):
        assert request(url, "POST", CHAT, packed, "Content-Encoding: gzip").status == 200
        assert endpoint.requests[0].body == packed
        assert request(url, "POST", CHAT, body(messages=["x" * 200])).status == 413
    # The reply was cut at the same limit, so its tokens are not known.
    assert budget.budget.spent.usd == pytest.approx(4)
