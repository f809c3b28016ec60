"""Samples the student on a vLLM server, which takes token ids and returns ids and logprobs."""

import hashlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import msgspec

from stillroom.data.chat.render import ChatRenderer
from stillroom.errors import FailureClass
from stillroom.models.load import LoadedModel
from stillroom.policy.hf import SamplingStoppedError
from stillroom.policy.tool_calls import Parser, parser_for
from stillroom.policy.turn_reader import TurnReader
from stillroom.serving.model_server import ModelServer, UnreadableAnswerError
from stillroom.types import (
    BegunTurn,
    Message,
    SampledTurn,
    SamplingSettings,
    TokenTrace,
    ToolSchema,
    Usage,
)

_ID_PREFIX = "token_id:"


@dataclass(frozen=True, slots=True)
class ServedTurn:
    """The tokens that a server sampled for one turn."""

    ids: list[int]
    logprobs: list[float]
    """The log-probability of each token in nats, at temperature 1."""
    is_finished: bool
    """Whether the turn ended with one of the model's stop tokens."""


class ServedPolicy:
    """Samples each turn on a vLLM server by sending the exact tokens of the conversation so far.

    Because token ids are sent, no text is tokenized a second time. `model` is the name under which
    the server serves the student's current weights. A conversation is reproducible from its seed,
    as far as the server computes the same logits whichever other requests share a batch.
    """

    def __init__(
        self,
        server: ModelServer,
        model: str,
        loaded: LoadedModel,
        sampling: SamplingSettings,
        *,
        max_context: int,
        include_thinking: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self.loaded, self.sampling, self.max_context = loaded, sampling, max_context
        self.renderer = ChatRenderer(
            loaded.tokenizer, include_thinking=include_thinking, variables=variables
        )
        self._server, self._model = server, model
        self._is_stopping = False
        self._under_way: set[anyio.CancelScope] = set()

    @asynccontextmanager
    async def converse(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        *,
        seed_key: str,
        seed: int | None = None,
    ) -> AsyncGenerator["ServedConversation"]:
        """Yields a conversation that begins with `messages`.

        `seed_key` and the seed (`seed`, or the sampling settings' if it is None) determine which
        tokens are drawn.
        """
        parser = parser_for(self.loaded.tokenizer.chat_template) if tools else None
        given = self.sampling.seed or 0 if seed is None else seed
        prompt = self.renderer.prompt_ids(messages, tools)
        yield ServedConversation(self, prompt, parser, tools, f"{given}:{seed_key}")

    def stop_sampling(self) -> None:
        """Stops sampling in all conversations; tokens of turns in flight are discarded."""
        self._is_stopping = True
        for scope in self._under_way:
            scope.cancel()

    async def next_turn(self, ids: Sequence[int], *, max_tokens: int, seed: int) -> ServedTurn:
        """Returns the tokens that the server samples after `ids`.

        Raises:
            CallFailedError: every attempt failed, or the server refused the request.
            SamplingStoppedError: sampling was stopped before the turn was complete.
        """
        body = self._request(ids, max_tokens=max_tokens, seed=seed)
        with anyio.CancelScope() as scope:
            self._under_way.add(scope)
            try:
                if not self._is_stopping:
                    return await self._server.post(
                        "/v1/completions", body, lambda answer: _read(answer, ids), tokens=len(ids)
                    )
            finally:
                self._under_way.discard(scope)
        raise SamplingStoppedError(FailureClass.INTERNAL, "sampling was stopped")

    def _request(self, ids: Sequence[int], *, max_tokens: int, seed: int) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": list(ids),
            "add_special_tokens": False,
            "max_tokens": max_tokens,
            "seed": seed,
            "temperature": self.sampling.temperature,
            # For parameters that a request leaves out, vLLM uses the model's own generation config.
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            # A turn must end at the same tokens as when this process samples the student itself.
            "ignore_eos": True,
            "stop_token_ids": sorted(self.loaded.stop_ids),
            "logprobs": 1,
            "return_token_ids": True,
            # Servers that do not know `return_token_ids` then return "token_id:17" as the token.
            "return_tokens_as_token_ids": True,
            "skip_special_tokens": False,
        }


