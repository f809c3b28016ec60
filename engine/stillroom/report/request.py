"""The request and result of write_report, and the screenshot of its page."""

from pathlib import Path
from typing import Annotated

import anyio
import msgspec
from pydantic import Field

from stillroom.errors import missing_extra
from stillroom.files import write_atomic
from stillroom.outputs import ReplacingRequest
from stillroom.settings import Workspace
from stillroom.validation import StrictModel


class WriteReport(ReplacingRequest):
    """The request for a page about all runs of the workspace."""

    output: str = "report.html"
    png: Annotated[bool, Field(description="Also as a picture")] = False


class WrittenReport(msgspec.Struct, frozen=True, kw_only=True):
    """The page that was written."""

    output: str
    picture: str | None = None
    """The path of the picture; None if none was requested."""


_NO_NETWORK = "http://127.0.0.1:9"
"""A proxy address without a server, so that the page cannot use the network."""


class DrawPage(StrictModel):
    """The request for a screenshot of a written page."""

    page: str
    picture: str


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """A picture that was written."""

    path: str


def draw_page(workspace: Workspace, request: DrawPage) -> Picture:
    """Writes the page as a PNG file.

    Raises MissingExtraError without Playwright, and InputError without a Chromium.
    """
    try:
        from stillroom.tools.browser.chromium import Chromium, ChromiumOptions
    except ModuleNotFoundError as error:
        raise missing_extra("browse", "a picture of the report") from error

    async def screenshot() -> bytes:
        chromium = await Chromium.launch(ChromiumOptions(_NO_NETWORK))
        try:
            return await chromium.screenshot(Path(request.page))
        finally:
            await chromium.aclose()

    write_atomic(Path(request.picture), anyio.run(screenshot))
    return Picture(path=workspace.shown(Path(request.picture)))
