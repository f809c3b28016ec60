"""A policy that samples a model in this process: many conversations share one decode engine."""

import hashlib
import random
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self

import anyio
from anyio import AsyncContextManagerMixin

from stillroom.data.chat.render import ChatRenderer
from stillroom.errors import CallFailedError, FailureClass
from stillroom.models.load import LoadedModel
from stillroom.policy.conversation import TokenConversation
from stillroom.policy.decode import DecodeEngine
from stillroom.policy.sequences import DecodedSequence
from stillroom.reporting import background_tasks
from stillroom.types import Message, SampledTurn, SamplingSettings, ToolSchema

# The maximum seconds that the next step waits for a conversation whose tools are running: quick
# tools keep the batch full, so a seed gives the same rollouts, and slow tools do not delay it.
TOOL_PATIENCE_S = 0.05


class HFPolicy(AsyncContextManagerMixin):
    """A policy that samples from a transformers model. Use as an async context manager.

    The tokens of a conversation depend on its own seed, not on the rest of the batch.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        sampling: SamplingSettings,
        *,
        max_rows: int,
        max_context: int | None = None,
        include_thinking: bool = False,
        variables: Mapping[str, Any] | None = None,
        sampling_lock: anyio.Lock | None = None,
    ) -> None:
        """variables: further variables of the chat template, in addition to the conversation.

        Policies that share a `sampling_lock` sample one after the other, each until none of its
        conversations waits, so that their batches do not depend on how fast either policy is.
        """
        self.loaded, self._sampling = loaded, sampling
        self.renderer = ChatRenderer(
            loaded.tokenizer, include_thinking=include_thinking, variables=variables
        )
        limit = min(loaded.max_context, max_context or loaded.max_context)
        self._engine = DecodeEngine(loaded, max_rows=max_rows, max_context=limit)
        self._waiting: dict[DecodedSequence, anyio.Event] = {}
        # The conversations between two turns (their tools run), with the time when each turn ended.
        self._between_turns: dict[DecodedSequence, float] = {}
        self._requested: list[DecodedSequence] = []
        self._released: list[DecodedSequence] = []
        self._changed = anyio.Event()
        self._sampling_lock = sampling_lock or anyio.Lock()
        self._is_stopping = False
        self._stopped: set[DecodedSequence] = set()

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        async with background_tasks() as tasks:
            tasks.start_soon(self._run_engine)
            yield self

    @asynccontextmanager
    async def converse(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        *,
        seed_key: str,
        seed: int | None = None,
    ) -> AsyncGenerator["HFConversation"]:
        """Yields a conversation that begins with `messages`.

        `seed_key` and the seed (`seed`, or the sampling settings' if it is None) determine its
        random numbers.
        """
        if seed is None:
            seed = self._sampling.seed or 0
        sequence = DecodedSequence(self._sampling, rng=conversation_rng(seed, seed_key))
        conversation = HFConversation(self, sequence, messages, tools)
        self._between_turns[sequence] = time.monotonic()
        try:
            yield conversation
        finally:
            self._waiting.pop(sequence, None)
            self._between_turns.pop(sequence, None)
            self._released.append(sequence)
            self._changed.set()

    async def next_turn(self, sequence: DecodedSequence) -> bool:
        """Waits until the sequence's turn has been sampled; False if sampling stops before that."""
        if self._is_stopping:
            return False
        self.loaded.check_ids([sequence.ids], "a conversation")
        done = self._waiting[sequence] = anyio.Event()
        self._requested.append(sequence)
        self._between_turns.pop(sequence, None)
        self._changed.set()
        await done.wait()
        return sequence not in self._stopped

    def stop_sampling(self) -> None:
        """Stops sampling for all conversations; a partially sampled turn keeps its tokens."""
        self._is_stopping = True
        self._changed.set()

    def set_aside(self, sequence: DecodedSequence) -> None:
        """Lets other conversations continue without this one, which will not need a turn soon."""
        self._between_turns.pop(sequence, None)
        self._changed.set()

    async def _run_engine(self) -> None:
        """Steps the engine as long as a conversation waits for a turn, or is about to."""
        while True:
            while not self._waiting:
                await self._next_change(None)
            async with self._sampling_lock:
                await self._gather_conversations()
                while self._waiting:
                    if self._is_stopping:
                        self._wake_all()
                        break
                    self._submit_requests()
                    self._wake_finished(await anyio.to_thread.run_sync(self._engine.step))
                    await self._gather_conversations()

    def _wake_finished(self, finished: Sequence[DecodedSequence]) -> None:
        """Wakes the conversations whose turn has ended."""
        for sequence in finished:
            # A conversation may have been cancelled during the step.
            if sequence in self._waiting:
                self._between_turns[sequence] = time.monotonic()
                self._waiting.pop(sequence).set()

    def _wake_all(self) -> None:
        """Wakes all waiting conversations, since sampling was stopped."""
        self._stopped.update(self._waiting)
        for done in self._waiting.values():
            done.set()
        self._waiting.clear()

    def _submit_requests(self) -> None:
        """Hands the conversations' requests to the engine.

        This happens only between steps: a step runs in a thread of its own, and the engine is not
        thread-safe.
        """
        for sequence in self._released:
            self._engine.release(sequence)
        for sequence in self._requested:
            if sequence in self._waiting:
                self._engine.request_turn(sequence)
        self._released.clear()
        self._requested.clear()

    async def _gather_conversations(self) -> None:
        """Waits briefly for conversations that are about to ask for their next turn."""
        while self._between_turns:
            patience = min(self._between_turns.values()) + TOOL_PATIENCE_S - time.monotonic()
            if patience <= 0:
                overdue = min(self._between_turns, key=lambda key: self._between_turns[key])
                del self._between_turns[overdue]
                continue
            await self._next_change(patience)

    async def _next_change(self, timeout_s: float | None) -> None:
        """Waits until a conversation's state changes, or until the timeout."""
        with anyio.move_on_after(timeout_s):
            await self._changed.wait()
        self._changed = anyio.Event()


class SamplingStoppedError(CallFailedError):
    """Sampling was stopped before a conversation's turn had ended."""


class HFConversation(TokenConversation):
    """One conversation of an HFPolicy."""

    def __init__(
        self,
        policy: HFPolicy,
        sequence: DecodedSequence,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
    ) -> None:
        super().__init__(sequence, policy.loaded, policy.renderer, messages, tools)
        self._policy, self._sequence = policy, sequence

    async def sample(self) -> SampledTurn:
        """Returns the model's next turn; raises SamplingStoppedError if sampling stops before."""
        self._start_turn()
        if not await self._policy.next_turn(self._sequence):
            raise SamplingStoppedError(FailureClass.INTERNAL, "sampling was stopped")
        return self._finished_turn(self._sequence.finish_reason or "stop")

    def set_aside(self) -> None:
        """Lets other conversations continue without this one, which will not need a turn soon."""
        self._policy.set_aside(self._sequence)


def conversation_rng(seed: int, key: str) -> random.Random:
    """Returns one conversation's random generator, determined by the seed and key."""
    digest = hashlib.sha256(f"{seed}:{key}".encode()).digest()
    return random.Random(int.from_bytes(digest[:16], "big"))
