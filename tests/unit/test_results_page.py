"""docs/results.md against the figures that `make real` has kept."""

import importlib
import json

import pytest

from fakes.source_tree import ROOT
from stillroom.evaluate.intervals import Estimate

HERE = ROOT / "benchmarks" / "real"
KEPT = json.loads((HERE / "figures.json").read_text(encoding="utf-8"))


@pytest.fixture
def page(monkeypatch):
    """The module that makes the page."""
    monkeypatch.syspath_prepend(str(HERE))
    return importlib.import_module("page")


def test_the_page_says_what_was_measured(page):
    assert (ROOT / "docs" / "results.md").read_text(encoding="utf-8") == page.page(KEPT)
    picture = ROOT / "docs" / "images" / "results.svg"
    assert picture.read_text(encoding="utf-8") == page.picture(KEPT)


def test_a_method_is_compared_task_by_task_with_as_much_more_sft(page):
    trained = {"minutes": 1, "teacher_rows": 2, "seconds": 60, "date": "2026-01-01", "commit": "c"}
    rows = [
        {"task": "tickets", "seed": 1, "method": name, "seen": "11" * 20, "new": new, **trained}
        for name, new in (("SFT, then more SFT", "01" * 20), ("SFT, then DPO", "11" * 20))
    ]
    text = page.page(rows)
    assert "| SFT, then DPO | 100.0% [91.2%, 100.0%] | 100.0% [91.2%, 100.0%] | **+50.0 [" in text
    assert "Better than *SFT, then more SFT*: SFT, then DPO." in text
    assert "**One seed so far** of Tickets" in text
    second = [{**row, "seed": 2} for row in rows]
    assert "One seed so far" not in page.page([*rows, *second])
    assert "points at 1 seed and" in page.page([*rows, *second, {**rows[0], "task": "returns"}])


@pytest.mark.parametrize(
    ("low", "high", "is_shown"),
    [(0.0004, 0.2, False), (0.0006, 0.2, True), (-0.2, -0.0004, False), (-0.1, 0.2, False)],
)
def test_a_difference_is_shown_only_if_its_printed_interval_excludes_0(page, low, high, is_shown):
    gap = Estimate(value=(low + high) / 2, low=low, high=high, n=100)
    assert page._is_clear(gap) == is_shown