class ServedConversation:
    """One conversation of a ServedPolicy, held as its exact tokens."""

    def __init__(
        self,
        policy: ServedPolicy,
        prompt: Sequence[int],
        parser: Parser | None,
        tools: Sequence[ToolSchema],
        key: str,
    ) -> None:
        self._policy, self._tools, self._key = policy, tools, key
        self._reader = TurnReader(policy.renderer, parser, policy.loaded.stop_ids)
        self._ids: list[int] = []
        self._sampled: list[bool] = []
        self._logprobs: list[float] = []
        self._num_begun = self._num_turns = 0
        self._max_tokens = policy.sampling.max_tokens
        self._give(prompt)

    async def sample(self) -> SampledTurn:
        """Samples and returns the model's next turn; the turn is empty if the context is full."""
        start = len(self._ids) - self._num_begun
        room = self._policy.max_context - len(self._ids)
        most = min(self._max_tokens - self._num_begun, room)
        is_finished = False
        if most > 0:
            digest = hashlib.sha256(f"{self._key}:{self._num_turns}".encode()).digest()
            seed = int.from_bytes(digest[:7], "big")
            turn = await self._policy.next_turn(self._ids, max_tokens=most, seed=seed)
            self._append(turn.ids, turn.logprobs)
            is_finished = turn.is_finished
        self._num_begun = 0
        self._num_turns += 1
        ids = self._ids[start:]
        is_full = most == room
        return SampledTurn(
            message=self._reader.read(ids),
            finish_reason="stop" if is_finished else "context" if is_full else "length",
            usage=Usage(prompt_tokens=start, completion_tokens=len(ids)),
            token_ids=ids,
            logprobs=self._logprobs[start:],
        )

    def reply(self, call: Message, replies: Sequence[Message]) -> None:
        """Appends the messages that follow the model's turn: tool replies or a user message."""
        self._give(self._policy.renderer.reply_ids(call, replies, self._tools))

    def restore(self, turn: SampledTurn) -> None:
        """Appends a turn that this policy sampled earlier, instead of sampling a new one."""
        self._took(turn)
        self._append(turn.token_ids or [], turn.logprobs or [])

    def add_turn(self, turn: SampledTurn) -> None:
        """Appends the exact tokens of a turn that another policy sampled, as tokens not sampled."""
        self._took(turn)
        self._give(turn.token_ids or [])

    def begin_turn(self, begun: BegunTurn) -> None:
        """Starts the next turn with tokens that were sampled before sampling was stopped."""
        self._append(begun.ids, begun.logprobs)
        self._num_begun = len(begun.ids)

    def begun_turn(self) -> BegunTurn:
        """Returns the tokens with which the current turn was begun by `begin_turn`.

        A server's tokens arrive only when the turn is complete, so a stopped turn adds none.
        """
        start = len(self._ids) - self._num_begun
        return BegunTurn(ids=self._ids[start:], logprobs=self._logprobs[start:])

    def limit_turn(self, max_tokens: int) -> None:
        """Limits the turns that follow to `max_tokens`, if the sampling settings allow more."""
        self._max_tokens = min(max_tokens, self._policy.sampling.max_tokens)

    def set_aside(self) -> None:
        """Does nothing, because the server lets no other conversation wait for this one."""

    def trace(self) -> TokenTrace | None:
        """Returns the conversation's tokens so far."""
        return TokenTrace(
            ids=list(self._ids), sampled=list(self._sampled), logprobs=list(self._logprobs)
        )

    def _give(self, ids: Sequence[int]) -> None:
        self._ids += ids
        self._sampled += [False] * len(ids)
        self._logprobs += [0.0] * len(ids)

    def _append(self, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        self._ids += ids
        self._sampled += [True] * len(ids)
        self._logprobs += logprobs

    def _took(self, turn: SampledTurn) -> None:
        self._num_turns += 1
        self._reader.count_calls(turn)


class _Logprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]


class _Choice(msgspec.Struct):
    finish_reason: str | None
    logprobs: _Logprobs
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]


def _read(body: bytes, prompt_ids: Sequence[int]) -> ServedTurn:
    """Returns the sampled tokens that a response holds.

    Raises UnreadableAnswerError if token ids or logprobs are missing or contradict the request.
    """
    try:
        (choice,) = msgspec.json.decode(body, type=_Answer).choices
    except (msgspec.DecodeError, UnicodeError, RecursionError, ValueError) as error:
        raise UnreadableAnswerError(str(error)) from error
    sampled = choice.logprobs
    ids = choice.token_ids
    if ids is None:
        if not all(token.startswith(_ID_PREFIX) for token in sampled.tokens):
            raise UnreadableAnswerError("the sampled tokens' ids did not come; use a newer vLLM")
        ids = [int(token.removeprefix(_ID_PREFIX)) for token in sampled.tokens]
    logprobs = [value for value in sampled.token_logprobs if value is not None and value <= 1e-2]
    if not ids or len(logprobs) != len(ids):
        raise UnreadableAnswerError(f"{len(ids)} tokens came with {len(logprobs)} probabilities")
    if choice.prompt_token_ids is not None and choice.prompt_token_ids != list(prompt_ids):
        raise UnreadableAnswerError("the server read other tokens than it was sent")
    if choice.finish_reason not in ("stop", "length"):
        raise UnreadableAnswerError(f"sampling ended by {choice.finish_reason!r}")
    return ServedTurn(ids, [min(value, 0.0) for value in logprobs], choice.finish_reason == "stop")
