"""The words of a conversation, without case, punctuation and blanks, and the language of a text."""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

from stillroom.errors import InputError, missing_extra
from stillroom.validation import nearest

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


# Code, links and markup would outweigh the words around them in the detection.
_CODE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`|https?://\S+|<[^<>\n]{1,200}>", re.DOTALL)
_MOST_CHARACTERS = 4000
# fmt: off
LANGUAGES = (
    "am", "ar", "az", "be", "bg", "bn", "ca", "cs", "da", "de", "el", "en", "es", "et", "eu",
    "fa", "fi", "fr", "gu", "he", "hi", "hr", "hu", "hy", "is", "it", "ja", "ka", "kn", "ko",
    "ku", "lo", "lt", "lv", "ml", "mr", "ms", "nl", "no", "or", "pa", "pl", "pt", "ro", "ru",
    "sk", "sl", "sq", "sr", "sv", "ta", "te", "th", "tl", "tr", "uk", "ur", "vi", "yo", "zh",
)
# fmt: on


class LanguageDetector:
    """Detects which of 60 languages, given as ISO 639-1 codes, a text is in, by letter sequences.

    The constructor raises MissingExtraError if the library is not installed, and InputError if the
    `wanted` language is not one of the 60.
    """

    def __init__(self, wanted: str) -> None:
        try:
            import eld
        except ModuleNotFoundError as error:
            raise missing_extra("curate", "telling languages") from error
        if wanted not in LANGUAGES:
            raise InputError(
                f"language {wanted!r} is not known{nearest(wanted, LANGUAGES)}",
                f"give the code of a language: {', '.join(LANGUAGES)}",
            )
        self._detector: Any = eld.LanguageDetector()

    def language_of(self, text: str) -> str | None:
        """Returns the code of a text's language; None if the text has too few words to decide.

        Only the first 4000 characters are considered.
        """
        prose = _CODE.sub(" ", text[:_MOST_CHARACTERS])
        if not any(map(str.isalpha, prose)):
            return None
        return self._detector.detect(prose).language
