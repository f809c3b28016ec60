"""The category of a row: a field of its metadata."""

from collections.abc import Mapping
from typing import Any

_NESTED = "verifier_metadata"
"""The object in which rows of NeMo Gym keep what their verifier knows of the task."""


def category_in(metadata: Mapping[str, Any], field: str) -> str | None:
    """Returns a metadata field as text; None if there is none.

    A field that is not there itself is looked for along its dots (`a.b` is b of the object a), and
    in the row's `verifier_metadata`.
    """
    value = metadata.get(field)
    if value is None:
        value = _along(metadata, field.split("."))
    if value is None:
        value = _along(metadata, [_NESTED, *field.split(".")])
    return None if value is None else str(value)


def _along(value: Any, names: list[str]) -> Any:
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
