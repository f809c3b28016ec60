"""Extracts the words of a conversation to compare rows: without case, punctuation and blanks."""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

# Chinese and Japanese have no blanks between words, so each character counts as a word.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+")
_FOLDED = "".join(chr(c).lower() if _WORD.match(chr(c)) else " " for c in range(128))
"""The folded ASCII characters by their code: without `_WORD`, an ASCII text is split faster."""
_SHINGLE_WORDS = 3
_SPOKEN = ("user", "assistant")
_THINKING = ("reasoning_content", "reasoning", "thinking")


def words_of(text: str) -> list[str]:
    """Returns the words of a text in order, casefolded, in NFKC and without punctuation."""
    if text.isascii():
        return text.translate(_FOLDED).split()
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def shingles_of(text: str) -> frozenset[str]:
    """Returns the runs of three words in a text; a shorter text gives its words as one run.

    A text without any word gives itself, so that two such texts are alike only if they are equal.
    """
    words = words_of(text)
    if len(words) < _SHINGLE_WORDS:
        return frozenset([" ".join(words) or text.strip()])
    return frozenset(map(" ".join, zip(words, words[1:], words[2:], strict=False)))


def jaccard(one: frozenset[str], other: frozenset[str]) -> float:
    """Returns the Jaccard similarity of two sets, which must not both be empty.

    It is the size of their intersection over the size of their union.
    """
    shared = len(one & other)
    return shared / (len(one) + len(other) - shared)


def content_text(content: Any) -> str:
    """Returns the text of a message's content; parts that are not text are left out."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    parts = [part for part in cast("list[Any]", content) if isinstance(part, dict)]
    return "\n".join(part["text"] for part in parts if isinstance(part.get("text"), str))


def spoken_text(messages: Iterable[dict[str, Any]]) -> str:
    """Returns the texts, reasoning and tool calls of user and assistant.

    System prompts and tool results are left out.
    """
    return "\n".join(part for message in messages for part in _spoken_parts(message))


def _spoken_parts(message: dict[str, Any]) -> Iterator[str]:
    if message.get("role") not in _SPOKEN:
        return
    for field in _THINKING:
        if isinstance(message.get(field), str):
            yield message[field]
    yield content_text(message.get("content"))
    for call in message.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            yield f"{function.get('name')} {function.get('arguments')}"


def final_answer(messages: Sequence[dict[str, Any]]) -> str:
    """Returns the text of the last message if it is the assistant's, else an empty text."""
    if not messages or messages[-1].get("role") != "assistant":
        return ""
    return content_text(messages[-1].get("content"))


def user_texts(messages: Iterable[dict[str, Any]]) -> list[str]:
    """Returns the texts of the user's messages."""
    return [content_text(m.get("content")) for m in messages if m.get("role") == "user"]


def strings_in(value: Any) -> Iterator[str]:
    """Yields every string of a JSON value, keys included."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, list):
            pending += cast("list[Any]", item)
        elif isinstance(item, dict):
            pending += item.keys()
            pending += item.values()
