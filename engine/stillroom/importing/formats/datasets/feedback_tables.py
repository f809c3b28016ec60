"""Recognises and reads tables of feedback: rows with the id of a call or session, and a score."""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stillroom.data.checks import describe
from stillroom.importing.json_rows import JsonRow, Row, convert_rows
from stillroom.importing.payloads.fields import decimal_number, is_id_name
from stillroom.importing.records import Feedback, RefusedRow, SourceRow, feedback_row

_IDS = (
    "session_id", "session", "conversation_id", "conversation", "thread_id", "thread", "chat_id",
    "trace_id", "trace", "run_id", "call_id", "call", "request_id", "response_id", "completion_id",
    "message_id", "id",
)  # fmt: skip


def _words(text: str) -> frozenset[str]:
    """Returns the words of a text, separated by spaces or underscores."""
    return frozenset(text.replace("_", " ").split())


_CALL_WORDS = _words(
    "call chat completion conversation event exchange generation interaction log message "
    "observation request response run session span thread trace turn"
)
_OTHER_IDS = _words(
    "account agent annotator author customer feedback labeler label order org organization project "
    "rater reviewer score team tenant ticket user workspace"
)
"""The first words of ids that name no call: a user's id, for example, or the feedback's own."""
_GENERAL_SCORES = _words("score reward value")
_SCORE_WORDS = _words("thumb thumbs vote rating stars feedback score verdict reaction")
_CLEAR_SCORE_WORDS = _words("thumb thumbs vote")
"""Words that name a score in any table, even next to an id of unknown kind."""
_THUMB_WORDS = _words("thumb thumbs thumbsup vote upvote feedback")
_DOWN_WORDS = _words("against down downvote dislike no not thumbsdown")
_NOT_SCORES = _words(
    "at by comment count date id kind model name note reason source text time timestamp type user"
)
"""The last words of columns about a score that do not contain it, such as `thumb_comment`."""
_MAX_FEEDBACK_COLUMNS = 3
"""In a table with more columns, names as general as `id` and `score` may mean anything."""
_MAX_FLAT_FIELDS = 8
_NUM_HEAD_ROWS = 50
_POSITIVE = (
    "up thumbs_up thumb_up thumbsup upvote like liked good great positive yes y true correct right "
    "helpful accepted pass passed 👍 ✅"
)
_NEGATIVE = (
    "down thumbs_down thumb_down thumbsdown downvote dislike disliked bad poor negative no n false "
    "incorrect wrong unhelpful not_helpful rejected fail failed 👎 ❌"
)
_WORD_SCORES: dict[str, float] = {
    word: score for words, score in ((_POSITIVE, 1.0), (_NEGATIVE, 0.0)) for word in words.split()
}
"""The scores of common feedback words, as `_normalize` returns them."""
_MODIFIERS = re.compile("[\N{VARIATION SELECTOR-16}\U0001f3fb-\U0001f3ff]")
"""The skin tones and the variation selector that may follow an emoji."""


@dataclass(frozen=True, slots=True)
class FeedbackColumns:
    """The names of the columns of a table of feedback."""

    target: str
    """The column with the id of a session, trace or call."""
    score_columns: Sequence[str]
    """The columns with scores, as numbers or words such as up and down."""


def feedback_columns(present: Sequence[str], chosen: Mapping[str, str]) -> FeedbackColumns | None:
    """Returns the columns of a table of feedback; None if there are none, or they are ambiguous.

    `chosen` maps roles to the columns that the user named; feedback needs `id` and `score`.
    """
    if chosen:
        if set(chosen) != {"id", "score"} or not set(chosen.values()) <= set(present):
            return None
        return FeedbackColumns(chosen["id"], [chosen["score"]])
    by_name = {_normalize(name): name for name in present}
    target = _target_column(by_name)
    scores = [
        name
        for normalized, name in by_name.items()
        if _is_score_name(normalized) and name != target
    ]
    if {"name", "value"} <= by_name.keys():  # each row names its score in `name`
        scores = [name for name in scores if _normalize(name) != "value"]
    if target is None or not scores:
        return None
    # Any table may have an id and a value: with such general names, it is feedback only if small.
    is_of_call = _is_call_id(_normalize(target))
    is_clear = is_of_call or any(_CLEAR_SCORE_WORDS & _words(_normalize(name)) for name in scores)
    is_clear = is_clear or len(present) <= _MAX_FEEDBACK_COLUMNS
    return FeedbackColumns(target, scores) if is_clear else None


