"""Supervised rows that name their tools."""

from pathlib import Path
from typing import Any

import pytest

from fakes.rollout_rows import assistant, tool_call, tool_reply, user, write_rows
from stillroom.data.formats import CHECKS, RowFormat, load_sft_rows
from stillroom.data.tool_names import has_tool_names
from stillroom.errors import DataError
from stillroom.types import ToolSchema

BROWSE: ToolSchema = {
    "type": "function",
    "function": {"name": "browse", "description": "d", "parameters": {"type": "object"}},
}
ROW: dict[str, Any] = {
    "messages": [
        user("?"), assistant("", tool_call("browse", "c1", "{}")), tool_reply("page", "c1"),
        assistant("7"),
    ],
    "tools": ["browse"],
    "metadata": {"teacher": "openai/gpt-4o-mini", "turns": 2},
}  # fmt: skip


def test_a_row_may_name_its_tools(tmp_path: Path) -> None:
    assert list(CHECKS[RowFormat.SFT](ROW)) == []
    path = tmp_path / "train.jsonl"
    write_rows(path, [{**ROW, "tools": [BROWSE]}, {**ROW, "tools": []}, ROW])

    rows = load_sft_rows(path, {"browse": BROWSE})

    assert [row.tools for row in rows] == [[BROWSE], [], [BROWSE]]


@pytest.mark.parametrize(
    ("named", "problem"),
    [
        (None, "no tools.py was found"),
        ({"browser": BROWSE}, "is not in tools.py (did you mean 'browser'?)"),
        ({"x": BROWSE}, "is not in tools.py (it has: x)"),
    ],
)
def test_a_name_that_is_not_known_is_refused_with_its_line(
    tmp_path: Path, named: dict[str, ToolSchema] | None, problem: str
) -> None:
    path = tmp_path / "train.jsonl"
    write_rows(path, [{**ROW, "tools": None}, ROW])

    with pytest.raises(DataError) as caught:
        load_sft_rows(path, named)

    assert caught.value.problem.startswith(f"{path}:2 names the tool 'browse'")
    assert problem in caught.value.problem


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"tools": ["a"]}', True),
        ('{"tools" :\t[ "a"]}', True),
        ('{"tools": [{"type": "function"}]}', False),
        ('{"tools": []}', False),
        ('{"content": "{\\"tools\\": [\\"a\\"]}"}', False),
        ("x" * ((1 << 20) - 5) + '{"tools": ["a"]}', True),
    ],
)
def test_names_are_found_in_the_bytes_of_a_file(tmp_path: Path, text: str, expected: bool) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text, encoding="utf-8")

    assert has_tool_names(path) is expected
