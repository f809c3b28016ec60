"""A teacher's next bytes from the few next tokens that its server lists at each position.

Only bytes with which some listed token continues are distinguished. What the listed tokens leave of
the probability, the tail, is never given to a byte: it counts to all other bytes together, on whose
side the student's probabilities of them count too. Within a token the tail is that of the unlisted
tokens which begin as the token does, taken to be their share of all unlisted tokens; what begins
otherwise is ruled out by the bytes that are fixed already.
Shapes: k of a teacher's positions, K tokens that are listed at each, m units of one choice, V
vocabulary, S symbols.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stillroom.models.reread.byte_chain import NUM_BYTES, SideSymbols, TriePlaces
from stillroom.models.reread.byte_units import Choice
from stillroom.models.reread.token_bytes import ByteTrie


class _Following(NamedTuple):
    """The listed probabilities of what continues the beginnings of tokens."""

    bytes_m: Tensor
    """Of each next byte, [m, 256]."""
    ended_m: Tensor
    """Of the token that is the beginning itself."""
    total_m: Tensor
    """Of all tokens with the beginning, with their share of the tail."""


@dataclass(frozen=True, slots=True)
class ListedTokens:
    """The tokens that a server listed at a teacher's positions: a `NextSymbols`."""

    ids_kK: Tensor
    """The ids; -1 where fewer tokens are listed."""
    places_kK: Tensor
    """The tokens' places in the teacher's trie; -1 for those that it does not hold."""
    probabilities_kK: Tensor
    """In float64; 0 where fewer tokens are listed."""
    num_sorted: int
    """The number of tokens in the trie."""

    @classmethod
    def of(
        cls,
        listed: Sequence[tuple[Sequence[int], Sequence[float]]],
        own: Sequence[tuple[int, float]],
        trie: ByteTrie,
        device: torch.device,
    ) -> "ListedTokens":
        """Returns the listed tokens of all positions.

        listed: the ids of the likeliest tokens at each position, and their log-probabilities in
        nats. own: the token that stands there in the text, which need not be among them.
        """
        shape = len(listed), len(listed[0][0]) if listed else 0
        ids_kK = np.array([ids for ids, _ in listed], np.int64).reshape(shape)
        logprobs_kK = np.array([logprobs for _, logprobs in listed], np.float64).reshape(shape)
        own_ids_k = np.array([token for token, _ in own], np.int64)
        is_listed_k = (ids_kK == own_ids_k[:, None]).any(1)
        own_ids_k[is_listed_k] = -1
        own_k = np.exp(np.array([logprob for _, logprob in own], np.float64)) * ~is_listed_k
        ids_kK = np.concatenate([ids_kK, own_ids_k[:, None]], 1)
        place_V = np.full(int(max(trie.order.max(initial=0), ids_kK.max(initial=0))) + 1, -1)
        place_V[trie.order] = np.arange(len(trie.order))
        places_kK = np.where(ids_kK >= 0, place_V[ids_kK], -1)
        probabilities_kK = np.concatenate([np.exp(logprobs_kK), own_k[:, None]], 1)
        return cls(
            torch.from_numpy(ids_kK).to(device),
            torch.from_numpy(places_kK).to(device),
            torch.from_numpy(probabilities_kK).to(device),
            len(trie.order),
        )

    def part(self, part: slice) -> "ListedTokens":
        """Returns the listed tokens of some of the positions."""
        return replace(
            self,
            ids_kK=self.ids_kK[part],
            places_kK=self.places_kK[part],
            probabilities_kK=self.probabilities_kK[part],
        )

    def at(
        self, rows_m: Tensor, places: TriePlaces, before: TriePlaces, choice: Choice
    ) -> SideSymbols:
        """Returns the probabilities of the next symbols at units of one choice.

        rows_m: their positions; `places` and `before` as in `with_longer_tokens`.
        """
        is_all_m = places.is_root_M & (not choice.is_conditional)
        here = self._following(rows_m, places, is_all_m)
        symbols_m = [
            here.bytes_m[:, list(symbol.teacher_bytes)].sum(1)
            + self._of_marks(rows_m, symbol.teacher_ids) * places.is_root_M
            for symbol in choice.symbols
        ]
        after_mS = torch.column_stack([here.bytes_m, *symbols_m]) / here.total_m[:, None]
        # The token before might have been a longer one, see `with_longer_tokens`.
        longer = self._following((rows_m - 1).clamp_min(0), before, torch.zeros_like(is_all_m))
        longer_m = [
            longer.bytes_m[:, list(symbol.teacher_bytes)].sum(1) for symbol in choice.symbols
        ]
        longer_mS = torch.column_stack([longer.bytes_m, *longer_m])
        mixed_mS = (longer_mS + longer.ended_m[:, None] * after_mS) / longer.total_m[:, None]
        probabilities_mS = torch.where(before.is_root_M[:, None], after_mS, mixed_mS)
        return SideSymbols(probabilities_mS, probabilities_mS > 0, here.total_m)

    def _following(self, rows_m: Tensor, places: TriePlaces, is_all_m: Tensor) -> _Following:
        """Returns what continues the beginnings at `places`; `is_all_m`: any token counts."""
        probabilities_mK, places_mK = self.probabilities_kK[rows_m], self.places_kK[rows_m]
        is_inside = (places_mK >= places.low_M[:, None]) & (places_mK < places.high_M[:, None])
        inside_mK = probabilities_mK * is_inside
        # Column 0 holds what ends with the beginning, and column b + 1 what continues with byte b.
        columns_mK = torch.searchsorted(places.starts_M.long(), places_mK, right=True)
        sums = inside_mK.new_zeros(len(rows_m), NUM_BYTES + 2)
        sums.scatter_add_(1, columns_mK, inside_mK)
        num_listed_m = (places_mK >= 0).sum(1)
        num_here_m = places.high_M - places.low_M - is_inside.sum(1)
        share_m = num_here_m / (self.num_sorted - num_listed_m).clamp_min(1)
        tail_m = (1 - probabilities_mK.sum(1)).clamp_min(0)
        total_m = inside_mK.sum(1) + tail_m * share_m
        total_m = torch.where(is_all_m, torch.ones_like(total_m), total_m).clamp_min(1e-300)
        return _Following(sums[:, 1 : NUM_BYTES + 1], sums[:, 0], total_m)

    def _of_marks(self, rows_m: Tensor, ids: tuple[int, ...]) -> Tensor:
        """Returns the listed probability of a mark's tokens."""
        marks = torch.tensor(ids, dtype=torch.int64, device=rows_m.device)
        return (self.probabilities_kK[rows_m] * torch.isin(self.ids_kK[rows_m], marks)).sum(1)
