"""Which files hold rows, and their rows one by one: .jsonl, .txt, and .json with one row each."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stillroom.errors import DataError
from stillroom.files import BOM, read_lines

MAX_DOCUMENT_BYTES = 256 << 20
_MANIFEST = ".manifest.json"
_BLANKS = re.compile(rb'("[^"\\]*+(?:\\.[^"\\]*+)*+")|[ \t\r\n]++')


@dataclass(frozen=True, slots=True)
class RowLine:
    """One row of a file, as bytes that may stand on a line, and where it is."""

    number: int
    """Of its line, from 1."""
    offset: int
    num_bytes: int
    """From `offset`, in the file: `data` is shorter where blanks were taken out."""
    data: bytes


def read_row_lines(path: Path) -> Iterator[RowLine]:
    """Yields the rows of a file; the whole of a .json document is one row.

    A document's blanks are taken out of `data`; nothing else is changed.
    """
    document = _document(path) if path.suffix == ".json" else None
    if document is not None:
        yield document
        return
    for line in read_lines(path):
        yield RowLine(line.number, line.offset, len(line.data), line.data)


def read_row(path: Path, offset: int, num_bytes: int) -> bytes:
    """Returns the bytes of a row again, as it stands in its file."""
    with path.open("rb") as stream:
        stream.seek(offset)
        return stream.read(num_bytes)


def _document(path: Path) -> RowLine | None:
    """Returns the one row of a .json file; None where each line is a row, or nothing is one."""
    first = next(read_lines(path), None)
    if first is None or _is_json(first.data):
        return None
    num_bytes = path.stat().st_size
    if num_bytes > MAX_DOCUMENT_BYTES:
        raise DataError(
            f"{path} is one JSON document of over {MAX_DOCUMENT_BYTES >> 20} MB",
            "write one row a line as .jsonl",
        )
    data = path.read_bytes()
    start = len(BOM) if data.startswith(BOM) else 0
    if not _is_json(data[start:]):
        return None
    plain = _BLANKS.sub(lambda match: match[1] or b"", data[start:])
    return RowLine(1, start, num_bytes - start, plain)


def _is_json(data: bytes) -> bool:
    try:
        msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def rollout_files(path: Path) -> list[Path]:
    """Returns the files with rows that `path` names: itself, or those of a folder, in order.

    Of a folder its .jsonl and .json files, and the .json files one folder deeper: rnow's
    `rollouts/rollout_N/sample_M.json`.
    """
    if path.is_file():
        return [path]
    found = [f for pattern in ("*.jsonl", "*.json", "*/*.json") for f in path.glob(pattern)]
    files = [f for f in found if f.is_file() and _is_visible(f, path)]
    if not files:
        raise DataError(
            f"the folder {path} holds no .jsonl or .json files with rollouts",
            "give the file that generate_rollouts wrote, or the folder it wrote to",
        )
    return sorted(files, key=lambda file: _in_order(file, path))


def _is_visible(file: Path, folder: Path) -> bool:
    is_hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
    return not is_hidden and not file.name.endswith(_MANIFEST)


def _in_order(file: Path, folder: Path) -> list[tuple[int, str]]:
    """Returns a key that puts sample_2 before sample_10."""
    parts = re.split(r"(\d+)", str(file.relative_to(folder)))
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]
