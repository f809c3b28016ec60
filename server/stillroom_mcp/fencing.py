"""Marks untrusted text in answers and errors, before an agent reads it.

Every string of an answer passes through `fenced_answer`, and every string that a next step may
quote through `quotable_result`. Both depend on the type of the result's field: `OwnText` is a
sentence of Stillroom, `OthersText` is text from others, and any other string is a name, such as
that of a file, model or column. A name that reads like a sentence is treated as text from others.
"""

import enum
import functools
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TextIO, TypeVar

import msgspec

from stillroom import fences
from stillroom.errors import EngineError, InputError
from stillroom.secrecy.keys import KeyNotAllowedError
from stillroom.types import OTHERS_WROTE, OWN_TEXT, RowReason
from stillroom_mcp.shell_steps import as_cli_commands

_WRITER = "others (rows, models, tools, pages or programs)"
_OWN_KEYS = frozenset[str](RowReason)
"""Keys that are Stillroom's own in results of runs, which are kept without their types."""
_Result = TypeVar("_Result", bound=msgspec.Struct)


def fenced_answer(result: msgspec.Struct) -> dict[str, Any]:
    """Returns a result as JSON values, with marks around text from others.

    If there is any such text, `about_marks` explains the marks.
    """
    mark = fences.new_mark()
    fencing = _Fencing(mark)
    answer = fencing.struct(result)
    if fencing.has_marks:
        answer["about_marks"] = fences.warning(mark, writer=_WRITER)
    return answer


def quotable_result(result: _Result) -> _Result:
    """Returns a result whose strings a next step may quote: Stillroom's own text, and names.

    Other strings are replaced by their length.
    """
    return _quotable(result, _NAME)


def fenced_error(error: EngineError) -> str:
    """Returns an error's text, with marks around a problem that may quote text from others.

    The problem of an InputError quotes only the arguments of the call, so it needs no marks.
    """
    if type(error) in (InputError, KeyNotAllowedError):
        return fences.printable(str(error))
    return f"{fenced_quote(error.problem)}\nfix: {fences.printable(error.fix)}"


def fenced_quote(text: str) -> str:
    """Returns a text from others between marks, after a warning."""
    mark = fences.new_mark()
    return f"{fences.warning(mark, writer=_WRITER)}\n{fences.fenced(text, mark)}"


def quoted_for(stream: TextIO, text: str) -> str:
    """Returns a text from others for a command's output: between marks, unless a person reads it.

    People read terminals; agents read pipes.
    """
    return fences.printable(text) if stream.isatty() else fenced_quote(text)


def error_for(stream: TextIO, error: EngineError) -> str:
    """Returns an error's text for a command's output, with marks as in `quoted_for`.

    Its fix names commands instead of tools.
    """
    text = fences.printable(str(error)) if stream.isatty() else fenced_error(error)
    problem, separator, fix = text.rpartition("\nfix: ")
    return f"{problem}{separator}{as_cli_commands(fix)}"


@dataclass(frozen=True, slots=True)
class _Author:
    """Who wrote the strings of a field, by the field's type; by default, they are names."""

    is_own: bool = False
    """Whether the strings are Stillroom's own sentences."""
    is_others: bool = False
    """Whether the strings are text from others."""
    has_own_keys: bool = False
    """Whether the keys of an object are Stillroom's own."""


_NAME = _Author()


@functools.cache
def _authors(kind: type[msgspec.Struct]) -> dict[str, _Author]:
    """Returns the author of each field of a struct, by the field's name."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {field.name: _author(hints[field.name]) for field in msgspec.structs.fields(kind)}


def _author(hint: Any) -> _Author:
    """Returns the author of a field with this type hint."""
    marks = getattr(hint, "__metadata__", ())
    if OWN_TEXT in marks or OTHERS_WROTE in marks:
        return _Author(is_own=OWN_TEXT in marks, is_others=OTHERS_WROTE in marks)
    inner = [_author(part) for part in typing.get_args(hint)]
    if typing.get_origin(hint) is dict:
        keys, values = inner
        return _Author(values.is_own, values.is_others, has_own_keys=keys.is_own)
    return _Author(
        any(part.is_own for part in inner),
        any(part.is_others for part in inner),
        any(part.has_own_keys for part in inner),
    )


def _key_author(key: object, author: _Author) -> _Author:
    """Returns the author of a key; `author` is that of the object's field."""
    return _Author(is_own=author.has_own_keys or key in _OWN_KEYS)


class _Fencing:
    """Puts marks around the untrusted strings of one answer."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self.has_marks = False

    def struct(self, value: msgspec.Struct) -> dict[str, Any]:
        """Returns a result as JSON values, with each string treated by the type of its field."""
        kind = type(value)
        authors, omits = _authors(kind), kind.__struct_config__.omit_defaults
        return {
            field.encode_name: self._value(getattr(value, field.name), authors[field.name])
            for field in msgspec.structs.fields(kind)
            if not (omits and _is_default(getattr(value, field.name), field))
        }

    def _value(self, value: Any, author: _Author) -> Any:
        match value:
            case msgspec.Struct():
                return self.struct(value)
            case enum.Enum():
                return value.value
            case str():
                return self._text(value, author)
            case Mapping():
                return {
                    self._text(str(key), _key_author(key, author)): self._value(inner, author)
                    for key, inner in value.items()
                }
            case list() | tuple() | set() | frozenset():
                return self._list(list(value), author)
            case _:
                return msgspec.to_builtins(value)

    def _list(self, values: list[Any], author: _Author) -> list[Any]:
        if not values or not author.is_others:
            return [self._value(inner, author) for inner in values]
        self.has_marks = True
        lines = [fences.printable(str(line)) for line in values]
        return [fences.opening(self._mark), *lines, fences.closing(self._mark)]

    def _text(self, text: str, author: _Author) -> str:
        if author.is_own:
            return fences.one_line(text)
        if not text or (not author.is_others and fences.is_name(text)):
            return text
        self.has_marks = True
        return fences.fenced(text, self._mark)


def _is_default(value: Any, field: msgspec.structs.FieldInfo) -> bool:
    if field.default_factory is not msgspec.NODEFAULT:
        return value == field.default_factory()
    return value is field.default


def _quotable(value: Any, author: _Author) -> Any:
    """Returns a value in which strings that a next step may not quote are replaced."""
    match value:
        case msgspec.Struct():
            authors = _authors(type(value))
            fields = {name: _quotable(getattr(value, name), authors[name]) for name in authors}
            return msgspec.structs.replace(value, **fields)
        case enum.Enum():
            return value
        case str():
            return fences.one_line(value) if author.is_own else fences.safe_name(value)
        case Mapping():
            return {
                _quotable(str(key), _key_author(key, author)): _quotable(inner, author)
                for key, inner in value.items()
            }
        case list():
            return [_quotable(inner, author) for inner in value]
        case _:
            return value
