"""Pages about data in a real browser: no request, no error, readable; verdicts can be given."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Page

from fakes.rollout_rows import assistant, rollout_row, tool_call, tool_reply, user, write_rows
from fakes.watched_pages import accessibility_faults, watched_page
from stillroom import api
from stillroom.settings import Workspace

pytestmark = pytest.mark.browser

ATTACK = "<img src=https://example.com/x.png onerror=document.title='owned'><script>1/0</script>"
PAGES = ["review.html", "reports/rows.jsonl.html", "plain.html", "tokens.html"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, warm_program: Path) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(warm_program))
        write_pages(folder)
    return folder


def write_pages(folder: Path) -> None:
    # Each token is an element of the page, and axe looks at each.
    for name, length in (("tokens", 30), ("plain", 3000)):
        write_rows(folder / f"{name}.jsonl", _rows(length))
    write_rows(folder / "rows.jsonl", [*_rows(3000), {"messages": 5}])
    workspace = Workspace(folder)
    api.validate_dataset(workspace, api.ValidateDataset(path="rows.jsonl", format="rollouts"))
    api.sample_for_review(workspace, api.SampleForReview(input="rows.jsonl", output="review.jsonl"))
    for name, model in (("plain", None), ("tokens", "demo/student")):
        requested = api.InspectExamples(path=f"{name}.jsonl", model=model, html=f"{name}.html")
        api.inspect_examples(workspace, requested)


def _rows(length: int) -> list[dict[str, Any]]:
    reply = tool_reply("error: " + "x" * length)
    talk = [assistant("I look.", tool_call()), reply, assistant("12")]
    return [
        rollout_row(
            task_id=f"t{n}",
            messages=[user(f"{n} {ATTACK}"), *talk],
            reward=n / 11,
            metadata={"task_type": ATTACK if n % 2 else "price"},
        )
        for n in range(12)
    ]


def opened(context: BrowserContext, path: Path) -> Page:
    page = context.new_page()
    page.goto(path.as_uri())
    page.wait_for_load_state("networkidle")
    return page


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_accessible_at_each_width_and_makes_no_request_and_no_error(
    context: BrowserContext, folder: Path, name: str
) -> None:
    page, requests, errors = watched_page(context)
    page.goto((folder / name).as_uri())
    page.wait_for_load_state("networkidle")
    for width, scheme in ((390, "light"), (1280, "dark")):
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        assert page.get_by_role("heading").first.is_visible()
        assert page.evaluate("document.documentElement.scrollWidth") == width
    assert accessibility_faults(page) == ""
    assert [url for url in requests if not url.startswith("data:")] == [(folder / name).as_uri()]
    assert errors == []
    assert page.title() != "owned"
    page.close()


def test_verdicts_are_given_by_click_and_key_kept_and_downloaded(
    context: BrowserContext, folder: Path
) -> None:
    page = opened(context, folder / "review.html")
    cards = page.locator(".card")
    assert cards.count() == 12
    cards.nth(0).get_by_role("button", name="Keep").click()
    cards.nth(0).get_by_label("Notes").fill('says "12"')
    cards.nth(1).focus()
    page.keyboard.press("d")
    cards.nth(4).get_by_role("button", name="Drop").click()
    cards.nth(4).get_by_role("button", name="Drop").click()
    assert page.locator("#count").inner_text() == "2 of 12 judged"
    page.get_by_role("button", name="Next to judge").click()
    with page.expect_download() as download:
        page.get_by_role("button", name="Download verdicts").click()
    assert download.value.suggested_filename == "review.verdicts.jsonl"
    lines = Path(download.value.path()).read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["verdict"] for row in rows] == ["keep", "drop", *[None] * 10]
    assert rows[0]["notes"] == 'says "12"'
    page.reload()
    assert page.locator("#count").inner_text() == "2 of 12 judged"
    page.close()

    (folder / "verdicts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    requested = api.FilterDataset(
        input="rows.jsonl", output="kept.jsonl", verdicts="verdicts.jsonl"
    )
    kept = api.filter_dataset(Workspace(folder), requested)
    assert kept.kept == 11


def test_a_token_tells_its_id_and_long_texts_unfold(context: BrowserContext, folder: Path) -> None:
    page = opened(context, folder / "tokens.html")
    token = page.locator(".row .tokens .trained").first
    assert token.get_attribute("title").isdecimal()
    page.close()
    page = opened(context, folder / "plain.html")
    rest = page.locator("details.rest").first
    assert not rest.locator(".said").is_visible()
    rest.locator("summary").click()
    assert rest.locator(".said").is_visible()
    page.close()
