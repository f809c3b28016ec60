"""The bytes of each token of a tokenizer, and the tokens that continue given bytes.

A tokenizer is supported if the bytes of its tokens, joined, are exactly the text that was encoded:
byte-level BPE (GPT-2, Qwen, Llama 3, gpt-oss, Mistral Tekken, tiktoken), and SentencePiece with
byte fallback that adds no space before a text (Gemma).

With tokens sorted by their bytes, all tokens with one prefix are neighbours, and so are those among
them with the same next byte. So the probability of each next byte is the difference of two
cumulative sums, and only the prefixes that occur are looked up.
"""

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stillroom.errors import ModelError
from stillroom.models.pairing import OFF_POLICY_ROUTE, alternatives

PROBE = (
    "The answer is 1234.5, of\u00a0course:\r\n\tna\u00efve \u65e5\u672c\u8a9e "
    "\u043f\u0440\u0438\u0432\u0435\u0442 \ufb01 \uff21 \u2460 \U0001f642\U0001f469\u200d\U0001f469"
    '  {"item": "l\\u00e9", "n": [1, 2.5, null]}\n\n\n def f(x):  # '
)
"""A text that many tokenizers change: line ends, spaces, compatibility characters, emoji, escapes.
It is in Unicode form NFC, to which some byte-level tokenizers normalise every text."""


@lru_cache(maxsize=1)
def gpt2_byte_decoder() -> dict[str, int]:
    """Returns the byte of each character in byte-level vocabularies, in GPT-2's encoding."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {chr(byte): byte for byte in plain}
    return letters | {chr(256 + index): byte for index, byte in enumerate(others)}


def _byte_level(token: str) -> bytes:
    """Returns the bytes of a token of byte-level BPE, from its string in the vocabulary."""
    letters = gpt2_byte_decoder()
    if all(letter in letters for letter in token):
        return bytes(letters[letter] for letter in token)
    return token.encode()


def _sentence_piece(token: str) -> bytes:
    """Returns the bytes of a SentencePiece token, from its string in the vocabulary."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("\u2581", " ").encode()


_DECODERS: tuple[Callable[[str], bytes], ...] = (_byte_level, _sentence_piece)


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """The bytes of each token of one tokenizer."""

    by_id: Sequence[bytes]
    """The bytes by token id; empty for ids that no token has."""
    marker_ids: frozenset[int]
    """Special tokens and tokens that the chat template writes, which are not text."""

    @classmethod
    def from_tokenizer(cls, tokenizer: Any, name: str) -> "TokenBytes":
        """Returns the bytes of a tokenizer's tokens; name: the model's name in errors.

        Raises ModelError if the bytes of a text's tokens, joined, are not the text.
        """
        added: dict[int, Any] = tokenizer.added_tokens_decoder
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        template = tokenizer.chat_template or ""
        marker_ids = set(tokenizer.all_special_ids)
        for token_id, token in added.items():
            text = str(token)
            if token.special or (text.strip() and text in template):
                marker_ids.add(token_id)
        ids = encode(tokenizer, PROBE)
        words = {token_id: word for word, token_id in vocabulary.items()}
        for decode in _DECODERS:
            by_id = [b""] * (max(words) + 1)
            for token_id, word in words.items():
                is_added = token_id in added
                by_id[token_id] = str(added[token_id]).encode() if is_added else decode(word)
            if b"".join(by_id[token_id] for token_id in ids) == PROBE.encode():
                return cls(by_id, frozenset(marker_ids))
        raise _tokenizer_error(tokenizer, name, ids)

    def text(self, ids: Sequence[int]) -> bytes:
        """Returns the joined bytes of tokens, markers included."""
        return b"".join(self.by_id[token_id] for token_id in ids)


def encode(tokenizer: Any, text: str) -> list[int]:
    """Returns the tokens of a text, without special tokens around it."""
    return list(tokenizer.encode(text, add_special_tokens=False))


def _tokenizer_error(tokenizer: Any, name: str, ids: list[int]) -> ModelError:
    """Returns the error for a tokenizer whose tokens, joined, are not the encoded text."""
    decoded: str = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    first = str(tokenizer.convert_ids_to_tokens(ids[:1])[0]) if ids else ""
    if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids:
        problem = f"has no token for some texts and uses {tokenizer.unk_token!r} instead"
    elif first.startswith(("\u2581", "\u0120")):
        problem = "adds a space before every text, so that parts of a conversation do not join"
    elif decoded != PROBE:
        problem = "normalises text before tokenizing it (case, accents, spaces or characters)"
    else:
        problem = "has tokens whose bytes are not known"
    return ModelError(
        f"the tokenizer of {name} {problem}, so its tokens cannot be compared by bytes",
        alternatives(
            "use a model whose tokenizer is byte-level BPE, or SentencePiece with byte_fallback "
            "and without add_dummy_prefix",
            OFF_POLICY_ROUTE,
        ),
    )


_MAX_NODES = 1 << 15
"""The number of cached prefixes; each takes a kilobyte."""
_BYTES = np.arange(257)


@dataclass(frozen=True, slots=True)
class TrieNode:
    """The tokens that begin with one prefix, grouped by their next byte."""

    low: int
    high: int
    """The tokens with the prefix are `low` to `high` in the sorted order."""
    starts: NDArray[np.int32]
    """The first sorted token that continues with each byte, and the end, [257]. Tokens between
    `low` and the first start equal the prefix."""


class ByteTrie:
    """A vocabulary's tokens, without markers, sorted by their bytes."""

    def __init__(self, tokens: TokenBytes) -> None:
        pairs = sorted(
            (word, token_id)
            for token_id, word in enumerate(tokens.by_id)
            if word and token_id not in tokens.marker_ids
        )
        self.order = np.array([token_id for _, token_id in pairs], dtype=np.int64)
        """The ids of the sorted tokens."""
        self._words = [word for word, _ in pairs]
        # All words joined, and the offset of each word in them.
        self._flat = np.frombuffer(b"".join(self._words), dtype=np.uint8)
        lengths = np.array([len(word) for word in self._words], dtype=np.int64)
        self._offsets = np.concatenate([[0], lengths.cumsum()])
        self._nodes: OrderedDict[bytes, TrieNode] = OrderedDict()

    def node(self, prefix: bytes) -> TrieNode:
        """Returns the tokens that begin with a prefix of a token, grouped by their next byte."""
        cached = self._nodes.get(prefix)
        if cached is not None:
            self._nodes.move_to_end(prefix)
            return cached
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
        """Returns the range of sorted tokens that begin with a prefix."""
        low = bisect_left(self._words, prefix)
        following = prefix.rstrip(b"\xff")
        if not following:
            return low, len(self._words)
        following = following[:-1] + bytes([following[-1] + 1])
        return low, bisect_left(self._words, following, low)
