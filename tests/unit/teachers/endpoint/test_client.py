import base64
import json
import math
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any
from urllib.parse import quote

import anyio
import anyio.lowlevel
import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.chat_endpoint import ScriptedChannel, completion
from fakes.rollout_rows import assistant, tool_call, tool_reply, user
from fakes.waiting import run_async
from stillroom.errors import CallFailedError, FailureClass, TeacherError
from stillroom.settings import read_key
from stillroom.teachers.budget import Budget, BudgetSpentError, Cost
from stillroom.teachers.endpoint.attempts import MAX_ATTEMPTS, MAX_RATE_LIMIT_WAIT_S
from stillroom.teachers.endpoint.client import CallSettings, OpenAITeacher, Spending
from stillroom.teachers.endpoint.http_channel import (
    ConnectionFailedError,
    NotConnectedError,
    UnreadableReplyError,
)
from stillroom.teachers.limits.limit_types import LimitSettings
from stillroom.teachers.pricing import Price
from stillroom.teachers.providers import PROVIDERS, Endpoint
from stillroom.types import SampledTurn, SamplingSettings, Usage

ENDPOINT = Endpoint("http://teacher.test/v1", "TEACHER_TEST_KEY")
CALLS = CallSettings(timeout_s=5.0)
SCHEMA: Any = {"type": "function", "function": {"name": "price", "parameters": {}}}
SILENCE = None
"""Stands in a script for a request that is never answered."""
Script = Sequence[httpx.Response | Exception | None]


class Bench:
    """A teacher on scripted answers; it keeps the requests and the waits instead of waiting."""

    def __init__(
        self,
        script: Script,
        *,
        endpoint: Endpoint = ENDPOINT,
        calls: CallSettings = CALLS,
        spending: Spending | None = None,
        sleep: Callable[[float], Awaitable[None]] | None = None,
        **sampling: Any,
    ) -> None:
        self.requests: list[httpx.Request] = []
        self.waits: list[float] = []
        self._script = list(script)
        self.teacher = OpenAITeacher(
            endpoint,
            "m",
            SamplingSettings(**sampling),
            key=read_key("TEACHER_TEST_KEY"),
            calls=calls,
            spending=spending,
            channel=ScriptedChannel(self._answer, endpoint, read_key("TEACHER_TEST_KEY")),
            sleep=sleep or self._sleep,
        )

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(request.content) for request in self.requests]

    def complete(self, *, tools: Sequence[Any] = (), seed: int | None = None) -> SampledTurn:
        async def main() -> SampledTurn:
            async with self.teacher:
                return await self.teacher.complete([user("hi")], list(tools), seed=seed)

        return run_async(main)

    def converse(
        self, reply: str = "7", *, restored: SampledTurn | None = None, tools: Sequence[Any] = ()
    ) -> list[SampledTurn]:
        """Samples a turn, or restores one, replies to its call, and samples the next turn."""

        async def main() -> list[SampledTurn]:
            async with (
                self.teacher as teacher,
                teacher.converse([user("hi")], list(tools), seed_key="task:0") as conversation,
            ):
                turn = restored or await conversation.sample()
                if restored is not None:
                    conversation.restore(restored)
                conversation.add_responses(turn.message, [tool_reply(reply)])
                assert conversation.trace() is None
                return [turn, await conversation.sample()]

        return run_async(main)

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self._script.pop(0)
        if answer is SILENCE:
            await anyio.sleep_forever()
        if not isinstance(answer, httpx.Response):
            raise answer or AssertionError("unreachable")
        return answer

    async def _sleep(self, seconds: float) -> None:
        self.waits.append(seconds)


def body(text: str | bytes, *, status: int = 200, **headers: str) -> httpx.Response:
    return httpx.Response(status, content=text, headers=headers)


def limited(retry_after: str | None = None, *, status: int = 429) -> httpx.Response:
    headers = {} if retry_after is None else {"retry-after": retry_after}
    return httpx.Response(status, text="slow down", headers=headers)


