"""A line on a terminal that shows that a command is still working."""

import sys
import threading
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.text import Text

from stillroom.fences import printable

DELAY_S = 2.0
"""The seconds after which the line appears."""
_SHOW_S = 1.0
"""The maximum number of seconds to wait for a line that is just appearing."""


class BusyLine:
    """A line on standard error after two seconds, if that is a terminal; it ends with the block.

    Elsewhere, only reported progress is printed, each report on a line of its own.
    """

    def __init__(self, text: str) -> None:
        is_terminal = sys.stderr.isatty()
        self._status = Console(stderr=True).status(Text(text)) if is_terminal else None
        self._timer = threading.Timer(DELAY_S, self._status.start) if self._status else None

    def __enter__(self) -> Self:
        if self._timer is not None:
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._timer is not None and self._status is not None:
            self._timer.cancel()
            # The line may be about to appear.
            self._timer.join(_SHOW_S)
            self._status.stop()

    def show(self, text: str) -> None:
        """Shows what the command is doing now."""
        if self._status is not None:
            self._status.update(Text(printable(text)))
        else:
            sys.stderr.write(printable(text) + "\n")
            sys.stderr.flush()
