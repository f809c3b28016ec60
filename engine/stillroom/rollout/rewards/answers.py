"""Finds the final answer in a text, and normalises texts so that they can be compared.

Every function takes time linear in its input: models write anything, so no pattern may backtrack.
"""

import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, cast

import msgspec

_MARKERS = re.compile(
    r"\banswer[ \t*_]{0,4}(?:[:=]|is\b)|\bfinal answer[ \t*_]{0,4}(?=\r?\n)"
    r"|\b(?:correct|right|best) (?:option|choice) is\b|####",
    re.IGNORECASE,
)
_BOXED = re.compile(r"\\f?boxed[ \t]{0,3}\{")
_ARTICLES = frozenset({"a", "an", "the"})
_REPLACEABLE = re.compile(r"[^\w\s#%&@+]|_")
"""The characters that `normalize` may replace: all but letters, digits, spaces and a few signs."""
_DELETED = frozenset(".'\u2019")
_SIGNS = {0x2044: "/"} | dict.fromkeys((0x2010, 0x2011, 0x2012, 0x2013, 0x2212), "-")
"""Replacements for the fraction slash of ½ and for the dashes that mean a minus sign."""
_STRIPPED_BEFORE, _STRIPPED_AFTER = " \t\r\n*_`:", " \t\r*_`."
_MAX_DIGITS = 400
_MAX_EXPONENT = 400
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_SUPERSCRIPT_RUN = re.compile(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]{1,6}")
_VULGAR = re.compile("[¼-¾⅐-⅞↉]")
"""Unicode's vulgar fractions, such as ½."""
_FRACTION = re.compile(
    r"(\d?)\\[dt]?frac[ ]?(?:\{[ ]{0,2}([\d.,]{1,40})[ ]{0,2}\}[ ]?"
    r"\{[ ]{0,2}([\d.,]{1,40})[ ]{0,2}\}|(\d)[ ]?(\d))"
)
_GROUP_SEPARATORS = re.compile(r"(?<=\d)(?:[\u00a0\u2009\u202f'’_]|\{,\}|\\,|\\!)(?=\d{3})")
_TIMES_TEN = re.compile(
    r"(?<=\d)[ ]?(?:\\times|\\cdot|[×x·*])[ ]?10[ ]?(?:\^|\*\*)[ ]?"
    r"(?:\{[ ]?([-+]?\d{1,6})[ ]?\}|\(([-+]?\d{1,6})\)|([-+]?\d{1,6}))"
)
_POWER_OF_TEN = re.compile(r"(?<![\w.^])10\^(?:\{([-+]?\d{1,6})\}|([-+]?\d{1,6}))")
_DECIMAL = r"(?:\d{1,3}(?:,\d{3})++(?![\d,])|\d++)(?:\.\d++)?+|\.\d++"
_NUMBER = re.compile(
    # Dates, versions and lists such as 1,5 (which some mean as 1.5) are not numbers.
    rf"(?<![\w.^/])(?<!\d,)(?P<sign>[-+])?(?:[$€£¥][ ]?)?"
    rf"(?:(?P<whole>\d{{1,9}})[ ](?=\d{{1,9}}[ ]?/[ ]?\d))?"
    rf"(?P<number>{_DECIMAL})(?:[eE](?P<exponent>[-+]?\d{{1,6}})(?!\w))?+"
    rf"(?:[ ]?/[ ]?(?P<denominator>{_DECIMAL}))?+(?!\d|[.,]\d|[ ]?[/^][ ]?\d)"
    rf"(?P<percent>[ ]?%|[ ]?percent\b)?",
    re.IGNORECASE,
)
_MINUS = str.maketrans("\u2012\u2013\u2212", "---")
_LEAD_IN = re.compile(r"(?:\s|[*_`$\"'])*(?:(?:option|choice|answer)\s{1,3})?", re.IGNORECASE)
_LETTER = re.compile(
    r"[(\[]?[*_`]{0,2}\\?(?:text\{|mathrm\{)?(?P<letter>[A-Za-z])"
    # After a space, only what cannot follow "A" as an article, which would not be a choice.
    r"(?P<after>\s*$|[)\]*_`.:,;}!-]|[ ](?=is\b|because\b|since\b|as\b|[-–(]))"
)
_SECOND_OPTION = re.compile(
    r"[)\]*_`.,\s]{0,4}(?:and|or|AND|OR|/|&|,)\s{0,2}(?:[(\[][A-Za-z]|[A-Z])(?![A-Za-z])"
)
"""A second option after the first, as in "A or B"."""


