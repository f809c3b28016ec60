"""Notes on valid rows that may not teach what the user expects, e.g. calls without schemas."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from stillroom.data.formats import DpoRow, SftRow


def calls_tools(messages: Sequence[Any]) -> bool:
    """Returns whether a message of a conversation calls a tool."""
    return any(message.get("tool_calls") for message in messages)


def tools_notes(num_without: int, num_rows: int) -> list[str]:
    """Returns a note if some of the rows call tools whose schemas they lack, or []."""
    if not num_without:
        return []
    note = (
        f"{num_without} of {num_rows} rows call tools but have no `tools`: a student trained on "
        "them never reads a schema. convert_rollouts and make_dpo_pairs take the schemas from "
        "tools.py, next to their output or in the workspace, if it has every function that a row "
        "calls; import_rollouts with infer_tools infers schemas from a log's calls"
    )
    return [note]


def unjudged_notes(num_unjudged: int, num_rows: int) -> list[str]:
    """Returns a note if some rows, but not all, have neither a reward nor a success, or []."""
    if not 0 < num_unjudged < num_rows:
        return []
    note = (
        f"{num_unjudged} of {num_rows} rows have no reward or success, unlike the others: nothing "
        "judged their answers, which may be wrong. score_rollouts judges them, and filter_dataset "
        "with min_reward leaves them out"
    )
    return [note]


def summed_reward_notes(smallest: float, largest: float) -> list[str]:
    """Returns a note if successes that only their reward judged have rewards up to above 1, or [].

    `smallest` and `largest` are the rewards of these rows.
    """
    if not smallest < largest or largest <= 1:
        return []
    highest = repr(largest).removesuffix(".0")  # Not rounded: no row reaches a higher reward.
    note = (
        f"rewards of these rows go from {smallest:g} to {largest:g}, and from 0.5 on a row without "
        "`success` counts as one: if several rewards were summed, of which one (such as a "
        "precondition) is also given for wrong answers, filter_dataset with min_reward "
        f"{highest} leaves these out"
    )
    return [note]


def has_later_system(roles: Iterable[str]) -> bool:
    """Returns whether a conversation has a system message after its first message."""
    return "system" in itertools.islice(roles, 1, None)


def later_system_notes(num_later: int, num_rows: int) -> list[str]:
    """Returns a note if some of the rows have a system message after their first message, or []."""
    if not num_later:
        return []
    note = (
        f"{num_later} of {num_rows} rows have a system message after their first message: some "
        "chat templates refuse such a row, others join or move the messages. Write one system "
        "message at the start, or see what a model reads with inspect_examples(model=…)"
    )
    return [note]


def notes_on_rows(rows: Sequence[SftRow] | Sequence[DpoRow]) -> list[str]:
    """Returns the notes on rows that are trained on."""
    without = later = 0
    for row in rows:
        messages = _messages_of(row)
        without += not row.tools and calls_tools(messages)
        later += has_later_system(message["role"] for message in messages)
    return [*tools_notes(without, len(rows)), *later_system_notes(later, len(rows))]


def _messages_of(row: SftRow | DpoRow) -> list[Any]:
    if isinstance(row, SftRow):
        return list(row.messages)
    return [*row.prompt, *row.chosen, *row.rejected]
