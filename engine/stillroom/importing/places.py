"""The places of the source rows that an imported row names, for following it back to them."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from stillroom.data.layouts.foreign import as_object
from stillroom.importing.records import Place
from stillroom.settings import Workspace

IMPORTED_FROM = "imported_from"
"""The field of a prompt's metadata with the place of the row that it was cut out of."""
_PLACE = re.compile(r"(.*?):(\d+)(?:#(.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ImportedFrom:
    """The places of the rows behind an imported row."""

    kept: Place
    others: list[Place]
    """The places of the earlier calls, in the order of the conversation, and of copies."""


def imported_from(workspace: Workspace, data: bytes) -> ImportedFrom | None:
    """Returns the source rows of a row that import_rollouts wrote; None if it names none."""
    try:
        row = as_object(msgspec.json.decode(data))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    origin = as_object(row.get("origin"))
    kept = origin.get("source") or as_object(row.get("metadata")).get(IMPORTED_FROM)
    place = _place(workspace, kept)
    if place is None:
        return None
    others = (_place(workspace, other) for other in origin.get("sources") or ())
    return ImportedFrom(place, [other for other in others if other is not None])


def _place(workspace: Workspace, shown: Any) -> Place | None:
    """Returns the place that a text such as `logs/a.jsonl:12#choice 1` names."""
    found = _PLACE.fullmatch(shown) if isinstance(shown, str) else None
    if found is None:
        return None
    return Place(Path(workspace.path(found[1])), int(found[2]), found[3] or "")
