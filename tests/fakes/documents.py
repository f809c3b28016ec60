"""Reads the blocks of code in README, docs and skills."""

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(r"^( *)```(\w*) ?([^\n]*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A block of code. `info` is what follows the language, such as a tool's or a file's name."""

    language: str
    info: str
    text: str


def blocks_of(document: Path) -> Iterator[Block]:
    """Yields the blocks of code in a document."""
    for found in _BLOCK.finditer(document.read_text(encoding="utf-8")):
        yield Block(found[2], found[3].strip(), textwrap.dedent(found[4]))


def text_outside_blocks(document: Path) -> str:
    """Returns a document without its blocks of code."""
    return _BLOCK.sub("", document.read_text(encoding="utf-8"))
