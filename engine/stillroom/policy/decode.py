"""Batched decoding over one key/value cache: sequences join, pause for tools, and leave.

A sequence is a list of token ids, of which some were given and the others sampled. Sampled tokens
are kept as they are: they are never turned into text and tokenized again.

Shapes: B rows of one forward pass, V vocabulary.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stillroom.models.batches import microbatches
from stillroom.models.lm_head import HeadRunner, token_logprobs
from stillroom.models.load import LoadedModel
from stillroom.models.prefixes import SharedPrefix, shared_prefixes
from stillroom.models.rope import length_class, rope_boundaries
from stillroom.policy.graphs import StepGraphs, recorder_for
from stillroom.policy.passes import SlotPasses, passes_for
from stillroom.policy.sampling import sample_tokens
from stillroom.policy.sequences import DecodedSequence, FinishReason
from stillroom.policy.slots import SlotTable

# Idle rows, which wait for a tool, are included in a pass if they are at most this share of all.
_MAX_IDLE_SHARE = 0.25
# A row's chunk of given tokens waits until this share of the batch's rows has one.
_CHUNK_SHARE = 0.125
_MAX_WAITING_STEPS = 8
_MAX_CHUNK_TOKENS = 16384
# Rows that may not be padded share a pass if their chunks differ by fewer tokens; the rest
# runs token by token. More passes have more overhead, but tokens cost more singly than in chunks.
_MAX_LENGTH_GAP = 6
# A shared prefix of fewer tokens is run again instead of being copied. On a GPU, waiting for the
# sequence that runs it first costs a pass, which takes as long as one of many tokens.
_MIN_SHARED, _MIN_SHARED_CUDA = 16, 1024


class DecodeEngine:
    """Runs many sequences through one model. It is not thread-safe: use one thread at a time."""

    def __init__(self, loaded: LoadedModel, *, max_rows: int, max_context: int) -> None:
        model: Any = loaded.model
        self._device = loaded.device
        self._stop_ids = loaded.stop_ids
        self._tokenizer_size = 1 + max(loaded.tokenizer.get_vocab().values())
        self._max_rows = max_rows
        self._max_context = max_context
        self._passes = passes_for(model, num_slots=max_rows)
        self._head = HeadRunner(model)
        self._boundaries = rope_boundaries(model.config)
        self._graphs = self._step_graphs()
        self._min_shared = _MIN_SHARED_CUDA if self._device.type == "cuda" else _MIN_SHARED
        self._table = SlotTable(
            self._passes.cache,
            max_rows=max_rows,
            min_shared=self._min_shared if self._passes.can_copy else max_context,
            copies_whole_slots=self._passes.is_recurrent,
            boundaries=self._boundaries,
        )
        self._rows: list[DecodedSequence] = []
        self.tokens_run = 0
        """The number of tokens run through the model; a token that is run twice counts twice."""
        self._waiting: list[DecodedSequence] = []
        self._steps_waited = 0

    @property
    def tokens_shared(self) -> int:
        """The number of tokens that were copied from another sequence instead of being run."""
        return self._table.tokens_shared

    @property
    def graph_error(self) -> str | None:
        """Why steps cannot be recorded as CUDA graphs; None if they are, or there is no GPU."""
        return self._graphs.record_error if self._graphs is not None else None

    @property
    def has_work(self) -> bool:
        """Whether a sequence waits for a slot or has a turn to continue."""
        return bool(self._waiting) or any(not s.is_paused for s in self._table.sequences)

    def request_turn(self, sequence: DecodedSequence) -> None:
        """Requests the next turn of a sequence, which later steps sample."""
        sequence.begin_turn()
        if sequence.slot is None:
            self._waiting.append(sequence)

    def release(self, sequence: DecodedSequence) -> None:
        """Removes a sequence from the engine."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        self._table.release(sequence)

    @torch.no_grad()
    def step(self) -> list[DecodedSequence]:
        """Advances every sequence that is ready; returns those whose turn ended (now paused)."""
        self._table.assign_slots(self._waiting)
        self._rows = self._table.sequences
        full = [s for s in self._rows if not s.is_paused and len(s.ids) >= self._max_context]
        finished = [_end_turn(sequence, "context") for sequence in full]
        ready = [s for s in self._rows if not s.is_paused]
        self._drop_outdated_cache(ready)
        chunks = [s for s in ready if self._is_chunk(s)]
        singles = [s for s in ready if not self._is_chunk(s)]
        if chunks and self._is_time_for_chunks(len(chunks), len(singles)):
            advance = self._advance_evenly if self._passes.is_recurrent else self._advance_chunks
            finished += advance(chunks)
        for group in self._groups_by_frequencies(singles):
            finished += self._advance_singles(group)
        for sequence in finished:
            self._rescore(sequence)
        return finished

    def _is_chunk(self, sequence: DecodedSequence) -> bool:
        """Whether a sequence has several tokens to run, or recurrent states to initialise."""
        begins = self._passes.is_recurrent and sequence.num_cached == 0
        return begins or sequence.num_pending > 1

    def _advance_singles(self, singles: Sequence[DecodedSequence]) -> list[DecodedSequence]:
        """Runs one token of each row, along with a few idle rows, and samples the next tokens."""
        running = set(singles)
        idle = [s for s in self._rows if s not in running]
        frequencies = self._frequencies(len(singles[0].ids))
        is_alike = all(self._frequencies(s.num_cached + 1) == frequencies for s in idle)
        if self._graphs is not None and is_alike:
            return self._advance_by_graph(singles, self._graphs)
        # A pass over all slots reads the cache in place, while one over some of them would copy
        # their keys and values. So a few idle rows are included.
        is_few = len(idle) <= _MAX_IDLE_SHARE * len(self._rows)
        is_filled = is_few and is_alike and self._passes.can_fill
        return self._advance(singles, fillers=idle if is_filled else [], num_tokens=1)

    def _is_time_for_chunks(self, num_chunks: int, num_singles: int) -> bool:
        """Whether to run the chunks now, or to wait for more, since every pass has an overhead."""
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

        `twins` are sequences that are equal to another one and copy all its tokens; other sequences
        copy a shared prefix from a sequence that must be run before them.
        """
        new = [sequence for sequence in chunks if self._may_share(sequence)]
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
            for alike in self._groups_by_frequencies(ready):
                for group in _group_by_length(alike):
                    finished += self._advance(group, twins=twins)
            remaining = [sequence for sequence in remaining if sequence not in ready]
        return finished

    def _advance_evenly(self, chunks: Sequence[DecodedSequence]) -> list[DecodedSequence]:
        """Runs chunks of given tokens without padding, for layers that padding would change.

        A prefix that several new sequences share is run once: the row that runs it stops at its
        end, where the others copy it.
        """
        new = [sequence for sequence in chunks if self._may_share(sequence)]
        targets: dict[DecodedSequence, dict[int, list[DecodedSequence]]] = {}
        running = list(chunks)
        for sequence, share in zip(new, shared_prefixes([s.ids for s in new]), strict=True):
            # The last token must be run in any case, because the logits after it are not kept.
            num = min(share.num_tokens, len(sequence.ids) - 1) if share else 0
            if share and self._waits_for_prefix(new[share.index], sequence, num):
                targets.setdefault(new[share.index], {}).setdefault(num, []).append(sequence)
                running.remove(sequence)
        for source in list(targets):
            running += self._copy_to_targets(source, targets)
        finished: list[DecodedSequence] = []
        while running:
            # A row stops at its end, or where other sequences copy from it.
            remaining = {s: min([len(s.ids), *targets.get(s, ())]) - s.num_cached for s in running}
            rows, num_tokens = self._even_rows(remaining)
            sampling = {s for s in rows if s.num_pending == num_tokens}
            finished += self._advance(rows, num_tokens=num_tokens)
            for source in rows:
                running += self._copy_to_targets(source, targets)
            running = [s for s in running if s not in sampling]
        return finished

    def _even_rows(
        self, remaining: Mapping[DecodedSequence, int]
    ) -> tuple[list[DecodedSequence], int]:
        """Returns rows that run the same number of tokens in the next pass, and that number.

        remaining: the number of tokens of each row up to its next stop.
        """
        # New rows run separately, as a model's first pass may differ from later ones.
        long = [s for s in remaining if s.num_cached == 0]
        if not long and self._passes.can_continue:
            long = [s for s in remaining if remaining[s] >= _MAX_LENGTH_GAP]
        if not long:
            return list(remaining), 1
        shortest = min(remaining[s] for s in long)
        rows = [s for s in long if remaining[s] < shortest + _MAX_LENGTH_GAP]
        return rows, min(shortest, max(1, _MAX_CHUNK_TOKENS // len(rows)))

    def _may_share(self, sequence: DecodedSequence) -> bool:
        """Whether a sequence may copy a prefix from another one, or be copied from."""
        is_original = not any(self._frequencies(len(sequence.ids)))
        can_copy = self._passes.can_copy and self._passes.can_continue
        return sequence.is_new and is_original and can_copy

    def _waits_for_prefix(
        self, source: DecodedSequence, target: DecodedSequence, num_tokens: int
    ) -> bool:
        """Whether `target` waits until `source` has run their shared prefix, then copies it."""
        is_worth_it = num_tokens - target.num_cached >= self._min_shared
        return is_worth_it and source.num_cached <= num_tokens

    def _copy_to_targets(
        self,
        source: DecodedSequence,
        targets: dict[DecodedSequence, dict[int, list[DecodedSequence]]],
    ) -> list[DecodedSequence]:
        """Copies a row's tokens to the targets that wait for exactly these, then from each target.

        Returns all sequences that were copied to.
        """
        ready = targets.get(source, {}).pop(source.num_cached, [])
        if ready:
            self._table.share(source, ready, source.num_cached)
        return ready + [
            later for target in ready for later in self._copy_to_targets(target, targets)
        ]

    def _advance(
        self,
        active: Sequence[DecodedSequence],
        *,
        fillers: Sequence[DecodedSequence] = (),
        num_tokens: int | None = None,
        twins: Mapping[DecodedSequence, Sequence[DecodedSequence]] | None = None,
    ) -> list[DecodedSequence]:
        """Runs the active rows' pending tokens; samples one for each row that has no more of them.

        num_tokens: the number of tokens to run of each row; None for all. fillers: idle rows in
        the pass, whose results are discarded. twins: the sequences with the same tokens as a
        row, for each of which a token is sampled too.
        """
        rows = sorted([*active, *fillers], key=_slot)
        running = set(active)
        new_tokens = [row.pending[:num_tokens] if row in running else None for row in rows]
        logits_BV = self._passes.logits(
            [_slot(row) for row in rows], [row.num_cached for row in rows], new_tokens
        )
        logit_rows: list[int] = []
        sampling: list[DecodedSequence] = []
        for index, (row, new) in enumerate(zip(rows, new_tokens, strict=True)):
            if new is None:
                continue
            self.tokens_run += len(new)
            row.num_cached += len(new)
            row.is_new = False
            if row.num_pending:
                continue
            alike = list(twins.get(row, ())) if twins else []
            if alike:
                self._table.share(row, alike, len(row.ids))
            sampling += [row, *alike]
            logit_rows += [index] * (1 + len(alike))
        if not sampling:
            return []
        if logit_rows != list(range(len(rows))):
            logits_BV = logits_BV[logit_rows]
        return self._sample(sampling, logits_BV)

    def _advance_by_graph(
        self, active: Sequence[DecodedSequence], graphs: StepGraphs
    ) -> list[DecodedSequence]:
        """Runs all slots by a graph, even idle ones, and samples a token for each active row."""
        ids = [row.ids[-1] if row.num_pending == 1 else 0 for row in self._rows]
        running = set(active)
        idle = [row not in running for row in self._rows]
        logits_BV = graphs.logits(ids, [row.num_cached for row in self._rows], idle)
        self.tokens_run += len(active)
        for row in active:
            row.num_cached += 1
            row.is_new = False
        if len(active) < len(self._rows):
            logits_BV = logits_BV[[_slot(row) for row in active]]
        return self._sample(active, logits_BV)

    def _step_graphs(self) -> StepGraphs | None:
        """Returns the graphs of decode steps; None where steps are not recorded."""
        passes, recorder = self._passes, recorder_for(self._device)
        if recorder is None or not isinstance(passes, SlotPasses):
            return None
        return StepGraphs(
            recorder,
            passes.step_logits,
            passes.cache,
            max_rows=self._max_rows,
            max_context=self._max_context,
            device=self._device,
        )

    def _frequencies(self, num_tokens: int) -> tuple[int, ...]:
        """Returns a key that is equal for lengths with the same RoPE frequencies."""
        return length_class(self._boundaries, num_tokens)

    def _drop_outdated_cache(self, rows: Sequence[DecodedSequence]) -> None:
        """Drops cached tokens that were run with other RoPE frequencies than a row has now."""
        if self._boundaries:
            for row in rows:
                if self._frequencies(row.num_cached) != self._frequencies(len(row.ids)):
                    row.num_cached = 0

    def _rescore(self, sequence: DecodedSequence) -> None:
        """Recomputes log-probabilities that were sampled with different RoPE frequencies.

        Beyond a RoPE boundary, a pass over the whole conversation gives earlier tokens different
        log-probabilities than when they were sampled. Training compares with that pass.
        """
        first = sequence.sampled.index(True) if any(sequence.sampled) else len(sequence.ids)
        if self._frequencies(first) == self._frequencies(len(sequence.ids)):
            return
        ids_T = torch.tensor(sequence.ids, device=self._device)
        hidden_TH = self._head.hidden(ids_T[None])[0, :-1]
        size = self._head.max_positions
        scores = [
            token_logprobs(self._head.logits(hidden_nH), targets_n)
            for hidden_nH, targets_n in zip(
                hidden_TH.split(size), ids_T[1:].split(size), strict=True
            )
        ]
        for index, logprob in enumerate(torch.cat(scores).tolist(), start=1):
            if sequence.sampled[index]:
                sequence.logprobs[index] = logprob

    def _groups_by_frequencies(
        self, rows: Sequence[DecodedSequence]
    ) -> list[list[DecodedSequence]]:
        """Returns the rows in groups of equal RoPE frequencies, each of which may share a pass."""
        groups: dict[tuple[int, ...], list[DecodedSequence]] = {}
        for row in rows:
            groups.setdefault(self._frequencies(len(row.ids)), []).append(row)
        return list(groups.values())

    def _sample(self, rows: Sequence[DecodedSequence], logits_BV: Tensor) -> list[DecodedSequence]:
        """Appends one sampled token to each row; returns the rows whose turn ended with it."""
        ids, logprobs = sample_tokens(
            logits_BV,
            [row.settings for row in rows],
            [row.rng.random() for row in rows],
            tokenizer_size=self._tokenizer_size,
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
    """Returns the slot of a sequence. Raises ValueError if it has none."""
    if sequence.slot is None:
        raise ValueError("the sequence has no slot")
    return sequence.slot


def _end_turn(sequence: DecodedSequence, reason: FinishReason) -> DecodedSequence:
    """Ends a sequence's turn, and returns the sequence."""
    sequence.end_turn(reason)
    return sequence


def _group_by_length(chunks: Sequence[DecodedSequence]) -> Iterator[list[DecodedSequence]]:
    """Yields groups of chunks of similar length that fit into one pass."""
    lengths = [sequence.num_pending for sequence in chunks]
    for group in microbatches(lengths, max_tokens=_MAX_CHUNK_TOKENS):
        yield [chunks[index] for index in group]
