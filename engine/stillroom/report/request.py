"""The request and result of write_report."""

from typing import Annotated

import msgspec
from pydantic import Field

from stillroom.outputs import ReplacingRequest


class WriteReport(ReplacingRequest):
    """Ask for a page about all runs of the workspace."""

    output: str = "report.html"
    png: Annotated[bool, Field(description="Also as a picture")] = False


class WrittenReport(msgspec.Struct, frozen=True, kw_only=True):
    """The page that was written."""

    output: str
    picture: str | None = None
    """The path of its picture; None if none was requested."""