def test_a_request_says_how_to_sample() -> None:
    bench = Bench([completion()] * 2, temperature=0.25, top_p=0.5, max_tokens=7)
    bench.complete(tools=[SCHEMA], seed=11)

    assert bench.bodies[0] == {
        "model": "m",
        "messages": [user("hi")],
        "max_tokens": 7,
        "temperature": 0.25,
        "top_p": 0.5,
        "seed": 11,
        "tools": [SCHEMA],
    }
    assert str(bench.requests[0].url) == "http://teacher.test/v1/chat/completions"


@pytest.mark.parametrize(("key", "header"), [("", None), ("sk-canary\n", "Bearer sk-canary")])
def test_the_body_holds_neither_the_key_nor_options_that_are_not_set(
    monkeypatch: pytest.MonkeyPatch, key: str, header: str | None
) -> None:
    monkeypatch.setenv("TEACHER_TEST_KEY", key)
    bench = Bench([completion()])
    bench.complete()

    assert bench.bodies[0].keys() == {"model", "messages", "max_tokens", "temperature"}
    assert bench.requests[0].headers.get("authorization") == header
    assert b"sk-canary" not in bench.requests[0].content


def test_tool_calls_keep_their_ids_and_arguments_as_written() -> None:
    calls = [tool_call("price", "abc", '{"item": '), {"function": {"name": "stock"}, "id": None}]
    turn = Bench([completion(None, tool_calls=calls, finish_reason="tool_calls")]).complete()

    assert turn.message == {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            tool_call("price", "abc", '{"item": '),
            tool_call("stock", "call_1", "{}"),
        ],
    }


def test_reasoning_is_kept_and_the_endpoints_own_fields_are_not() -> None:
    details = [{"type": "reasoning.text", "text": "hm"}]
    answer = completion(
        "7",
        tool_calls=[],
        reasoning_content="think",
        reasoning_details=details,
        refusal=None,
        annotations=[],
    )

    assert Bench([answer]).complete().message == {
        "role": "assistant",
        "content": "7",
        "reasoning_content": "think",
        "reasoning_details": details,
    }


@pytest.mark.parametrize(
    ("reason", "finish"),
    [
        ("length", "length"),
        ("content_filter", "filter"),
        ("stop", "stop"),
        ("tool_calls", "stop"),
        ("end_turn", "stop"),
    ],
)
def test_a_turn_that_was_cut_off_says_so(reason: str, finish: str) -> None:
    # Whichever role the endpoint names, it is the assistant's turn.
    turn = Bench([completion("a", finish_reason=reason, role="model")]).complete()
    assert (turn.finish_reason, turn.message["role"]) == (finish, "assistant")


@pytest.mark.parametrize(
    "usage",
    [
        {},
        {"prompt_tokens": None, "completion_tokens": "many"},
        {"prompt_tokens": [1]},
        [1, 2],
        "free",
        {"prompt_tokens": -3, "completion_tokens": True},
        {"prompt_tokens": 1e300, "completion_tokens": 1},
    ],
)
def test_an_answer_that_was_paid_for_is_kept_whatever_its_usage_says(usage: Any) -> None:
    turn = Bench([completion("7", usage=usage)]).complete()

    assert turn.message["content"] == "7"
    assert turn.usage == Usage()


UNREADABLE = [
    body(""),
    body("<html>bad gateway</html>"),
    body('{"choices": ['),
    body('{"choices": []}'),
    body('{"choices": null}'),
    body('{"error": {"message": "overloaded"}}'),
    body('{"choices": [{"message": null}]}'),
    body('{"choices": [{"message": {"content": 7}}]}'),
    body('{"choices": [{"message": {"content": "a", "tool_calls": [{"function": {}}]}}]}'),
    body('{"choices": [{"message": {"content": "a"}, "finish_reason": "error"}]}'),
    body('data: {"choices": []}\n\ndata: [DONE]\n'),
    body(b'{"choices": [{"message": {"content": "\xff"}}]}'),
    body('{"choices": [{"message": {"content": "a", "x": ' + "[" * 10_000 + "]" * 10_000 + "}}]}"),
    body("[" * 100_000),
]


