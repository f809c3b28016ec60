"""A teacher behind an OpenAI-compatible chat completions endpoint."""

import hashlib
import math
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Self, cast

import anyio
import msgspec

from stillroom.data.chat.tool_calls import message_with_calls
from stillroom.errors import CallFailedError, FailureClass, TeacherError
from stillroom.secrecy.redaction import Redactor
from stillroom.teachers.budget import NO_COST, Budget, Cost, Overrun
from stillroom.teachers.endpoint.attempts import (
    MAX_QUOTED_CHARS,
    Attempts,
    Retry,
    open_channel,
    post_once,
    retry_of,
    retry_unreadable,
    run_limited,
    text_of,
)
from stillroom.teachers.endpoint.http_channel import HttpChannel, HttpReply, RedactedChannel
from stillroom.teachers.endpoint.replies import (
    REASONING_KEYS,
    UnreadableTurnError,
    is_context_error,
    is_credit_error,
    is_moderation_error,
    is_tool_parser_error,
    read_turn,
    readable_arguments,
)
from stillroom.teachers.limits.allowance import allowances
from stillroom.teachers.limits.limit_types import LimitSettings, SentRequest
from stillroom.teachers.limits.limiter import Limiter
from stillroom.teachers.pricing import FREE, Price
from stillroom.teachers.providers import Endpoint, sampling_fields
from stillroom.types import (
    Answerer,
    Message,
    SampledTurn,
    SamplingSettings,
    TokenTrace,
    ToolCall,
    ToolSchema,
    Usage,
)

_BYTES_PER_TOKEN = 4.0
"""The approximate size of a token, for the limiter and for prompts whose usage is not reported."""
_RETURNED_REASONING_KEYS = ("reasoning_details",)
"""The message keys with reasoning that are sent back to providers that need it."""


@dataclass(frozen=True, slots=True)
class CallSettings:
    """The settings with which an endpoint is called."""

    timeout_s: float = 120.0
    """The seconds within which a complete response must arrive."""
    limits: LimitSettings = field(default_factory=LimitSettings)
    sends_thinking_back: bool = False
    """Whether all earlier reasoning is sent back, even if the provider does not require it."""


@dataclass(frozen=True, slots=True)
class Spending:
    """The price of a model's tokens and the budget for its calls."""

    price: Price | None = None
    """The price of the tokens; None if it is unknown."""
    budget: Budget = field(default_factory=Budget)

    def of(self, usage: Usage | None, reported_usd: float | None) -> float | None:
        """Returns a call's cost in US dollars; None if it is unknown.

        A reported cost takes precedence over one computed from the usage, except a reported 0 for a
        model that has a price.
        """
        if self.price == FREE:
            return reported_usd or 0.0
        if reported_usd or (reported_usd is not None and self.price is None):
            return reported_usd
        return None if self.price is None or usage is None else self.price.of(usage)


@dataclass(frozen=True, slots=True)
class _Answer:
    """A turn, and whether the endpoint reported its token usage."""

    turn: SampledTurn
    has_usage: bool

    def unconfirmed(self, worst: Cost) -> Cost:
        """Returns the possible cost of the call beyond the reported one."""
        if self.has_usage:
            return NO_COST
        return Cost(worst.tokens, worst.usd if self.turn.cost_usd is None else 0.0)


class ConversationTooLongError(CallFailedError):
    """The endpoint refused a conversation because it is longer than the model's context."""


