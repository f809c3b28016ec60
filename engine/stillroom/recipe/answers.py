"""Finds answers of one form (labels, JSON objects, lines of few patterns) in longer texts.

The answers.py that a recipe writes (`files.py`) uses the classes, their fields and `named`, so
these names must not change.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from stillroom.rollout.rewards.answers import as_text, fields_in, objects_in

_MAX_ANSWERS = 60
_MIN_REPEATS = 2
"""The least mean number of occurrences of an answer if answers are from a small set."""
_NUMBER = re.compile(r"[-+]?[\d.,]+\s*\S{0,3}")
_WORD_JOINT = re.compile(r"(?<=[^\W_])[\s_-]+(?=[^\W_])")
_MIN_REPEATS_OF_NUMBERS = 10
"""The same for numbers: ratings repeat often, but any other number may be a right answer."""
_MIN_SHARE = 0.9
"""The least share of the answers that must have the same fields."""
_MIN_COPIED, _COPIED_SHARE = 10, 0.98
"""The least number and share of a field's values that occur in their texts if it is copied."""
_VARYING = re.compile(r"\b(?=[^\W\d]*\d)\w++(?:[.,:/-](?=[^\W\d]*\d)\w++)*+")
"""A word with a digit, or several that are joined: B7791, 3.5, 2026-11-24."""
_NOT_AFTER, _NOT_BEFORE = r"(?<!\w)(?<!\d[.,:/-])", r"(?!\w|[.,:/-]\d)"
"""The boundaries of a whole value: 5 in 3.5 is none, nor is B7791 in B7791-2."""
_MAX_PATTERN_CHARACTERS = 120
_GAP = "…"
"""The placeholder in a pattern for a word with a digit."""
_SCALARS = (str, int, float, bool, type(None))


@dataclass(frozen=True, slots=True)
class LabelAnswers:
    """Answers that are one of a fixed set of labels."""

    labels: tuple[str, ...]

    def named(self, text: str) -> str | None:
        """Returns the label that a text gives; None if it gives none or several."""
        return named_answer(text, self.labels)

    @property
    def num_bytes(self) -> int:
        """The length of the longest answer."""
        return max(len(label.encode()) for label in self.labels)

    def closed_fields(self, answer: str) -> dict[str, str]:
        """Returns the whole answer under the name "", since it is from a fixed set."""
        return {"": answer}

    def with_closed_field(self, answer: str, name: str, value: str) -> str:
        """Returns an answer with another value of one of its `closed_fields`."""
        return value

    def is_grounded(self, answer: str, text: str) -> bool:
        """Returns True, since a label is not copied from the text."""
        return True


@dataclass(frozen=True, slots=True)
class ObjectAnswers:
    """Answers that are JSON objects with the same fields, in one order and format."""

    fields: tuple[str, ...]
    known: Mapping[str, tuple[str, ...]]
    """The allowed values, as JSON, of the fields that have a fixed set of them."""
    texts: tuple[str, ...] = ()
    """The fields whose values are strings; a number in them is read as a string."""
    copied: tuple[str, ...] = ()
    """The fields whose values occur in the text that is answered."""
    num_bytes: int = 0
    """The length of the longest answer."""

    def named(self, text: str) -> str | None:
        """Returns the only object of this form in a text, in its usual spelling; otherwise None."""
        values = object_in(text)
        if values is None or set(values) != set(self.fields):
            return None
        for name in self.texts:
            if isinstance(value := values[name], int | float) and not isinstance(value, bool):
                values[name] = str(value)
        for name, allowed in self.known.items():
            by_spelling = {spelling_key(as_text(json.loads(value))): value for value in allowed}
            if (usual := by_spelling.get(spelling_key(as_text(values[name])))) is None:
                return None
            values[name] = json.loads(usual)
        return _as_json({name: values[name] for name in self.fields})

    def closed_fields(self, answer: str) -> dict[str, str]:
        """Returns the values, as JSON, of the fields that have a fixed set of allowed values."""
        values = json.loads(answer)
        return {name: _as_json(values[name]) for name in self.known}

    def with_closed_field(self, answer: str, name: str, value: str) -> str:
        """Returns an answer with another value of one of its `closed_fields`."""
        return _as_json({**json.loads(answer), name: json.loads(value)})

    def is_grounded(self, answer: str, text: str) -> bool:
        """Returns whether all values that must be copied from the text are in it."""
        values, text = json.loads(answer), text.casefold()
        return all(_occurs_in(values[name], text) for name in self.copied)


