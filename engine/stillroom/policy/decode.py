"""Batched decoding over one key/value cache, where sequences join, pause for tools and leave.

A sequence is a list of token ids, of which some were given and the others sampled. Sampled tokens
are kept as they are: they are never turned into text and tokenized again.

Shapes: B rows of one forward pass, n new tokens of each, T tokens attended to, V vocabulary.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stillroom.errors import ModelError
from stillroom.models.batches import microbatches
from stillroom.models.heads import OutputHead
from stillroom.models.load import LoadedModel
from stillroom.policy.graphs import StepGraphs
from stillroom.policy.kv_cache import ForwardPlan, SlotCache
from stillroom.policy.prefixes import SharedPrefix, shared_prefixes
from stillroom.policy.sampling import sample_tokens
from stillroom.policy.sequences import DecodedSequence, FinishReason
from stillroom.policy.slots import SlotTable

# Rows that pause for a tool are run along with the others up to this share of all rows.
_MAX_IDLE_SHARE = 0.25
# A row's chunk of given tokens waits until this share of the batch's rows has one.
_CHUNK_SHARE = 0.125
_MAX_WAITING_STEPS = 8
_MAX_CHUNK_TOKENS = 16384
# A shared prefix of fewer tokens is run again instead of being copied. On a GPU, waiting for the
# sequence that runs it first costs a pass, which takes as long as one of many tokens.
_MIN_SHARED, _MIN_SHARED_CUDA = 16, 1024


class DecodeEngine:
    """Runs many sequences through one model. It is not thread-safe: use one thread at a time."""

    def __init__(self, loaded: LoadedModel, *, max_rows: int, max_context: int) -> None:
        self._model: Any = loaded.model
        self._head = OutputHead(loaded.model)
        self._device = loaded.device
        self._stop_ids = loaded.stop_ids
        self._num_known = 1 + max(loaded.tokenizer.get_vocab().values())
        self._max_rows = max_rows
        self._max_context = max_context
        config = self._model.config.get_text_config()
        self._has_layer_types = bool(getattr(config, "layer_types", None))
        self._cache = SlotCache(num_layers=config.num_hidden_layers, num_slots=max_rows)
        self._sliding_window = _sliding_window(config)
        self._is_eager = self._model.config._attn_implementation == "eager"
        self._graphs = self._step_graphs()
        self._min_shared = _MIN_SHARED_CUDA if self._device.type == "cuda" else _MIN_SHARED
        self._table = SlotTable(self._cache, max_rows=max_rows, min_shared=self._min_shared)
        self._slots: list[DecodedSequence] = []
        self.tokens_run = 0
        """The number of tokens that were run through the model; a token that is run twice counts
        twice."""
        self._waiting: list[DecodedSequence] = []
        self._steps_waited = 0

    @property
    def tokens_shared(self) -> int:
        """The number of tokens that were copied from another sequence instead of being run."""
        return self._table.tokens_shared

    @property
    def has_work(self) -> bool:
        """Whether a sequence waits for a slot or has a turn to go on with."""
        return bool(self._waiting) or any(not s.is_paused for s in self._table.sequences)

    def ask(self, sequence: DecodedSequence) -> None:
        """Begins the next turn of a sequence, which later steps sample."""
        sequence.begin_turn()
        if sequence.slot is None:
            self._waiting.append(sequence)

    def release(self, sequence: DecodedSequence) -> None:
        """Takes a sequence out of the engine."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        self._table.release(sequence)

    @torch.no_grad()
    def step(self) -> list[DecodedSequence]:
        """Advances every sequence that is ready; returns those whose turn ended (now paused)."""
        self._table.settle(self._waiting)
        self._slots = self._table.sequences
        full = [s for s in self._slots if not s.is_paused and len(s.ids) >= self._max_context]
        finished = [_end_turn(sequence, "context") for sequence in full]
        ready = [s for s in self._slots if not s.is_paused]
        chunks = [s for s in ready if s.num_pending > 1]
        singles = [s for s in ready if s.num_pending == 1]
        if chunks and self._is_time_for_chunks(len(chunks), len(singles)):
            finished += self._advance_chunks(chunks)
        if singles and self._graphs is not None:
            finished += self._advance_by_graph(singles, self._graphs)
        elif singles:
            idle = [s for s in self._slots if s.is_paused or s.num_pending != 1]
            # A pass over all slots reads the cache in place, while one over some of them would copy
            # their keys and values. So a few idle rows are run along.
            is_few = len(idle) <= _MAX_IDLE_SHARE * len(self._slots)
            finished += self._advance(singles, fillers=idle if is_few else [])
        return finished

    def _is_time_for_chunks(self, num_chunks: int, num_singles: int) -> bool:
        """Returns whether to run the chunks now, or collect more, as every pass has an overhead."""
        self._steps_waited += 1
        is_time = (
            num_singles == 0
            or num_chunks >= _CHUNK_SHARE * num_singles
            or self._steps_waited > _MAX_WAITING_STEPS
        )
        if is_time:
            self._steps_waited = 0
        return is_time

    def _advance_chunks(self, chunks: Sequence[DecodedSequence]) -> list[DecodedSequence]:
        """Runs chunks of given tokens; a prefix that several new sequences share is run once.

        In the code `twins` are sequences that equal another one and copy all its tokens; other
        sequences copy a shared prefix from a sequence that must be run before them.
        """
        new = [sequence for sequence in chunks if sequence.is_new]
        shares: dict[DecodedSequence, SharedPrefix] = {}
        twins: dict[DecodedSequence, list[DecodedSequence]] = {}
        for sequence, share in zip(new, shared_prefixes([s.ids for s in new]), strict=True):
            if share is None:
                continue
            source = new[share.index]
            if share.num_tokens == len(sequence.ids) == len(source.ids):
                twins.setdefault(source, []).append(sequence)
            elif share.num_tokens - sequence.num_cached >= self._min_shared:
                shares[sequence] = share
        are_twins = {twin for group in twins.values() for twin in group}
        remaining = [sequence for sequence in chunks if sequence not in are_twins]
        finished: list[DecodedSequence] = []
        while remaining:
            ready = [s for s in remaining if s not in shares or not new[shares[s].index].is_new]
            for sequence in ready:
                if share := shares.get(sequence):
                    self._table.share(new[share.index], [sequence], share.num_tokens)
            for group in _chunk_groups(ready):
                finished += self._advance(group, fillers=[], twins=twins)
            remaining = [sequence for sequence in remaining if sequence not in ready]
        return finished

    def _advance(
        self,
        active: Sequence[DecodedSequence],
        *,
        fillers: Sequence[DecodedSequence],
        twins: Mapping[DecodedSequence, Sequence[DecodedSequence]] | None = None,
    ) -> list[DecodedSequence]:
        """Runs the active rows' pending tokens and samples one token for each of them.

        The results for fillers are thrown away: their keys and values are written behind their last
        token, where the next real token will overwrite them. `twins` of a row have the same tokens
        as the row; a token is sampled for each of them too.
        """
        rows = sorted([*active, *fillers], key=_slot)
        new_tokens = {id(row): row.pending for row in active}
        logits_BV = self._forward(rows, [new_tokens.get(id(row), [0]) for row in rows])
        chosen: list[int] = []
        sampling: list[DecodedSequence] = []
        for index, row in enumerate(rows):
            if id(row) not in new_tokens:
                continue
            self.tokens_run += row.num_pending
            row.num_cached = len(row.ids)
            row.is_new = False
            alike = list(twins.get(row, ())) if twins else []
            if alike:
                self._table.share(row, alike, len(row.ids))
            sampling += [row, *alike]
            chosen += [index] * (1 + len(alike))
        if chosen != list(range(len(rows))):
            logits_BV = logits_BV[chosen]
        return self._sample(sampling, logits_BV)

    def _advance_by_graph(
        self, active: Sequence[DecodedSequence], graphs: StepGraphs
    ) -> list[DecodedSequence]:
        """Runs all slots by a graph, even idle ones, and samples a token for each active row."""
        ids = [row.ids[-1] if row.num_pending == 1 else 0 for row in self._slots]
        logits_BV = graphs.logits(self._step_logits, ids, [row.num_cached for row in self._slots])
        self.tokens_run += len(active)
        for row in active:
            row.num_cached += 1
            row.is_new = False
        if len(active) < len(self._slots):
            logits_BV = logits_BV[[_slot(row) for row in active]]
        return self._sample(active, logits_BV)

    def _step_graphs(self) -> StepGraphs | None:
        if self._device.type != "cuda":
            return None
        return StepGraphs(
            self._cache,
            max_rows=self._max_rows,
            max_context=self._max_context,
            device=self._device,
        )

    def _step_logits(self, ids_B: Tensor, starts_B: Tensor, num_attended: int) -> Tensor:
        """Returns the logits after one more token of the first B slots, [B, V] (without a sync)."""
        rows_B = torch.arange(len(ids_B), device=self._device)
        plan = ForwardPlan(rows_B, starts_B[:, None], num_attended, is_prefix=True)
        return self._head.logits(self._hidden(ids_B[:, None], starts_B[:, None], plan)[:, 0])

    def _forward(
        self, rows: Sequence[DecodedSequence], new_tokens: Sequence[Sequence[int]]
    ) -> Tensor:
        """Returns the logits after each row's last new token, [B, V]."""
        num_new = max(map(len, new_tokens))
        ids_Bn = torch.tensor(
            [[*new, *[0] * (num_new - len(new))] for new in new_tokens], device=self._device
        )
        starts = [row.num_cached for row in rows]
        starts_B = torch.tensor(starts, device=self._device)
        steps_n = torch.arange(num_new, device=self._device)
        slots = [_slot(row) for row in rows]
        plan = ForwardPlan(
            slots_B=torch.tensor(slots, device=self._device),
            positions_Bn=starts_B[:, None] + steps_n,
            num_attended=max(starts) + num_new,
            is_prefix=slots == list(range(len(slots))),
        )
        last_B = torch.tensor([len(new) - 1 for new in new_tokens], device=self._device)
        # Padding repeats the last position, since a position beyond the context might not exist.
        positions_Bn = starts_B[:, None] + steps_n.minimum(last_B[:, None])
        hidden_BnH = self._hidden(ids_Bn, positions_Bn, plan)
        rows_B = torch.arange(len(rows), device=self._device)
        return self._head.logits(hidden_BnH[rows_B, last_B])

    def _hidden(self, ids_Bn: Tensor, positions_Bn: Tensor, plan: ForwardPlan) -> Tensor:
        """Runs the new tokens and adds them to the cache; returns hidden states, [B, n, H]."""
        self._cache.set_plan(plan)
        return self._head.run_body(
            input_ids=ids_Bn,
            position_ids=positions_Bn,
            attention_mask=self._masks(positions_Bn, plan.num_attended),
            past_key_values=self._cache,
            use_cache=True,
        )

    def _masks(self, positions_Bn: Tensor, num_attended: int) -> Any:
        """Returns the new tokens' attention masks, [B, 1, n, T], by layer type if they differ.

        transformers takes a mask of four dimensions as it is. Otherwise it would build one from the
        cache's length, which is one number for all rows, while here each row has its own length.
        """
        keys_T = torch.arange(num_attended, device=self._device)
        queries_Bn1 = positions_Bn[:, None, :, None]
        full = keys_T <= queries_Bn1
        if self._sliding_window is None:
            return self._as_mask(full)
        is_near = full & (keys_T > queries_Bn1 - self._sliding_window)
        if not self._has_layer_types:
            return self._as_mask(is_near)
        return {
            "full_attention": self._as_mask(full),
            "sliding_attention": self._as_mask(is_near),
        }

    def _as_mask(self, allowed: Tensor) -> Tensor:
        if not self._is_eager:
            return allowed
        # Eager attention adds its mask to the scores.
        lowest = torch.finfo(self._model.dtype).min
        return torch.where(allowed, 0.0, lowest).to(self._model.dtype)

    def _sample(self, rows: Sequence[DecodedSequence], logits_BV: Tensor) -> list[DecodedSequence]:
        """Appends one sampled token to each row; returns the rows whose turn ended with it."""
        ids, logprobs = sample_tokens(
            logits_BV,
            [row.settings for row in rows],
            [row.draws.random() for row in rows],
            num_known=self._num_known,
        )
        finished: list[DecodedSequence] = []
        for row, token, logprob in zip(rows, ids, logprobs, strict=True):
            row.ids.append(token)
            row.sampled.append(True)
            row.logprobs.append(logprob)
            row.is_new = False
            if token in self._stop_ids:
                finished.append(_end_turn(row, "stop"))
            elif len(row.ids) - row.turn_start >= row.settings.max_tokens:
                finished.append(_end_turn(row, "length"))
        return finished


