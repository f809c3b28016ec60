"""What docs/trust.md names exists: each promise has its number, its script and its tests."""

import ast
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from stillroom import bounds

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


@pytest.mark.thorough
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry["text"][:40])
def test_what_shows_a_promise_exists(entry: dict[str, Any]) -> None:
    if "script" in entry:
        assert (ROOT / entry["script"].split()[0]).is_file()
    for test in entry.get("tests", []):
        path, _, name = test.partition("::")
        assert (ROOT / path).is_file(), test
        assert not name or name in functions_of(ROOT / path), test


def test_every_promise_has_its_figure() -> None:
    page = (ROOT / "docs/trust.md").read_text(encoding="utf-8")
    assert "no figure yet" not in page


BOUNDS = {name: one for name, one in vars(bounds).items() if isinstance(one, bounds.Bound)}


def test_the_page_lists_every_bound_as_it_is() -> None:
    page = (ROOT / "docs/trust.md").read_text(encoding="utf-8")
    section = page.partition("## Limits on input")[2].partition("\n## ")[0]
    rows = [f"| {b.sender} | {b.subject} | {b.size} | {b.consequence} |" for b in BOUNDS.values()]
    assert [line for line in section.splitlines() if line.startswith("| ")][1:] == rows


def test_every_bound_is_kept_to_somewhere() -> None:
    folders = (ROOT / "engine", ROOT / "server")
    code = "".join(path.read_text("utf-8") for folder in folders for path in folder.rglob("*.py"))
    used = set(re.findall(r"\bbounds\.([A-Z_]+)", code))
    assert used == BOUNDS.keys()


@pytest.mark.parametrize(
    ("bound", "size"),
    [
        (bounds.FRAME, "256 MB"),
        (bounds.FRAME_HEADER, "1 kB"),
        (bounds.LOGIN, "60 s"),
        (bounds.DOWN, "1 h"),
        (bounds.RATE_LIMIT, "15 min"),
        (bounds.ANSWER, "200,000 characters"),
        (bounds.REPLY_HEADERS, "128"),
    ],
)
def test_a_bound_is_written_as_people_write_it(bound: bounds.Bound, size: str) -> None:
    assert bound.size == size
