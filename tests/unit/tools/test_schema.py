from datetime import date
from typing import Any, Literal, Optional, Union

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from stillroom.errors import ToolFileError
from stillroom.tools.schema import (
    ArgumentChecker,
    ArgumentError,
    core_schema_of,
    has_task_parameter,
    tool_schema,
)
from stillroom.tools.user.file import ToolArgs


def everything(  # noqa: PLR0917
    text: str,
    count: int,
    share: float,
    is_new: bool,
    anything: Any,
    items: list,
    options: dict,
    names: list[str],
    prices: dict[str, float],
    size: Literal["s", "m", 3],
    label: Optional[str],  # noqa: UP045
    limit: int | None,
    key: int | str,
    either: int | str | None,
    nested: list[int | None],
    color: str = "red",
    args: ToolArgs | None = None,
) -> str:
    """Show everything.

    Two paragraphs.
    """
    return f"{text}{args}"


def test_a_schema_says_what_the_signature_says() -> None:
    function = tool_schema(everything)["function"]

    assert function["name"] == "everything"
    assert function["description"] == "Show everything.\n\nTwo paragraphs."
    assert function["parameters"] == {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "count": {"type": "integer"},
            "share": {"type": "number"},
            "is_new": {"type": "boolean"},
            "anything": {},
            "items": {"type": "array"},
            "options": {"type": "object"},
            "names": {"type": "array", "items": {"type": "string"}},
            "prices": {"type": "object", "additionalProperties": {"type": "number"}},
            "size": {"enum": ["s", "m", 3]},
            "label": {"type": ["string", "null"]},
            "limit": {"type": ["integer", "null"]},
            "key": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
            "either": {"anyOf": [{"type": "integer"}, {"type": "string"}, {"type": "null"}]},
            "nested": {"type": "array", "items": {"type": ["integer", "null"]}},
            "color": {"type": "string"},
        },
        "required": [
            "text",
            "count",
            "share",
            "is_new",
            "anything",
            "items",
            "options",
            "names",
            "prices",
            "size",
            "label",
            "limit",
            "key",
            "either",
            "nested",
        ],
        "additionalProperties": False,
    }


def no_docstring(item: str) -> str:
    return item


def no_type(item) -> str:
    """Has no type."""
    return item


def star(*items: str) -> str:
    """Takes any number."""
    return str(items)


def star_called_args(*args: str) -> str:
    """Takes any number under the name of the injected parameter."""
    return str(args)


def stars_called_args(**args: str) -> str:
    """Takes any keyword under the name of the injected parameter."""
    return str(args)


def by_position(item: str, /) -> str:
    """Takes its argument by position only."""
    return item


def odd_type(item: complex) -> str:
    """Takes what JSON does not have."""
    return str(item)


class Lamp:
    """A class of the user's own."""


def own_class(item: Lamp) -> str:
    """Takes an object of the user's own class."""
    return str(item)


def own_class_inside(items: list[Lamp]) -> str:
    """Takes objects of the user's own class."""
    return str(items)


def unknown_name(item: "Nowhere") -> str:  # type: ignore[name-defined] # noqa: F821
    """Has a type that is defined nowhere."""
    return str(item)


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (no_docstring, "has no docstring"),
        (no_type, "has no type for parameter 'item'"),
        (star, r"takes \*items"),
        (star_called_args, r"takes \*args"),
        (stars_called_args, r"takes \*args"),
        (by_position, "has the positional-only parameter 'item'"),
        (odd_type, "parameter 'item'"),
        (own_class, "parameter 'item'"),
        (own_class_inside, "parameter 'items'"),
        (unknown_name, "Nowhere"),
    ],
)
def test_a_function_no_model_could_call_is_refused_with_its_place(
    function: Any, problem: str
) -> None:
    line = function.__code__.co_firstlineno
    with pytest.raises(ToolFileError, match=problem) as caught:
        tool_schema(function)
    assert caught.value.problem.startswith(f"{__file__}:{line}: tool {function.__name__!r} ")


def numbers(count: int, share: float = 0.5, is_new: bool = False, size: Literal[1, "m"] = 1) -> str:
    """Take numbers."""
    return f"{count}{share}{is_new}{size}"


def texts(name: str, label: str | None = None, key: int | str = 0) -> str:
    """Take texts."""
    return f"{name}{label}{key}"


def json(json: str, copy: int = 1, schema: list[int] | None = None) -> str:
    """Take what is called like a part of pydantic's models."""
    return f"{json}{copy}{schema}"


@pytest.mark.parametrize(
    ("function", "given", "checked"),
    [
        (numbers, {"count": "3"}, {"count": 3}),
        (numbers, {"count": 3.0, "share": "0.25"}, {"count": 3, "share": 0.25}),
        (numbers, {"count": 1, "share": 2}, {"count": 1, "share": 2.0}),
        (numbers, {"count": 1, "is_new": "true"}, {"count": 1, "is_new": True}),
        (numbers, {"count": 1, "size": "m"}, {"count": 1, "size": "m"}),
        (texts, {"name": "a", "label": None}, {"name": "a", "label": None}),
        (texts, {"name": "a", "key": "7"}, {"name": "a", "key": "7"}),
        (texts, {"name": "a", "key": 7}, {"name": "a", "key": 7}),
        (json, {"json": "{}", "copy": "2"}, {"json": "{}", "copy": 2}),
        (json, {"json": "{}", "schema": ["1", 2]}, {"json": "{}", "schema": [1, 2]}),
    ],
)
def test_arguments_become_the_functions_types_where_nothing_is_lost(
    function: Any, given: dict, checked: dict
) -> None:
    result = ArgumentChecker(function).check(given)

    assert result == checked
    assert [type(value) for value in result.values()] == [type(v) for v in checked.values()]


@pytest.mark.parametrize(
    ("function", "given", "named"),
    [
        (numbers, {}, "count"),
        (numbers, {"count": "three"}, "count"),
        (numbers, {"count": 3.5}, "count"),
        (numbers, {"count": "3.5"}, "count"),
        (numbers, {"count": None}, "count"),
        (numbers, {"count": [3]}, "count"),
        (numbers, {"count": 1, "size": "l"}, "size"),
        (numbers, {"count": 1, "cuont": 2}, "cuont"),
        (numbers, {"count": 1, "args": {}}, "args"),
        (texts, {"name": 7}, "name"),
        (json, {"json": "", "schema": ["x"]}, "schema.0"),
    ],
)
def test_arguments_that_do_not_fit_are_named_to_the_model(
    function: Any, given: dict, named: str
) -> None:
    with pytest.raises(ArgumentError, match=f"wrong arguments: {named}: ") as caught:
        ArgumentChecker(function).check(given)
    assert "pydantic" not in str(caught.value)


KINDS = st.recursive(
    st.sampled_from([str, int, float, bool, type(None), list, dict, Any, Literal["a", 1], date]),
    lambda inner: st.one_of(
        inner.map(lambda kind: list[kind]),
        st.tuples(st.sampled_from([str, int]), inner).map(lambda kinds: dict[kinds[0], kinds[1]]),
        st.lists(inner, min_size=2, max_size=3).map(lambda kinds: Union[tuple(kinds)]),  # noqa: UP007
    ),
    max_leaves=4,
)


@given(KINDS)
def test_a_type_is_checked_as_pydantic_checks_it(kind: Any) -> None:
    assert core_schema_of(kind) == TypeAdapter(kind).core_schema


def test_only_a_tool_that_asks_for_its_task_gets_it() -> None:
    assert has_task_parameter(everything)
    assert not has_task_parameter(numbers)
