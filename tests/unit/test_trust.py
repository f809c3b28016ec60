"""What docs/trust.md names exists: each promise has its number, its script and its tests."""

import ast
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TABLE: dict[str, Any] = tomllib.loads(
    (ROOT / "tests/thorough/promises.toml").read_text(encoding="utf-8")
)
ENTRIES = [*TABLE["promise"], *TABLE.get("fault", [])]
NUM_PROMISES = 27


def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in tree.body if isinstance(node, kinds)}


def test_every_promise_has_its_number() -> None:
    numbers = [entry["number"] for entry in TABLE["promise"]]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) >= NUM_PROMISES


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry["text"][:40])
def test_what_shows_a_promise_exists(entry: dict[str, Any]) -> None:
    if "script" in entry:
        assert (ROOT / entry["script"].split()[0]).is_file()
    for test in entry.get("tests", []):
        path, _, name = test.partition("::")
        assert (ROOT / path).is_file(), test
        assert not name or name in functions_of(ROOT / path), test
