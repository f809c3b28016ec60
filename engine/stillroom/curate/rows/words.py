"""The words of a conversation, as rows are compared by them: no case, punctuation or blanks."""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

# Chinese and Japanese put no blanks between words: there each character counts as one.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+")
_FOLDED = "".join(chr(c).lower() if _WORD.match(chr(c)) else " " for c in range(128))
"""The ASCII characters, folded: a text of them alone is cut faster without `_WORD`."""
_SHINGLE_WORDS = 3
_SPOKEN = ("user", "assistant")
_THINKING = ("reasoning_content", "reasoning", "thinking")


def words_of(text: str) -> list[str]:
    """Returns the words of a text in order, folded so that only what is said counts."""
    if text.isascii():
        return text.translate(_FOLDED).split()
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def shingles_of(text: str) -> frozenset[str]:
    """Returns the runs of three words of a text; of a shorter one its words as one run.

    A text without any word gives itself, so that two of them are alike only if they are equal.
    """
    words = words_of(text)
    if len(words) < _SHINGLE_WORDS:
        return frozenset([" ".join(words) or text.strip()])
    return frozenset(map(" ".join, zip(words, words[1:], words[2:], strict=False)))


def jaccard(one: frozenset[str], other: frozenset[str]) -> float:
    """Returns the share of what two sets have together that both have."""
    shared = len(one & other)
    return shared / (len(one) + len(other) - shared)


def content_text(content: Any) -> str:
    """Returns the text of a message's content; parts that are no text say nothing."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    parts = [part for part in cast("list[Any]", content) if isinstance(part, dict)]
    return "\n".join(part["text"] for part in parts if isinstance(part.get("text"), str))


def spoken_text(messages: Iterable[dict[str, Any]]) -> str:
    """Returns what user and assistant say, think and call; no system prompt, no tool results."""
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
    """Returns the text of the last message if the assistant wrote it, else no text."""
    if not messages or messages[-1].get("role") != "assistant":
        return ""
    return content_text(messages[-1].get("content"))


def user_texts(messages: Iterable[dict[str, Any]]) -> list[str]:
    """Returns what the user says, message by message."""
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
