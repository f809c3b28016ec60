from pathlib import Path

import pytest

from fakes.user_files import write_tools
from stillroom.errors import ToolFileError
from stillroom.tools.user.file import (
    RewardMark,
    ToolMark,
    load_user_file,
    mark_of,
    marked_functions,
    read_user_file,
)

pytestmark = pytest.mark.usefixtures("same_imports")


def test_marks_keep_their_options(tmp_path: Path) -> None:
    path = write_tools(
        tmp_path,
        '''
        @tool
        def plain(item: str) -> str:
            """Plain."""

        @tool(timeout=2.5, sandbox=True)
        async def slow(item: str) -> str:
            """Slow."""

        @reward
        def right(args, messages):
            return 1.0

        @reward(precondition=True, timeout=3)
        def polite(args, messages):
            return 1.0

        def neither():
            pass
        ''',
    )

    module = load_user_file(read_user_file(path))

    tools = marked_functions(module, ToolMark)
    assert list(tools) == ["plain", "slow"]
    assert mark_of(tools["plain"]) == ToolMark(sandbox=False, timeout_s=None)
    assert mark_of(tools["slow"]) == ToolMark(sandbox=True, timeout_s=2.5)
    rewards = marked_functions(module, RewardMark)
    assert list(rewards) == ["right", "polite"]
    assert mark_of(rewards["polite"]) == RewardMark(precondition=True, sandbox=False, timeout_s=3)


def test_a_dataclass_in_the_file_finds_its_module(tmp_path: Path) -> None:
    path = tmp_path / "tools.py"
    path.write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "@dataclass\n"
        "class Lamp:\n"
        "    price: int\n",
        encoding="utf-8",
    )

    assert load_user_file(read_user_file(path)).Lamp(7).price == 7


@pytest.mark.parametrize(
    ("code", "line", "text"),
    [
        ("\n\nimport nowhere_to_be_found\n", 4, "ModuleNotFoundError"),
        ("\ndef f(:\n    pass\n", 3, "SyntaxError"),
        ("\ndef f():\n    return 1 / 0\n\nf()\n", 4, "ZeroDivisionError"),
        ("\nx = 'unterminated\n", 3, "SyntaxError"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_told_with_its_line(
    tmp_path: Path, code: str, line: int, text: str
) -> None:
    path = write_tools(tmp_path, code)

    with pytest.raises(ToolFileError) as caught:
        load_user_file(read_user_file(path))
    assert caught.value.problem.startswith(f"{path}:{line}: loading failed: {text}")


def test_a_file_with_nul_bytes_is_an_error_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "tools.py"
    path.write_bytes(b"x = 1\0\n")

    with pytest.raises(ToolFileError, match="loading failed"):
        load_user_file(read_user_file(path))


def test_a_file_that_is_no_python_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tools.txt"
    path.touch()

    with pytest.raises(ToolFileError, match="is not a Python file"):
        load_user_file(read_user_file(path))
