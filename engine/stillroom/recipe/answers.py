"""Answers of one form (labels, JSON objects, lines of few patterns): finds one in a longer text."""

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
"""How often an answer occurs on average, if answers are from a small set."""
_NUMBER = re.compile(r"[-+]?[\d.,]+\s*\S{0,3}")
_JOINED = re.compile(r"(?<=[^\W_])[\s_-]+(?=[^\W_])")
_MIN_REPEATS_OF_NUMBERS = 10
"""For ratings, say; of other numbers more may be right than were seen."""
_MIN_SHARE = 0.9
"""The least share of the answers that have the form of all."""
_MIN_COPIED, _COPIED_SHARE = 10, 0.98
"""How many values of a field, and what share of them, occur in their texts if all must."""
_VARYING = re.compile(r"\b(?=[^\W\d]*\d)\w++(?:[.,:/-](?=[^\W\d]*\d)\w++)*+")
"""A word with a digit, or several that are joined: B7791, 3.5, 2026-11-24."""
_NOT_AFTER, _NOT_BEFORE = r"(?<!\w)(?<!\d[.,:/-])", r"(?!\w|[.,:/-]\d)"
"""Around a whole value: 5 is none in 3.5, nor B7791 in B7791-2."""
_LONGEST_PATTERN = 120
_GAP = "…"
"""The placeholder for such a word in a pattern."""
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
        """Returns the values that are from a fixed set: here the whole answer, named ""."""
        return {"": answer}

    def with_closed_field(self, answer: str, name: str, value: str) -> str:
        """Returns an answer with another value of one of its `closed_fields`."""
        return value

    def is_grounded(self, answer: str, text: str) -> bool:
        """Returns whether all that must be copied from the text is in it: here nothing must."""
        return True


@dataclass(frozen=True, slots=True)
class ObjectAnswers:
    """Answers that are JSON objects with the same fields, in one order and way of writing."""

    fields: tuple[str, ...]
    known: Mapping[str, tuple[str, ...]]
    """The allowed values, as JSON, of the fields that have a fixed set of them. The name is
    also in the answers.py that recipes write, so it must not change."""
    texts: tuple[str, ...] = ()
    """The fields whose values are never numbers; 5 is then "5"."""
    copied: tuple[str, ...] = ()
    """The fields whose values occur in the text that is answered."""
    num_bytes: int = 0
    """The length of the longest answer."""

    def named(self, text: str) -> str | None:
        """Returns the one object of this form in a text, as it is to be written; else None."""
        values = object_in(text)
        if values is None or set(values) != set(self.fields):
            return None
        for name in self.texts:
            if isinstance(value := values[name], int | float) and not isinstance(value, bool):
                values[name] = str(value)
        for name, allowed in self.known.items():
            spelt = {spelling_key(as_text(json.loads(value))): value for value in allowed}
            if (usual := spelt.get(spelling_key(as_text(values[name])))) is None:
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
        return all(_is_in(values[name], text) for name in self.copied)


@dataclass(frozen=True, slots=True)
class PatternAnswers:
    """Answers of a few patterns, which differ only in words with digits: `queue=sales order=…`."""

    patterns: tuple[str, ...]
    are_copied: bool = False
    """Whether the words with digits occur in the text that is answered."""
    num_bytes: int = 0
    """The length of the longest answer."""

    def named(self, text: str) -> str | None:
        """Returns the answer of these patterns that a text gives; None if none or several."""
        for part in (text.strip(), text.strip().partition("\n")[0]):
            for pattern in self.patterns:
                if (match := _pattern(pattern).fullmatch(part)) is not None:
                    return _filled(pattern, match)
        rest, found = text, dict[str, str]()
        for pattern in sorted(self.patterns, key=len, reverse=True):
            for match in _pattern(pattern).finditer(rest):
                answer = _filled(pattern, match)
                found.setdefault(answer.casefold(), answer)
            rest = _pattern(pattern).sub(" ", rest)
        return found.popitem()[1] if len(found) == 1 else None

    def closed_fields(self, answer: str) -> dict[str, str]:
        """Returns the values of the fields that have a fixed set of values: here the pattern."""
        return {"": pattern_of(answer)} if len(self.patterns) > 1 else {}

    def with_closed_field(self, answer: str, name: str, value: str) -> str:
        """Returns an answer with another value of a closed field: here the pattern alone."""
        return value

    def is_grounded(self, answer: str, text: str) -> bool:
        """Returns whether all that must be copied from the text is in it."""
        text = text.casefold()
        return not self.are_copied or all(_is_in(word, text) for word in _VARYING.findall(answer))