def _slot(sequence: DecodedSequence) -> int:
    if sequence.slot is None:
        raise ValueError("the sequence has no slot")
    return sequence.slot


def _end_turn(sequence: DecodedSequence, reason: FinishReason) -> DecodedSequence:
    sequence.end_turn(reason)
    return sequence


def _chunk_groups(chunks: Sequence[DecodedSequence]) -> Iterator[list[DecodedSequence]]:
    lengths = [sequence.num_pending for sequence in chunks]
    for group in microbatches(lengths, max_tokens=_MAX_CHUNK_TOKENS):
        yield [chunks[index] for index in group]


def _sliding_window(config: Any) -> int | None:
    """Returns the window of the sliding layers in tokens, or None if no layer slides."""
    layer_types: list[str] | None = getattr(config, "layer_types", None)
    if not layer_types:
        # In Mistral, Mixtral and Phi a window, if there is one, holds for every layer.
        return getattr(config, "sliding_window", None)
    kinds = set(layer_types)
    unknown = kinds - {"full_attention", "sliding_attention"}
    if unknown:
        raise ModelError(
            f"{config.model_type} has layers of type {', '.join(sorted(unknown))}, which cannot be "
            "sampled in-process",
            "serve the model with vLLM or SGLang and give its URL with provider openai",
        )
    return int(config.sliding_window) if "sliding_attention" in kinds else None
