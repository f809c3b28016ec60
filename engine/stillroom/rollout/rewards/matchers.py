"""Compares an answer with the expected one in one of five ways."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, cast

import msgspec

from stillroom import bounds
from stillroom.data.checks import as_number, describe
from stillroom.errors import DataError
from stillroom.rollout.rewards.answers import (
    Number,
    as_text,
    chosen_letter,
    contains_words,
    fields_in,
    final_answers,
    letter_of,
    lowercased,
    normalize,
    number_in,
)

MAX_ANSWER_CHARACTERS = bounds.ANSWER.limit
"""The maximum number of characters at the end of a text that are searched for the answer."""
_MAX_EXPECTED_CHARACTERS = bounds.EXPECTED.limit
_FIELDS = msgspec.json.Decoder(dict[str, str | int | float | bool | None])


class AnswerMatch(StrEnum):
    """How an answer is compared with the expected one."""

    CONTAINED = "contained"
    """The text contains the expected answer as whole words."""
    EXACT = "exact"
    """The text equals the expected answer, apart from whitespace around it."""
    NORMALISED = "normalised"
    """The text, or the answer marked in it, equals the expected answer once both are normalised:
    case, punctuation, articles and Unicode variants do not count."""
    NUMERIC = "numeric"
    """The final number of the text equals the expected one, within the tolerance."""
    CHOICE = "choice"
    """The text chooses the expected option, by its letter or its text."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far a number may be from the expected one; either bound suffices."""

    absolute: float = 0.0
    relative: float | None = None
    """The bound as a share of the expected number; None means 0 for whole numbers, else 1e-9."""


@dataclass(frozen=True, slots=True)
class AnswerKey:
    """The answers that a row accepts, and how a text is compared with them."""

    accepted: tuple[str, ...]
    match: AnswerMatch = AnswerMatch.CONTAINED
    tolerance: Tolerance = Tolerance()
    choices: Mapping[str, str] | None = None
    """The options of a multiple-choice question, from letter to text; None if none are given."""
    fields: Mapping[str, tuple[str, ...]] | None = None
    """The accepted answers of each part, if the expected answer has several; all must be right."""


def answer_key(
    metadata: Mapping[str, Any], *, default: AnswerMatch = AnswerMatch.CONTAINED
) -> AnswerKey | None:
    """Returns the answer key in a row's metadata, or None if it has no expected_answer.

    Raises DataError for a key that cannot be used, e.g. for an unknown answer_match, an answer that
    is neither text nor number, or a numeric answer without a number.
    """
    expected = metadata.get("expected_answer")
    if expected is None:
        return None
    fields = _parse_accepted_fields(expected) if isinstance(expected, dict) else None
    key = AnswerKey(
        _parse_accepted(expected) if fields is None else (),
        _parse_match(metadata.get("answer_match"), default),
        _parse_tolerance(metadata.get("answer_tolerance")),
        _parse_choices(metadata.get("choices")),
        fields,
    )
    if key.match is AnswerMatch.NUMERIC:
        for answer in (
            *key.accepted,
            *(answer for part in (fields or {}).values() for answer in part),
        ):
            if number_in(answer) is None:
                raise DataError(
                    f"expected_answer {answer[:60]!r} holds no number, but answer_match is numeric",
                    "set expected_answer to a number, or choose another answer_match",
                )
    return key


def as_expected_answer(answer: str) -> str | dict[str, Any]:
    """Returns an answer as a row's expected_answer: the fields of a JSON object, else its text."""
    try:
        return _FIELDS.decode(answer) or answer
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return answer


def is_accepted(text: str, key: AnswerKey) -> bool:
    """Returns whether a text gives an accepted answer, with all of its parts if it has several."""
    if key.fields is None:
        return any(is_match(text, expected, key) for expected in key.accepted)
    fields = fields_in(text[-MAX_ANSWER_CHARACTERS:])
    return all(
        any(_text_gives_part(text, expected, key) for expected in accepted)
        if fields is None
        else any(_field_gives_part(fields.get(name, ""), expected, key) for expected in accepted)
        for name, accepted in key.fields.items()
    )


def is_only_answer(text: str, key: AnswerKey) -> bool:
    """Returns whether a text is an accepted answer and nothing else, whatever the key's match.

    Case, punctuation and articles do not count. Of several parts, a JSON object must have no other.
    """
    if key.fields is None:
        normalised = normalize(text)
        return any(normalised == normalize(expected) for expected in key.accepted)
    fields = fields_in(text) if text.strip()[:1] + text.strip()[-1:] == "{}" else None
    return (
        fields is not None
        and fields.keys() <= key.fields.keys()
        and is_accepted(text, replace(key, match=AnswerMatch.NORMALISED))
    )


def _text_gives_part(text: str, expected: str, key: AnswerKey) -> bool:
    """Returns whether a text gives a part of the answer; every text gives an empty part."""
    return not expected.strip() or is_match(text, expected, key)


def _field_gives_part(field: str, expected: str, key: AnswerKey) -> bool:
    """Returns whether a JSON field gives a part of the answer; empty parts need empty fields."""
    return is_match(field, expected, key) if expected.strip() else not field.strip()


def is_match(text: str, expected: str, key: AnswerKey) -> bool:
    """Returns whether a text gives the answer `expected`."""
    text = text[-MAX_ANSWER_CHARACTERS:]
    match key.match:
        case AnswerMatch.CONTAINED:
            return contains_words(lowercased(text), lowercased(expected))
        case AnswerMatch.EXACT:
            return bool(expected.strip()) and text.strip() == expected.strip()
        case AnswerMatch.NORMALISED:
            return _is_normalised_match(text, expected)
        case AnswerMatch.NUMERIC:
            return _is_numeric_match(text, expected, key.tolerance)
        case AnswerMatch.CHOICE:
            return _is_same_choice(text, expected, key.choices)


