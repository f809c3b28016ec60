"""Which sequence holds which slot of a cache, and whose beginning a newcomer may take over.

What a sequence that left has written stays until its slot is needed: the next rollout of the same
prompt often comes just then.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from stillroom.policy.kv_cache import SlotCache
from stillroom.policy.prefixes import Beginnings, Share
from stillroom.policy.sequences import DecodedSequence


@dataclass(frozen=True, slots=True)
class _Left:
    """The tokens that a sequence has left behind in its slot."""

    ids: list[int]
    num_cached: int


class SlotTable:
    """The slots 0 … n-1 that are held; `settle` closes the gaps that leavers make."""

    def __init__(self, cache: SlotCache, *, max_rows: int, min_shared: int) -> None:
        self._cache = cache
        self._max_rows = max_rows
        self._min_shared = min_shared
        self._entries: list[DecodedSequence | _Left] = []
        self.tokens_shared = 0
        """Tokens that newcomers took over instead of running them."""

    @property
    def sequences(self) -> list[DecodedSequence]:
        """Those that hold slots; after `settle` in the order of their slots, without a gap."""
        return [entry for entry in self._entries if isinstance(entry, DecodedSequence)]

    def release(self, sequence: DecodedSequence) -> None:
        """Takes a sequence out."""
        if sequence.slot is not None:
            left = _Left(sequence.ids[: sequence.num_cached], sequence.num_cached)
            self._entries[sequence.slot] = left
            sequence.slot = None

    def settle(self, waiting: list[DecodedSequence]) -> None:
        """Lets sequences in, first come first served, as long as there is room; closes gaps."""
        room = self._max_rows - len(self.sequences)
        newcomers = waiting[:room]
        del waiting[:room]
        if newcomers:
            self._let_in(newcomers)
        while gaps := self._gaps():
            last = self._entries.pop()
            if isinstance(last, DecodedSequence):
                self._cache.copy_tokens(len(self._entries), [gaps[0]], last.num_cached)
                last.slot = gaps[0]
                self._entries[gaps[0]] = last

    def share(self, source: DecodedSequence, takers: Sequence[DecodedSequence], num: int) -> None:
        """Gives the first tokens of a sequence to others that begin alike."""
        if source.slot is None:
            raise ValueError("the sequence has no slot")
        slots = [taker.slot for taker in takers if taker.slot is not None]
        self._cache.copy_tokens(source.slot, slots, num)
        for taker in takers:
            self.tokens_shared += num - taker.num_cached
            taker.take_over(num)

    def _let_in(self, newcomers: Sequence[DecodedSequence]) -> None:
        held = [entry.ids[: entry.num_cached] for entry in self._entries]
        beginnings = Beginnings(held)
        sources = [self._source(beginnings, newcomer) for newcomer in newcomers]
        # First those that find their beginning where somebody left: nothing is copied for them.
        for newcomer, source in zip(newcomers, sources, strict=True):
            if source is not None and isinstance(self._entries[source.index], _Left):
                self._place(newcomer, source.index, source)
        for index, (newcomer, source) in enumerate(zip(newcomers, sources, strict=True)):
            if newcomer.slot is not None:
                continue
            needed = {later.index for later in sources[index:] if later is not None}
            gaps = sorted(self._gaps(), key=lambda slot: slot in needed)
            if len(self._entries) < self._max_rows and (not gaps or gaps[0] in needed):
                gaps = [len(self._entries)]
                self._entries.append(_Left([], 0))
            self._place(newcomer, gaps[0], source)
            # What was there is gone.
            sources = [s if s is None or s.index != gaps[0] else None for s in sources]

    def _place(self, newcomer: DecodedSequence, slot: int, source: Share | None) -> None:
        newcomer.slot = slot
        self._entries[slot] = newcomer
        if source is None:
            return
        if source.index != slot:
            self._cache.copy_tokens(source.index, [slot], source.num_tokens)
        newcomer.take_over(source.num_tokens)
        self.tokens_shared += source.num_tokens

    def _source(self, beginnings: Beginnings, newcomer: DecodedSequence) -> Share | None:
        """Returns the slot that holds most of what the newcomer begins with, if it is much."""
        longest = beginnings.longest(newcomer.ids)
        if longest is None:
            return None
        # One token is left to be run: what follows it is not kept.
        num = min(longest.num_tokens, len(newcomer.ids) - 1)
        return Share(longest.index, num) if num >= self._min_shared else None

    def _gaps(self) -> list[int]:
        return [i for i, entry in enumerate(self._entries) if isinstance(entry, _Left)]