@dataclass(frozen=True, slots=True)
class PatternAnswers:
    """Answers of a few patterns, which differ only in words with digits: `queue=sales order=…`."""

    patterns: tuple[str, ...]
    are_copied: bool = False
    """Whether the words with digits occur in the text that is answered."""
    num_bytes: int = 0
    """The length of the longest answer."""

    def named(self, text: str) -> str | None:
        """Returns the answer of these patterns that a text gives; None for none or several."""
        for part in (text.strip(), text.strip().partition("\n")[0]):
            for pattern in self.patterns:
                if (match := _pattern(pattern).fullmatch(part)) is not None:
                    return _matched_answer(pattern, match)
        remaining, answers = text, dict[str, str]()
        for pattern in sorted(self.patterns, key=len, reverse=True):
            for match in _pattern(pattern).finditer(remaining):
                answer = _matched_answer(pattern, match)
                answers.setdefault(answer.casefold(), answer)
            remaining = _pattern(pattern).sub(" ", remaining)
        return answers.popitem()[1] if len(answers) == 1 else None

    def closed_fields(self, answer: str) -> dict[str, str]:
        """Returns the answer's pattern under the name "", if there are several patterns."""
        return {"": pattern_of(answer)} if len(self.patterns) > 1 else {}

    def with_closed_field(self, answer: str, name: str, value: str) -> str:
        """Returns the other pattern alone, without the words with digits."""
        return value

    def is_grounded(self, answer: str, text: str) -> bool:
        """Returns whether all words that must be copied from the text are in it."""
        text = text.casefold()
        return not self.are_copied or all(
            _occurs_in(word, text) for word in _VARYING.findall(answer)
        )


AnswerForm = LabelAnswers | ObjectAnswers | PatternAnswers


def form_of(answered: Sequence[tuple[str, str]], *, are_bare: bool = True) -> AnswerForm | None:
    """Returns the form of the answers in pairs of a text and its answer; None if it is free text.

    are_bare: whether each answer is nothing but the answer. Otherwise it may be a longer text, with
    a JSON object in it, and patterns are not looked for.
    """
    if (objects := _object_form(answered)) is not None:
        return objects
    labels = label_set([answer for _, answer in answered])
    if labels is not None:
        return LabelAnswers(tuple(labels))
    return _pattern_form(answered) if are_bare else None


def _pattern_form(answered: Sequence[tuple[str, str]]) -> PatternAnswers | None:
    answers = [answer.strip() for _, answer in answered]
    if len(answers) < _MIN_COPIED or max(map(len, answers)) > _MAX_PATTERN_CHARACTERS:
        return None
    if any(_GAP in answer for answer in answers):
        return None
    answer_patterns = [pattern_of(answer) for answer in answers]
    patterns = tuple(dict.fromkeys(answer_patterns))
    if len(patterns) > 1 and label_set(answer_patterns) is None:
        return None
    # A pattern without words would be found in any text.
    if not all(any(letter.isalpha() for letter in pattern) for pattern in patterns):
        return None
    is_copied = [
        _occurs_in(word, text.casefold())
        for text, answer in answered
        for word in _VARYING.findall(answer)
    ]
    are_copied = len(is_copied) >= _MIN_COPIED and sum(is_copied) >= _COPIED_SHARE * len(is_copied)
    num_bytes = max(len(answer.encode()) for answer in answers)
    return PatternAnswers(patterns, are_copied, num_bytes)


def pattern_of(answer: str) -> str:
    """Returns an answer with a placeholder for each word that has a digit."""
    return _VARYING.sub(_GAP, answer.strip())


@lru_cache(maxsize=2 * _MAX_ANSWERS)
def _pattern(pattern: str) -> re.Pattern[str]:
    """Returns the regular expression that finds a pattern's answers in a text, as whole words."""
    parts = f"({_VARYING.pattern})".join(map(re.escape, pattern.split(_GAP)))
    # The sign of a negative number would be lost.
    unsigned = "(?<![-+])" if pattern.startswith(_GAP) else ""
    return re.compile(f"{_NOT_AFTER}{unsigned}{parts}{_NOT_BEFORE}", re.IGNORECASE)


def _matched_answer(pattern: str, match: re.Match[str]) -> str:
    """Returns the answer that was matched, with the case of the pattern."""
    first, *others = pattern.split(_GAP)
    return first + "".join(word + part for word, part in zip(match.groups(), others, strict=True))


