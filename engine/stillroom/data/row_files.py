"""Finds the files with rows (.jsonl, .txt, .json) and reads their rows one by one."""

import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Self

import msgspec

from stillroom import bounds
from stillroom.data.checks import Problem, decode_row, decode_text_row
from stillroom.errors import DataError
from stillroom.lines import BOM, Line, count_lines, read_line_blocks, read_lines
from stillroom.secrecy.readable import check_readable

MAX_ROW_BYTES = bounds.ROW.limit
TOO_LONG = f"is longer than {MAX_ROW_BYTES >> 20} MB"
_MAX_OPEN = 16
_MANIFEST = ".manifest.json"
_DOCUMENTS = (".json", ".traj")
"""The suffixes of files that may be a single JSON document; in others, each line is a row."""
_STRINGS_AND_BLANKS = re.compile(rb'("[^"\\]*+(?:\\.[^"\\]*+)*+")|[ \t\r\n]++')
_JSON = msgspec.json.Decoder(msgspec.Raw)


def read_row_lines(path: Path) -> Iterator[Line]:
    """Yields the rows of a file as lines; a whole .json document is one row.

    Whitespace between the JSON tokens of a document is removed; nothing else is changed.
    """
    return itertools.chain.from_iterable(read_row_blocks(path))


def read_row_blocks(path: Path) -> Iterator[list[Line]]:
    """Yields the same rows as read_row_lines, in one list per block of the file.

    Raises InputError for a file that must not be read.
    """
    check_readable(path)
    document = _read_document(path) if path.suffix in _DOCUMENTS else None
    if document is not None:
        yield [document]
        return
    yield from read_line_blocks(path, max_bytes=MAX_ROW_BYTES)


def count_rows(path: Path) -> int:
    """Returns the number of rows of a file."""
    return (
        count_lines(path) if path.suffix not in _DOCUMENTS else sum(1 for _ in read_row_lines(path))
    )


def decode_line(line: Line) -> dict[str, Any] | Problem:
    """Returns the JSON object of a line, or the problem of the line."""
    return _too_long() if line.is_cut else decode_row(line.data)


def decode_text_line(line: Line) -> dict[str, Any] | Problem:
    """Returns a line of a text file as a prompt row, or the problem of the line."""
    return _too_long() if line.is_cut else decode_text_row(line.data)


def _too_long() -> Problem:
    return Problem("", TOO_LONG, "remove the line, or split it into several rows")


class RowReader:
    """Reads single rows again by their positions, with a few files open at a time."""

    def __init__(self) -> None:
        self._open: dict[Path, BinaryIO] = {}

    def read(self, path: Path, offset: int, num_bytes: int) -> bytes:
        """Returns the bytes of a row as read_row_lines yielded them.

        Raises DataError if the file has been truncated.
        """
        stream = self._open.get(path)
        if stream is None:
            if len(self._open) == _MAX_OPEN:
                self._open.pop(next(iter(self._open))).close()
            stream = self._open[path] = path.open("rb", buffering=0)
        data = os.pread(stream.fileno(), num_bytes, offset)
        if len(data) != num_bytes:
            raise DataError(
                f"{path} was truncated while it was read",
                "repeat the call once no other program is writing to the file",
            )
        return _without_blanks(data) if b"\n" in data else data

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self._open.values():
            stream.close()


def _read_document(path: Path) -> Line | None:
    """Returns a .json file as a single row; None if each line is a row or the file is empty."""
    first_line = next(read_lines(path, max_bytes=MAX_ROW_BYTES), None)
    if first_line is None or first_line.is_cut or _is_json(first_line.data):
        return None
    num_bytes = path.stat().st_size
    if num_bytes > MAX_ROW_BYTES:
        return None if _has_rows(path) else Line(1, 0, num_bytes, first_line.data, is_cut=True)
    data = path.read_bytes()
    start = len(BOM) if data.startswith(BOM) else 0
    if not _is_json(data[start:]):
        # A document that is cut off is one broken row, however many lines it has.
        is_document = data[start:].lstrip().startswith(b"{")
        if not is_document or _has_rows(path, max_lines=None):
            return None
    return Line(1, start, num_bytes - start, _without_blanks(data[start:]))


def _has_rows(path: Path, *, max_lines: int | None = 20) -> bool:
    """Returns whether one of the first lines is a JSON object; broken lines may precede it."""
    lines = itertools.islice(read_lines(path, max_bytes=MAX_ROW_BYTES), max_lines)
    return any(line.data.startswith(b"{") and _is_json(line.data) for line in lines)


def _without_blanks(data: bytes) -> bytes:
    return _STRINGS_AND_BLANKS.sub(lambda match: match[1] or b"", data)


def _is_json(data: bytes) -> bool:
    try:
        _JSON.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def rollout_files(path: Path) -> list[Path]:
    """Returns the files with rows at `path`: the file itself, or those of a folder, sorted.

    Of a folder these are the .jsonl and .json files, and the .json files of its subfolders, because
    rnow writes `rollouts/rollout_N/sample_M.json`.
    """
    if path.is_file():
        return [path]
    matches = [f for pattern in ("*.jsonl", "*.json", "*/*.json") for f in path.glob(pattern)]
    files = [f for f in matches if f.is_file() and _is_visible(f, path)]
    if not files:
        raise DataError(
            f"the folder {path} has no .jsonl or .json files",
            "give a file of rows, or a folder with such files",
        )
    if (undecodable := next((file for file in files if not _is_utf8(file)), None)) is not None:
        raise DataError(
            f"{undecodable}: the file's name is not UTF-8, so it cannot be recorded in a manifest",
            "rename the file",
        )
    return sorted(files, key=lambda file: _sort_key(file, path))


def _is_utf8(file: Path) -> bool:
    try:
        str(file).encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_visible(file: Path, folder: Path) -> bool:
    is_hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
    return not is_hidden and not file.name.endswith(_MANIFEST)


def _sort_key(file: Path, folder: Path) -> list[tuple[int, str]]:
    """Returns a key for natural order: sample_2 comes before sample_10."""
    parts = re.split(r"(\d+)", str(file.relative_to(folder)))
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]