@pytest.mark.parametrize("unreadable", UNREADABLE)
def test_an_unreadable_response_is_requested_again(unreadable: httpx.Response) -> None:
    bench = Bench([unreadable, completion("7")])

    assert bench.complete().message["content"] == "7"
    assert len(bench.requests) == 2


def test_what_an_endpoint_says_instead_of_a_turn_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_TEST_KEY", "sk-canary")
    text = '{"error": {"message": "no GPU is free for sk-canary", "code": 502}}'
    bench = Bench([body(text)] * MAX_ATTEMPTS)

    with pytest.raises(CallFailedError) as caught:
        bench.complete()
    assert "no GPU is free for [key]" in caught.value.message


FAILURES: list[tuple[Callable[[], httpx.Response | Exception], FailureClass]] = [
    (lambda: limited(status=500), FailureClass.SERVER_ERROR),
    (lambda: limited(status=503), FailureClass.SERVER_ERROR),
    (lambda: limited(status=408), FailureClass.SERVER_ERROR),
    (lambda: limited(status=599), FailureClass.SERVER_ERROR),
    (lambda: TimeoutError("slow"), FailureClass.TIMEOUT),
    (lambda: NotConnectedError("timed out after 30 s"), FailureClass.CONNECTION),
    (lambda: NotConnectedError("refused"), FailureClass.CONNECTION),
    (lambda: ConnectionFailedError("reset"), FailureClass.CONNECTION),
    (lambda: body("<html>"), FailureClass.BAD_RESPONSE),
    (lambda: UnreadableReplyError("not gzip"), FailureClass.BAD_RESPONSE),
]


@pytest.mark.parametrize(("fail", "kind"), FAILURES)
def test_a_passing_failure_is_tried_again_and_a_lasting_one_told_by_its_class(
    fail: Callable[[], httpx.Response | Exception], kind: FailureClass
) -> None:
    passing = Bench([fail() for _ in range(MAX_ATTEMPTS - 1)] + [completion("7")])
    assert passing.complete().message["content"] == "7"
    assert len(passing.waits) == MAX_ATTEMPTS - 1

    lasting = Bench([fail() for _ in range(MAX_ATTEMPTS)])
    with pytest.raises(CallFailedError) as caught:
        lasting.complete()
    assert caught.value.kind is kind
    assert f"({MAX_ATTEMPTS} attempts)" in caught.value.message
    assert len(lasting.waits) == MAX_ATTEMPTS - 1
    for attempt, wait in enumerate(lasting.waits, start=1):
        assert 0.25 * 2**attempt <= wait <= 0.5 * 2**attempt


@pytest.mark.parametrize(
    ("header", "low", "high"),
    [
        ("3", 3, 3),
        ("0.25", 0.25, 0.25),
        ("0", 0, 0),
        ("-5", 0, 0),
        ("nan", 0, 1),
        ("soon", 0.5, 1),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0, 0),
        ("", 0.5, 1),
    ],
)
def test_the_time_an_endpoint_names_is_waited(header: str, low: float, high: float) -> None:
    for status in (429, 503):
        bench = Bench([limited(header, status=status), completion()])
        bench.complete()
        [wait] = bench.waits
        assert low <= wait <= high + (0.02 if status == 429 else 0)


def test_a_date_to_come_back_is_read() -> None:
    bench = Bench(
        [limited(format_datetime(datetime.now(UTC) + timedelta(seconds=90))), completion()]
    )
    bench.complete()
    assert 80 <= bench.waits[0] <= 90


def test_a_call_waits_for_a_rate_limit_longer_than_it_is_tried_again_after_failures() -> None:
    bench = Bench([limited("10")] * (MAX_ATTEMPTS + 3) + [completion("7")])
    assert bench.complete().message["content"] == "7"
    assert bench.waits == [10.0] * (MAX_ATTEMPTS + 3)


