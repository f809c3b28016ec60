"""Turns pydantic's errors into sentences that name the field, its fault, and the nearest name."""

import difflib
from collections.abc import Sequence
from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from stillroom.fences import on_one_line
from stillroom.secrecy.redaction import is_secret_name

_LEAST, _MOST = -(2**63), 2**63 - 1
_MAX_SHOWN = 20
_LONGEST_PART = 80

Where = Annotated[str | None, Field(description="Machine of machines.yml")]
"""The field `where` of requests whose work may be done on another machine."""


class StrictModel(BaseModel):
    """A request or a part of a configuration: no unknown keys, and only finite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _fits_into_json(cls, value: Any) -> Any:
        if isinstance(value, int) and not _LEAST <= value <= _MOST:
            raise ValueError("the number is too large")
        return value


class PlacedRequest(StrictModel):
    """A request whose work may be done on another machine.

    Where it is done is no part of what is done, so that neither a run's request nor a manifest
    has it.
    """

    where: Annotated[Where, Field(exclude=True)] = None


def describe_errors(error: ValidationError, model: type[BaseModel]) -> str:
    """Returns one text with all faults of a validation, without pydantic's links and type names."""
    faults = error.errors(include_url=False)
    sentences = [_sentence(fault, model) for fault in faults[:_MAX_SHOWN]]
    if len(faults) > _MAX_SHOWN:
        sentences.append(f"and {len(faults) - _MAX_SHOWN} more")
    return "; ".join(sentences)


def nearest(name: str, known_names: Sequence[str]) -> str:
    """Returns " (did you mean 'x'?)" for a misspelt name, or "" if no known name is like it."""
    close = difflib.get_close_matches(name[:_LONGEST_PART], known_names, n=1, cutoff=0.6)
    # A name's beginning is less like the whole than the measure asks for: price, price_per_hour.
    close = close or [known for known in known_names if name and known.startswith(f"{name}_")]
    return f" (did you mean {close[0]!r}?)" if close else ""


def _sentence(fault: Any, model: type[BaseModel]) -> str:
    # A key of a document may be anything, even several lines.
    path = [on_one_line(str(part), most=_LONGEST_PART) for part in fault["loc"]]
    where = ".".join(path)
    match fault["type"]:
        case "extra_forbidden":
            field_names = _fields_at(model, path[:-1])
            hint = nearest(path[-1], field_names) or f" (known: {', '.join(field_names)})"
            return f"{where} is not known{hint}"
        case "missing":
            return f"{where} is required"
        case "value_error":
            return f"{where + ': ' if where else ''}{fault['ctx']['error']}"
        case _:
            text = f"{fault['msg'][0].lower()}{fault['msg'][1:]}"
            return f"{where}: {text}, not {_shown(fault['input'], path)}".lstrip(": ")


def _shown(value: Any, path: Sequence[str]) -> str:
    """Returns a wrong value as an error shows it: only if it is short and can be no secret."""
    is_plain = isinstance(value, str | int | float | bool | None)
    # Without a path the whole document is wrong: a file of keys taken for a config, perhaps.
    if not is_plain or not path or any(map(is_secret_name, path)):
        return type(value).__name__
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _fields_at(model: type[BaseModel], path: Sequence[str]) -> list[str]:
    """Returns the field names of the model that is at a path of nested models."""
    for part in path:
        if part.isdigit():  # an index in a list of models
            continue
        field = model.model_fields.get(part)
        inner = [field.annotation, *get_args(field.annotation)] if field else []
        models = [kind for kind in inner if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if not models:
            return []
        model = models[0]
    return list(model.model_fields)
