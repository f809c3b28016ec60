"""tools.py and rewards.py as they are written for rnow."""

import sys
from pathlib import Path
from typing import Any

import pytest

from fakes.rollout_rows import assistant, user
from fakes.waiting import run_async
from stillroom.errors import ToolFileError
from stillroom.tools.user.file import UserFile, get_response, load_user_file, read_user_file
from stillroom.tools.user.pool import UserPool
from stillroom.tools.user.worker import CallReward, CallTool, UserCode

pytestmark = pytest.mark.usefixtures("same_imports")

TOOLS = '''
import sqlite3
from rnow.core.tool import tool
from rnow.models import ToolArgs

@tool
def stock(args: ToolArgs, query: str) -> dict:
    """Look up the stock."""
    return {"shop": args.metadata["shop"], "found": query}
'''
REWARDS = """
import re
from rnow.core import RewardArgs, get_response, reward

@reward(precondition=True)
def used_a_tool(args: RewardArgs, messages: list) -> float:
    calls = [m for m in messages if m.get("role") == "assistant" and m.get("tool_calls")]
    return 1.0 if calls else 0.0

@reward(timeout=30)
async def accuracy(args: RewardArgs, messages: list) -> float:
    found = re.search(r"Final Answer:\\s*(.+)", get_response(messages))
    return float(found is not None and found[1] == args.metadata["expected_answer"])
"""


def written(folder: Path, code: str, name: str = "tools.py") -> UserFile:
    (folder / name).write_text(code, encoding="utf-8")
    return read_user_file(folder / name)


def test_files_that_import_rnow_run_unchanged_and_it_is_said_once(tmp_path: Path) -> None:
    tools, rewards = written(tmp_path, TOOLS), written(tmp_path, REWARDS, "rewards.py")

    async def use() -> tuple[str, list[float], list[str]]:
        async with UserPool(tools_file=tools, rewards_file=rewards) as pool:
            looked_up = await pool.call("stock", {"query": "lamp"}, metadata={"shop": "A"})
            messages: Any = [user("?"), assistant("Final Answer: 7")]
            about = {"metadata": {"expected_answer": "7"}, "variables": {}}
            given = [await pool.reward(name, messages, **about) for name in ("accuracy",)]
            given.append(await pool.reward("used_a_tool", messages, **about))
            assert [one.precondition for one in pool.rewards] == [True, False]
            return looked_up.content, given, pool.notes

    content, rewards_given, notes = run_async(use)

    assert content == '{"shop":"A","found":"lamp"}'
    assert rewards_given == [1.0, 0.0]
    assert notes == [
        "tools.py: stillroom provides the rnow modules that it imports",
        "rewards.py: stillroom provides the rnow modules that it imports",
    ]


@pytest.mark.parametrize(
    "imports",
    [
        "from rnow.core import tool",
        "from rnow.core.tool import tool\nfrom rnow.core import tool",
        "import rnow.core.tool\nfrom rnow.core import tool",
        "import rnow.core\ntool = rnow.core.tool",
        "from rnow.core.tool import tool as t\ntool = t",
        "import rnow.models as m\nfrom rnow.core import ToolArgs, tool\nm.ToolArgs()",
    ],
)
def test_each_way_to_import_the_decorator_gives_ours(tmp_path: Path, imports: str) -> None:
    code = UserCode(
        written(tmp_path, f'{imports}\n@tool\ndef f() -> str:\n    """Do it."""\n    return "x"\n'),
        None,
    )

    assert code.run(CallTool(name="f", arguments={}, metadata={})).content == "x"


def test_a_bare_decorator_needs_no_import_and_it_is_said(tmp_path: Path) -> None:
    rewards = written(
        tmp_path,
        "@reward\ndef right(args: RewardArgs, messages: list) -> float:\n"
        '    return float(get_response(messages) == "7")\n',
        "rewards.py",
    )

    code = UserCode(None, rewards)

    call = CallReward(name="right", messages=[assistant("7")], metadata={}, variables={})
    assert code.run(call).reward == 1.0
    assert code.describe().notes == [
        "rewards.py: stillroom provides RewardArgs, get_response, reward (used without an import)"
    ]