@pytest.mark.parametrize("header", [None, "0", "30", "3600", "inf"])
def test_no_call_waits_for_a_rate_limit_for_ever(header: str | None) -> None:
    bench = Bench([limited(header)] * 100)
    with pytest.raises(CallFailedError) as caught:
        bench.complete()
    assert caught.value.kind is FailureClass.RATE_LIMIT
    assert sum(bench.waits) <= MAX_RATE_LIMIT_WAIT_S
    assert len(bench.waits) < 100


@pytest.mark.parametrize("status", [400, 413, 422, 301, 307, 204])
def test_a_request_refused_as_such_is_not_sent_again(status: int) -> None:
    answer = body("no such thing", status=status, location="https://elsewhere.test/v1")
    bench = Bench([answer])

    with pytest.raises(CallFailedError) as caught:
        bench.complete()
    assert caught.value.kind is FailureClass.BAD_REQUEST
    assert f"HTTP {status}" in caught.value.message
    assert ("elsewhere.test" in caught.value.message) == (300 <= status < 400)
    assert bench.waits == []


@pytest.mark.parametrize(
    ("status", "text"), [(401, "TEACHER_TEST_KEY"), (403, "TEACHER_TEST_KEY"), (404, "base_url")]
)
def test_a_refused_key_or_model_is_an_error_of_the_whole_run(status: int, text: str) -> None:
    bench = Bench([body("no", status=status)])

    with pytest.raises(TeacherError) as caught:
        bench.complete()
    assert text in caught.value.fix
    assert "teacher.test" in caught.value.problem
    assert bench.waits == []


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (402, "Insufficient credits"),
        (429, '{"error": {"code": "insufficient_quota"}}'),
        (400, "Your credit balance is too low to access the API"),
    ],
)
def test_an_account_without_credit_ends_the_run_instead_of_failing_all_of_it(
    status: int, text: str
) -> None:
    bench = Bench([body(text, status=status)])

    with pytest.raises(TeacherError) as caught:
        bench.complete()
    assert "no credit" in caught.value.problem
    assert "resumes from here" in caught.value.fix
    assert bench.waits == []


def test_a_server_without_tool_calls_is_refused_with_the_flags_that_it_lacks() -> None:
    words = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
    bench = Bench([body(words, status=400)])

    with pytest.raises(TeacherError) as caught:
        bench.complete(tools=[SCHEMA])
    assert words in caught.value.problem
    assert "--enable-auto-tool-choice --tool-call-parser" in caught.value.fix


def test_one_prompt_that_is_forbidden_fails_alone() -> None:
    flagged = body("this input was flagged by moderation", status=403)
    for script in ([flagged], [completion("7"), body("no", status=403)]):
        bench = Bench(script)

        async def main(bench: Bench = bench, num_calls: int = len(script)) -> None:
            for _ in range(num_calls):
                await bench.teacher.complete([user("hi")], [])

        with pytest.raises(CallFailedError) as caught:
            run_async(main)
        assert caught.value.kind is FailureClass.BAD_REQUEST


