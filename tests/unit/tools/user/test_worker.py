"""The worker's own part, in this process; the process itself is tested with the pool."""

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fakes.rollout_rows import assistant, user
from fakes.user_files import write_tools
from stillroom.errors import ToolFileError
from stillroom.tools.user.file import read_user_file
from stillroom.tools.user.worker import (
    MAX_RESULT_CHARACTERS,
    CallResult,
    CallReward,
    CallTool,
    UserCode,
)

pytestmark = pytest.mark.usefixtures("same_imports")


def answer_of(folder: Path, code: str, **arguments: Any) -> CallResult:
    """What a file's tool `f` answers."""
    user_code = UserCode(read_user_file(write_tools(folder, code)), None)
    answer = user_code.run(CallTool(name="f", arguments=arguments, metadata={"seen": 1}))
    return msgspec.json.decode(msgspec.json.encode(answer), type=CallResult)


def tool_code(returned: str, *, signature: str = "") -> str:
    return f'@tool\ndef f({signature}):\n    """Do it."""\n    return {returned}\n'


def raising(statement: str) -> str:
    return f'@tool\ndef f():\n    """Do it."""\n    {statement}\n'


@pytest.mark.parametrize(
    ("returned", "content"),
    [
        ("'plain text'", "plain text"),
        ("{'price': 7, 'ü': [1, None]}", '{"price":7,"ü":[1,null]}'),
        ("None", "null"),
        ("True", "true"),
        ("7.5", "7.5"),
        ("(1, 2)", "[1,2]"),
        ("''", ""),
        ("args.metadata", '{"seen":1}'),
        (
            "'x' * 3_000_000",
            "x" * MAX_RESULT_CHARACTERS + "… (cut; 3000000 characters in all)",
        ),
    ],
)
def test_a_result_is_text_or_json(tmp_path: Path, returned: str, content: str) -> None:
    assert answer_of(tmp_path, tool_code(returned, signature="args: ToolArgs")) == CallResult(
        content=content, is_none=returned == "None"
    )


@pytest.mark.parametrize(
    ("statement", "error"),
    [
        ("raise ValueError('no such item')", "no such item"),
        ("raise KeyError('lamp')", "KeyError: 'lamp'"),
        ("raise ValueError()", "ValueError"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("return f()", "RecursionError: maximum recursion depth exceeded"),
        ("return object()", "TypeError: Encoding objects of type object is unsupported"),
        ("input()", "EOFError"),
    ],
)
def test_whatever_a_tool_raises_is_told_to_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statement: str, error: str
) -> None:
    with Path("/dev/null").open(encoding="utf-8") as empty:
        monkeypatch.setattr(sys, "stdin", empty)
        answer = answer_of(tmp_path, raising(statement))

    assert answer.error is not None
    assert answer.error.startswith(error)
    assert answer.content == ""


def test_an_error_that_cannot_tell_itself_is_told_by_its_type(tmp_path: Path) -> None:
    code = '''
        class Mute(Exception):
            def __str__(self):
                raise RuntimeError("not even this")

        @tool
        def f():
            """Do it."""
            raise Mute
        '''

    assert answer_of(tmp_path, code).error == "Mute"


def test_text_that_is_no_unicode_still_reaches_the_model(tmp_path: Path) -> None:
    assert answer_of(tmp_path, tool_code(r"'half a \ud800 pair'")).content == "half a ? pair"
    answer = answer_of(tmp_path, raising(r"raise ValueError('half \udcff')"))
    assert answer.error == "half ?"


def test_a_tool_is_called_by_the_name_it_has_in_the_file(tmp_path: Path) -> None:
    code = '''
        def make(price):
            async def lookup(item: str) -> int:
                """Look it up."""
                return price
            return lookup

        lamp = tool(make(7))
        f = tool(make(9))
        '''
    user_code = UserCode(read_user_file(write_tools(tmp_path, code)), None)

    described = [tool.schema["function"]["name"] for tool in user_code.describe().tools]

    assert described == ["lamp", "f"]
    assert answer_of(tmp_path, code, item="x") == CallResult(content="9")
    assert answer_of(tmp_path, code).error == "wrong arguments: item: Field required"


def reward_of(folder: Path, code: str) -> CallResult:
    user_code = UserCode(None, read_user_file(write_tools(folder, code, name="rewards.py")))
    call = CallReward(
        name="r",
        messages=[user("a"), assistant("b")],
        metadata={"weight": 0.5},
        variables={"x": 2},
    )
    return msgspec.json.decode(msgspec.json.encode(user_code.run(call)), type=CallResult)


def reward_code(returned: str) -> str:
    return f"@reward\ndef r(args, messages):\n    return {returned}\n"


@pytest.mark.parametrize(
    ("returned", "value"),
    [
        ("0.25", 0.25),
        ("1", 1.0),
        ("-3", -3.0),
        ("args.metadata['weight'] + args.variables['x']", 2.5),
        ("float(messages[-1]['content'] == 'b')", 1.0),
        ("messages[-1]['content'] == 'b'", 1.0),
    ],
)
def test_a_reward_is_a_number(tmp_path: Path, returned: str, value: float) -> None:
    assert reward_of(tmp_path, reward_code(returned)) == CallResult(reward=value)


@pytest.mark.parametrize(
    "returned", ["None", "'1'", "float('nan')", "float('inf')", "10**400", "[1.0]"]
)
def test_a_reward_that_is_no_finite_number_is_an_error(tmp_path: Path, returned: str) -> None:
    answer = reward_of(tmp_path, reward_code(returned))

    assert answer.error is not None
    assert answer.reward == 0.0


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("def f(): pass\n", "has no function marked with @tool"),
        (raising("pass").replace("@tool", "@tool(sandbox=True)"), "sandbox=True"),
    ],
)
def test_a_file_whose_tools_cannot_be_offered_is_refused(
    tmp_path: Path, code: str, problem: str
) -> None:
    with pytest.raises(ToolFileError, match=problem):
        UserCode(read_user_file(write_tools(tmp_path, code)), None)
