"""Counts kept, merged and refused source rows, and records each refused one."""

from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import msgspec

from stillroom.errors import writable_text
from stillroom.importing.records import Place, Refusal


class FormatCount(msgspec.Struct, kw_only=True):
    """The counts of one format; read = kept + merged + refused."""

    read: int = 0
    kept: int = 0
    """The rows with a rollout of their own; for joined calls, the last call."""
    merged: int = 0
    """The rows merged into another row's rollout: earlier calls, copies and feedback."""
    refused: int = 0


class RefusedRow(msgspec.Struct, frozen=True):
    """A line of the file `OUTPUT.refused`: the place of a refused row, and the reason."""

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
        """`note_refused` is called with each refused row.

        `redact` removes secrets from a text that may quote a row.
        """
        self._note_refused, self._shown_path, self._redact = note_refused, shown_path, redact
        self._names: dict[Path, str] = {}
        self.formats: defaultdict[str, FormatCount] = defaultdict(FormatCount)
        self.reasons: Counter[str] = Counter()
        self.first_refused: list[str] = []
        """The first refused rows, at most 5, each with its place and the problem."""
        self.disagreeing: set[int] = set()
        """The kept rows of rollouts with two values of one score, of which one is feedback."""

    def show_line(self, path: Path, line: int) -> str:
        """Returns `file:line` with the path as shown to users."""
        name = self._names.get(path)
        if name is None:
            name = self._names[path] = self._shown_path(path)
        return f"{name}:{line}"

    def show_place(self, place: Place) -> str:
        """Returns a place as shown to users."""
        show_line = self.show_line(place.path, place.line)
        return f"{show_line}#{self._redact(place.part)}" if place.part else show_line

    def read(self, name: str, num_rows: int = 1) -> None:
        """Counts rows as read."""
        self.formats[name].read += num_rows

    def keep(self, name: str) -> None:
        """Counts a row as kept."""
        self.formats[name].kept += 1

    def merge(self, name: str, num_rows: int = 1) -> None:
        """Counts rows as merged into the rollout of another row."""
        self.formats[name].merged += num_rows

    def refuse(self, name: str, refusal: Refusal, *, is_read: bool = False) -> None:
        """Counts and records a refused row; with `is_read`, it is already counted as read."""
        count = self.formats[name]
        count.read += not is_read
        count.refused += 1
        self.reasons[refusal.reason] += 1
        source, detail = (
            self.show_place(refusal.place),
            self._redact(writable_text(refusal.detail)),
        )
        if len(self.first_refused) < 5:
            shown_detail = f" ({detail[:200]})" if detail else ""
            self.first_refused.append(f"{source}: {refusal.reason}{shown_detail}")
        self._note_refused(RefusedRow(source, name, refusal.reason, detail))

    @property
    def total(self) -> FormatCount:
        """The total counts of all formats."""
        counts = self.formats.values()
        return FormatCount(
            read=sum(count.read for count in counts),
            kept=sum(count.kept for count in counts),
            merged=sum(count.merged for count in counts),
            refused=sum(count.refused for count in counts),
        )
