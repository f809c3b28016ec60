"""Which tokens of a vocabulary go on from given bytes, as ranges of the tokens sorted by bytes.

All tokens that begin with the same bytes are neighbours once tokens are sorted, and so are those
among them that go on with the same byte. So the probability of each next byte is the difference of
two cumulative sums, and only the prefixes that occur are ever looked up.
"""

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stillroom.models.reread.token_bytes import TokenBytes

_MAX_NODES = 1 << 15
"""The number of prefixes that are kept; each takes a kilobyte."""
_BYTES = np.arange(257)


@dataclass(frozen=True, slots=True)
class TrieNode:
    """The tokens that begin with one prefix, and where the next byte divides them."""

    low: int
    high: int
    """The tokens with the prefix are `low` to `high` of the sorted ones."""
    starts: NDArray[np.int32]
    """The first sorted token that goes on with each byte, and the end, [257]. Tokens between `low`
    and the first start are the prefix itself."""


class ByteTrie:
    """A vocabulary's tokens, without its marks, sorted by their bytes."""

    def __init__(self, tokens: TokenBytes) -> None:
        pairs = sorted(
            (word, token_id)
            for token_id, word in enumerate(tokens.of_token)
            if word and token_id not in tokens.marks
        )
        self.order = np.array([token_id for _, token_id in pairs], dtype=np.int64)
        """The ids of the sorted tokens."""
        self._words = [word for word, _ in pairs]
        self._flat = np.frombuffer(b"".join(self._words), dtype=np.uint8)
        lengths = np.array([len(word) for word in self._words], dtype=np.int64)
        self._offsets = np.concatenate([[0], lengths.cumsum()])
        self._nodes: OrderedDict[bytes, TrieNode] = OrderedDict()

    def node(self, prefix: bytes) -> TrieNode:
        """Returns the tokens that begin with a prefix of a token, by their next byte."""
        known = self._nodes.get(prefix)
        if known is not None:
            self._nodes.move_to_end(prefix)
            return known
        low, high = self._range(prefix)
        first = bisect_right(self._words, prefix, low, high)
        column = self._flat[self._offsets[first:high] + len(prefix)]
        starts = (first + np.searchsorted(column, _BYTES)).astype(np.int32)
        node = TrieNode(low, high, starts)
        self._nodes[prefix] = node
        if len(self._nodes) > _MAX_NODES:
            self._nodes.popitem(last=False)
        return node

    def _range(self, prefix: bytes) -> tuple[int, int]:
        low = bisect_left(self._words, prefix)
        following = prefix.rstrip(b"\xff")
        if not following:
            return low, len(self._words)
        following = following[:-1] + bytes([following[-1] + 1])
        return low, bisect_left(self._words, following, low)
