"""The verdicts of a review: which rows a person kept, and which not."""

from pathlib import Path
from typing import Any, Literal

import msgspec

from stillroom.data.row_files import read_row_lines
from stillroom.errors import DataError

Verdict = Literal["keep", "drop"]


class _Reviewed(msgspec.Struct):
    id: str
    verdict: Any = None


_DECODER = msgspec.json.Decoder(_Reviewed)


def read_verdicts(path: Path) -> dict[str, Verdict]:
    """Returns the verdict on each reviewed row by its id; a later line replaces an earlier one.

    Rows whose verdict is null were not reviewed. Raises DataError for a line that says neither
    keep nor drop, and for a file without any verdict.
    """
    verdicts: dict[str, Verdict] = {}
    for line in read_row_lines(path):
        where = f"{path}:{line.number}"
        try:
            row = _DECODER.decode(line.data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise DataError(
                f"{where}: is no reviewed row: {error}",
                'write {"id": "<id of the row>", "verdict": "keep"} or "drop" on each line',
            ) from error
        match row.verdict:
            case None:
                continue
            case "keep" | "drop":
                verdicts[row.id] = row.verdict
            case other:
                raise DataError(
                    f"{where}: verdict {other!r} is unknown", 'write "keep", "drop" or null'
                )
    if not verdicts:
        raise DataError(
            f"{path} holds no verdict", "review its rows first: set verdict to keep or drop"
        )
    return verdicts
