"""Token sequences, and the batches that a model runs: padded rows, or one row that packs them.

Shapes: B sequences, T tokens of the longest, N trained tokens of the whole batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stillroom.models.packing import Pack, PackSpan
from stillroom.models.sharing import lay_out
from stillroom.types import TokenTrace


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """One conversation as tokens; `trained[i]` is whether `ids[i]` is trained on or scored.

    The first token has no context to be predicted from, so it is never trained.
    """

    ids: list[int]
    trained: list[bool]

    @property
    def num_trained(self) -> int:
        """The number of trained tokens."""
        return sum(self.trained[1:])


def sampled_sequence(trace: TokenTrace) -> TokenSequence:
    """Returns a rollout's tokens, of which those that the policy sampled are trained on.

    Given tokens after the last sampled one (a reply too long for the context, say) are left out:
    no trained token depends on them.
    """
    end = max((i for i, is_sampled in enumerate(trace.sampled, start=1) if is_sampled), default=0)
    return TokenSequence(trace.ids[:end], trace.sampled[:end])


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """A batch of sequences as a model runs it, and the positions that predict its trained tokens.

    Either each sequence is a row, padded on the right (attention is causal, so no real position
    ever sees padding and no mask is needed), or all of them are one row, a pack.
    """

    ids_BT: Tensor
    """The token ids, [B, T] int64; [1, T] for a pack."""
    rows_N: Tensor
    """The index of the sequence that each trained token belongs to, [N]."""
    sources_N: Tensor
    """The position that predicts each trained token (the one before it), counted across rows,
    [N]."""
    targets_N: Tensor
    """The id of each trained token, [N]."""
    pack: Pack | None = None
    positions_BT: Tensor | None = None
    """The position of each token of a pack in its own sequence, [1, T]; None without a pack."""

    @property
    def num_trained(self) -> int:
        """The number of trained tokens, N."""
        return self.targets_N.shape[0]


def collate(
    sequences: Sequence[TokenSequence], *, device: torch.device, is_packed: bool = False
) -> TokenBatch:
    """Returns one batch of the sequences; its trained tokens are in the sequences' order."""
    if is_packed:
        return _packed(sequences, device)
    longest = max(len(sequence.ids) for sequence in sequences)
    ids_BT = torch.zeros(len(sequences), longest, dtype=torch.int64)
    trained_BT = torch.zeros(len(sequences), longest, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        ids_BT[row, : len(sequence.ids)] = torch.tensor(sequence.ids)
        trained_BT[row, : len(sequence.ids)] = torch.tensor(sequence.trained)
    rows_N, positions_N = trained_BT[:, 1:].nonzero(as_tuple=True)
    targets_N = ids_BT[rows_N, positions_N + 1]
    return TokenBatch(
        ids_BT.to(device),
        rows_N.to(device),
        (rows_N * longest + positions_N).to(device),
        targets_N.to(device),
    )


def _packed(sequences: Sequence[TokenSequence], device: torch.device) -> TokenBatch:
    """Returns the sequences as one row, in which a prefix that several share occurs once."""
    layout = lay_out([sequence.ids for sequence in sequences])
    ids: list[int] = []
    positions: list[int] = []
    starts: list[int] = []
    for piece in layout.pieces:
        starts.append(len(ids))
        ids += sequences[piece.holder].ids[piece.start : piece.stop]
        positions += range(piece.start, piece.stop)
    rows: list[int] = []
    sources: list[int] = []
    targets: list[int] = []
    for row, sequence in enumerate(sequences):
        places: list[int] = []
        for index in layout.of_sequence[row]:
            piece = layout.pieces[index]
            places += range(starts[index], starts[index] + piece.stop - piece.start)
        trained = [i for i in range(1, len(sequence.ids)) if sequence.trained[i]]
        rows += [row] * len(trained)
        # The token before a trained one predicts it; that may be in a shared piece, elsewhere in
        # the row.
        sources += [places[i - 1] for i in trained]
        targets += [sequence.ids[i] for i in trained]
    columns = torch.tensor([rows, sources, targets], dtype=torch.int64, device=device)
    spans = [PackSpan(piece.stop - piece.start, piece.before) for piece in layout.pieces]
    return TokenBatch(
        torch.tensor([ids], device=device),
        *columns.unbind(),
        pack=Pack(spans),
        positions_BT=torch.tensor([positions], device=device),
    )


def microbatches(lengths: Sequence[int], *, max_tokens: int) -> Iterator[list[int]]:
    """Yields index groups of similar length whose padded size stays within `max_tokens`.

    A sequence longer than `max_tokens` gets a group of its own.
    """
    group: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        # Sorted by length, so the new sequence is the longest of its group and sets its width.
        if group and (len(group) + 1) * lengths[index] > max_tokens:
            yield group
            group = []
        group.append(index)
    if group:
        yield group
