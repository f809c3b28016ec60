"""The slots of the key/value cache: which sequence holds each, and which prefixes to reuse.

The keys and values of a sequence that was released stay in its slot until the slot is needed: the
next rollout of the same prompt often starts in the meantime.
"""

from collections.abc import Sequence

from stillroom.models.prefixes import PrefixIndex, SharedPrefix
from stillroom.models.rope import RopeBoundary, length_class
from stillroom.policy.passes import CopyableCache
from stillroom.policy.sequences import DecodedSequence


class SlotTable:
    """The slots 0 … n-1 in use; `assign_slots` closes the gaps that released sequences leave.

    Without gaps a forward pass can run the cache's first slots in place; with them it would have to
    copy the keys and values of every layer.
    """

    def __init__(
        self,
        cache: CopyableCache,
        *,
        max_rows: int,
        min_shared: int,
        copies_whole_slots: bool = False,
        boundaries: Sequence[RopeBoundary] = (),
    ) -> None:
        """copies_whole_slots: whether all of a slot's tokens must be copied, or none.

        boundaries: tokens that were run in a pass longer than one of these are never copied.
        """
        self._cache = cache
        self._max_rows = max_rows
        self._min_shared = min_shared
        self._copies_whole_slots, self._boundaries = copies_whole_slots, boundaries
        self._entries: list[DecodedSequence | list[int]] = []
        """The sequence in each slot, or the tokens of a released sequence that are still cached."""
        self.tokens_shared = 0
        """The number of tokens whose keys and values were copied instead of being computed."""

    @property
    def sequences(self) -> list[DecodedSequence]:
        """The sequences that hold slots; after `assign_slots` in slot order, without a gap."""
        return [entry for entry in self._entries if isinstance(entry, DecodedSequence)]

    def release(self, sequence: DecodedSequence) -> None:
        """Removes a sequence from its slot."""
        if sequence.slot is not None:
            self._entries[sequence.slot] = sequence.ids[: sequence.num_cached]
            sequence.slot = None

    def assign_slots(self, waiting: list[DecodedSequence]) -> None:
        """Gives waiting sequences slots, first come first served, and closes gaps.

        Sequences that get a slot are removed from `waiting`.
        """
        num_free = self._max_rows - len(self.sequences)
        new = waiting[:num_free]
        del waiting[:num_free]
        if new:
            self._place_all(new)
        while gaps := self._gaps():
            last = self._entries.pop()
            if isinstance(last, DecodedSequence):
                self._cache.copy_tokens(len(self._entries), [gaps[0]], last.num_cached)
                last.slot = gaps[0]
                self._entries[gaps[0]] = last

    def share(self, source: DecodedSequence, targets: Sequence[DecodedSequence], num: int) -> None:
        """Copies the first `num` tokens of a sequence to others that share that prefix."""
        if source.slot is None:
            raise ValueError("the sequence has no slot")
        slots = [target.slot for target in targets if target.slot is not None]
        self._cache.copy_tokens(source.slot, slots, num)
        for target in targets:
            self.tokens_shared += num - target.num_cached
            target.num_cached = num

    def _place_all(self, new: Sequence[DecodedSequence]) -> None:
        """Gives new sequences slots, and copies prefixes that other slots have."""
        cached = [
            entry if isinstance(entry, list) else entry.ids[: entry.num_cached]
            for entry in self._entries
        ]
        prefixes = PrefixIndex([ids if self._has_original_rope(len(ids)) else [] for ids in cached])
        sources = [self._find_source(prefixes, sequence) for sequence in new]
        # First the sequences whose prefix is in the slot of a released sequence: they take that
        # slot, and nothing is copied.
        for sequence, source in zip(new, sources, strict=True):
            if source is not None and isinstance(self._entries[source.index], list):
                self._place(sequence, source.index, source)
        for index, (sequence, source) in enumerate(zip(new, sources, strict=True)):
            if sequence.slot is not None:
                continue
            needed = {later.index for later in sources[index:] if later is not None}
            gaps = sorted(self._gaps(), key=lambda slot: slot in needed)
            if len(self._entries) < self._max_rows and (not gaps or gaps[0] in needed):
                gaps = [len(self._entries)]
                self._entries.append([])
            self._place(sequence, gaps[0], source)
            # That slot's cached prefix is overwritten, so later sequences cannot copy from it.
            sources = [s if s is None or s.index != gaps[0] else None for s in sources]

    def _place(self, sequence: DecodedSequence, slot: int, source: SharedPrefix | None) -> None:
        """Gives a sequence a slot, and copies its prefix from the source, if there is one."""
        sequence.slot = slot
        self._entries[slot] = sequence
        if source is None:
            return
        if source.index != slot:
            self._cache.copy_tokens(source.index, [slot], source.num_tokens)
        sequence.num_cached = source.num_tokens
        self.tokens_shared += source.num_tokens

    def _find_source(self, slots: PrefixIndex, sequence: DecodedSequence) -> SharedPrefix | None:
        """Returns the slot with the sequence's longest prefix; None if it is too short to copy."""
        if not self._has_original_rope(len(sequence.ids)):
            return None
        # The last token must be run in any case, because the logits after it are not kept.
        limit = len(sequence.ids) - 1
        longest = (
            slots.longest_prefix_of(sequence.ids[:limit])
            if self._copies_whole_slots
            else slots.longest_shared(sequence.ids)
        )
        if longest is None:
            return None
        num = min(longest.num_tokens, limit)
        return SharedPrefix(longest.index, num) if num >= self._min_shared else None

    def _has_original_rope(self, num_tokens: int) -> bool:
        """Whether a pass of `num_tokens` tokens has the original RoPE frequencies."""
        return not any(length_class(self._boundaries, num_tokens))

    def _gaps(self) -> list[int]:
        """Returns the slots without a sequence."""
        return [i for i, entry in enumerate(self._entries) if isinstance(entry, list)]