AnswerForm = LabelAnswers | ObjectAnswers | PatternAnswers


def form_of(answered: Sequence[tuple[str, str]], *, are_bare: bool = True) -> AnswerForm | None:
    """Returns the form of the answers in pairs of a text and its answer; None if it is free text.

    are_bare: whether the answers are nothing else. Others may be longer texts, each with a JSON
    object in it, or labels.
    """
    if (objects := _object_form(answered)) is not None:
        return objects
    labels = known_answers([answer for _, answer in answered])
    if labels is not None:
        return LabelAnswers(tuple(labels))
    return _pattern_form(answered) if are_bare else None


def _pattern_form(answered: Sequence[tuple[str, str]]) -> PatternAnswers | None:
    answers = [answer.strip() for _, answer in answered]
    if len(answers) < _MIN_COPIED or max(map(len, answers)) > _LONGEST_PATTERN:
        return None
    if any(_GAP in answer for answer in answers):
        return None
    of_answers = [pattern_of(answer) for answer in answers]
    patterns = tuple(dict.fromkeys(of_answers))
    if len(patterns) > 1 and known_answers(of_answers) is None:
        return None
    # A pattern without words would be found in any text.
    if not all(any(letter.isalpha() for letter in pattern) for pattern in patterns):
        return None
    words = [
        _is_in(word, text.casefold())
        for text, answer in answered
        for word in _VARYING.findall(answer)
    ]
    are_copied = len(words) >= _MIN_COPIED and sum(words) >= _COPIED_SHARE * len(words)
    num_bytes = max(len(answer.encode()) for answer in answers)
    return PatternAnswers(patterns, are_copied, num_bytes)


def pattern_of(answer: str) -> str:
    """Returns an answer with a mark in place of each word that has a digit."""
    return _VARYING.sub(_GAP, answer.strip())


@lru_cache(maxsize=2 * _MAX_ANSWERS)
def _pattern(pattern: str) -> re.Pattern[str]:
    """Returns what finds the answers of a pattern in a text, as whole words."""
    parts = f"({_VARYING.pattern})".join(map(re.escape, pattern.split(_GAP)))
    # Of a negative number, the sign would be lost.
    unsigned = "(?<![-+])" if pattern.startswith(_GAP) else ""
    return re.compile(f"{_NOT_AFTER}{unsigned}{parts}{_NOT_BEFORE}", re.IGNORECASE)


def _filled(pattern: str, match: re.Match[str]) -> str:
    """Returns the answer that was found, in the pattern's own letters."""
    first, *others = pattern.split(_GAP)
    return first + "".join(word + part for word, part in zip(match.groups(), others, strict=True))


def _object_form(answered: Sequence[tuple[str, str]]) -> ObjectAnswers | None:
    found = [(text, values) for text, answer in answered if (values := object_in(answer))]
    kinds = Counter(frozenset(values) for _, values in found)
    if not kinds or kinds.most_common(1)[0][1] < max(2, _MIN_SHARE * len(answered)):
        return None
    names = kinds.most_common(1)[0][0]
    of_form = [(text.casefold(), values) for text, values in found if values.keys() == names]
    fields, allowed = tuple(of_form[0][1]), dict[str, tuple[str, ...]]()
    texts, copied = list[str](), list[str]()
    for name in fields:
        values = [(text, one[name]) for text, one in of_form]
        stated = [_is_in(value, text) for text, value in values if value not in (None, "")]
        are_copied = len(stated) >= _MIN_COPIED and sum(stated) >= _COPIED_SHARE * len(stated)
        # The values that are copied from texts are as many as there are texts.
        if not are_copied and known_answers([as_text(value) or "null" for _, value in values]):
            allowed[name] = tuple(dict.fromkeys(_as_json(value) for _, value in values))
            continue
        if all(isinstance(value, str | None) for _, value in values):
            texts.append(name)
        if are_copied:
            copied.append(name)
    num_bytes = max(len(_as_json(values).encode()) for _, values in of_form)
    return ObjectAnswers(fields, allowed, tuple(texts), tuple(copied), num_bytes)


