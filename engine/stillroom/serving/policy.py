"""Samples the student on a vLLM server: token ids in, token ids and logprobs out."""

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
from stillroom.policy.conversation import TokenConversation
from stillroom.policy.hf import SamplingStoppedError
from stillroom.policy.sequences import TokenHistory
from stillroom.serving.model_server import (
    ModelServerClient,
    UnreadableResponseError,
    decode_response,
)
from stillroom.types import Message, SampledTurn, SamplingSettings, ToolSchema

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
    the server serves the student's current weights. A conversation is reproducible from its seed
    if the server's logits do not depend on the other requests in a batch.
    """

    def __init__(
        self,
        server: ModelServerClient,
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
        self._in_flight: set[anyio.CancelScope] = set()

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
        base_seed = self.sampling.seed or 0 if seed is None else seed
        yield ServedConversation(self, messages, tools, f"{base_seed}:{seed_key}")

    def stop_sampling(self) -> None:
        """Cancels sampling in all conversations; tokens of turns in flight are discarded."""
        self._is_stopping = True
        for scope in self._in_flight:
            scope.cancel()

    async def next_turn(self, ids: Sequence[int], *, max_tokens: int, seed: int) -> ServedTurn:
        """Samples the next turn after the tokens `ids`.

        Raises:
            CallFailedError: every attempt failed, or the server rejected the request.
            SamplingStoppedError: sampling was stopped before the turn was complete.
        """
        body = self._request(ids, max_tokens=max_tokens, seed=seed)
        with anyio.CancelScope() as scope:
            self._in_flight.add(scope)
            try:
                if not self._is_stopping:
                    return await self._server.post(
                        "/v1/completions",
                        body,
                        lambda data: _parse_turn(data, ids),
                        tokens=len(ids),
                    )
            finally:
                self._in_flight.discard(scope)
        raise SamplingStoppedError(FailureClass.INTERNAL, "sampling was stopped")

    def _request(self, ids: Sequence[int], *, max_tokens: int, seed: int) -> dict[str, Any]:
        """Returns the body of a request for the next turn."""
        return {
            "model": self._model,
            "prompt": list(ids),
            "add_special_tokens": False,
            "max_tokens": max_tokens,
            "seed": seed,
            "temperature": self.sampling.temperature,
            # vLLM takes omitted parameters from the model's own generation config.
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            # A turn must end at the same stop tokens as when the student is sampled in-process.
            "ignore_eos": True,
            "stop_token_ids": sorted(self.loaded.stop_ids),
            "logprobs": 1,
            "return_token_ids": True,
            # Servers that do not know `return_token_ids` then return "token_id:17" as the token.
            "return_tokens_as_token_ids": True,
            "skip_special_tokens": False,
        }


class ServedConversation(TokenConversation):
    """One conversation of a ServedPolicy."""

    def __init__(
        self,
        policy: ServedPolicy,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        key: str,
    ) -> None:
        history = TokenHistory(policy.sampling)
        super().__init__(history, policy.loaded, policy.renderer, messages, tools)
        self._policy, self._key = policy, key

    async def sample(self) -> SampledTurn:
        """Samples the model's next turn; it is empty if the context is full.

        The server returns tokens only when the turn is complete, so a cancelled turn keeps only
        the tokens that it started from.
        """
        history = self._history
        num_partial = len(history.ids) - self._start_turn()
        room = self._policy.max_context - len(history.ids)
        max_tokens = min(history.settings.max_tokens - num_partial, room)
        is_finished = False
        if max_tokens > 0:
            digest = hashlib.sha256(f"{self._key}:{self._num_turns}".encode()).digest()
            seed = int.from_bytes(digest[:7], "big")
            turn = await self._policy.next_turn(history.ids, max_tokens=max_tokens, seed=seed)
            history.restore(turn.ids, turn.logprobs)
            is_finished = turn.is_finished
        history.num_partial = 0
        is_full = max_tokens == room
        return self._finished_turn("stop" if is_finished else "context" if is_full else "length")

    def set_aside(self) -> None:
        """Does nothing: the server schedules its conversations itself."""


class _Logprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]


class _Choice(msgspec.Struct):
    finish_reason: str | None
    logprobs: _Logprobs
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]


def _parse_turn(body: bytes, prompt_ids: Sequence[int]) -> ServedTurn:
    """Returns the sampled tokens in a response body.

    Raises UnreadableResponseError if token ids or logprobs are missing or do not match the request.
    """
    choices = decode_response(body, _Completion).choices
    if len(choices) != 1:
        raise UnreadableResponseError(f"expected 1 choice, got {len(choices)}")
    (choice,) = choices
    sampled = choice.logprobs
    ids = choice.token_ids
    if ids is None:
        if not all(token.startswith(_ID_PREFIX) for token in sampled.tokens):
            raise UnreadableResponseError("the response has no token ids; use a newer vLLM")
        ids = [int(token.removeprefix(_ID_PREFIX)) for token in sampled.tokens]
    logprobs = [value for value in sampled.token_logprobs if value is not None and value <= 1e-2]
    if not ids:
        raise UnreadableResponseError("the response has no tokens")
    if len(logprobs) != len(ids):
        raise UnreadableResponseError(f"got {len(ids)} tokens but {len(logprobs)} valid logprobs")
    if choice.prompt_token_ids is not None and choice.prompt_token_ids != list(prompt_ids):
        raise UnreadableResponseError("prompt_token_ids differs from the token ids in the request")
    if choice.finish_reason not in ("stop", "length"):
        raise UnreadableResponseError(f"unexpected finish_reason {choice.finish_reason!r}")
    return ServedTurn(ids, [min(value, 0.0) for value in logprobs], choice.finish_reason == "stop")
