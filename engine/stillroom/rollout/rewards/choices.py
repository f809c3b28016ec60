"""Reads which option of a multiple-choice question a text chooses."""

import re
from collections.abc import Mapping

from stillroom.rollout.rewards.answers import holds_words, marked_answer, normalised, plain

_LEAD_IN = re.compile(r"(?:\s|[*_`$\"'])*(?:(?:option|choice|answer)\s{1,3})?", re.IGNORECASE)
_LETTER = re.compile(
    r"[(\[]?[*_`]{0,2}\\?(?:text\{|mathrm\{)?(?P<letter>[A-Za-z])"
    # After a blank, only what cannot follow "A" as an article, which would not be a choice.
    r"(?P<after>\s*$|[)\]*_`.:,;}!-]|[ ](?=is\b|because\b|since\b|as\b|[-–(]))"
)
_ANOTHER = re.compile(
    r"[)\]*_`.,\s]{0,4}(?:and|or|AND|OR|/|&|,)\s{0,2}(?:[(\[][A-Za-z]|[A-Z])(?![A-Za-z])"
)


def letter_of(expected: str, choices: Mapping[str, str] | None) -> str | None:
    """Returns the letter of the expected option, given by letter or text; None if there is none."""
    wanted = normalised(expected)
    for letter, text in (choices or {}).items():
        if normalised(text) == wanted:
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
        if choices is not None and (letter := _by_text(region, choices)) is not None:
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
    start = _LEAD_IN.match(region)
    match = _LETTER.match(region, start.end() if start else 0)
    if match is None or _ANOTHER.match(region, match.end("letter")):
        return None
    return match["letter"].upper()


def _by_text(region: str, choices: Mapping[str, str]) -> str | None:
    said = normalised(region)
    same = [letter for letter, text in choices.items() if normalised(text) == said]
    if same:
        return same[0] if len(same) == 1 else None
    held = [letter for letter, text in choices.items() if holds_words(plain(region), plain(text))]
    # A text with "New York" also holds the option "York": the longest is meant if it holds all.
    longest = max(held, key=lambda letter: len(choices[letter]), default=None)
    if longest is None:
        return None
    whole = plain(choices[longest])
    is_clear = all(holds_words(whole, plain(choices[letter])) for letter in held)
    return longest if is_clear else None
