"""docs/families.md against the figures that `make families` has kept."""

import importlib
import json

import pytest

from fakes.source_tree import ROOT

HERE = ROOT / "benchmarks" / "families"
KEPT = json.loads((HERE / "figures.json").read_text(encoding="utf-8"))


@pytest.fixture
def run(monkeypatch):
    """The script that makes the page."""
    monkeypatch.syspath_prepend(str(HERE))
    return importlib.import_module("run")


def test_the_page_says_what_was_measured(run):
    assert (ROOT / "docs" / "families.md").read_text(encoding="utf-8") == run.page(KEPT)


def test_thirty_families_say_yes_in_every_cell(run):
    assert set(KEPT["families"]) <= set(run.names())
    cells = [family["cells"] for family in KEPT["families"].values()]
    assert all(tuple(of_family) == run.COLUMNS for of_family in cells)
    whole = [f for f in cells if all(cell["works"] for cell in f.values())]
    assert len(whole) >= run.AT_LEAST


def test_a_cell_that_turns_to_no_is_named(run):
    before = {"a": {"cells": {"DPO": {"works": True}, "distill": {"works": False, "why": "x"}}}}
    after = {
        "a": {"cells": {key: {"works": False, "why": "it broke"} for key in ("DPO", "distill")}}
    }

    assert run.turned(before, after) == ["a, DPO: it broke"]
    assert run.turned(after, before) == []