def strip_thinking(text: str) -> str:
    """Returns a text without the thinking that some models put between <think> tags."""
    if "</think>" in text:
        return text.rpartition("</think>")[2].strip()
    return "" if text.lstrip().startswith("<think>") else text


def fields_in(text: str) -> dict[str, str] | None:
    """Returns the fields of the JSON object in a text, as strings; None if there is no object."""
    start, end = text.find("{"), text.rfind("}")
    try:
        fields = msgspec.json.decode(text[start : end + 1], type=dict[str, Any])
    # ValueError: half of a surrogate pair; RecursionError: nested too deep.
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return {name: as_text(value) for name, value in fields.items()}


def objects_in(text: str) -> list[dict[str, Any]]:
    """Returns the outermost JSON objects in a text."""
    decoder = json.JSONDecoder()
    objects: list[dict[str, Any]] = []
    start = text.find("{")
    while start >= 0:
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            end = start + 1
        else:
            objects.append(cast("dict[str, Any]", value))
        start = text.find("{", end)
    return objects


def as_text(value: Any) -> str:
    """Returns a JSON value as text: strings unchanged, null as "", other values as JSON."""
    if value is None or isinstance(value, str):
        return value or ""
    return msgspec.json.encode(value).decode()


def lowercased(text: str) -> str:
    """Returns a text in lower case, with single spaces between its words."""
    return " ".join(text.casefold().split())


@lru_cache(maxsize=256)
def _words_pattern(wanted: str) -> re.Pattern[str]:
    # 12 must match neither 112 nor 12.5, but "12." at the end of a sentence is fine.
    return re.compile(rf"(?<![\w.,-]){re.escape(wanted)}(?![\w-]|[.,]\d)")


def contains_words(text: str, wanted: str) -> bool:
    """Returns whether a text contains `wanted` as whole words; both must come from `lowercased`."""
    return bool(wanted) and _words_pattern(wanted).search(text) is not None


def normalize(text: str) -> str:
    """Returns a text in lower case, without punctuation, articles and Unicode variants.

    The signs and decimal points of numbers are kept: -3 is not 3, and 1.5 is not 15.
    """
    folded = unicodedata.normalize("NFKC", text).casefold()
    folded = unicodedata.normalize("NFKC", folded).translate(_SIGNS)
    words = _REPLACEABLE.sub(_replacement, folded).split()
    # An answer that consists of articles alone means the letter, e.g. option A.
    return " ".join([word for word in words if word not in _ARTICLES] or words)


def _replacement(match: re.Match[str]) -> str:
    """Returns what replaces a character when normalised: the character, a space or nothing."""
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
    rest = text[markers[-1].end() :].lstrip(_STRIPPED_BEFORE)
    line = rest.split("\n", 1)[0].rstrip(_STRIPPED_AFTER)
    if len(line) > 1 and line[0] == line[-1] == "$":
        line = line[1:-1].strip()
    return line or None


def _last_boxed(text: str) -> str | None:
    """Returns the content of the last \\boxed{…}; None if there is none or it has no end."""
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
    """Returns the parts of a text that may be its answer.

    These are the whole text and, if part of it is marked as the answer, the marked part and its
    first sentence.
    """
    marked = marked_answer(text)
    if marked is None:
        return [text]
    sentence = re.split(r"[.;!?] ", marked, maxsplit=1)[0]
    return [text, marked, sentence]


@dataclass(frozen=True, slots=True)
class Number:
    """A number in a text, with its value as written: the value of 50 % is 50."""

    value: Fraction
    is_percent: bool


def number_in(text: str) -> Number | None:
    r"""Returns the number that a text gives as its answer, or None if it has no number.

    In a marked answer (`\boxed{}`, "The answer is") this is the first number after the last "=", in
    a text without a marked answer the last number.
    """
    marked = marked_answer(text)
    if marked is not None:
        text = marked.rpartition("=")[2]
        return next(_numbers(_NUMBER.finditer(_with_ascii_numbers(text))), None)
    return next(_numbers(reversed(list(_NUMBER.finditer(_with_ascii_numbers(text))))), None)


def _numbers(matches: Iterable[re.Match[str]]) -> Iterator[Number]:
    return (number for match in matches if (number := _number(match)) is not None)


