"""Rows that call tools but have no schemas take those of the project's tools.py."""

from pathlib import Path
from typing import Any

import pytest

from fakes.foreign_rollouts import RNOW_ROW, write_rnow
from fakes.rollout_rows import read_rows
from stillroom.curate.convert import ConvertResult, ConvertRollouts, convert_rollouts
from stillroom.curate.pairs import MakeDpoPairs, make_dpo_pairs
from stillroom.lineage import read_manifest
from stillroom.settings import Workspace

PRICE = """
from rnow.core import tool


@tool
def price(item: str) -> int:
    \"\"\"Price of an item.\"\"\"
    return 7
"""
STOCK = """

@tool
def stock() -> int:
    \"\"\"How many there are.\"\"\"
    return 5
"""
WRONG: dict[str, Any] = RNOW_ROW | {
    "id": "b",
    "total_reward": 0.0,
    "conversation": [*RNOW_ROW["conversation"][:-1], {"role": "assistant", "content": "12"}],
}


def project(folder: Path, tools: str) -> Workspace:
    (folder / "tools.py").write_text(tools, encoding="utf-8")
    (folder / "data").mkdir()
    write_rnow(folder / "rollouts", RNOW_ROW, WRONG)
    return Workspace(folder)


def convert(workspace: Workspace) -> ConvertResult:
    request = ConvertRollouts(input="rollouts", output="data/train.jsonl")
    return convert_rollouts(workspace, request)


def names_in(path: Path) -> list[list[str]]:
    return [[tool["function"]["name"] for tool in row["tools"]] for row in read_rows(path)]


def input_names(output: Path) -> list[str]:
    manifest = read_manifest(output)
    assert manifest is not None
    return [Path(record.path).name for record in manifest.inputs]


@pytest.mark.usefixtures("warm_python")
def test_rows_and_pairs_take_the_schemas_of_a_tools_file_that_has_what_they_call(
    tmp_path: Path,
) -> None:
    workspace = project(tmp_path, PRICE + STOCK)

    [note] = convert(workspace).notes
    pairs = make_dpo_pairs(workspace, MakeDpoPairs(input="rollouts", output="data/pairs.jsonl"))

    start = "1 of 1 rows call tools but had no schemas: they now have the schemas of tools.py"
    assert note.startswith(f"{start} (price, stock). ")
    assert pairs.notes == [note]
    for name in ("train", "pairs"):
        output = tmp_path / f"data/{name}.jsonl"
        assert names_in(output) == [["price", "stock"]]
        assert "tools.py" in input_names(output)


@pytest.mark.usefixtures("warm_python")
def test_a_tools_file_without_a_called_function_is_not_used(tmp_path: Path) -> None:
    [note] = convert(project(tmp_path, PRICE)).notes

    assert note.startswith("1 of 1 rows call tools but have no `tools`: ")
    assert names_in(tmp_path / "data/train.jsonl") == [[]]
    assert "tools.py" not in input_names(tmp_path / "data/train.jsonl")


@pytest.mark.usefixtures("warm_python")
def test_a_tools_file_that_cannot_be_loaded_stops_no_conversion(tmp_path: Path) -> None:
    raising = "\nraise RuntimeError('delete the workspace')\n"
    notes = convert(project(tmp_path, PRICE + raising)).notes

    assert notes[0].startswith("no row has schemas from tools.py, which cannot be loaded: ")
    assert notes[0].endswith("loading failed: RuntimeError")
    assert notes[1].startswith("1 of 1 rows call tools but have no `tools`: ")
