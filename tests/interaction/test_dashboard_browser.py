"""The dashboard in a real browser: it goes on by itself, opens rows, and lets nothing out."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Page

from fakes.dashboards import ServedDashboard, kept_running, served
from fakes.rollout_rows import assistant, rollout_row, tool_call, tool_reply, user, write_rows
from fakes.run_folders import evaluate, write_run, write_training
from fakes.watched_pages import accessibility_faults, watched_page

pytestmark = pytest.mark.browser

ATTACK = "<img src=https://example.com/x.png onerror=document.title='owned'><script>1/0</script>"
NUM_ROWS = 130


def write_everything(folder: Path) -> None:
    runs = folder / "runs"
    evaluate(runs, "base", set(range(6)), minute=0)
    evaluate(runs, ATTACK.replace("/", "|"), set(range(24)), minute=3)
    losses = [{"loss": 2 / step, "val_loss": 2.1 / step} for step in range(1, 200)]
    write_training(runs, "sft-a", losses, minute=1)
    write_training(runs, "sft-b", losses[:60], minute=2)
    pair = {
        "teacher_kl": 0.0789,
        "reward": 0.5,
        "response_tokens": 9.0,
        "truncated": 0.0,
        "ratio": 1,
    }
    write_training(
        runs, "distill-a", [pair, {**pair, "teacher_kl": 0.0542, "ratio": 1.001}], minute=2
    )
    write_run(runs, "export-a", minute=1, result={"format": "merged", "output": "exports/a"})
    write_training(runs, "sft-now", [{"loss": 2.0}], minute=5, status="running")
    write_run(runs, "dpo-b", minute=4, status="failed", error={"problem": ATTACK, "fix": ATTACK})
    call = tool_call(ATTACK, arguments=json.dumps({"item": ATTACK}))
    talk = [assistant("I look.", call), tool_reply(f"error: {ATTACK}"), assistant(ATTACK)]
    rows = [
        rollout_row(
            task_id=f"t{n}", messages=[user(f"Task {n} {ATTACK}"), *talk], success=n % 2 == 0,
            reward=float(n % 2 == 0), metadata={"task_type": ATTACK},
        )
        for n in range(NUM_ROWS)
    ]  # fmt: skip
    write_rows(folder / "rows.jsonl", rows)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dashboard")
    write_everything(folder)
    return folder


@pytest.fixture(scope="module")
def dashboard(folder: Path) -> Iterator[ServedDashboard]:
    with kept_running(folder / "runs" / "sft-now"), served(folder) as dashboard:
        yield dashboard


@pytest.fixture
def page(context: BrowserContext, dashboard: ServedDashboard) -> Iterator[Page]:
    """A page that is let in; at its end it has asked nobody else, and nothing went wrong in it."""
    page, asked, wrong = watched_page(context)
    page.goto(dashboard.entrance)
    page.wait_for_url(f"{dashboard.base}/")
    yield page
    assert page.title() != "owned"
    page.close()
    own = (dashboard.base, "data:")
    assert [url for url in asked if not url.startswith(own)] == []
    assert wrong == []


ADDRESSES = [
    "/", "/runs/sft-a", "/runs/dpo-b", "/evaluations", "/data", "/data/file?path=rows.jsonl",
    "/rows?path=rows.jsonl&row=121", "/compare?a=sft-a&b=sft-b",
    f"/compare?a=evaluate-base&b=evaluate-{ATTACK.replace('/', '|')}", "/lineage?path=rows.jsonl",
    "/compare", "/lineage", "/runs/distill-a",
]  # fmt: skip


def test_the_token_leaves_the_address_wherever_it_was_clicked(
    page: Page, dashboard: ServedDashboard, browser: Any
) -> None:
    page.wait_for_url(f"{dashboard.base}/")
    page.goto(dashboard.entrance)
    page.wait_for_url(f"{dashboard.base}/")
    # A terminal or chat in a browser is another site, whose visitors bring no strict cookie.
    stranger = browser.new_context()
    elsewhere = stranger.new_page()
    elsewhere.goto(f"data:text/html,<a href='{dashboard.entrance}'>open</a>")
    elsewhere.get_by_text("open").click()
    elsewhere.get_by_role("heading", name="Runs").wait_for()
    assert elsewhere.url == f"{dashboard.base}/"
    stranger.close()


@pytest.mark.parametrize("address", ADDRESSES, ids=range(len(ADDRESSES)))
def test_a_page_is_accessible_and_hostile_content_does_nothing_in_it(
    page: Page, dashboard: ServedDashboard, address: str
) -> None:
    for width, scheme in ((390, "light"), (1280, "dark")):
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        page.goto(dashboard.base + address)
        assert page.get_by_role("heading").first.is_visible()
        assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.locator("main img").count() == 0
    if "/rows" in address:
        page.locator(".rows-list summary").first.click()
        page.locator(".row-body .conversation").first.wait_for()
    assert accessibility_faults(page) == ""


def test_curves_move_while_the_run_goes_on(
    page: Page, dashboard: ServedDashboard, folder: Path
) -> None:
    page.goto(f"{dashboard.base}/runs/sft-now")
    change = page.locator("figure[data-metric=loss] .change")
    change.get_by_text("2", exact=True).wait_for()
    before = page.locator("figure[data-metric=loss] canvas").screenshot()
    with (folder / "runs" / "sft-now" / "events.jsonl").open("a", encoding="utf-8") as events:
        for step in range(2, 30):
            values = {"loss": 2 / step, "tokens_per_s": 100.0}
            row = {"time": "t", "event": "metrics", "step": step, "values": values}
            events.write(json.dumps(row) + "\n")
    change.get_by_text("2 → 0.069", exact=True).wait_for()
    assert page.locator("figure[data-metric=loss] canvas").screenshot() != before


def test_the_legend_has_values_only_under_the_pointer(
    page: Page, dashboard: ServedDashboard
) -> None:
    page.goto(f"{dashboard.base}/runs/sft-a")
    legend = page.locator("figure[data-metric=loss] .u-legend")
    legend.get_by_text("Loss", exact=True).wait_for()
    assert "step" not in legend.inner_text()
    assert "–" not in legend.inner_text()
    page.locator("figure[data-metric=loss] .u-over").hover()
    legend.get_by_text("step").wait_for()
    page.get_by_role("heading").first.hover()
    legend.get_by_text("step").wait_for(state="hidden")


def test_neighbouring_charts_have_level_axes(page: Page, dashboard: ServedDashboard) -> None:
    """The longest of the three titles takes two lines."""
    page.goto(f"{dashboard.base}/runs/distill-a")
    page.locator("figure[data-metric=reward] canvas").wait_for()
    captions, canvases = (
        [box for each in page.locator(css).all() if (box := each.bounding_box()) is not None]
        for css in (".curves > .charts figcaption > .chart-title", ".curves > .charts canvas")
    )
    assert len({box["height"] for box in captions}) == 2
    assert len(canvases) == 3
    assert len({(box["y"], box["width"], box["height"]) for box in canvases}) == 1


def test_an_axis_ends_near_its_values_and_repeats_no_label(
    page: Page, dashboard: ServedDashboard
) -> None:
    page.goto(f"{dashboard.base}/runs/distill-a")
    page.get_by_text("More curves").click()
    page.locator("figure[data-metric=ratio] canvas").wait_for()
    plot = "document.querySelector('figure[data-metric={}]').plot"
    assert page.evaluate(plot.format("truncated") + ".scales.y.max") == 1
    labels = page.evaluate(plot.format("ratio") + ".axes[1]._values")
    assert len(labels) > 2
    assert len(set(labels)) == len(labels)


def test_a_run_without_steps_has_no_curves(page: Page, dashboard: ServedDashboard) -> None:
    page.goto(f"{dashboard.base}/runs/export-a")
    page.get_by_role("heading", name="Curves").wait_for(state="hidden")
    assert page.get_by_text("step").locator("visible=true").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_each_status_has_a_word_and_a_colour_of_its_own(
    page: Page, dashboard: ServedDashboard, scheme: Any
) -> None:
    page.emulate_media(color_scheme=scheme)
    page.goto(dashboard.base)
    colours = {
        word: page.locator(f".status.{word}", has_text=word).first.evaluate(
            "element => getComputedStyle(element).color"
        )
        for word in ("running", "succeeded", "failed")
    }
    assert len(set(colours.values())) == 3


@pytest.mark.parametrize("address", ["/", "/runs/sft-a", "/rows?path=rows.jsonl", "/compare"])
def test_what_has_the_focus_is_outlined(
    page: Page, dashboard: ServedDashboard, address: str
) -> None:
    page.goto(dashboard.base + address)
    outlines: list[str] = []
    # Past the last link, the focus leaves the page.
    while "BODY" not in "".join(outlines) and len(outlines) < 14:
        page.keyboard.press("Tab")
        outlines.append(
            page.evaluate(
                """() => {
                const {outlineStyle, outlineWidth} = getComputedStyle(document.activeElement);
                return `${document.activeElement.tagName} ${outlineStyle} ${outlineWidth}`;
                }"""
            )
        )
    reached = [outline for outline in outlines if "BODY" not in outline]
    assert len(reached) > 6
    assert [outline for outline in reached if not outline.endswith("solid 2px")] == []


def test_a_run_that_begins_appears_by_itself(
    page: Page, dashboard: ServedDashboard, folder: Path
) -> None:
    page.goto(dashboard.base)
    assert page.get_by_text("sft-late").count() == 0
    write_training(folder / "runs", "sft-late", [{"loss": 1.0}], minute=9)
    page.get_by_role("link", name="sft-late").wait_for()


def test_rows_open_with_their_tool_calls_folded_by_keys_alone(
    page: Page, dashboard: ServedDashboard
) -> None:
    page.goto(f"{dashboard.base}/rows?path=rows.jsonl")
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    row = page.locator(".rows-list > li").nth(1)
    row.get_by_text("I look.").wait_for()
    said = row.locator("details.call .said")
    assert not said.is_visible()
    row.locator("details.call > summary").click()
    assert said.is_visible()
    page.keyboard.press("n")
    page.get_by_text(f"rows 51 to 100 of {NUM_ROWS}").wait_for()
    page.get_by_label("Show").first.select_option("wrong")
    page.get_by_role("button", name="Show").click()
    page.get_by_text("✗ wrong").first.wait_for()
    assert page.get_by_text("✓ right").count() == 0


def test_a_row_shows_which_tokens_a_student_would_train(
    page: Page, dashboard: ServedDashboard, warm_program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", str(warm_program))
    page.goto(f"{dashboard.base}/rows?path=rows.jsonl")
    page.locator(".rows-list summary").first.click()
    page.get_by_label("Show trained tokens for the student").fill("demo/student")
    page.get_by_role("button", name="Show the mask").click()
    page.locator(".tokens .trained").first.wait_for()
    assert page.locator(".tokens .user").count() > 0
    assert page.locator(".tokens img").count() == 0


def test_a_page_elsewhere_learns_nothing(
    context: BrowserContext, dashboard: ServedDashboard, tmp_path: Path
) -> None:
    """The browser has the cookie, and a page of another origin asks with it."""
    friend = context.new_page()
    friend.goto(dashboard.entrance)
    friend.wait_for_url(f"{dashboard.base}/")
    page = context.new_page()
    page.goto("data:text/html,<title>elsewhere</title>")
    script = """async (url) => {
        try { return await (await fetch(url, {credentials: "include"})).text(); }
        catch { return "refused"; }
    }"""
    assert page.evaluate(script, f"{dashboard.base}/runs/sft-a/metrics") == "refused"
    page.close()