def object_in(text: str) -> dict[str, Any] | None:
    """Returns the JSON object in a text, if it has exactly one, and that without nested values."""
    found = objects_in(text)
    if len(found) != 1 or not found[0]:
        return None
    try:
        # Neither NaN nor half of a surrogate pair is JSON.
        json.dumps(found[0], allow_nan=False, ensure_ascii=False).encode()
    except ValueError:
        return None
    is_flat = all(isinstance(value, _SCALARS) for value in found[0].values())
    return found[0] if is_flat else None


def has_value(text: str, field: str, *, of: str) -> bool:
    """Returns whether the JSON object in a text has the same value of a field as the object `of`.

    A text without an object, or one without the field, has not.
    """
    given, right = fields_in(text) or {}, fields_in(of) or {}
    return field in given and given[field].strip() == right.get(field, "").strip()


def _is_in(value: object, text: str) -> bool:
    """Returns whether a text in lower case has a field's value as whole words; an empty one is."""
    if value in (None, ""):
        return True
    whole = f"{_NOT_AFTER}{re.escape(str(value).casefold())}{_NOT_BEFORE}"
    return re.search(whole, text) is not None


def _as_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def known_answers(expected: Sequence[str]) -> list[str] | None:
    """Returns the different answers, the commonest first; None if they are not from a small set."""
    counts = Counter(answer.strip() for answer in expected)
    if len(counts) < 2 or len(counts) > _MAX_ANSWERS or "" in counts:
        return None
    num_numbers = sum(_NUMBER.fullmatch(answer) is not None for answer in counts)
    are_numbers = 2 * num_numbers > len(counts)
    min_repeats = _MIN_REPEATS_OF_NUMBERS if are_numbers else _MIN_REPEATS
    if sum(counts.values()) < min_repeats * len(counts):
        return None
    return [answer for answer, _ in counts.most_common()]


def usual_spellings(answers: Sequence[str]) -> dict[str, str]:
    """Returns for each answer that is a commoner one in other letters, that one.

    The two differ in case, in spaces around them, or in what joins their words. Returns nothing
    unless answers are from a small set.
    """
    counts, usual = Counter(answers), dict[str, str]()
    spellings = {
        answer: usual.setdefault(spelling_key(answer), answer.strip())
        for answer, _ in counts.most_common()
    }
    if known_answers([spellings[answer] for answer in answers]) is None:
        return {}
    return {answer: other for answer, other in spellings.items() if answer != other}


def spelling_key(answer: str) -> str:
    """Returns an answer without what differs between spellings of the same one."""
    return _JOINED.sub(" ", answer.strip()).casefold()


def named_answer(text: str, answers: Sequence[str]) -> str | None:
    """Returns the one of `answers` that a text gives; None if it gives none or several.

    The whole text or its first line may be the answer. Otherwise exactly one answer must occur in
    the text as whole words; an answer within a longer one ("refund" in "refund status") does not
    count.
    """
    for part in (text, text.strip().partition("\n")[0]):
        exact = [answer for answer in answers if _bare(answer) == _bare(part)]
        if len(exact) == 1:
            return exact[0]
    rest, named = text.casefold(), list[str]()
    for answer in sorted(answers, key=len, reverse=True):
        pattern = rf"(?<!\w){re.escape(answer.casefold())}(?!\w)"
        if re.search(pattern, rest):
            named.append(answer)
            rest = re.sub(pattern, " ", rest)
    return named[0] if len(named) == 1 else None


def _bare(text: str) -> str:
    """Returns a text without case, and without punctuation and marks around it."""
    return spelling_key(re.sub(r"^\W+|\W+$", "", text))
