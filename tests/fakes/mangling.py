"""Rows that are almost right: one valid row with one part replaced or taken out."""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any

from hypothesis import strategies as st

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from([0, -1, 1, 2**64, 10**400, 0.5, 1e300])
    | st.sampled_from(["", "user", "assistant", "tool", "text", "\x00", "ü", "null"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "function", "name", "id"]),
            inner,
            max_size=2,
        )
    ),
    max_leaves=4,
)


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the path of every part of a value."""
    entries = value.items() if isinstance(value, dict) else ()
    for key, inner in enumerate(value) if isinstance(value, list) else entries:
        yield (*path, key)
        yield from paths_of(inner, (*path, key))


@st.composite
def mangled(draw: st.DrawFn, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One of the rows with one to three parts replaced, taken out or added."""
    row = deepcopy(draw(st.sampled_from(rows)))
    for _ in range(draw(st.integers(1, 3))):
        paths = list(paths_of(row))
        if not paths:
            break
        *way, last = draw(st.sampled_from(paths))
        inner: Any = row
        for step in way:
            inner = inner[step]
        if draw(st.booleans()):
            inner[last] = draw(JSON)
        else:
            del inner[last]
    for name in draw(st.sets(st.sampled_from(["chosen", "metadata", "prompt", "reward", "tools"]))):
        row.setdefault(name, draw(JSON))
    return row
