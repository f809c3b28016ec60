"""Finds the final answer in a text, and normalises texts so that they can be compared.

Every function takes time linear in its input: models write anything, so no pattern may backtrack.
"""

import re
import unicodedata
from functools import lru_cache

_MARKERS = re.compile(
    r"\banswer[ \t*_]{0,4}(?:[:=]|is\b)|\bfinal answer[ \t*_]{0,4}(?=\r?\n)"
    r"|\b(?:correct|right|best) (?:option|choice) is\b|####",
    re.IGNORECASE,
)
_BOXED = re.compile(r"\\f?boxed[ \t]{0,3}\{")
_ARTICLES = frozenset({"a", "an", "the"})
_OTHER = re.compile(r"[^\w\s#%&@+]|_")
"""The characters that `normalised` may replace: no letters, digits, blanks or kept signs."""
_DELETED = frozenset(".'\u2019")
_SIGNS = {0x2044: "/"} | dict.fromkeys((0x2010, 0x2011, 0x2012, 0x2013, 0x2212), "-")
"""Replacements for the fraction slash of ½ and for the dashes that stand for a minus sign."""
_BEFORE, _AFTER = " \t\r\n*_`:", " \t\r*_`."


def without_thinking(text: str) -> str:
    """Returns a text without the thinking that some models put between <think> tags."""
    if "</think>" in text:
        return text.rpartition("</think>")[2].strip()
    return "" if text.lstrip().startswith("<think>") else text


def plain(text: str) -> str:
    """Returns a text in lower case, with single blanks between its words."""
    return " ".join(text.casefold().split())


@lru_cache(maxsize=256)
def _words_pattern(wanted: str) -> re.Pattern[str]:
    # 12 must match neither 112 nor 12.5, but "12." at the end of a sentence is fine.
    return re.compile(rf"(?<![\w.,-]){re.escape(wanted)}(?![\w-]|[.,]\d)")


def holds_words(text: str, wanted: str) -> bool:
    """Returns whether a text contains `wanted` as whole words; both must come from `plain`."""
    return bool(wanted) and _words_pattern(wanted).search(text) is not None


def normalised(text: str) -> str:
    """Returns a text in lower case, without punctuation, articles and Unicode variants.

    The signs and decimal points of numbers are kept: -3 is not 3, and 1.5 is not 15.
    """
    folded = unicodedata.normalize("NFKC", text).casefold()
    folded = unicodedata.normalize("NFKC", folded).translate(_SIGNS)
    words = _OTHER.sub(_replacement, folded).split()
    # An answer that consists of articles alone means the letter, e.g. option A.
    return " ".join([word for word in words if word not in _ARTICLES] or words)


def _replacement(match: re.Match[str]) -> str:
    """Returns what replaces a character when normalised: the character, a blank or nothing."""
    text, index, character = match.string, match.start(), match.group()
    before = text[index - 1] if index else " "
    after = text[index + 1] if index + 1 < len(text) else " "
    if character in ".,/" and before.isdigit() and after.isdigit():
        return character
    if character == "-" and after.isdigit() and not before.isalnum():
        return character
    if character in _DELETED:
        return ""
    return " " if unicodedata.category(character).startswith("P") else character


def marked_answer(text: str) -> str | None:
    r"""Returns the part of a text that is marked as its answer, or None if nothing is marked.

    That is the content of the last `\boxed{…}`, else the rest of the line after the last "Answer:",
    "The answer is", "####" or similar.
    """
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed
    markers = list(_MARKERS.finditer(text))
    if not markers:
        return None
    line = text[markers[-1].end() :].lstrip(_BEFORE).split("\n", 1)[0].rstrip(_AFTER)
    if len(line) > 1 and line[0] == line[-1] == "$":
        line = line[1:-1].strip()
    return line or None


def _last_boxed(text: str) -> str | None:
    boxes = list(_BOXED.finditer(text))
    if not boxes:
        return None
    begin, depth = boxes[-1].end(), 1
    for index in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[begin:index].strip() or None
    return None


def final_answers(text: str) -> list[str]:
    """Returns the parts of a text that may be its answer: the text, the marked part, its start.

    The last of them is the first sentence of the marked part.
    """
    marked = marked_answer(text)
    if marked is None:
        return [text]
    sentence = re.split(r"[.;!?] ", marked, maxsplit=1)[0]
    return [text, marked, sentence]