def test_a_file_with_names_of_its_own_keeps_them_and_has_no_note(tmp_path: Path) -> None:
    (tmp_path / "rnow.py").write_text("def tool(f):\n    return f\n", encoding="utf-8")
    file = written(tmp_path, "from rnow import tool\nLOADED = tool(len)\n")

    assert load_user_file(file).LOADED is len

    assert "stillroom" not in str(sys.modules["rnow"].__file__)


@pytest.mark.parametrize(
    ("line", "problem", "fix"),
    [
        ("from rnow.core import llm_judge", "llm_judge", "judge.yml"),
        ("from rnow.core.llm_judge import llm_judge", "llm_judge", "judge.yml"),
        ("from rnow.core import TOOL_REGISTRY", "imports TOOL_REGISTRY from rnow.core", "tool"),
        ("from rnow.cli.test import test", "rnow.cli, which stillroom does not", "rnow.core"),
    ],
)
def test_what_rnow_has_and_stillroom_does_not_is_refused_by_name(
    tmp_path: Path, line: str, problem: str, fix: str
) -> None:
    with pytest.raises(ToolFileError) as caught:
        load_user_file(written(tmp_path, f"import json\n{line}\n"))

    assert caught.value.problem.startswith(f"{tmp_path / 'tools.py'}:2: it imports")
    assert problem in caught.value.problem
    assert fix in caught.value.fix


@pytest.mark.parametrize(
    ("module", "package"),
    [("bs4", "beautifulsoup4"), ("nest_asyncio_x", "nest-asyncio-x"), ("no_such.part", "no-such")],
)
def test_a_module_that_is_not_installed_comes_with_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, "bs4", None)
    file = written(tmp_path, f"import {module}\n")

    with pytest.raises(ToolFileError) as caught:
        load_user_file(file)
    assert f"{sys.executable} -m pip install {package}`" in caught.value.fix

    (tmp_path / "requirements.txt").write_text(f"{package}\n", encoding="utf-8")
    with pytest.raises(ToolFileError) as caught:
        load_user_file(file)
    assert f"pip install -r {tmp_path / 'requirements.txt'}`" in caught.value.fix


def test_a_module_that_only_a_function_imports_is_named_before_it_is_called(
    tmp_path: Path,
) -> None:
    (tmp_path / "mine.py").write_text("", encoding="utf-8")
    file = written(
        tmp_path,
        """
        @tool
        def look(url: str) -> str:
            "Look."
            import json, mine, no_such_browser
            try:
                import no_such_parser
            except ImportError:
                pass
            from no_such_browser.pages import page
            return json.dumps(url)
        """.replace("\n        ", "\n"),
    )

    (bare, missing) = UserCode(file, None).describe().notes

    assert "tool (used without an import)" in bare
    assert "a function imports no_such_browser, which is not installed" in missing
    assert "pip install no-such-browser`" in missing


def test_rewards_receive_the_variables_that_the_user_gives_to_tools(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BUCKET", "b-1")
    rewards = written(
        tmp_path,
        "from rnow.core import RewardArgs, reward\n"
        "@reward\ndef named(args: RewardArgs, messages: list) -> float:\n"
        "    return float(args.secrets[args.metadata['name']] == 'b-1')\n",
        "rewards.py",
    )
    code = UserCode(None, rewards, ["BUCKET"])

    def call(name: str) -> CallReward:
        return CallReward(name="named", messages=[], metadata={"name": name}, variables={})

    assert code.run(call("BUCKET")).reward == 1.0
    assert "add the line `- {key: OTHER, tools: true}` to keys.yml" in (
        code.run(call("OTHER")).error or ""
    )


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([assistant("one"), {"role": "tool", "content": "reply"}], "one"),
        (
            [{"role": "assistant", "content": [{"type": "thinking", "thinking": "2"},
                                               {"type": "text", "text": "4"}]}],
            "4",
        ),
        ([{"role": "assistant", "content": None}], ""),
        ([user("?")], ""),
    ],
)  # fmt: skip
def test_the_response_is_the_last_answers_text(messages: list[Any], text: str) -> None:
    assert get_response(messages) == text
