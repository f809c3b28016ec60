"""The outline of a row, by a module in C; left out where there was no compiler to build it."""

from typing import TYPE_CHECKING

from stillroom.files import Buffer

if TYPE_CHECKING:
    from stillroom.curate._outline import Outline

__all__ = ["outline"]

try:
    from stillroom.curate._outline import outline
except ImportError:

    def outline(line: Buffer, /) -> "Outline | None":
        """Returns None: every line takes a closer look."""
