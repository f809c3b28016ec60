"""What can be asked of a lineage, and its answer."""

from enum import StrEnum
from typing import Annotated, Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field


class ShowLineage(BaseModel):
    """Ask where a file, a run's result or a checkpoint comes from."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Annotated[str, Field(description="File, run id or checkpoint")]
    row: Annotated[int | str | None, Field(description="Line or id: also follow that row")] = None
    tag: Annotated[str | None, Field(description="Keep the file as it is: path@tag names it")] = (
        None
    )

    @property
    def wanted_row(self) -> int | str | None:
        """The line, or the id; the command line gives both as text."""
        row = self.row
        return int(row) if isinstance(row, str) and row.isdecimal() else row


class State(StrEnum):
    """What has become of something since it was used."""

    SAME = "same"
    GROWN = "grown"
    """Rows were added behind those that were used."""
    CHANGED = "changed"
    MISSING = "missing"
    UNCHECKED = "unchecked"
    """Elsewhere, or too large to hash now."""


class LineageNode(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A file or a model, and what it was made from."""

    path: str
    state: State
    sha256: str | None = None
    """The first digits, as it was used."""
    role: str | None = None
    """Of a model."""
    made_by: str | None = None
    """The operation; None of what nothing on record has made."""
    run_id: str | None = None
    created_at: str | None = None
    counts: dict[str, int] = {}
    options: dict[str, Any] = {}
    """What a filter, conversion or pairing was asked for."""
    versions: list[str] = []
    note: str | None = None
    inputs: list["LineageNode"] = []
    more_inputs: dict[str, int] = {}
    """Those not shown, by state."""


class RowStep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A row on its way, the latest first."""

    what: str
    at: str
    """`file:line`; the file alone where the row is not in it."""
    state: State
    """Of the file."""
    id: str | None = None
    decision: str | None = None
    reasons: list[str] = []
    like: str | None = None
    also_at: list[str] = []
    """Rows with the very same content: it may have been any of them."""


class Lineage(msgspec.Struct, frozen=True, kw_only=True):
    """Where something comes from."""

    root: LineageNode
    row: list[RowStep]
    tagged: str | None
    """Under which name the file is kept now."""
    problems: list[str]
    """What has changed, is missing, or is not on record."""
