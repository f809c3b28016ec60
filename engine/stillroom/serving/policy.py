"""A student that a vLLM server samples: token ids in, token ids and their log-probabilities out."""

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
    """What a server sampled."""

    ids: list[int]
    logprobs: list[float]
    """Nats, at temperature 1."""
    is_finished: bool
    """Whether it ended with a token that ends a turn."""


class ServedPolicy:
    """Asks a vLLM server for each turn, by the tokens so far; nothing is encoded again.

    `model` is how the server calls the student's weights as they are now. What a conversation
    becomes depends on its own seed as far as the server's arithmetic does not on its neighbours.
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
        """Gives a conversation that begins with `messages`; its key and the seed fix its draws."""
        parser = parser_for(self.loaded.tokenizer.chat_template) if tools else None
        given = self.sampling.seed or 0 if seed is None else seed
        prompt = self.renderer.prompt_ids(messages, tools)
        yield ServedConversation(self, prompt, parser, tools, f"{given}:{seed_key}")

    def stop_sampling(self) -> None:
        """Lets no conversation have a further token; half a turn is given up."""
        self._is_stopping = True
        for scope in self._under_way:
            scope.cancel()

    async def next_turn(self, ids: Sequence[int], *, max_tokens: int, seed: int) -> ServedTurn:
        """Returns what the server samples after these tokens.

        Raises:
            CallFailedError: every attempt failed; SamplingStoppedError: sampling stops before.
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
            # A model's own generation config would change what is left out here.
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            # Turns end where the student's do in this process, and nowhere else.
            "ignore_eos": True,
            "stop_token_ids": sorted(self.loaded.stop_ids),
            "logprobs": 1,
            "return_token_ids": True,
            # What servers that do not know `return_token_ids` name tokens by.
            "return_tokens_as_token_ids": True,
            "skip_special_tokens": False,
        }


class ServedConversation:
    """One conversation of a ServedPolicy: its exact tokens."""

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
        """Returns the model's next turn; an empty one where the context is full."""
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
        """Appends what follows the model's last turn: tools' replies, or a user's message."""
        self._give(self._policy.renderer.reply_ids(call, replies, self._tools))

    def restore(self, turn: SampledTurn) -> None:
        """Appends a turn that was sampled earlier, instead of sampling it."""
        self._took(turn)
        self._append(turn.token_ids or [], turn.logprobs or [])

    def add_turn(self, turn: SampledTurn) -> None:
        """Appends a turn that another policy sampled: given tokens, the very same."""
        self._took(turn)
        self._give(turn.token_ids or [])

    def begin_turn(self, begun: BegunTurn) -> None:
        """Makes these the first tokens of the turn to be sampled next."""
        self._append(begun.ids, begun.logprobs)
        self._num_begun = len(begun.ids)

    def begun_turn(self) -> BegunTurn:
        """Returns what there is of a turn that was stopped: what it began with."""
        start = len(self._ids) - self._num_begun
        return BegunTurn(ids=self._ids[start:], logprobs=self._logprobs[start:])

    def limit_turn(self, max_tokens: int) -> None:
        """Bounds the next turn further than the settings do."""
        self._max_tokens = min(max_tokens, self._policy.sampling.max_tokens)

    def set_aside(self) -> None:
        """Does nothing: a server waits for nobody."""

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
    """Returns what was sampled. Raises UnreadableAnswerError for what is not exact tokens."""
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
