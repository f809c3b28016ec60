"""The prompts of a file that `entries` and `n` choose."""

from collections.abc import Sequence

from stillroom.data.formats import Task
from stillroom.errors import InputError


def select_entries(tasks: list[Task], *, n: int | None, entries: str | None) -> list[Task]:
    """Returns the tasks that `entries` (e.g. "0,2,5-9", 0-based) and `n` choose."""
    return [tasks[number] for number in chosen_numbers(len(tasks), n=n, entries=entries)]


def chosen_numbers(length: int, *, n: int | None, entries: str | None) -> Sequence[int]:
    """Returns the numbers of the chosen prompts among `length`, from 0."""
    return (range(length) if entries is None else _indices(entries, length))[:n]


def _indices(entries: str, length: int) -> list[int]:
    indices: list[int] = []
    for part in entries.split(","):
        begin, dash, last = part.strip().partition("-")
        try:
            start, end = int(begin), int(last) if dash else int(begin)
        except ValueError:
            raise InputError(
                f"entries {entries!r}: {part.strip()!r} is not a number or a range",
                "write numbers and ranges such as 0,2,5-9 (0 is the first prompt)",
            ) from None
        if not 0 <= start <= end < length:
            raise InputError(
                f"entries {entries!r}: {part.strip()!r} is outside the file's 0-{length - 1}",
                f"choose among 0-{length - 1}",
            )
        indices += range(start, end + 1)
    return indices
