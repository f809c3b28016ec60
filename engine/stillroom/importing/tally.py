"""Counts what becomes of every source row, and notes each refused one."""

from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import msgspec

from stillroom.errors import writable_text
from stillroom.importing.records import Place, Refusal


class FormatCount(msgspec.Struct, kw_only=True):
    """The counts of one format. Always read = kept + merged + refused."""

    read: int = 0
    kept: int = 0
    """The rows that are rollouts; of a joined conversation, its last call."""
    merged: int = 0
    """The rows that went into the rollout of another one: earlier calls, copies, and feedback."""
    refused: int = 0


class RefusedRow(msgspec.Struct, frozen=True):
    """A line of the side file `OUTPUT.refused`: the place of a refused row, and the reason."""

    source: str
    format: str
    reason: str
    detail: str


class ImportTally:
    """Counts the rows of all formats."""

    def __init__(
        self,
        note_refused: Callable[[RefusedRow], None],
        shown_path: Callable[[Path], str],
        redact: Callable[[str], str],
    ) -> None:
        """`note_refused` is given each refused row.

        `redact` takes secrets out of a text that may quote a row.
        """
        self._note_refused, self._shown_path, self._redact = note_refused, shown_path, redact
        self._names: dict[Path, str] = {}
        self.formats: defaultdict[str, FormatCount] = defaultdict(FormatCount)
        self.reasons: Counter[str] = Counter()
        self.first_refused: list[str] = []
        """The first refused rows, at most 5, each with its place and what is wrong with it."""

    def shown(self, path: Path, line: int) -> str:
        """Returns the place of a line as users read it."""
        name = self._names.get(path)
        if name is None:
            name = self._names[path] = self._shown_path(path)
        return f"{name}:{line}"

    def shown_place(self, place: Place) -> str:
        """Returns a place as users read it."""
        shown = self.shown(place.path, place.line)
        return f"{shown}#{self._redact(place.part)}" if place.part else shown

    def read(self, name: str, num_rows: int = 1) -> None:
        """Counts rows that are not refused so far."""
        self.formats[name].read += num_rows

    def keep(self, name: str) -> None:
        """Counts a row that is a rollout."""
        self.formats[name].kept += 1

    def merge(self, name: str, num_rows: int = 1) -> None:
        """Counts rows that went into the rollout of another."""
        self.formats[name].merged += num_rows

    def refuse(self, name: str, refusal: Refusal, *, is_read: bool = False) -> None:
        """Counts and notes a refused row; with `is_read` it has been counted as read before."""
        count = self.formats[name]
        count.read += not is_read
        count.refused += 1
        self.reasons[refusal.reason] += 1
        source, detail = (
            self.shown_place(refusal.place),
            self._redact(writable_text(refusal.detail)),
        )
        if len(self.first_refused) < 5:
            shown_detail = f" ({detail[:200]})" if detail else ""
            self.first_refused.append(f"{source}: {refusal.reason}{shown_detail}")
        self._note_refused(RefusedRow(source, name, refusal.reason, detail))

    @property
    def total(self) -> FormatCount:
        """The counts of all formats together."""
        counts = self.formats.values()
        return FormatCount(
            read=sum(count.read for count in counts),
            kept=sum(count.kept for count in counts),
            merged=sum(count.merged for count in counts),
            refused=sum(count.refused for count in counts),
        )
