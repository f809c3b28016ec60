"""The report in a real browser: one file, no request, no error, readable at every width."""

from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext, Page

from fakes.run_folders import evaluate, write_run, write_training
from fakes.watched_pages import accessibility_faults, watched_page
from stillroom import api
from stillroom.report.write import write_report
from stillroom.settings import Workspace

pytestmark = pytest.mark.browser

SECTIONS = ("Evaluations", "Learning curves", "Before and after", "All runs")
ATTACK = "<img src=https://example.com/x.png onerror=document.title='owned'>"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("report")
    runs = folder / "runs"
    evaluate(runs, "base", set(range(6)), minute=0)
    losses = [{"loss": 2 / step, "val_loss": 2.1 / step} for step in range(1, 120)]
    write_training(runs, "sft-a", losses, minute=1)
    write_run(runs, "dpo-b", minute=2, status="failed", error={"problem": ATTACK, "fix": ATTACK})
    evaluate(runs, ATTACK.replace("/", "|"), set(range(24)), minute=3)
    return write_report(runs, folder / "report.html", title=ATTACK).as_uri()


def test_page_is_accessible_at_each_width_and_makes_no_request_and_no_error(
    context: BrowserContext, report: str
) -> None:
    page, requests, errors = watched_page(context)
    page.goto(report)
    page.wait_for_load_state("networkidle")
    for scheme, darkest, lightest in (("light", 200, 255), ("dark", 0, 60)):
        page.emulate_media(color_scheme=scheme)
        assert darkest <= lightness(page, "backgroundColor") <= lightest
        for width in (390, 1280):
            page.set_viewport_size({"width": width, "height": 900})
            for name in SECTIONS:
                assert page.get_by_role("heading", name=name, exact=True).is_visible()
            assert page.locator("svg[role=img]").count() >= 3
            assert page.evaluate("document.documentElement.scrollWidth") == width
        assert accessibility_faults(page) == ""
    assert [url for url in requests if not url.startswith("data:")] == [report]
    assert errors == []
    assert page.title().startswith(ATTACK)
    page.close()


def test_examples_open_and_show_both_conversations(context: BrowserContext, report: str) -> None:
    page = context.new_page()
    page.goto(report)
    examples = page.locator("details.example")
    assert examples.count() == 5
    last = examples.last
    assert not last.get_by_text("Before").is_visible()
    last.locator("summary").first.click()
    assert last.get_by_text("Before").is_visible()
    assert last.get_by_text("After").is_visible()
    page.close()


def lightness(page: Page, style: str) -> float:
    """Mean of the channels (0 to 255) of a colour of the body."""
    colour = page.evaluate(f"getComputedStyle(document.body).{style}")
    channels = colour.removeprefix("rgb(").removesuffix(")").split(",")
    return sum(map(float, channels)) / len(channels)


def test_a_report_is_drawn_as_a_picture_beside_it(report: str) -> None:
    folder = Path(report.removeprefix("file://")).parent
    written = api.write_report(Workspace(folder), api.WriteReport(output="drawn.html", png=True))
    assert written.picture == "drawn.png"
    data = (folder / "drawn.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = (int.from_bytes(data[at : at + 4]) for at in (16, 20))
    assert width == 2400
    assert height > 1800
