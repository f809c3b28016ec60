"""Reads the JSON documents in a zip file, also those packed with Zstandard, one at a time."""

import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stillroom.data.checks import Problem, decode_row
from stillroom.data.row_files import MAX_ROW_BYTES, TOO_LONG
from stillroom.errors import missing_extra
from stillroom.importing.json_rows import JsonRow
from stillroom.importing.records import Place, Refusal
from stillroom.secrecy.readable import check_readable

_ZSTANDARD = 93
_LOCAL_HEADER = struct.Struct("<26xHH")
"""The lengths of the name and of the extra field, at the end of a member's own header."""


def read_members(path: Path, *prefixes: str) -> Iterator[JsonRow | Refusal]:
    """Yields the JSON objects of a zip file whose names begin with one of the prefixes, in order.

    A place has the member's name as its `part`, and its number among those of the same prefix.
    Raises MissingExtraError if a member is packed with Zstandard and pyarrow is missing.
    """
    check_readable(path)
    try:
        with zipfile.ZipFile(path) as archive:
            # Members of the same name are versions of one; the last is in force.
            members = {info.filename: info for info in archive.infolist()}
            for prefix in prefixes:
                named = [info for name, info in members.items() if name.startswith(prefix)]
                for number, info in enumerate(named, start=1):
                    place = Place(path, number, info.filename)
                    if info.file_size > MAX_ROW_BYTES:
                        yield Refusal(place, "not a JSON object", f"the member {TOO_LONG}")
                    else:
                        yield _row(place, _unpacked(archive, info))
    except (zipfile.BadZipFile, EOFError, OSError, struct.error, zlib.error) as error:
        yield Refusal(Place(path, 1), "not a whole zip file", f"it was not finished: {error}")


def _row(place: Place, data: bytes) -> JsonRow | Refusal:
    row = decode_row(data)
    if isinstance(row, Problem):
        return Refusal(place, "not a JSON object", f"the member {row.message}")
    return JsonRow(place, row)


def _unpacked(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    if info.compress_type != _ZSTANDARD:
        return archive.read(info)
    try:
        import pyarrow
    except ImportError as error:
        raise missing_extra("traces", "reading .eval files") from error
    stream: Any = archive.fp
    stream.seek(info.header_offset)
    name_length, extra_length = _LOCAL_HEADER.unpack(stream.read(_LOCAL_HEADER.size))
    stream.seek(name_length + extra_length, 1)
    packed = pyarrow.BufferReader(stream.read(info.compress_size))
    return pyarrow.CompressedInputStream(packed, "zstd").read(info.file_size)