@pytest.mark.parametrize("status", [400, 401, 429])
def test_a_key_that_an_endpoint_repeats_is_not_passed_on(
    monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setenv("TEACHER_TEST_KEY", "sk-canary")
    # Where a message is cut, the first half of a key could be left.
    text = "x" * 294 + "sk-canary"
    bench = Bench([body(text, status=status)] * 100)

    with pytest.raises((CallFailedError, TeacherError)) as caught:
        bench.complete()
    assert "sk-c" not in str(caught.value)


def test_an_endpoint_that_never_answers_runs_into_the_deadline() -> None:
    bench = Bench([SILENCE] * MAX_ATTEMPTS, calls=CallSettings(timeout_s=0.01))

    with pytest.raises(CallFailedError) as caught:
        bench.complete()
    assert caught.value.kind is FailureClass.TIMEOUT


def test_a_conversation_is_sent_whole_with_each_turn() -> None:
    """What Google's models sign is sent back in its place."""
    signed = {"google": {"thought_signature": "c2lnbmVk"}}
    call = {**tool_call(), "extra_content": signed}
    first = completion(None, tool_calls=[call], finish_reason="tool_calls", extra_content=signed)
    bench = Bench([first, completion("7")])

    bench.converse(tools=[SCHEMA])
    answered = {**assistant(None, call), "extra_content": signed}
    assert bench.bodies[1]["messages"] == [user("hi"), answered, tool_reply("7")]


def seeds_of(seed: int | None, keys: Sequence[str]) -> list[int | None]:
    bench = Bench([completion()] * len(keys), seed=seed)

    async def main() -> None:
        async with bench.teacher as teacher:
            for key in keys:
                async with teacher.converse([user("hi")], [], seed_key=key) as conversation:
                    await conversation.sample()

    run_async(main)
    return [sent.get("seed") for sent in bench.bodies]


def test_each_sample_has_a_seed_of_its_own_that_comes_back() -> None:
    keys = ["a:0", "a:1", "b:0"]
    seeds = seeds_of(7, keys)

    assert len(set(seeds)) == 3
    assert all(isinstance(seed, int) and 0 <= seed < 2**31 for seed in seeds)
    assert seeds_of(7, keys) == seeds
    assert set(seeds_of(8, keys)).isdisjoint(seeds)
    assert seeds_of(None, keys) == [None] * 3


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["choices", "message", "content", "tool_calls", "usage", "function"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=10,
)


@given(st.binary(max_size=30) | JSON.map(lambda value: json.dumps(value).encode()))
def test_no_body_of_any_shape_is_more_than_a_failed_call(content: bytes) -> None:
    bench = Bench([body(content) for _ in range(MAX_ATTEMPTS)])

    try:
        turn = bench.complete()
    except CallFailedError as error:
        kind = error.kind
    else:
        assert turn.message["role"] == "assistant"
        return
    assert kind is FailureClass.BAD_RESPONSE


PRICE = Price(prompt=1000, completion=10_000)
OPENROUTER = Endpoint("http://teacher.test/v1", None, PROVIDERS["openrouter"])


def test_without_a_price_only_the_endpoint_can_say_what_a_call_costs() -> None:
    reported = {"prompt_tokens": 10, "completion_tokens": 5, "cost": 0.25}
    bench = Bench([completion()])

    assert bench.complete().cost_usd is None
    assert bench.teacher.spending.budget.spent == Cost(tokens=15)
    assert Bench([completion(usage=reported)]).complete().cost_usd == 0.25
    assert Bench([completion(usage={**reported, "cost": 0})]).complete().cost_usd == 0.0


@pytest.mark.parametrize(
    ("cost", "cost_usd"),
    [
        (0.25, 0.25),
        (2, 2.0),
        (0, 0.06),
        (None, 0.06),
        ("0.25", 0.06),
        (True, 0.06),
        (-1, 0.06),
        ({"usd": 1}, 0.06),
    ],
)
def test_what_an_endpoint_says_of_the_cost_comes_first_if_it_can_be_one(
    cost: Any, cost_usd: float
) -> None:
    usage = {"prompt_tokens": 10, "completion_tokens": 5, "cost": cost}
    bench = Bench([completion(usage=usage)], spending=Spending(PRICE))

    assert bench.complete().cost_usd == pytest.approx(cost_usd)
    assert bench.teacher.spending.budget.spent.usd == pytest.approx(cost_usd)


REASONED = {
    "reasoning": "hm",
    "reasoning_content": "hm",
    "reasoning_details": [{"type": "reasoning.encrypted", "data": "x"}],
}


@pytest.mark.parametrize(
    ("endpoint", "sends_thinking_back", "goes_back"),
    [
        (ENDPOINT, False, ()),
        (ENDPOINT, True, tuple(REASONED)),
        (OPENROUTER, False, ("reasoning_details",)),
        (OPENROUTER, True, tuple(REASONED)),
    ],
)
@pytest.mark.parametrize("is_restored", [False, True])
def test_reasoning_is_kept_and_goes_back_only_where_it_is_wanted(
    endpoint: Endpoint, sends_thinking_back: bool, goes_back: tuple[str, ...], is_restored: bool
) -> None:
    first = completion(None, tool_calls=[tool_call()], finish_reason="tool_calls", **REASONED)
    calls = CallSettings(timeout_s=5.0, sends_thinking_back=sends_thinking_back)
    bench = Bench([first, completion("7")], endpoint=endpoint, calls=calls)

    restored = bench.complete() if is_restored else None
    turn, _ = bench.converse(restored=restored)

    assert turn.message == {**assistant(None, tool_call()), **REASONED}
    wanted = {key: REASONED[key] for key in goes_back}
    assert bench.bodies[1]["messages"][1] == {**assistant(None, tool_call()), **wanted}


def test_malformed_arguments_go_back_so_that_a_server_can_read_them() -> None:
    call = tool_call(arguments='{"item": "la')
    bench = Bench([completion(None, tool_calls=[call]), completion("7")])

    turn, _ = bench.converse()
    # What the model wrote is kept.
    assert turn.message == assistant(None, call)
    [sent] = bench.bodies[1]["messages"][1]["tool_calls"]
    assert sent == tool_call(arguments='{"malformed":"{\\"item\\": \\"la"}')


TOO_LONG = [
    "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens",
    '{"error": {"code": "context_length_exceeded"}}',
    "prompt is too long: 210000 tokens > 200000 maximum",
    "The input token count (1200000) exceeds the maximum number of tokens allowed",
    "the request exceeds the available context size",
]


@pytest.mark.parametrize("text", TOO_LONG)
def test_a_conversation_that_fills_the_context_ends_there_and_does_not_fail(text: str) -> None:
    first = completion(None, tool_calls=[tool_call()])
    bench = Bench([first, body(text, status=400)])

    _, turn = bench.converse("7" * 1000)
    assert (turn.finish_reason, turn.usage, turn.cost_usd) == ("context", Usage(), 0.0)
    assert turn.message == assistant("")
    # A prompt that is too long by itself is another matter.
    with pytest.raises(CallFailedError) as caught:
        Bench([body(text, status=400)]).complete()
    assert caught.value.kind is FailureClass.BAD_REQUEST


def test_the_form_of_an_answer_is_asked_for() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": {}}}
    bench = Bench([completion("{}")])

    async def main() -> None:
        async with bench.teacher as teacher:
            await teacher.complete([user("hi")], [], response_format=form)

    run_async(main)
    assert bench.bodies[0]["response_format"] == form


MAY_BE_BILLED: list[Callable[[], httpx.Response | Exception]] = [
    lambda: TimeoutError("slow"),
    lambda: ConnectionFailedError("reset"),
    lambda: body("<html>"),
    lambda: UnreadableReplyError("not gzip"),
]
COSTS_NOTHING: list[Callable[[], httpx.Response | Exception]] = [
    lambda: limited(status=500),
    lambda: limited(status=503),
    lambda: limited("0"),
    lambda: NotConnectedError("refused"),
    lambda: NotConnectedError("timed out after 30 s"),
]


def spent_after(fail: Callable[[], httpx.Response | Exception]) -> Bench:
    bench = Bench([fail(), completion()], spending=Spending(PRICE), max_tokens=20)
    assert bench.complete().cost_usd == pytest.approx(0.06)
    assert bench.teacher.spending.budget.reserved == Cost()
    return bench


@pytest.mark.parametrize("fail", MAY_BE_BILLED)
def test_a_call_that_may_have_been_billed_counts_at_its_worst(
    fail: Callable[[], httpx.Response | Exception],
) -> None:
    bench = spent_after(fail)

    num_bytes = len(bench.requests[0].content)
    worst = (num_bytes * 1000 + 20 * 10_000) / 1e6
    budget = bench.teacher.spending.budget
    assert budget.unconfirmed == Cost(num_bytes + 20, pytest.approx(worst))
    assert budget.spent == Cost(num_bytes + 20 + 15, pytest.approx(worst + 0.06))


@pytest.mark.parametrize("fail", COSTS_NOTHING)
def test_a_call_that_was_refused_costs_nothing(
    fail: Callable[[], httpx.Response | Exception],
) -> None:
    budget = spent_after(fail).teacher.spending.budget

    assert budget.unconfirmed == Cost()
    assert budget.spent == Cost(15, pytest.approx(0.06))


UNCOUNTED: Any = [
    None, "free", {}, {"prompt_tokens": 9},
    # So few tokens cannot be those of the text.
    {"prompt_tokens": 0, "completion_tokens": 0}, {"prompt_tokens": 9, "completion_tokens": 1},
]  # fmt: skip


@pytest.mark.parametrize("usage", UNCOUNTED)
def test_an_answer_that_does_not_say_what_it_took_counts_at_its_worst(usage: Any) -> None:
    reported = completion("12" * 200, usage=usage or {})
    bench = Bench([reported], spending=Spending(PRICE, Budget(usd=1.0)), max_tokens=20)

    assert bench.complete().cost_usd is None
    num_bytes = len(bench.requests[0].content)
    worst = Cost(num_bytes + 20, pytest.approx((num_bytes * 1000 + 20 * 10_000) / 1e6))
    budget = bench.teacher.spending.budget
    assert (budget.spent, budget.unconfirmed, budget.reserved) == (worst, worst, Cost())


def test_calls_that_report_no_tokens_for_their_texts_do_not_pass_a_budget() -> None:
    usage = {"prompt_tokens": 0, "completion_tokens": 0}
    budget = Budget(usd=1.0)
    bench = Bench(
        [completion("12", usage=usage)] * 60, spending=Spending(PRICE, budget), max_tokens=20
    )

    with pytest.raises(BudgetSpentError):
        [bench.complete() for _ in range(60)]
    assert len(bench.requests) < 5


def test_a_prompt_of_no_tokens_is_counted_by_its_size() -> None:
    usage = {"prompt_tokens": 0, "completion_tokens": 5}
    turn = (bench := Bench([completion(usage=usage)])).complete()

    size = len(bench.requests[0].content)
    assert turn.usage == Usage(prompt_tokens=math.ceil(size / 4), completion_tokens=5)


def test_dollars_that_are_told_count_where_the_tokens_are_not() -> None:
    bench = Bench([completion(usage={"cost": 0.25})], spending=Spending(PRICE), max_tokens=20)

    assert bench.complete().cost_usd == 0.25
    budget = bench.teacher.spending.budget
    assert (budget.spent.usd, budget.unconfirmed.usd) == (0.25, 0.0)
    assert budget.spent.tokens == len(bench.requests[0].content) + 20


def test_thinking_that_only_the_total_counts_is_paid_for() -> None:
    usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 115}
    bench = Bench([completion(usage=usage)], spending=Spending(PRICE))

    turn = bench.complete()
    assert turn.usage == Usage(prompt_tokens=10, completion_tokens=105)
    assert turn.cost_usd == pytest.approx(1.06)


