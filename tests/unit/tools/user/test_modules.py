"""The modules that a user's Python file imports from its own folder."""

import sys
from pathlib import Path

import pytest

from fakes.user_files import write_tools
from fakes.waiting import run_async
from stillroom.errors import InputError
from stillroom.tools.user.file import load_user_file, read_user_file
from stillroom.tools.user.pool import UserPool

pytestmark = pytest.mark.usefixtures("same_imports")

PRICE = '''
from prices import LAMP

@tool
def price() -> str:
    """The price of a lamp."""
    return LAMP

@tool
def end() -> str:
    """Ends this process."""
    import os
    os._exit(1)
'''


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def test_the_modules_are_those_that_the_file_and_its_modules_import(tmp_path: Path) -> None:
    write(tmp_path / "one.py", "import json, deep.er\n")
    write(tmp_path / "deep" / "er.py", "from . import beside\nfrom .. import above\n")
    write(tmp_path / "deep" / "beside.py", "from one import something\n")
    write(tmp_path / "pack" / "__init__.py", "from .inner import *\n")
    write(tmp_path / "pack" / "inner.py", "def broken(:\n")
    write(tmp_path / "never.py", "")
    path = write_tools(tmp_path, "import one\ndef later():\n    from pack import VALUE\n")

    file = read_user_file(path)

    assert sorted(file.modules) == [
        *("deep/beside.py", "deep/er.py", "one.py", "pack/__init__.py", "pack/inner.py")
    ]
    assert file.paths[:2] == [path, tmp_path / "deep" / "beside.py"]
    assert (file.modules_sha256 or {}).keys() == file.modules.keys()
    assert read_user_file(write_tools(tmp_path, "", name="alone.py")).modules_sha256 is None


def test_what_runs_are_the_modules_as_they_were_read(tmp_path: Path) -> None:
    write(tmp_path / "fixed_values" / "__init__.py", "from .inner import LAMP\n")
    write(tmp_path / "fixed_values" / "inner.py", "LAMP = 7\n")
    write(tmp_path / "fixed_alone.py", "DESK = 9\n")
    path = write_tools(
        tmp_path, "import fixed_alone\nfrom fixed_values import LAMP\nDESK = fixed_alone.DESK\n"
    )

    file = read_user_file(path)
    write(tmp_path / "fixed_values" / "inner.py", "LAMP = 8\n")
    (tmp_path / "fixed_alone.py").unlink()
    module = load_user_file(file)

    assert (module.LAMP, module.DESK) == (7, 9)
    assert not list(tmp_path.rglob("*.pyc"))
    assert sys.modules["fixed_values.inner"].__file__ == str(tmp_path / "fixed_values/inner.py")


def test_a_new_process_imports_the_modules_that_the_run_began_with(tmp_path: Path) -> None:
    write(tmp_path / "prices.py", "LAMP = '7'\n")
    file = read_user_file(write_tools(tmp_path, PRICE))

    async def main() -> str:
        async with UserPool(tools_file=file, rewards_file=None) as pool:
            write(tmp_path / "prices.py", "LAMP = '8'\n")
            await pool.call("end", {}, metadata={})
            return (await pool.call("price", {}, metadata={})).content

    assert run_async(main) == "7"


def test_a_module_that_leads_to_a_file_of_keys_is_not_read(tmp_path: Path) -> None:
    write(tmp_path / ".env", "SHOP_KEY=1")
    (tmp_path / "shop.py").symlink_to(tmp_path / ".env")

    with pytest.raises(InputError, match="usually contain keys"):
        read_user_file(write_tools(tmp_path, "import shop\n"))
