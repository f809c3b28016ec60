"""Counts the kept, merged and refused source rows, and records each refused row."""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from stillroom.errors import writable_text
from stillroom.importing.records import Feedback, Location, RefusedRow


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


@dataclass(slots=True)
class FeedbackTable:
    """The columns of a table of feedback, and how many of its scores match an imported row."""

    target: str
    """The column with the ids."""
    scores: dict[str, None] = field(default_factory=dict[str, None])
    """The columns with scores."""
    num_scores: int = 0
    num_matched: int = 0
    """The number of scores whose id is that of an imported call or session."""


@dataclass(slots=True)
class RefusedFile:
    """The refused rows of a file of which nothing was read."""

    num_rows: int = 0
    reasons: Counter[str] = field(default_factory=Counter[str])
    columns: tuple[str, ...] = ()
    """The columns of the file, if it is a table that is refused as a whole."""


class FileTally:
    """Tracks the files of which no row was read, and the tables that were read as feedback."""

    def __init__(self, show_path: Callable[[Path], str]) -> None:
        """`show_path` formats a path for users; it shows a decompressed copy as its original."""
        self._show_path = show_path
        self._read: set[str] = set()
        self.refused: dict[str, RefusedFile] = {}
        """The files with refused rows, of which nothing was read."""
        self.feedback: dict[str, FeedbackTable] = {}
        """The tables of feedback whose columns were recognised, or named by the user."""

    def mark_as_read(self, path: Path) -> None:
        """Records that at least one row of a file was read."""
        name = self._show_path(path)
        self._read.add(name)
        self.refused.pop(name, None)

    def refuse(self, row: RefusedRow) -> None:
        """Counts a refused row of a file."""
        if (name := self._show_path(row.location.path)) not in self._read:
            file = self.refused.setdefault(name, RefusedFile())
            file.num_rows += 1
            file.reasons[row.reason] += 1
            file.columns = file.columns or row.columns

    def add_feedback(self, feedback: Feedback, *, is_matched: bool) -> None:
        """Counts a score from a separate row, and whether its id is that of an imported row."""
        if is_matched:
            self.mark_as_read(feedback.location.path)
        if feedback.column:
            name = self._show_path(feedback.location.path)
            table = self.feedback.setdefault(name, FeedbackTable(feedback.column))
            table.scores[feedback.name] = None
            table.num_scores += 1
            table.num_matched += is_matched


class ImportTally:
    """Counts the rows of all formats."""

    def __init__(
        self,
        on_refused: Callable[[RefusedLine], None],
        format_path: Callable[[Path], str],
        redact: Callable[[str], str],
    ) -> None:
        """`on_refused` is called for each refused row; `format_path` formats a path for users.

        `redact` removes secrets from a text that may quote a row.
        """
        self._on_refused, self._format_path, self._redact = on_refused, format_path, redact
        self._shown_paths: dict[Path, str] = {}
        self.formats: defaultdict[str, FormatCount] = defaultdict(FormatCount)
        self.files = FileTally(self.show_path)
        self.reasons: Counter[str] = Counter()
        self.first_refused: list[str] = []
        """The first 5 refused rows, each as one line with its location and the problem."""
        self.conflicting_rows: set[int] = set()
        """The kept rows of rollouts whose feedback or copies of a call disagree on a score."""

    def show_path(self, path: Path) -> str:
        """Returns a path as shown to users."""
        shown = self._shown_paths.get(path)
        if shown is None:
            shown = self._shown_paths[path] = self._format_path(path)
        return shown

    def show_location(self, location: Location) -> str:
        """Returns a location as shown to users."""
        line = f"{self.show_path(location.path)}:{location.line}"
        return f"{line}#{self._redact(location.part)}" if location.part else line

    def count_read(self, format_name: str, num_rows: int = 1) -> None:
        """Counts rows as read."""
        self.formats[format_name].read += num_rows

    def count_kept(self, format_name: str) -> None:
        """Counts a row as kept."""
        self.formats[format_name].kept += 1

    def count_merged(self, format_name: str, num_rows: int = 1) -> None:
        """Counts rows as merged into the rollout of another row."""
        self.formats[format_name].merged += num_rows

    def refuse(self, format_name: str, row: RefusedRow, *, is_read: bool = False) -> None:
        """Counts and records a refused row; with `is_read`, it is already counted as read."""
        count = self.formats[format_name]
        count.read += not is_read
        count.refused += 1
        self.reasons[row.reason] += 1
        self.files.refuse(row)
        source, detail = (
            self.show_location(row.location),
            self._redact(writable_text(row.detail)),
        )
        if len(self.first_refused) < 5:
            shown_detail = f" ({detail[:200]})" if detail else ""
            self.first_refused.append(f"{source}: {row.reason}{shown_detail}")
        self._on_refused(RefusedLine(source, format_name, row.reason, detail))

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