@pytest.mark.parametrize("minutes", [math.inf, 0.002])
def test_of_two_cancelled_calls_only_the_one_that_was_sent_may_have_been_billed(
    minutes: float,
) -> None:
    """The endpoint never answers the first call, and the second one waits for its place."""
    calls = CallSettings(timeout_s=60, limits=LimitSettings(initial_in_flight=1, max_in_flight=1))
    budget = Budget(minutes=minutes)
    bench = Bench([SILENCE], calls=calls, spending=Spending(budget=budget))

    async def main() -> str | None:
        async with bench.teacher as teacher, anyio.create_task_group() as group:
            group.start_soon(teacher.complete, [user("hi")], [])
            while not bench.requests:
                await anyio.lowlevel.checkpoint()
            try:
                with anyio.move_on_after(0.05 if minutes == math.inf else 60):
                    await teacher.complete([user("hi")], [])
                return None
            except BudgetSpentError as spent:
                return spent.limit
            finally:
                group.cancel_scope.cancel()

    assert run_async(main) == (None if minutes == math.inf else "max_minutes")
    assert budget.unconfirmed == budget.spent
    assert SamplingSettings().max_tokens < budget.spent.tokens < 2 * SamplingSettings().max_tokens
    assert (budget.reserved, budget.num_reserved) == (Cost(), 0)