def _target_column(by_name: Mapping[str, str]) -> str | None:
    """Returns the column with the id of a call or session; None if there is not exactly one.

    `by_name` has the columns by their normalized names.
    """
    known_id = next((by_name[name] for name in _IDS if name in by_name), None)
    if known_id is not None and _normalize(known_id) != "id":
        return known_id
    other_ids = [
        normalized
        for normalized, name in by_name.items()
        if normalized != "id" and (is_id_name(name) or is_id_name(normalized))
        and normalized.split("_")[0] not in _OTHER_IDS
    ]  # fmt: skip
    other_ids = [normalized for normalized in other_ids if _is_call_id(normalized)] or other_ids
    if len(other_ids) > 1:
        return None
    # A column called just `id` has the feedback's own id if another one has an id of a call.
    return by_name[other_ids[0]] if other_ids else known_id


def _is_call_id(normalized: str) -> bool:
    return normalized in _IDS[:-1] or bool(_CALL_WORDS & _words(normalized))


def _is_score_name(normalized: str) -> bool:
    return normalized in _GENERAL_SCORES or _is_about_score(normalized)


def _is_about_score(normalized: str) -> bool:
    return (
        bool(_SCORE_WORDS & _words(normalized)) and normalized.rpartition("_")[2] not in _NOT_SCORES
    )


def is_thumb(name: str) -> bool:
    """Returns whether a score's name is that of a thumb or vote, for which 1 is good."""
    words = _words(_normalize(name).replace("_", " "))
    return bool(_THUMB_WORDS & words) and not _DOWN_WORDS & words


def scores_in(fields: Mapping[str, Any]) -> dict[str, float]:
    """Returns the thumbs, votes, ratings and scores among the fields of a conversation's row."""
    named = {name: fields[name] for name in fields if _is_about_score(_normalize(name))}
    scores = {name: score_of(value) for name, value in named.items()}
    return {name: score for name, score in scores.items() if score is not None}


def is_feedback_row(row: Row) -> bool:
    """Returns whether a JSON row is flat, with the columns of feedback and a score in one."""
    columns = feedback_columns(list(row), {})
    if columns is None or len(row) > _MAX_FLAT_FIELDS:
        return False
    scores = (score_of(row[name]) for name in columns.score_columns)
    return any(score is not None for score in scores) and not any(
        isinstance(value, dict | list) for value in row.values()
    )


def read_feedback(
    rows: Iterator[JsonRow | RefusedRow], columns: FeedbackColumns
) -> Iterator[SourceRow]:
    """Yields the feedback in the rows of a table.

    Of several columns that may have scores, those without a score in any of the first rows are
    left out, such as one with comments.
    """
    head = list(itertools.islice(rows, _NUM_HEAD_ROWS))
    readable = [
        name
        for name in columns.score_columns
        if any(
            isinstance(row, JsonRow) and score_of(row.data.get(name)) is not None for row in head
        )
    ]
    used = FeedbackColumns(columns.target, readable or columns.score_columns)
    all_rows: Iterable[JsonRow | RefusedRow] = itertools.chain(head, rows)
    return convert_rows(all_rows, lambda row: feedback_of(row, used))


def feedback_of(row: JsonRow, columns: FeedbackColumns) -> Iterator[Feedback | RefusedRow]:
    """Yields the feedback in one row."""
    target_id = row.data.get(columns.target)
    if target_id in (None, "") or isinstance(target_id, bool | float | list | dict):
        is_empty = target_id in (None, "")
        problem = "is empty" if is_empty else f"must be an id, not {describe(target_id)}"
        yield RefusedRow(row.location, "feedback without a target", f"{columns.target} {problem}")
        return
    for name in columns.score_columns:
        value = row.data.get(name)
        if value not in (None, "") or len(columns.score_columns) == 1:
            yield feedback_row(
                row.location, str(target_id), name, score_of(value), value, column=columns.target
            )


def score_of(value: Any) -> float | None:
    """Returns a score as a number; None if it is neither a number nor a known word."""
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, str):
        word = _normalize(_MODIFIERS.sub("", value).strip().strip(":"))
        return (
            _WORD_SCORES[word] if word in _WORD_SCORES else decimal_number(value.strip().strip(":"))
        )
    return decimal_number(value)


def _normalize(text: str) -> str:
    """Converts a name to snake case for look-ups, e.g. `sessionId` to `session_id`."""
    spaced = "".join(f"_{c}" if c.isupper() and i and text[i - 1].islower() else c
                     for i, c in enumerate(text.strip()))  # fmt: skip
    return spaced.lower().replace(" ", "_").replace("-", "_")
