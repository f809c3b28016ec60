"""Answers from a small, known set: recognises such a set, and finds its member in a longer text."""

import re
from collections import Counter
from collections.abc import Sequence

_MAX_ANSWERS = 60
_MIN_REPEATS = 2
"""How often an answer occurs on average, if answers are from a small set."""
_NUMBER = re.compile(r"[-+]?[\d.,]+\s*\S{0,3}")
_JOINED = re.compile(r"(?<=[^\W_])[\s_-]+(?=[^\W_])")
_MIN_REPEATS_OF_NUMBERS = 10
"""For ratings, say; of other numbers more may be right than were seen."""


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
