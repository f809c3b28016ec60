"""Extracts the texts and words of a conversation, and detects the language of a text."""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

from stillroom.data.chat.template import THINKING_FIELDS
from stillroom.errors import InputError, missing_extra
from stillroom.validation import did_you_mean

# Chinese and Japanese have no spaces between words, so each character counts as a word.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+")
_FOLDED_ASCII = "".join(chr(c).lower() if _WORD.match(chr(c)) else " " for c in range(128))
"""The replacement of each ASCII character: translating ASCII text is faster than `_WORD`."""
_SHINGLE_WORDS = 3
_ROLES = ("user", "assistant")


def words_of(text: str) -> list[str]:
    """Returns the words of a text in order, casefolded, in NFKC and without punctuation."""
    if text.isascii():
        return text.translate(_FOLDED_ASCII).split()
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def shingles_of(text: str) -> frozenset[str]:
    """Returns the word trigrams of a text; a shorter text has its words as a single shingle.

    The shingle of a text without words is the text itself: two such texts must be equal to be
    similar.
    """
    words = words_of(text)
    if len(words) < _SHINGLE_WORDS:
        return frozenset([" ".join(words) or text.strip()])
    return frozenset(map(" ".join, zip(words, words[1:], words[2:], strict=False)))


def jaccard(first: frozenset[str], second: frozenset[str]) -> float:
    """Returns the Jaccard similarity of two sets, which must not both be empty.

    It is the size of their intersection over the size of their union.
    """
    shared = len(first & second)
    return shared / (len(first) + len(second) - shared)


def content_text(content: Any) -> str:
    """Returns the text of a message's content; parts that are not text are left out."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    parts = [part for part in cast("list[Any]", content) if isinstance(part, dict)]
    return "\n".join(part["text"] for part in parts if isinstance(part.get("text"), str))


def user_and_assistant_text(messages: Iterable[dict[str, Any]]) -> str:
    """Returns the texts, reasoning and tool calls of user and assistant, joined by newlines.

    System messages and tool results are left out.
    """
    return "\n".join(part for message in messages for part in _text_parts(message))


def _text_parts(message: dict[str, Any]) -> Iterator[str]:
    """Yields the reasoning, text and calls of a user's or assistant's message."""
    if message.get("role") not in _ROLES:
        return
    for field in THINKING_FIELDS:
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


# Code, links and markup would distort the detection.
_CODE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`|https?://\S+|<[^<>\n]{1,200}>", re.DOTALL)
_MAX_CHARACTERS = 4000
# fmt: off
LANGUAGES = (
    "am", "ar", "az", "be", "bg", "bn", "ca", "cs", "da", "de", "el", "en", "es", "et", "eu",
    "fa", "fi", "fr", "gu", "he", "hi", "hr", "hu", "hy", "is", "it", "ja", "ka", "kn", "ko",
    "ku", "lo", "lt", "lv", "ml", "mr", "ms", "nl", "no", "or", "pa", "pl", "pt", "ro", "ru",
    "sk", "sl", "sq", "sr", "sv", "ta", "te", "th", "tl", "tr", "uk", "ur", "vi", "yo", "zh",
)
# fmt: on


class LanguageDetector:
    """Detects which of 60 languages (ISO 639-1 codes) a text is in, by its character n-grams.

    The constructor raises MissingExtraError if the library is not installed, and InputError if
    `language` is not one of the 60.
    """

    def __init__(self, language: str) -> None:
        try:
            import eld
        except ModuleNotFoundError as error:
            raise missing_extra("curate", "detecting languages") from error
        if language not in LANGUAGES:
            raise InputError(
                f"language {language!r} is unknown{did_you_mean(language, LANGUAGES)}",
                f"use one of these codes: {', '.join(LANGUAGES)}",
            )
        self._detector: Any = eld.LanguageDetector()

    def language_of(self, text: str) -> str | None:
        """Returns the code of a text's language; None if the text has too few words to decide.

        Only the first 4000 characters are considered.
        """
        prose = _CODE.sub(" ", text[:_MAX_CHARACTERS])
        if not any(map(str.isalpha, prose)):
            return None
        return self._detector.detect(prose).language
