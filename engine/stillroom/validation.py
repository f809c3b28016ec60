"""Turns pydantic's errors into sentences with the field, the problem and the closest name."""

import difflib
from collections.abc import Sequence
from typing import Annotated, Any, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from stillroom.fences import short_line
from stillroom.secrecy.redaction import is_secret_name

_MIN_INT64, _MAX_INT64 = -(2**63), 2**63 - 1
_MAX_SHOWN = 20
_LONGEST_PART = 80

Where = Annotated[str | None, Field(description="Machine of machines.yml")]
"""The field `where` of requests that can run on another machine."""


class StrictModel(BaseModel):
    """A request or part of a config, without unknown keys and with finite numbers only."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _as_list(cls, value: Any, info: ValidationInfo) -> Any:
        """Returns a list with the string if a single string is given for a list of strings."""
        field = cls.model_fields.get(info.field_name or "")
        is_listed = field is not None and field.annotation == tuple[str, ...]
        return (value,) if is_listed and isinstance(value, str) else value

    @field_validator("*")
    @classmethod
    def _check_fits_json(cls, value: Any) -> Any:
        """Returns the value. Raises ValueError for an integer that does not fit into 64 bits."""
        if isinstance(value, int) and not _MIN_INT64 <= value <= _MAX_INT64:
            raise ValueError("the number does not fit into 64 bits")
        return value


class PlacedRequest(StrictModel):
    """A request that can run on another machine.

    A run's request and manifests do not contain `where`, since it does not affect the result.
    """

    where: Annotated[Where, Field(exclude=True)] = None


UNKNOWN_KEY = "extra_forbidden"
"""Pydantic's type of the error for a key that a model does not have."""


def describe_errors(
    error: ValidationError, model: type[BaseModel], *, error_type: str | None = None
) -> str:
    """Returns one text with all validation errors, without pydantic's links and type names.

    With `error_type`, errors of other types are left out.
    """
    problems = [p for p in error.errors(include_url=False) if error_type in (None, p["type"])]
    sentences = [_sentence(problem, model) for problem in problems[:_MAX_SHOWN]]
    if len(problems) > _MAX_SHOWN:
        sentences.append(f"and {len(problems) - _MAX_SHOWN} more")
    return "; ".join(sentences)


def did_you_mean(name: str, known_names: Sequence[str]) -> str:
    """Returns " (did you mean 'x'?)" for a misspelt name, or "" if no known name is similar."""
    close = difflib.get_close_matches(name[:_LONGEST_PART], known_names, n=1, cutoff=0.6)
    # difflib does not match the beginning of a longer name, such as price for price_per_hour.
    close = close or [
        known_name for known_name in known_names if name and known_name.startswith(f"{name}_")
    ]
    return f" (did you mean {close[0]!r}?)" if close else ""


def _sentence(problem: Any, model: type[BaseModel]) -> str:
    """Returns one of pydantic's errors as a sentence, with the path of the field."""
    # A key of a document may be any text, even several lines.
    path = [short_line(str(part), max_characters=_LONGEST_PART) for part in problem["loc"]]
    where = ".".join(path)
    match problem["type"]:
        case "extra_forbidden":
            field_names = _fields_at(model, path[:-1])
            hint = did_you_mean(path[-1], field_names) or f" (known: {', '.join(field_names)})"
            return f"{where} is not known{hint}"
        case "missing":
            return f"{where} is required"
        case "value_error":
            return f"{where + ': ' if where else ''}{problem['ctx']['error']}"
        case _:
            text = f"{problem['msg'][0].lower()}{problem['msg'][1:]}"
            return f"{where}: {text}, not {_shown(problem['input'], path)}".lstrip(": ")


def _shown(value: Any, path: Sequence[str]) -> str:
    """Returns a wrong value for an error, or only its type if it may be a secret."""
    is_plain = isinstance(value, str | int | float | bool | None)
    # Without a path the whole document is wrong; it may be a file with keys instead of a config.
    if not is_plain or not path or any(map(is_secret_name, path)):
        return type(value).__name__
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _fields_at(model: type[BaseModel], path: Sequence[str]) -> list[str]:
    """Returns the field names of the model at a path of nested models."""
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
