"""The request and result of show_lineage."""

from enum import StrEnum
from typing import Annotated, Any

import msgspec
from pydantic import Field

from stillroom.types import OthersText, OwnText
from stillroom.validation import StrictModel


class ShowLineage(StrictModel):
    """The request for the origin of a file, a run's result or a checkpoint."""

    path: Annotated[str, Field(description="File, run id or checkpoint")]
    row: Annotated[int | str | None, Field(description="Line, name or id to follow")] = None
    tag: Annotated[str | None, Field(description="Keep a copy, named path@tag")] = None
    sources: Annotated[str | None, Field(description="File for all source rows")] = None

    @property
    def row_query(self) -> int | str | None:
        """The line number, name or id of the row; digits from the CLI are a line number."""
        row = self.row
        return int(row) if isinstance(row, str) and row.isdecimal() else row


class State(StrEnum):
    """How a file or model compares with the record of its content when it was used."""

    SAME = "same"
    GROWN = "grown"
    """Rows were appended; the rows that were used are unchanged."""
    CHANGED = "changed"
    MISSING = "missing"
    UNCHECKED = "unchecked"
    """It was not compared, because it is not on this disk or too large to hash."""


class LineageNode(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A file or model in the tree of a lineage, with the nodes of its inputs."""

    path: str
    state: State
    sha256: str | None = None
    """The first 12 digits of the SHA-256 of the content that was used; None if it has none."""
    role: str | None = None
    """The role of a model, such as student or teacher; None for a file."""
    made_by: str | None = None
    """The operation that wrote it; None without a manifest."""
    run_id: str | None = None
    created_at: str | None = None
    counts: dict[str, int] = {}
    """The counts in the manifest, such as the rows read and kept."""
    options: dict[str, Any] = {}
    """The options of a filter, conversion or pairing, without files and unset options."""
    versions: list[str] = []
    """The tagged versions (path@tag) that keep this content."""
    note: OthersText | None = None
    inputs: list["LineageNode"] = []
    more_inputs: dict[str, int] = {}
    """The number of inputs that are not shown, by state."""


class RowStep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One step in the history of a row, in one file; the latest step comes first."""

    kind: OwnText = msgspec.field(name="what")
    """The kind of row: row, rollout, chosen rollout, rejected rollout, prompt or source row."""
    at: str
    """The location as `file:line`; only the file if the row is not in it."""
    state: State
    """The state of the file."""
    row: str | None = None
    """The name of the row in that file; None for a row that is not in it."""
    id: OthersText | None = None
    """The row's own id, which other rows may share."""
    decision: OwnText | None = None
    """What happened to the row at this step, e.g. "kept by filter_dataset", or why the row cannot
    be shown, e.g. "the file is missing"; None for prompts."""
    reasons: list[OthersText] = []
    """The reasons why the row was dropped or left out."""
    like: str | None = None
    """The `file:line` of the kept row or evaluation prompt that a dropped row repeats."""
    also_at: list[str] = []
    """The `file:line` of other rows with the same content, which may be the actual source."""


class Lineage(msgspec.Struct, frozen=True, kw_only=True):
    """The lineage of a file or model, and the history of one row if a row was requested."""

    root: LineageNode
    row: list[RowStep]
    tagged: str | None
    """The name of the tagged version (path@tag) of the file; None if no tag was requested."""
    sources: str | None = None
    """The path of the file with all source rows; None if no such file was requested."""
    num_sources: int = 0
    """The number of rows in that file."""
    problems: list[OthersText]
    """One message for each file or model of the lineage that has changed or is missing."""
