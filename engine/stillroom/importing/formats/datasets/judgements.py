"""Reads tables of feedback: which session, trace or call was judged, and how."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stillroom.importing.bodies.facts import decimal_number
from stillroom.importing.json_rows import JsonRow
from stillroom.importing.records import Feedback, Refusal

_IDS = (
    "session_id", "session", "conversation_id", "conversation", "thread_id", "thread", "chat_id",
    "trace_id", "run_id", "request_id", "response_id", "completion_id", "message_id", "id",
)  # fmt: skip
_VERDICTS = frozenset(
    [
        "thumb",
        "thumbs",
        "thumbs_up",
        "feedback",
        "user_feedback",
        "vote",
        "rating",
        "stars",
        "score",
        "reward",
        "value",
    ]
)
_MOST_COLUMNS = 3
_RIGHT = ["up", "thumbs_up", "thumbsup", "like", "good", "positive", "yes", "true", "👍"]
_WRONG = ["down", "thumbs_down", "thumbsdown", "dislike", "bad", "negative", "no", "false", "👎"]
_WORDS: Mapping[str, float] = dict.fromkeys(_RIGHT, 1.0) | dict.fromkeys(_WRONG, 0.0)
"""What people's verdicts are called, in small letters and without blanks."""


@dataclass(frozen=True, slots=True)
class JudgementColumns:
    """The columns of a table of feedback."""

    about: str
    """The column that holds the id of a session, trace or call."""
    verdicts: Sequence[str]
    """The columns with numbers or with words such as up and down, each a score of its name."""


def judgement_columns(present: Sequence[str], chosen: Mapping[str, str]) -> JudgementColumns | None:
    """Returns the columns of a table of feedback; None if it is none.

    `chosen` are the columns that the user named, `id` and `score` for feedback.
    """
    if chosen:
        if set(chosen) != {"id", "score"} or not set(chosen.values()) <= set(present):
            return None
        return JudgementColumns(chosen["id"], [chosen["score"]])
    by_name = {_plain(name): name for name in present}
    about = next((by_name[name] for name in _IDS if name in by_name), None)
    verdicts = [name for plain, name in by_name.items() if plain in _VERDICTS]
    # Any table may have an id and a value: without a better name it is feedback only if small.
    is_clear = about is not None and (_plain(about) != "id" or len(present) <= _MOST_COLUMNS)
    return JudgementColumns(about, verdicts) if about and is_clear and verdicts else None


def judgements(row: JsonRow, columns: JudgementColumns) -> Iterator[Feedback | Refusal]:
    """Yields the judgements of one row of a table of feedback."""
    about = row.data.get(columns.about)
    if about in (None, "") or isinstance(about, bool | float | list | dict):
        yield Refusal(row.place, "a judgement of nothing", f"{columns.about} is empty")
        return
    for name in columns.verdicts:
        value = row.data.get(name)
        number = _number(value)
        if number is not None:
            yield Feedback(row.place, str(about), name, number)
        elif value not in (None, "") or len(columns.verdicts) == 1:
            yield Refusal(row.place, "a judgement without a number", f"{name}: {value}")


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, str) and (word := _plain(value)) in _WORDS:
        return _WORDS[word]
    return decimal_number(value)


def _plain(text: str) -> str:
    """Returns a name in the one spelling that is looked up: `sessionId` as `session_id`."""
    spaced = "".join(f"_{c}" if c.isupper() and i and text[i - 1].islower() else c
                     for i, c in enumerate(text.strip()))  # fmt: skip
    return spaced.lower().replace(" ", "_").replace("-", "_")
