"""The models that answered a row, by the names that its log or its endpoint gave them."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

import msgspec

from stillroom.curate.rows.read import CuratedRow


class _Model(msgspec.Struct, frozen=True, gc=False):
    model: str | None = None


class _Answerers(msgspec.Struct, frozen=True, gc=False):
    answered_by: list[_Model] | None = None
    teacher: _Model | None = None


_ANSWERERS = msgspec.json.Decoder(_Answerers)


def answerers_of(row: CuratedRow) -> set[str]:
    """Returns the models that answered a row; none if it does not say so.

    Those that an endpoint named go before the one that was asked for.
    """
    try:
        found = _ANSWERERS.decode(row.line.view)
    except msgspec.DecodeError:
        return set()  # of another layout, where these names mean something else
    named = found.answered_by or ([found.teacher] if found.teacher is not None else [])
    return {each.model for each in named if each.model}


def are_all_named(models: set[str], patterns: Sequence[str]) -> bool:
    """Returns whether each model has one of the names, in which `*` stands for any letters."""
    return all(any(fnmatchcase(model, pattern) for pattern in patterns) for model in models)
