r"""Reads numbers as people and models write them: 1,200.5, 3/4, 1½, 50 %, 1.2 × 10^5, \frac34."""

import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from stillroom.rollout.rewards.answers import marked_answer

_MAX_DIGITS = 400
_MAX_EXPONENT = 400
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_SUPERSCRIPT_RUN = re.compile(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]{1,6}")
_VULGAR = re.compile("[¼-¾⅐-⅞↉]")
_FRACTION = re.compile(
    r"(\d?)\\[dt]?frac[ ]?(?:\{[ ]{0,2}([\d.,]{1,40})[ ]{0,2}\}[ ]?"
    r"\{[ ]{0,2}([\d.,]{1,40})[ ]{0,2}\}|(\d)[ ]?(\d))"
)
_GROUP_BLANKS = re.compile(r"(?<=\d)(?:[\u00a0\u2009\u202f'’_]|\{,\}|\\,|\\!)(?=\d{3})")
_TIMES_TEN = re.compile(
    r"(?<=\d)[ ]?(?:\\times|\\cdot|[×x·*])[ ]?10[ ]?(?:\^|\*\*)[ ]?"
    r"(?:\{[ ]?([-+]?\d{1,6})[ ]?\}|\(([-+]?\d{1,6})\)|([-+]?\d{1,6}))"
)
_POWER_OF_TEN = re.compile(r"(?<![\w.^])10\^(?:\{([-+]?\d{1,6})\}|([-+]?\d{1,6}))")
_DECIMAL = r"(?:\d{1,3}(?:,\d{3})++(?![\d,])|\d++)(?:\.\d++)?+|\.\d++"
_NUMBER = re.compile(
    # Dates, versions and lists such as 1,5 (which some mean as 1.5) are no numbers.
    rf"(?<![\w.^/])(?<!\d,)(?P<sign>[-+])?(?:[$€£¥][ ]?)?"
    rf"(?:(?P<whole>\d{{1,9}})[ ](?=\d{{1,9}}[ ]?/[ ]?\d))?"
    rf"(?P<number>{_DECIMAL})(?:[eE](?P<exponent>[-+]?\d{{1,6}})(?!\w))?+"
    rf"(?:[ ]?/[ ]?(?P<below>{_DECIMAL}))?+(?!\d|[.,]\d|[ ]?[/^][ ]?\d)"
    rf"(?P<percent>[ ]?%|[ ]?percent\b)?",
    re.IGNORECASE,
)
_MINUS = str.maketrans("\u2012\u2013\u2212", "---")


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
        return next(_valid(_NUMBER.finditer(_spelt_out(marked.rpartition("=")[2]))), None)
    return next(_valid(reversed(list(_NUMBER.finditer(_spelt_out(text))))), None)


def _valid(matches: Iterable[re.Match[str]]) -> Iterator[Number]:
    return (number for match in matches if (number := _number(match)) is not None)


def _spelt_out(text: str) -> str:
    """Returns a text with its numbers rewritten in plain ASCII: 3/4, 1.2e5, 1200."""
    text = _SUPERSCRIPT_RUN.sub(lambda run: "^" + run.group().translate(_SUPERSCRIPTS), text)
    # These two precede NFKC, which turns 1½ into 11/2 and a thin blank into an ordinary one.
    text = _GROUP_BLANKS.sub("", text)
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
    above = _decimal(match["number"])
    below = _decimal(match["below"]) if match["below"] else Fraction(1)
    if above is None or not below:
        return None
    value = above / below + int(match["whole"] or 0)
    exponent = int(match["exponent"] or 0)
    if abs(exponent) > _MAX_EXPONENT:
        return None
    value *= Fraction(10) ** exponent
    return Number(-value if match["sign"] == "-" else value, match["percent"] is not None)


def _decimal(digits: str) -> Fraction | None:
    plain = digits.replace(",", "")
    # int() itself refuses thousands of digits, and long numbers take long to compare.
    return Fraction(plain) if len(plain) <= _MAX_DIGITS else None
