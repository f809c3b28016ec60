"""Token sequences and their batches: padded rows, or all sequences packed in one row.

Shapes: B sequences, T tokens of the longest, N trained tokens of the whole batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from stillroom.models.kernels import Pack, PackKernel, PackSpan
from stillroom.models.prefixes import group_by_prefix, split_shared_prefixes
from stillroom.models.rope import RopeBoundary, length_class
from stillroom.types import TokenTrace

PassLayout = Literal["packed", "padded", "alone"]
"""packed: all sequences in one row; padded: one row each; alone: one forward pass each."""


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """One conversation as tokens; `trained[i]` says whether `ids[i]` is trained on or scored.

    The first token has no context to be predicted from, so it is never trained on.
    """

    ids: list[int]
    trained: list[bool]
    for_teacher: "TokenSequence | None" = None
    """The same trained tokens after the teacher's own prompt; None if the teacher scores this
    sequence itself."""

    @property
    def num_trained(self) -> int:
        """The number of trained tokens."""
        return sum(self.trained[1:])

    @property
    def trained_ids(self) -> list[int]:
        """The ids of the trained tokens."""
        pairs = zip(self.ids, self.trained, strict=True)
        return [token for token, is_trained in pairs if is_trained]


def sampled_sequence(trace: TokenTrace, for_teacher: TokenTrace | None = None) -> TokenSequence:
    """Returns a rollout as a sequence in which the tokens that the policy sampled are trained on.

    for_teacher: the same rollout after the teacher's own prompt; None if its prompt is the same.
    Tokens after the last sampled one (such as a tool reply that exceeds the context) are dropped:
    no trained token depends on them.
    """
    end = max((i for i, is_sampled in enumerate(trace.sampled, start=1) if is_sampled), default=0)
    teacher_sequence = for_teacher and sampled_sequence(for_teacher)
    return TokenSequence(trace.ids[:end], trace.sampled[:end], teacher_sequence)


@dataclass(frozen=True, slots=True)
class PassRules:
    """Which sequences may share a forward pass without changing one another's logits."""

    layout: PassLayout = "padded"
    kernel: PackKernel = "spans"
    """The attention kernel of packs."""
    boundaries: tuple[RopeBoundary, ...] = ()
    """The sequence lengths at which the rotary (RoPE) frequencies change."""

    @property
    def may_split(self) -> bool:
        """Whether a batch may be split into several passes."""
        return self.layout == "alone" or bool(self.boundaries)

    def groups(self, lengths: Sequence[int]) -> list[list[int]]:
        """Groups sequences of these lengths into passes: returns each pass's indices, ascending."""
        if self.layout == "alone":
            return [[index] for index in range(len(lengths))]
        members: dict[tuple[int, ...], list[int]] = {}
        for index, length in enumerate(lengths):
            members.setdefault(length_class(self.boundaries, length), []).append(index)
        return list(members.values())


PADDED = PassRules()
"""The rules of a model that can run any sequences together as padded rows."""