class OpenAITeacher:
    """Samples each turn from an endpoint. Use it as an async context manager.

    The number and rate of calls adapt to the endpoint's rate limits (see `limits`). A rate-limited
    call waits as long as the endpoint asks, at most `MAX_RATE_LIMIT_WAIT_S` in total. A call that
    fails (5xx, timeout, lost connection, unreadable body) is attempted at most `MAX_ATTEMPTS`
    times. A rejected key or an unknown model raises TeacherError and ends the run.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        model: str,
        sampling: SamplingSettings,
        *,
        key: str | None = None,
        calls: CallSettings | None = None,
        spending: Spending | None = None,
        channel: HttpChannel | None = None,
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
    ) -> None:
        self.model, self.sampling = model, sampling
        self._endpoint, self._sleep = endpoint, sleep
        self.calls, self.spending = calls or CallSettings(), spending or Spending()
        self.limiter = Limiter(self.calls.limits)
        self._has_answered = False
        self._overrun = Overrun()
        self._last_answerer: Answerer | None = None
        self._jitter = random.Random(sampling.seed or 0)
        self._fields = {"model": model, **sampling_fields(endpoint, model, sampling)}
        """The fields that all requests have in common."""
        sent_keys = _RETURNED_REASONING_KEYS if endpoint.provider.wants_reasoning_back else ()
        sent_keys = REASONING_KEYS if self.calls.sends_thinking_back else sent_keys
        self._unsent_keys = frozenset(REASONING_KEYS) - frozenset(sent_keys)
        unredacted = channel or open_channel(endpoint.chat_url, endpoint.key_headers(key))
        self._channel = RedactedChannel(unredacted, Redactor([key]))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.aclose()

    @asynccontextmanager
    async def converse(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], *, seed_key: str
    ) -> AsyncGenerator["HttpConversation"]:
        """Yields a conversation that begins with `messages`.

        Each request sends the whole conversation. If the endpoint accepts a seed, `seed_key` makes
        the seed differ between conversations.
        """
        takes_seed = self.sampling.seed is not None and self._endpoint.provider.takes_seed
        seed = _conversation_seed(self.sampling.seed or 0, seed_key) if takes_seed else None
        # `weight` says which turns are trained; strict endpoints reject unknown fields.
        initial = [cast("Message", {k: v for k, v in m.items() if k != "weight"}) for m in messages]
        yield HttpConversation(self, initial, list(tools), seed)

    async def complete(
        self,
        messages: list[Message],
        tools: list[ToolSchema],
        *,
        seed: int | None = None,
        response_format: dict[str, Any] | None = None,
    ) -> SampledTurn:
        """Returns the endpoint's next turn after the given messages.

        Raises:
            CallFailedError: every attempt failed, or the endpoint refused this request.
            TeacherError: no call can succeed, e.g. because the key or the model was refused.
            BudgetSpentError: the call might exceed the budget.
        """
        body = self._body(messages, tools, seed, response_format)
        attempts = Attempts(self._jitter)
        while True:
            outcome = await self._limited_attempt(body)
            if isinstance(outcome, _Answer):
                return outcome.turn
            wait_s = attempts.count_failure(outcome)
            with self.spending.budget.within_time():
                await self._sleep(wait_s)

    async def _limited_attempt(self, body: bytes) -> _Answer | Retry:
        """Makes one attempt within the budget and the rate limits, and settles its cost."""
        budget, worst = self.spending.budget, self._worst_case(body)
        await budget.reserve(worst)
        try:
            with budget.within_time():
                sent = await self.limiter.acquire(len(body) / _BYTES_PER_TOKEN)
        except BaseException:
            budget.release(worst)
            raise
        budget.record_sent(worst)
        try:
            outcome = await run_limited(self.limiter, sent, self._attempt(body, sent))
        except (CallFailedError, TeacherError):
            budget.settle(worst, NO_COST)
            raise
        except BaseException:
            # The call was cancelled or failed after it was sent, so it may have been billed.
            budget.settle_unconfirmed(worst)
            raise
        if isinstance(outcome, _Answer):
            billed = Cost.of(outcome.turn.usage, outcome.turn.cost_usd)
            self._overrun.record(
                outcome.turn, len(body), self.sampling.max_tokens, self.spending.price
            )
            budget.settle(worst, billed, unconfirmed=outcome.unconfirmed(worst))
        elif outcome.may_be_billed:
            budget.settle_unconfirmed(worst)
        else:
            budget.settle(worst, NO_COST)
        return outcome

    def _worst_case(self, body: bytes) -> Cost:
        """Returns the most that a request is expected to cost.

        A prompt has at most one token per byte of the request. The largest overrun of earlier
        responses is added: providers add their own texts, count images, do not limit thinking by
        `max_tokens`, or charge a higher price.
        """
        overrun = self._overrun
        usage = Usage(
            prompt_tokens=len(body) + overrun.prompt_tokens,
            completion_tokens=self.sampling.max_tokens + overrun.completion_tokens,
        )
        price = self.spending.price
        usd = price.of(usage) + overrun.usd if price is not None else 0.0
        return Cost(usage.prompt_tokens + usage.completion_tokens, usd)

    def _body(
        self,
        messages: list[Message],
        tools: list[ToolSchema],
        seed: int | None,
        response_format: dict[str, Any] | None,
    ) -> bytes:
        """Returns the JSON body of a request."""
        body: dict[str, Any] = {**self._fields, "messages": messages}
        if seed is not None:
            body["seed"] = seed
        if tools:
            body["tools"] = tools
        if response_format is not None:
            body["response_format"] = response_format
        return msgspec.json.encode(body)

    def to_request_message(self, message: Message) -> Message:
        """Returns an assistant message in the form that later requests send back.

        Reasoning is left out unless the provider needs it or the settings ask for it.
        """
        sent: Any = {key: value for key, value in message.items() if key not in self._unsent_keys}
        if calls := message.get("tool_calls"):
            sent["tool_calls"] = [_to_request_call(call) for call in calls]
        return sent

    async def _attempt(self, body: bytes, sent: SentRequest) -> _Answer | Retry:
        """Sends a request once; returns its turn, or a Retry if it may succeed when repeated."""
        reply = await post_once(self._channel, body, timeout_s=self.calls.timeout_s)
        if isinstance(reply, Retry):
            return reply
        self.limiter.record_allowances(sent, allowances(reply.headers, datetime.now(UTC)))
        if reply.status == 200:
            return self._read_turn(reply.body, len(body))
        return self._retry_or_raise(reply)

    def _read_turn(self, body: bytes, request_bytes: int) -> _Answer | Retry:
        """Returns the turn in a response body; a Retry if it cannot be read.

        request_bytes: the size of the request in bytes.
        """
        try:
            parsed = read_turn(body)
        except UnreadableTurnError as error:
            return retry_unreadable(error)
        self._has_answered = True
        usage = parsed.usage
        if usage is not None and not usage.prompt_tokens:
            # A prompt has at least one token, but some servers do not count those in their cache.
            usage += Usage(prompt_tokens=math.ceil(request_bytes / _BYTES_PER_TOKEN))
        cost_usd = self.spending.of(usage, parsed.reported_usd)
        turn = SampledTurn(
            message=parsed.message,
            finish_reason=parsed.finish_reason,
            usage=usage or Usage(),
            cost_usd=cost_usd,
            answered_by=self._answerer(parsed.model, parsed.fingerprint),
        )
        return _Answer(turn, has_usage=usage is not None)

    def _answerer(self, model: str | None, fingerprint: str | None) -> Answerer | None:
        """Returns the model that a response names; None if it names none."""
        if model is None:
            return None
        last = self._last_answerer
        # The answerer seldom changes, so rows share one object to save memory.
        if last is None or (last.model, last.fingerprint) != (model, fingerprint):
            self._last_answerer = last = Answerer(model=model, fingerprint=fingerprint)
        return last

    def _retry_or_raise(self, reply: HttpReply) -> Retry:
        """Returns a Retry for an error response if the request may succeed when repeated.

        Raises TeacherError or CallFailedError if it cannot.
        """
        status, text = reply.status, text_of(reply)
        message = f"HTTP {status}: {text[:MAX_QUOTED_CHARS]}"
        where = f"{self._endpoint.base_url} (model {self.model!r})"
        if is_credit_error(status, text):
            raise TeacherError(
                f"{where} has no credit left: {message}",
                "add credit, or lower max_tokens; the same command resumes from here",
            )
        if (retry := retry_of(reply, message)) is not None:
            return retry
        # A 403 is about this prompt, not the key, if the key has worked before or the text says so.
        is_about_prompt = status == 403 and (self._has_answered or is_moderation_error(text))
        if status in (401, 403) and not is_about_prompt:
            raise self._key_error(where, message)
        if status == 404:
            raise TeacherError(
                f"{where} was not found: {message}", "check base_url and the model's name"
            )
        if is_tool_parser_error(text):
            raise TeacherError(
                f"{where} does not support tool calls: {message}",
                "start vLLM with --enable-auto-tool-choice --tool-call-parser PARSER (hermes for "
                "Qwen, llama3_json, mistral, …), or remove the tools; the same command resumes "
                "from here",
            )
        if is_context_error(status, text):
            raise ConversationTooLongError(FailureClass.BAD_REQUEST, message)
        if 300 <= status < 400:
            target = reply.headers.get("location", "no address")[:MAX_QUOTED_CHARS]
            message = f"{message} (a redirect to {target}; set base_url to the new address)"
        raise CallFailedError(FailureClass.BAD_REQUEST, message)

    def _key_error(self, where: str, message: str) -> TeacherError:
        """Returns the error for a missing or rejected API key."""
        name = self._endpoint.api_key_env
        if name is None:
            return TeacherError(
                f"{where} requires an API key: {message}",
                "set api_key_env to the environment variable that holds the key",
            )
        return TeacherError(
            f"{where} rejected the key in {name}: {message}",
            f"check the key in {name} and its permissions",
        )


class HttpConversation:
    """One conversation with an endpoint, held as the list of messages that is sent."""

    def __init__(
        self,
        teacher: OpenAITeacher,
        messages: list[Message],
        tools: list[ToolSchema],
        seed: int | None,
    ) -> None:
        self._teacher, self._messages, self._tools, self._seed = teacher, messages, tools, seed
        self._num_initial = len(messages)

    async def sample(self) -> SampledTurn:
        """Returns the endpoint's next turn; it is empty if earlier turns have filled the context.

        Raises ConversationTooLongError if the initial messages alone exceed the context.
        """
        try:
            turn = await self._teacher.complete(self._messages, self._tools, seed=self._seed)
        except ConversationTooLongError:
            if len(self._messages) == self._num_initial:
                raise
            return _context_full_turn()
        if self._tools:
            names = [tool["function"]["name"] for tool in self._tools]
            message = message_with_calls(turn.message, names, first_call=len(self._messages))
            turn = msgspec.structs.replace(turn, message=message)
        self._messages.append(self._teacher.to_request_message(turn.message))
        return turn

    def add_responses(self, turn: Message, responses: Sequence[Message]) -> None:
        """Appends the tool results, or a user's message, that follow the last turn."""
        self._messages += responses

    def restore(self, turn: SampledTurn) -> None:
        """Appends a turn that was sampled in an earlier process, so that it is not paid for
        again."""
        self._messages.append(self._teacher.to_request_message(turn.message))

    def trace(self) -> TokenTrace | None:
        """Returns None, because an endpoint does not return its token ids."""
        return None


def _context_full_turn() -> SampledTurn:
    """Returns an empty turn that ended because the context is full, as in-process models do."""
    message: Message = {"role": "assistant", "content": ""}
    return SampledTurn(message=message, finish_reason="context", usage=Usage(), cost_usd=0.0)


def _to_request_call(call: ToolCall) -> ToolCall:
    """Returns a tool call in the form that later requests send back: with an arguments object."""
    function = call["function"]
    arguments = readable_arguments(function["arguments"])
    return {**call, "function": {**function, "arguments": arguments}}


def _conversation_seed(seed: int, key: str) -> int:
    """Returns a 31-bit seed from `seed` and `key`, so that a task's samples differ."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{key}".encode()).digest()[:4], "big") >> 1
