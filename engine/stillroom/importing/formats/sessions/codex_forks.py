"""Knows which Codex threads were forked from which, and which of them has an item first."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from stillroom.importing.formats.sessions.message_tree import line_of
from stillroom.importing.json_rows import JsonRow, Row, read_json_rows
from stillroom.importing.payloads.blocks import BlockReader
from stillroom.importing.payloads.fields import as_row, first_text

_HEAD = 20


class ThreadForks:
    """The threads of an import that were forked, with those they come from.

    The file of a fork either names where the other thread's file is to be read up to, or begins
    with a copy of its lines. What several files of a family have belongs to the first one read.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._files: dict[str, Path] = {}
        self._origins: dict[str, str] = {}
        self._threads: dict[Path, str] = {}
        self._twice: set[str] = set()
        for path in paths:
            meta = _first_meta(path)
            if thread := first_text(meta, "id", "session_id"):
                self._threads[path] = thread
                longest = self._files.setdefault(thread, path)
                if longest != path:
                    self._twice.add(thread)
                    self._files[thread] = max(longest, path, key=_size)
                if origin := origin_of(meta):
                    self._origins.setdefault(thread, origin)
        self._related = {*self._origins, *self._origins.values(), *self._twice}
        self._owners: dict[int, str] = {}

    def in_order(self, paths: Iterable[Path]) -> list[Path]:
        """Returns the files, each after those of the threads that its thread was forked from.

        Of several files of a thread the longest is the first.
        """
        depths = {path: len(line_of(name, self._origins)) for path, name in self._threads.items()}
        later = {path for path in self._threads if self._files[self._threads[path]] != path}
        return sorted(paths, key=lambda path: (depths.get(path, 0), path in later))

    def file_of(self, thread: str | None) -> Path | None:
        """Returns the file of a thread; None if the import has none."""
        return self._files.get(thread or "")

    def is_twice(self, thread: str | None) -> bool:
        """Returns whether several files hold a thread, such as one that was packed and went on."""
        return thread in self._twice

    def family_of(self, thread: str | None) -> str | None:
        """Returns the id of the thread that a thread's family began with; None if it has none."""
        if thread is None or thread not in self._related:
            return None
        return line_of(thread, self._origins)[-1]

    def owner_of(self, family: str, item: Row) -> str | None:
        """Returns the conversation that an item belongs to; None if no file read had it."""
        return self._owners.get(_key(family, item) or 0)

    def own(self, family: str, item: Row, conversation: str) -> None:
        """Notes that an item belongs to a conversation."""
        if (key := _key(family, item)) is not None:
            self._owners.setdefault(key, conversation)


def is_message(item: Row) -> bool:
    """Returns whether an item can be recognised in another thread's file."""
    return _key("", item) is not None


def origin_of(meta: Mapping[str, Any]) -> str | None:
    """Returns the id of the thread that one was forked from."""
    return first_text(as_row(meta.get("history_base")), "thread_id") or first_text(
        meta, "forked_from_id"
    )


def _size(path: Path) -> int:
    return path.stat().st_size


def _first_meta(path: Path) -> Row:
    for row in islice(read_json_rows(path), _HEAD):
        if isinstance(row, JsonRow) and row.data.get("type") == "session_meta":
            return as_row(row.data.get("payload"))
    return {}


def _key(family: str, item: Row) -> int | None:
    """Returns what is the same in each copy of an item: a call's id, or a message's text."""
    call, role = item.get("call_id"), item.get("role")
    if isinstance(call, str):
        return hash((family, item.get("type"), call))
    if isinstance(role, str):
        return hash((family, role, BlockReader().text(item.get("content"))))
    return None
