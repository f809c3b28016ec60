"""Fences what others wrote in an answer or an error, before an agent reads it."""

import functools
import typing
from collections.abc import Mapping
from typing import Any

import msgspec

from stillroom import fences
from stillroom.errors import EngineError, InputError
from stillroom.types import OTHERS_WROTE

_WRITER = "others (rows, models, tools, pages or programs)"
_LONGEST_KEY = 120


def fenced_answer(result: msgspec.Struct) -> dict[str, Any]:
    """Returns a result as JSON values; what others wrote stands between marks.

    Such fields are those of type `OthersText`. If there are any, `about_marks` says what the marks
    mean. All other texts are put on one line, since names of files may hold anything; keys that
    are names out of rows or endpoints are cut too.
    """
    mark = fences.new_mark()
    fencing = _Fencing(mark)
    answer: dict[str, Any] = _on_one_line(msgspec.to_builtins(fencing.struct(result)), mark)
    if fencing.has_fenced:
        answer["about_marks"] = fences.warning(mark, writer=_WRITER)
    return answer


def fenced_error(error: EngineError) -> str:
    """Returns an error's text; a problem that may quote what others wrote stands between marks.

    Only an InputError quotes no more than the arguments of the call.
    """
    if type(error) is InputError:
        return fences.printable(str(error))
    return f"{fenced_quote(error.problem)}\nfix: {fences.printable(error.fix)}"


def fenced_quote(text: str) -> str:
    """Returns a text that others may have written between marks, with a warning before it."""
    mark = fences.new_mark()
    return f"{fences.warning(mark, writer=_WRITER)}\n{fences.fenced(text, mark)}"


class _Fencing:
    """Puts the texts of one answer between marks."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self.has_fenced = False

    def struct(self, value: msgspec.Struct) -> msgspec.Struct:
        changes: dict[str, Any] = {}
        for name in _fields(type(value)):
            inner = getattr(value, name)
            changed = self._texts(inner) if name in _others(type(value)) else self._inner(inner)
            if changed is not inner:
                changes[name] = changed
        return msgspec.structs.replace(value, **changes) if changes else value

    def _inner(self, value: Any) -> Any:
        if isinstance(value, msgspec.Struct):
            return self.struct(value)
        if isinstance(value, list):
            return [self._inner(item) for item in value]
        return value

    def _texts(self, value: Any) -> Any:
        if not value:
            return value
        self.has_fenced = True
        if isinstance(value, str):
            return fences.fenced(value, self._mark)
        lines = [fences.printable(line) for line in value]
        return [fences.opening(self._mark), *lines, fences.closing(self._mark)]


@functools.cache
def _fields(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    return tuple(field.name for field in msgspec.structs.fields(kind))


@functools.cache
def _others(kind: type[msgspec.Struct]) -> frozenset[str]:
    """Returns the names of the fields that hold what others wrote."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return frozenset(name for name, hint in hints.items() if _is_others(hint))


def _is_others(hint: Any) -> bool:
    if OTHERS_WROTE in getattr(hint, "__metadata__", ()):
        return True
    return any(_is_others(inner) for inner in typing.get_args(hint))


def _on_one_line(value: Any, mark: str) -> Any:
    if isinstance(value, Mapping):
        return {
            fences.on_one_line(str(key), most=_LONGEST_KEY): _on_one_line(inner, mark)
            for key, inner in typing.cast("Mapping[Any, Any]", value).items()
        }
    if isinstance(value, list):
        return [_on_one_line(inner, mark) for inner in value]
    is_fenced = isinstance(value, str) and value.startswith(fences.opening(mark))
    return fences.one_line(value) if isinstance(value, str) and not is_fenced else value