def test_no_call_waits_for_a_rate_limit_longer_than_the_minutes_of_the_run() -> None:
    spending = Spending(budget=Budget(minutes=0.001))
    with pytest.raises(BudgetSpentError) as caught:
        Bench([limited("600")], spending=spending, sleep=anyio.sleep).complete()
    assert caught.value.limit == "max_minutes"


OPENROUTER_USAGE = {"prompt_tokens": 10, "completion_tokens": 5}


@pytest.mark.parametrize(
    ("usage", "cost_usd"),
    [
        ({"cost": 0, "is_byok": True, "upstream_inference_cost": 1.1}, 1.1),
        ({"cost": 0, "is_byok": True, "cost_details": {"upstream_inference_cost": 1.1}}, 1.1),
        ({"cost": 0.05, "is_byok": True, "cost_details": {"upstream_inference_cost": 1.1}}, 1.15),
        ({"cost": 0.05, "cost_details": {"upstream_inference_cost": 1.1}}, 1.15),
        ({"cost": 0.3, "is_byok": False, "cost_details": {"upstream_inference_cost": 9}}, 0.3),
        ({"cost": 0.3, "is_byok": False, "cost_details": {"upstream_inference_cost": None}}, 0.3),
        # Nothing says what the other provider bills, so it is what the tokens cost by the list.
        ({"cost": 0, "is_byok": True}, 0.06),
        ({"cost": 0.01, "is_byok": True, "cost_details": {}}, 0.06),
        ({"cost": 0}, 0.06),
    ],
)
def test_a_call_with_ones_own_key_costs_what_the_other_provider_bills(
    usage: dict[str, Any], cost_usd: float
) -> None:
    reported = completion(usage={**OPENROUTER_USAGE, **usage})
    bench = Bench([reported], spending=Spending(PRICE, Budget(usd=5)), max_tokens=20)

    assert bench.complete().cost_usd == pytest.approx(cost_usd)
    assert bench.teacher.spending.budget.spent.usd == pytest.approx(cost_usd)