def _object_form(answered: Sequence[tuple[str, str]]) -> ObjectAnswers | None:
    objects = [(text, values) for text, answer in answered if (values := object_in(answer))]
    field_sets = Counter(frozenset(values) for _, values in objects)
    if not field_sets or field_sets.most_common(1)[0][1] < max(2, _MIN_SHARE * len(answered)):
        return None
    names = field_sets.most_common(1)[0][0]
    alike = [(text.casefold(), values) for text, values in objects if values.keys() == names]
    fields, allowed = tuple(alike[0][1]), dict[str, tuple[str, ...]]()
    texts, copied = list[str](), list[str]()
    for name in fields:
        values = [(text, one[name]) for text, one in alike]
        stated = [_occurs_in(value, text) for text, value in values if value not in (None, "")]
        are_copied = len(stated) >= _MIN_COPIED and sum(stated) >= _COPIED_SHARE * len(stated)
        # Values that are copied from the texts are as varied as the texts, so no set is closed.
        if not are_copied and label_set([as_text(value) or "null" for _, value in values]):
            allowed[name] = tuple(dict.fromkeys(_as_json(value) for _, value in values))
            continue
        if all(isinstance(value, str | None) for _, value in values):
            texts.append(name)
        if are_copied:
            copied.append(name)
    num_bytes = max(len(_as_json(values).encode()) for _, values in alike)
    return ObjectAnswers(fields, allowed, tuple(texts), tuple(copied), num_bytes)


def object_in(text: str) -> dict[str, Any] | None:
    """Returns the JSON object in a text; None if there is not exactly one, or it is nested."""
    objects = objects_in(text)
    if len(objects) != 1 or not objects[0]:
        return None
    try:
        # Neither NaN nor half of a surrogate pair is JSON.
        json.dumps(objects[0], allow_nan=False, ensure_ascii=False).encode()
    except ValueError:
        return None
    is_flat = all(isinstance(value, _SCALARS) for value in objects[0].values())
    return objects[0] if is_flat else None


def has_same_value(text: str, field: str, *, expected: str) -> bool:
    """Returns whether the JSON objects in two texts have the same value of a field.

    False if `text` has no object, or its object does not have the field.
    """
    values, expected_values = fields_in(text) or {}, fields_in(expected) or {}
    return field in values and values[field].strip() == expected_values.get(field, "").strip()


def _occurs_in(value: object, text: str) -> bool:
    """Returns whether a lower-case text contains a value as whole words; True if it is empty."""
    if value in (None, ""):
        return True
    pattern = f"{_NOT_AFTER}{re.escape(str(value).casefold())}{_NOT_BEFORE}"
    return re.search(pattern, text) is not None


def _as_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def label_set(answers: Sequence[str]) -> list[str] | None:
    """Returns the different answers, the commonest first; None if they are not from a small set."""
    counts = Counter(answer.strip() for answer in answers)
    if len(counts) < 2 or len(counts) > _MAX_ANSWERS or "" in counts:
        return None
    num_numbers = sum(_NUMBER.fullmatch(answer) is not None for answer in counts)
    are_numbers = 2 * num_numbers > len(counts)
    min_repeats = _MIN_REPEATS_OF_NUMBERS if are_numbers else _MIN_REPEATS
    if sum(counts.values()) < min_repeats * len(counts):
        return None
    return [answer for answer, _ in counts.most_common()]


def usual_spellings(answers: Sequence[str]) -> dict[str, str]:
    """Returns the usual spelling of each answer that is spelt differently, by the answer.

    Spellings differ in case, in spaces around them, or in what joins their words. The commonest is
    the usual one. Returns nothing unless answers are from a small set.
    """
    counts, usual = Counter(answers), dict[str, str]()
    spellings = {
        answer: usual.setdefault(spelling_key(answer), answer.strip())
        for answer, _ in counts.most_common()
    }
    if label_set([spellings[answer] for answer in answers]) is None:
        return {}
    return {answer: other for answer, other in spellings.items() if answer != other}


def spelling_key(answer: str) -> str:
    """Returns a key that all spellings of an answer share."""
    return _WORD_JOINT.sub(" ", answer.strip()).casefold()


def named_answer(text: str, answers: Sequence[str]) -> str | None:
    """Returns the one of `answers` that a text gives; None if it gives none or several.

    The whole text or its first line may be the answer. Otherwise exactly one answer must occur in
    the text as whole words; an answer within a longer one ("refund" in "refund status") does not
    count.
    """
    for part in (text, text.strip().partition("\n")[0]):
        exact = [answer for answer in answers if _normalised(answer) == _normalised(part)]
        if len(exact) == 1:
            return exact[0]
    remaining, named = text.casefold(), list[str]()
    for answer in sorted(answers, key=len, reverse=True):
        pattern = rf"(?<!\w){re.escape(answer.casefold())}(?!\w)"
        if re.search(pattern, remaining):
            named.append(answer)
            remaining = re.sub(pattern, " ", remaining)
    return named[0] if len(named) == 1 else None


def _normalised(text: str) -> str:
    """Returns a text in one spelling, without the punctuation around it."""
    return spelling_key(re.sub(r"^\W+|\W+$", "", text))
