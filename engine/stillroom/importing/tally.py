"""Counts the kept, merged and refused source rows, and records each refused row."""

from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import msgspec

from stillroom.errors import writable_text
from stillroom.importing.records import Location, RejectedRow


class FormatCount(msgspec.Struct, kw_only=True):
    """The counts of one format; read = kept + merged + refused."""

    read: int = 0
    kept: int = 0
    """The rows with a rollout of their own; for joined calls, the last call."""
    merged: int = 0
    """The rows merged into another row's rollout: earlier calls, copies and feedback."""
    refused: int = 0


class RefusedLine(msgspec.Struct, frozen=True):
    """A line of the file `OUTPUT.refused`: where a refused row is, and why it was refused."""

    source: str
    format: str
    reason: str
    detail: str


class ImportTally:
    """Counts the rows of all formats."""

    def __init__(
        self,
        on_rejected: Callable[[RefusedLine], None],
        shown_path: Callable[[Path], str],
        redact: Callable[[str], str],
    ) -> None:
        """`on_rejected` is called for each refused row; `shown_path` formats a path for users.

        `redact` removes secrets from a text that may quote a row.
        """
        self._on_rejected, self._shown_path, self._redact = on_rejected, shown_path, redact
        self._names: dict[Path, str] = {}
        self.formats: defaultdict[str, FormatCount] = defaultdict(FormatCount)
        self.reasons: Counter[str] = Counter()
        self.first_rejected: list[str] = []
        """The first 5 refused rows, each as one line with its location and the problem."""
        self.disagreeing: set[int] = set()
        """The kept rows of rollouts whose feedback or copies of a call disagree on a score."""

    def show_line(self, path: Path, line: int) -> str:
        """Returns `file:line` with the path as shown to users."""
        name = self._names.get(path)
        if name is None:
            name = self._names[path] = self._shown_path(path)
        return f"{name}:{line}"

    def show_location(self, location: Location) -> str:
        """Returns a location as shown to users."""
        line = self.show_line(location.path, location.line)
        return f"{line}#{self._redact(location.part)}" if location.part else line

    def read(self, format_name: str, num_rows: int = 1) -> None:
        """Counts rows as read."""
        self.formats[format_name].read += num_rows

    def keep(self, format_name: str) -> None:
        """Counts a row as kept."""
        self.formats[format_name].kept += 1

    def merge(self, format_name: str, num_rows: int = 1) -> None:
        """Counts rows as merged into the rollout of another row."""
        self.formats[format_name].merged += num_rows

    def reject(self, format_name: str, row: RejectedRow, *, is_read: bool = False) -> None:
        """Counts and records a refused row; with `is_read`, it is already counted as read."""
        count = self.formats[format_name]
        count.read += not is_read
        count.refused += 1
        self.reasons[row.reason] += 1
        source, detail = (
            self.show_location(row.location),
            self._redact(writable_text(row.detail)),
        )
        if len(self.first_rejected) < 5:
            shown_detail = f" ({detail[:200]})" if detail else ""
            self.first_rejected.append(f"{source}: {row.reason}{shown_detail}")
        self._on_rejected(RefusedLine(source, format_name, row.reason, detail))

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
