"""The outline of a row, by a module in C; left out where there was no compiler to build it."""

from stillroom.files import Buffer

__all__ = ["Outline", "outline"]

Outline = tuple[bytes, bool, int, int, int, int, bool]
"""The short fields as a JSON object; whether the messages are called `conversation`; where the list
of messages starts and ends in the line; how many messages there are, and how many turns of the
assistant; whether no answer of the assistant ends it."""

try:
    from stillroom.curate._outline import outline
except ImportError:

    def outline(line: Buffer, /) -> Outline | None:
        """Returns None: every line takes a closer look."""