def _is_normalised_match(text: str, expected: str) -> bool:
    wanted = normalize(expected)
    return bool(wanted) and any(normalize(part) == wanted for part in final_answers(text))


def _is_numeric_match(text: str, expected: str, tolerance: Tolerance) -> bool:
    wanted, actual = number_in(expected), number_in(text)
    return wanted is not None and actual is not None and _is_close(actual, wanted, tolerance)


def _is_close(actual: Number, wanted: Number, tolerance: Tolerance) -> bool:
    """Returns whether two numbers agree: 50 % agrees with 50 and with 0.5; 0.5 and 50 disagree."""
    readings = [actual.value]
    if actual.is_percent != wanted.is_percent:
        readings.append(actual.value / 100 if actual.is_percent else actual.value * 100)
    return any(_is_within_tolerance(value, wanted, tolerance) for value in readings)


def _is_within_tolerance(value: Any, wanted: Number, tolerance: Tolerance) -> bool:
    """Returns whether a value is within the tolerance of the wanted number."""
    difference = abs(value - wanted.value)
    relative = tolerance.relative
    if relative is None:
        are_whole = value.denominator == 1 and wanted.value.denominator == 1
        relative = 0.0 if are_whole else 1e-9
    return difference <= tolerance.absolute or difference <= relative * abs(wanted.value)


def _is_same_choice(text: str, expected: str, choices: Mapping[str, str] | None) -> bool:
    wanted = letter_of(expected, choices)
    if wanted is None:
        return _is_normalised_match(text, expected)
    return chosen_letter(text, choices) == wanted


def _parse_accepted_fields(expected: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    if not expected:
        raise DataError(
            "expected_answer is an empty object", "write the parts of the answer, or remove it"
        )
    texts = {k: as_text(v) if v is None or isinstance(v, bool) else v for k, v in expected.items()}
    return {name: _parse_accepted(text) for name, text in texts.items()}


def _parse_accepted(expected: Any) -> tuple[str, ...]:
    """Returns the accepted answers as text. Raises DataError for values that cannot be used."""
    answers = cast("Sequence[Any]", expected if isinstance(expected, list) else [expected])
    if not answers:
        raise DataError(
            "expected_answer is an empty list", "write the accepted answers, or remove it"
        )
    for answer in answers:
        if not isinstance(answer, str | int | float):
            raise DataError(
                f"expected_answer must be a string, a number, a list of them or an object, not "
                f"{describe(answer)}",
                'write e.g. "Paris", 12, ["Paris", "City of Paris"] or, for an answer of two '
                'parts, {"city": "Paris", "year": 1889}',
            )
        if len(str(answer)) > _MAX_EXPECTED_CHARACTERS:
            raise DataError(
                f"expected_answer has {len(str(answer))} characters",
                f"keep it below {_MAX_EXPECTED_CHARACTERS} characters, or use rewards.py instead",
            )
    return tuple(str(answer) for answer in answers)


def _parse_match(value: Any, default: AnswerMatch) -> AnswerMatch:
    """Returns a row's `answer_match`, or the default if it is None."""
    if value is None:
        return default
    try:
        return AnswerMatch(value)
    except ValueError:
        raise DataError(
            f"answer_match {value!r} is unknown", f"use one of {', '.join(AnswerMatch)}"
        ) from None


def _parse_tolerance(value: Any) -> Tolerance:
    """Returns a row's `answer_tolerance`, which is a number or {"abs": …, "rel": …}."""
    if value is None:
        return Tolerance()
    if (absolute := as_number(value)) is not None:
        return Tolerance(absolute=_checked_bound(absolute, value))
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        numbers = {name: as_number(field) for name, field in fields.items()}
        if numbers and numbers.keys() <= {"abs", "rel"} and None not in numbers.values():
            relative = numbers.get("rel")
            return Tolerance(
                absolute=_checked_bound(numbers.get("abs") or 0.0, value),
                relative=None if relative is None else _checked_bound(relative, value),
            )
    raise _tolerance_error(value)


def _checked_bound(number: float, value: Any) -> float:
    """Returns a bound of the tolerance `value`. Raises DataError if it cannot be used."""
    # Also refuses NaN, and infinity, which would accept every number.
    if 0 <= number < float("inf"):
        return number
    raise _tolerance_error(value)


def _tolerance_error(value: Any) -> DataError:
    return DataError(
        f"answer_tolerance {value!r} is not a valid tolerance",
        'write a number (absolute) or {"abs": 0.01, "rel": 0.001}',
    )


def _parse_choices(value: Any) -> dict[str, str] | None:
    """Returns a row's `choices` by letter. Raises DataError unless they are 1 to 26 strings."""
    if value is None:
        return None
    options = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    if isinstance(value, list):
        # One text more than there are letters, so that the check below rejects a longer list.
        texts = cast("list[Any]", value)[:27]
        options = {chr(ord("A") + index): text for index, text in enumerate(texts)}
    are_valid = all(len(k) == 1 and k.isalpha() and isinstance(v, str) for k, v in options.items())
    if not options or len(options) > 26 or not are_valid:
        raise DataError(
            "choices must be a list of 1 to 26 strings, or an object of them with single letters "
            f"as keys, not {describe(value)}",
            'write ["Paris", "Rome"] or {"A": "Paris", "B": "Rome"}',
        )
    return {letter.upper(): text for letter, text in options.items()}