def _with_ascii_numbers(text: str) -> str:
    """Returns a text with its numbers rewritten in plain ASCII: 3/4, 1.2e5, 1200."""
    text = _SUPERSCRIPT_RUN.sub(lambda run: "^" + run.group().translate(_SUPERSCRIPTS), text)
    # These two precede NFKC, which turns 1½ into 11/2 and a thin space into an ordinary one.
    text = _GROUP_SEPARATORS.sub("", text)
    text = _VULGAR.sub(lambda sign: " " + unicodedata.normalize("NFKC", sign.group()), text)
    text = unicodedata.normalize("NFKC", text).replace("\u2044", "/").translate(_MINUS)
    text = text.replace("\\$", "$").replace("\\%", "%")
    text = _FRACTION.sub(_as_quotient, text)
    text = _TIMES_TEN.sub(lambda m: f"e{m[1] or m[2] or m[3]}", text)
    return _POWER_OF_TEN.sub(lambda m: f"1e{m[1] or m[2]}", text)


def _as_quotient(match: re.Match[str]) -> str:
    digit = match[1]
    quotient = f"{match[2] or match[4]}/{match[3] or match[5]}"
    return f"{digit} {quotient}" if digit else quotient


def _number(match: re.Match[str]) -> Number | None:
    """Returns the number of a `_NUMBER` match; None if it is too long or a division by zero."""
    numerator = _decimal(match["number"])
    denominator = _decimal(match["denominator"]) if match["denominator"] else Fraction(1)
    if numerator is None or not denominator:
        return None
    value = numerator / denominator + int(match["whole"] or 0)
    exponent = int(match["exponent"] or 0)
    if abs(exponent) > _MAX_EXPONENT:
        return None
    value *= Fraction(10) ** exponent
    return Number(-value if match["sign"] == "-" else value, match["percent"] is not None)


def _decimal(digits: str) -> Fraction | None:
    plain = digits.replace(",", "")
    # int() itself refuses thousands of digits, and long numbers take long to compare.
    return Fraction(plain) if len(plain) <= _MAX_DIGITS else None


def letter_of(expected: str, choices: Mapping[str, str] | None) -> str | None:
    """Returns the letter of the expected option, given by letter or text; None if there is none."""
    wanted = normalize(expected)
    for letter, text in (choices or {}).items():
        if normalize(text) == wanted:
            return letter
    bare = expected.strip().strip("()[].:").upper()
    is_letter = len(bare) == 1 and bare.isascii() and bare.isalpha()
    return bare if is_letter and (choices is None or bare in choices) else None


def chosen_letter(text: str, choices: Mapping[str, str] | None) -> str | None:
    """Returns the letter of the option that a text chooses; None if the choice is not clear."""
    for region in _regions(text):
        letter = _letter_at(region)
        if letter is not None and (choices is None or letter in choices):
            return letter
        if choices is not None and (letter := _letter_by_text(region, choices)) is not None:
            return letter
    return None


def _regions(text: str) -> list[str]:
    """Returns the parts that may hold the choice: the marked one, or the last and first lines."""
    marked = marked_answer(text)
    if marked is not None:
        return [marked]
    lines = [line for line in text.splitlines() if line.strip()]
    return [lines[-1], lines[0]] if lines else []


def _letter_at(region: str) -> str | None:
    """Returns the letter with which a region begins; None if there is none, or a second one."""
    start = _LEAD_IN.match(region)
    match = _LETTER.match(region, start.end() if start else 0)
    if match is None or _SECOND_OPTION.match(region, match.end("letter")):
        return None
    return match["letter"].upper()


def _letter_by_text(region: str, choices: Mapping[str, str]) -> str | None:
    """Returns the letter of the option whose text a region equals or contains; None if unclear."""
    normalized = normalize(region)
    equal = [letter for letter, text in choices.items() if normalize(text) == normalized]
    if equal:
        return equal[0] if len(equal) == 1 else None
    words = lowercased(region)
    letters = [key for key, text in choices.items() if contains_words(words, lowercased(text))]
    # A text with "New York" also contains the option "York", so the longest option may be meant.
    longest = max(letters, key=lambda letter: len(choices[letter]), default=None)
    if longest is None:
        return None
    option = lowercased(choices[longest])
    is_clear = all(contains_words(option, lowercased(choices[letter])) for letter in letters)
    return longest if is_clear else None
