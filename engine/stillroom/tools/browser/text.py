"""Extracts the main content of a page as Markdown, in a child process that can be killed.

HTML from the web may keep a parser busy for hours or crash it, so it is never parsed in our own
process. The child, `python -m stillroom.tools.browser.text`, reads one page per line and writes one
text per line.
"""

import logging
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Any, Self, cast

import anyio
import anyio.abc
import msgspec
from anyio import AsyncContextManagerMixin
from anyio.abc import ByteReceiveStream, ByteSendStream
from anyio.streams.buffered import BufferedByteReceiveStream

from stillroom import bounds
from stillroom.errors import missing_extra
from stillroom.secrecy.environments import bare_environment

MAX_LINE_BYTES = bounds.PAGE_READ.limit
# Beyond this, the system refuses the child more memory, which ends the child.
_MAX_MEMORY_BYTES = bounds.PAGE_MEMORY.limit
_DISCONNECTED = (anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError, OSError)


class _PageHTML(msgspec.Struct, frozen=True, kw_only=True):
    """A page's current HTML and its URL."""

    html: str
    url: str


class _PageText(msgspec.Struct, frozen=True, kw_only=True):
    """The main content of a page; empty if none was found."""

    text: str


class TextReader(AsyncContextManagerMixin):
    """Extracts the main content of pages, one at a time. Use as an async context manager."""

    def __init__(self, *, timeout_s: float = 15.0) -> None:
        self._timeout_s = timeout_s
        self._lock = anyio.Lock()
        self._process: anyio.abc.Process | None = None

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        # A trial: later, a reader that does not work would look like a page without main content.
        if await self.extract_text(_TRIAL_PAGE, url="https://example.com/") == "":
            raise missing_extra("browse", "reading web pages with trafilatura")
        try:
            yield self
        finally:
            await self._stop()

    async def extract_text(self, html: str, *, url: str) -> str:
        """Returns a page's main content as Markdown; empty if none is found in time."""
        line = msgspec.json.encode(_PageHTML(html=html, url=url)) + b"\n"
        async with self._lock:
            try:
                with anyio.fail_after(self._timeout_s):
                    return await self._request(line)
            except (*_DISCONNECTED, TimeoutError, anyio.DelimiterNotFound, msgspec.DecodeError):
                await self._stop()
                return ""
            except BaseException:
                # The text of this page may still arrive, and must not be read as the next page's.
                await self._stop()
                raise

    async def _request(self, line: bytes) -> str:
        """Sends a page to the child, started if necessary, and returns the page's text."""
        if self._process is None:
            self._process = await anyio.open_process(
                [sys.executable, "-P", "-m", "stillroom.tools.browser.text"],
                env={k: v for k, v in bare_environment().items() if k in _KEPT_VARIABLES},
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        await cast("ByteSendStream", self._process.stdin).send(line)
        replies = BufferedByteReceiveStream(cast("ByteReceiveStream", self._process.stdout))
        reply = await replies.receive_until(b"\n", MAX_LINE_BYTES)
        return msgspec.json.decode(reply, type=_PageText).text

    async def _stop(self) -> None:
        """Kills the child, if there is one."""
        process, self._process = self._process, None
        if process is None:
            return
        with anyio.CancelScope(shield=True):
            with suppress(ProcessLookupError):
                process.kill()
            await process.aclose()


_TRIAL_PAGE = "<html><body><main><h1>Trial</h1><p>A page to begin with.</p></main></body></html>"
# Pages are hostile input, so the child's environment holds no key and no token.
_KEPT_VARIABLES = frozenset({"PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONPATH"})


def _extract_markdown(page: _PageHTML) -> str:
    """Returns the main content of a page as Markdown; empty if there is none."""
    import trafilatura

    extract = cast("Any", trafilatura).extract
    markdown: str | None = extract(
        page.html,
        url=page.url,
        output_format="markdown",
        include_comments=False,
        include_tables=True,
        favor_recall=True,
    )
    return markdown or ""


def _serve() -> None:
    logging.disable(logging.CRITICAL)
    _limit_memory()
    for line in sys.stdin.buffer:
        text = _extract_markdown(msgspec.json.decode(line, type=_PageHTML))
        sys.stdout.buffer.write(msgspec.json.encode(_PageText(text=text)) + b"\n")
        sys.stdout.buffer.flush()


def _limit_memory() -> None:
    import resource

    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))


if __name__ == "__main__":
    _serve()