@dataclass(frozen=True, slots=True)
class BatchPass:
    """Sequences that run together, and the positions that predict their trained tokens.

    Either each sequence is a row, padded on the right (attention is causal, so no real position
    attends to padding and no mask is needed), or all of them are packed in one row.
    """

    ids_BT: Tensor
    """The token ids, [B, T] int64; [1, T] for a pack."""
    sources_N: Tensor
    """The flat index of the position that predicts each trained token (the one before it), [N]."""
    pack: Pack | None = None
    positions_BT: Tensor | None = None
    """Each token's position in its own sequence, [1, T]; None unless packed."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """A batch, run in one forward pass, or in several if its sequences may not share one."""

    rows_N: Tensor
    """The index of the sequence that each trained token belongs to, [N], in ascending order."""
    targets_N: Tensor
    """The id of each trained token, [N]."""
    passes: tuple[BatchPass, ...]
    output_indices_N: Tensor | None = None
    """The index of each trained token in the concatenated outputs of the passes, [N]; None with a
    single pass."""

    @property
    def num_trained(self) -> int:
        """The number of trained tokens, N."""
        return self.targets_N.shape[0]


@dataclass(frozen=True, slots=True)
class _PassWithTargets:
    """A pass, with the row (within the pass) and the id of each of its trained tokens."""

    one_pass: BatchPass
    rows_N: Tensor
    targets_N: Tensor


def collate(
    sequences: Sequence[TokenSequence],
    *,
    device: torch.device,
    rules: PassRules = PADDED,
    max_tokens: int | None = None,
) -> TokenBatch:
    """Collates sequences into one batch, whose trained tokens keep the order of the sequences.

    max_tokens: the maximum number of tokens per pass, where a batch may be split; a longer sequence
    gets a pass of its own.
    """
    groups = rules.groups([len(sequence.ids) for sequence in sequences])
    if max_tokens is not None:
        groups = [
            sorted(group[i] for i in part)
            for group in groups
            for part in _split([sequences[i] for i in group], rules, max_tokens)
        ]
    parts: list[_PassWithTargets] = []
    for group in groups:
        members = [sequences[i] for i in group]
        is_packed = rules.layout == "packed"
        parts.append(
            _pack_rows(members, device, rules.kernel) if is_packed else _pad(members, device)
        )
    passes = tuple(part.one_pass for part in parts)
    if len(parts) == 1:
        return TokenBatch(parts[0].rows_N, parts[0].targets_N, passes)
    rows = [
        torch.tensor(group, device=device)[part.rows_N]
        for group, part in zip(groups, parts, strict=True)
    ]
    rows_N, output_indices_N = torch.cat(rows).sort(stable=True)
    targets_N = torch.cat([part.targets_N for part in parts])[output_indices_N]
    return TokenBatch(rows_N, targets_N, passes, output_indices_N)


def _split(
    sequences: Sequence[TokenSequence], rules: PassRules, max_tokens: int
) -> Iterator[list[int]]:
    """Yields index groups of sequences that fit into one pass of `max_tokens` tokens."""
    ids = [sequence.ids for sequence in sequences]
    if rules.layout == "packed":
        return group_by_prefix(ids, max_tokens=max_tokens)
    return microbatches([len(tokens) for tokens in ids], max_tokens=max_tokens)


def add_empty_passes(batch: TokenBatch, count: int) -> TokenBatch:
    """Returns the batch with `count` passes added that run one token and train none."""
    if not count:
        return batch
    ids_BT = batch.passes[0].ids_BT.new_zeros(1, 1)
    empty = BatchPass(ids_BT, batch.targets_N.new_zeros(0))
    output_indices_N = batch.output_indices_N
    if output_indices_N is None:
        output_indices_N = torch.arange(batch.num_trained, device=batch.targets_N.device)
    return replace(
        batch, passes=(*batch.passes, *[empty] * count), output_indices_N=output_indices_N
    )


def _pad(sequences: Sequence[TokenSequence], device: torch.device) -> _PassWithTargets:
    """Returns the sequences as one row each, padded to the longest."""
    longest = max(len(sequence.ids) for sequence in sequences)
    ids_BT = torch.zeros(len(sequences), longest, dtype=torch.int64)
    trained_BT = torch.zeros(len(sequences), longest, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        ids_BT[row, : len(sequence.ids)] = torch.tensor(sequence.ids)
        trained_BT[row, : len(sequence.ids)] = torch.tensor(sequence.trained)
    rows_N, positions_N = trained_BT[:, 1:].nonzero(as_tuple=True)
    targets_N = ids_BT[rows_N, positions_N + 1]
    sources_N = rows_N * longest + positions_N
    one_pass = BatchPass(ids_BT.to(device), sources_N.to(device))
    return _PassWithTargets(one_pass, rows_N.to(device), targets_N.to(device))


def _pack_rows(
    sequences: Sequence[TokenSequence], device: torch.device, kernel: PackKernel
) -> _PassWithTargets:
    """Returns the sequences as one row, in which a prefix that several share occurs once."""
    layout = split_shared_prefixes([sequence.ids for sequence in sequences])
    ids: list[int] = []
    positions: list[int] = []
    starts: list[int] = []
    for piece in layout.pieces:
        starts.append(len(ids))
        ids += sequences[piece.sequence].ids[piece.start : piece.stop]
        positions += range(piece.start, piece.stop)
    # For each trained token: its sequence, the position that predicts it, and its id.
    rows: list[int] = []
    sources: list[int] = []
    targets: list[int] = []
    for row, sequence in enumerate(sequences):
        # The position in the pack of each token of the sequence.
        packed_positions: list[int] = []
        for index in layout.piece_indices[row]:
            piece = layout.pieces[index]
            packed_positions += range(starts[index], starts[index] + piece.stop - piece.start)
        trained = [i for i in range(1, len(sequence.ids)) if sequence.trained[i]]
        rows += [row] * len(trained)
        # The token before a trained one predicts it; that may be in a shared piece, elsewhere in
        # the row.
        sources += [packed_positions[i - 1] for i in trained]
        targets += [sequence.ids[i] for i in trained]
    columns = torch.tensor([rows, sources, targets], dtype=torch.int64, device=device)
    rows_N, sources_N, targets_N = columns.unbind()
    spans = [PackSpan(piece.stop - piece.start, piece.before) for piece in layout.pieces]
    one_pass = BatchPass(
        torch.tensor([ids], device=device),
        sources_N,
        pack=Pack(spans, kernel),
        positions_BT=torch.tensor([positions], device=device),
    )
    return _PassWithTargets(one_pass, rows_N, targets_N)


def microbatches(
    lengths: Sequence[int], *, max_tokens: int, are_packed: bool = False
) -> Iterator[list[int]]:
    """Yields index groups of similar length whose size in tokens stays within `max_tokens`.

    The size is that of padded rows, or of a pack. A sequence longer than `max_tokens` gets a group
    of its own.
    """
    group: list[int] = []
    total = 0
    for index in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        total += lengths[index]
        # Sorted by length, so the new sequence is the longest of its group and sets its width.
        size = total if are_packed else (len(group) + 1) * lengths[index]
        if group and size > max_tokens:
            yield group
            group, total = [], lengths[index]
        group.append(index)
    if group:
        yield group
