"""CUDA graphs of decode steps, which launch all kernels of a step at once.

A step of one token per row is a thousand short kernels, and launching each of them from Python
takes several times as long as running it. A graph is valid for one shape only, so rows and attended
tokens are rounded up; the results for the added rows are discarded.

Shapes: B rows (the first slots of the cache), V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from stillroom.policy.slot_cache import SlotCache

_MIN_ATTENDED = 256


class StepFunction(Protocol):
    """A decode step that can be recorded: it uses only the GPU, at fixed addresses."""

    def __call__(
        self, ids_B: Tensor, starts_B: Tensor, num_attended: int, idle_B: Tensor | None
    ) -> Tensor:
        """Returns the logits after one more token of the first B slots, [B, V]."""
        ...


class Recorder(Protocol):
    """Records a device's work, so that it can be replayed without Python."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Records `work`, and returns a function that replays it on the same memory.

        Recording need not execute `work`. Raises RuntimeError if `work` waits for the device.
        """
        ...


class CudaRecorder:
    """Records CUDA graphs, which share one pool of memory."""

    def __init__(self) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Captures `work` as a CUDA graph, and returns a function that replays it."""
        graph = torch.cuda.CUDAGraph()
        # The outer context restores the stream if recording fails.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            work()
        return graph.replay


def recorder_for(device: torch.device) -> Recorder | None:
    """Returns the recorder of a device; None where launching from Python is cheap."""
    return CudaRecorder() if device.type == "cuda" else None


class StepGraphs:
    """Runs decode steps as graphs, one for each rounded shape, recorded on its first use.

    It keeps no reference to the engine that runs the step: such a cycle would keep the cache's
    memory alive after the engine's last use.
    """

    def __init__(
        self,
        recorder: Recorder,
        step: StepFunction,
        cache: SlotCache,
        *,
        max_rows: int,
        max_context: int,
        device: torch.device,
    ) -> None:
        self._recorder, self._step, self._cache = recorder, step, cache
        self._max_rows, self._max_context, self._device = max_rows, max_context, device
        self._replays: dict[tuple[int, int, bool], Callable[[], None]] = {}
        self._recorded_capacity = 0
        self._ids_B = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._starts_B = torch.zeros_like(self._ids_B)
        self._idle_B = torch.zeros_like(self._ids_B, dtype=torch.bool)
        self._logits_BV: Tensor | None = None
        self.record_error: str | None = None
        """Why the model's steps cannot be recorded; None if no recording has failed."""

    def logits(self, ids: Sequence[int], starts: Sequence[int], idle: Sequence[bool]) -> Tensor:
        """Returns the logits after one more token of each slot, [B, V]; the next call changes them.

        starts: the positions of the tokens; an idle slot's position is the one after its last
        token. idle: which slots are in the step but keep their states.
        """
        rows = rounded_rows(len(ids), limit=self._max_rows)
        attended = rounded_attended(max(starts) + 1, limit=self._max_context)
        padding = [0] * (rows - len(ids))
        # The inputs are copied into the recorded tensors, since a graph reads and writes fixed
        # addresses.
        columns = [[*ids, *padding], [*starts, *padding], [*map(int, idle), *padding]]
        inputs_3B = torch.tensor(columns).to(self._device)
        self._ids_B[:rows], self._starts_B[:rows] = inputs_3B[:2]
        self._idle_B[:rows] = inputs_3B[2].bool()
        # Idle slots' keys and values are written where the next token overwrites them.
        keeps_states = self._cache.is_recurrent and any(idle)
        replay = self._replays.get((rows, attended, keeps_states))
        if replay is not None and self._recorded_capacity == self._cache.capacity:
            replay()
        else:
            self._run_and_record(rows, attended, keeps_states)
        return self._logits_of(rows)[: len(ids)]

    def _run_and_record(self, rows: int, attended: int, keeps_states: bool) -> None:
        """Runs a step of a new shape, and records it for the next time.

        The step runs once before it is recorded, because libraries' first-use initialisation cannot
        be recorded.
        """
        ids_B, starts_B = self._ids_B[:rows], self._starts_B[:rows]
        idle_B = self._idle_B[:rows] if keeps_states else None
        logits_BV = self._step(ids_B, starts_B, attended, idle_B)
        if self._logits_BV is None:
            self._logits_BV = logits_BV.new_zeros(self._max_rows, logits_BV.shape[1])
        self._logits_of(rows).copy_(logits_BV)
        if self._recorded_capacity != self._cache.capacity:
            # The cache has grown, so its keys and values have moved to other addresses.
            self._replays.clear()
            self._recorded_capacity = self._cache.capacity
        if self.record_error is not None:
            return

        def step() -> None:
            self._logits_of(rows).copy_(self._step(ids_B, starts_B, attended, idle_B))

        try:
            self._replays[rows, attended, keeps_states] = self._recorder.record(step)
        # A step that reads numbers back from the GPU cannot be recorded.
        except RuntimeError as error:
            self.record_error = str(error).strip().partition("\n")[0]

    def _logits_of(self, rows: int) -> Tensor:
        """Returns the part of the recorded logits tensor that a step of `rows` rows writes."""
        if self._logits_BV is None:
            raise ValueError("no step has been run")
        return self._logits_BV[:rows]


def rounded_rows(num_rows: int, *, limit: int) -> int:
    """Returns the number of rows of a graph: the next power of two, at most `limit`."""
    return min(1 << (num_rows - 1).bit_length(), limit)


def rounded_attended(num_attended: int, *, limit: int) -> int:
    """Returns the number of tokens that a graph attends to: at most a quarter more, or 256 more."""
    step = max(_MIN_ATTENDED, 1 << max(0, (num_attended - 1).bit_length() - 3))
    return max(num_attended, min(-(-num_attended // step) * step, limit))