def test_a_budget_holds_where_ones_own_key_is_billed_elsewhere() -> None:
    usage = {**OPENROUTER_USAGE, "cost": 0, "is_byok": True, "upstream_inference_cost": 1.1}
    budget = Budget(usd=1.5)
    bench = Bench([completion(usage=usage)] * 20, spending=Spending(PRICE, budget), max_tokens=20)

    bench.complete()
    with pytest.raises(BudgetSpentError):
        bench.complete()
    assert budget.spent.usd == pytest.approx(1.1)


ECHOED = "sk-canary/5f+2d81=c0"


@pytest.mark.parametrize("form", ["plain", "escaped", "percent", "base64", "urlsafe", "offset"])
def test_a_key_that_an_answer_repeats_is_taken_out_of_all_its_parts(
    monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setenv("TEACHER_TEST_KEY", ECHOED)
    echo = {
        "plain": ECHOED,
        "escaped": ECHOED,
        "percent": quote(ECHOED, safe=""),
        "base64": base64.b64encode(f"Bearer {ECHOED}".encode()).decode(),
        "urlsafe": base64.urlsafe_b64encode(f"{ECHOED}!".encode()).decode(),
        "offset": base64.b64encode(f"ab{ECHOED}cd".encode()).decode(),
    }[form]
    call = {"id": echo, "function": {"name": f"f_{echo}", "arguments": json.dumps({"a": echo})}}
    message = {"content": f"You sent {echo}.", "reasoning": echo, "tool_calls": [call]}
    choice = {"message": message, "finish_reason": "stop"}
    text = json.dumps({"model": f"m {echo}", "system_fingerprint": echo, "choices": [choice]})
    if form == "escaped":
        text = text.replace("sk-canary", "\\u0073k-c\\u0061nary").replace("/", "\\/")

    turn = Bench([body(text)]).complete()

    shown = msgspec.json.encode(turn).decode()
    assert "You sent" in shown
    for hidden in (ECHOED, "canary", "5f+2", echo, echo[4:-4]):
        assert hidden not in shown
