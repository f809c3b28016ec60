"""The site's pages that are made from the code: all is there, and every link leads somewhere."""

import functools
import re

import pytest
import yaml

from fakes.source_tree import ROOT
from manual.pages import generated_pages, messages, reference, with_site_links
from manual.python_api import api_reference, result_types
from stillroom.api import OPERATIONS

KEPT = {
    path.relative_to(ROOT / "docs").as_posix(): path.read_text(encoding="utf-8")
    for path in (ROOT / "docs").rglob("*.md")
}
PICTURES = {path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/images/*")}


@functools.cache
def made_pages() -> dict[str, str]:
    return generated_pages()


def leaves(nav: object) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [leaf for part in parts for leaf in leaves(part)]


@pytest.mark.thorough
def test_the_table_of_contents_names_pages_that_are_there_and_every_kept_page():
    listed = set(leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert listed <= made_pages().keys() | KEPT.keys() | PICTURES
    assert KEPT.keys() <= listed


@pytest.mark.thorough
def test_no_made_page_hides_a_kept_one():
    assert not made_pages().keys() & KEPT.keys()


def test_the_reference_has_every_field_of_every_operation():
    page = reference()
    for operation in OPERATIONS:
        section = page.split(f"## `{operation.name}`\n")[1].split("\n## ")[0]
        for name in operation.request.model_fields:
            assert f"| `{name}` |" in section, operation.name


def test_the_python_reference_has_every_operation_with_the_fields_of_its_types():
    page = api_reference()
    sections = {part.split("`")[0]: part for part in page.split("\n### `")[1:]}
    for operation in OPERATIONS:
        section = sections[operation.name]
        assert f"{operation.name}(workspace: Workspace, request:" in section
        assert "Raises" in section, operation.name
        for name in operation.request.model_fields:
            assert f"| `{name}` |" in sections[operation.request.__name__]
        for name in operation.result.__struct_fields__:
            assert f"| `{name}` |" in sections[operation.result.__name__]
    assert {"TrainResult", "RolloutsResult", "ScoreResult", "Progress", "Estimate"} <= {
        kind.name for kind in result_types()
    }
    links = set(re.findall(r"\(#(\w+)\)", page))
    assert links <= {name.lower() for name in sections}


def test_the_page_of_errors_has_those_of_every_package_with_what_to_do():
    found = messages()
    assert {"teachers", "train", "curate", "rollout", "settings", "host_setup"} <= {
        message.package for message in found
    }
    assert len(found) > 250
    assert any(m.problem == "path … does not exist" or "does not exist" in m.problem for m in found)
    page = made_pages()["troubleshooting.md"]
    assert page.count("\n| ") >= len(set(found))
    # A cell that ends early, or opens a tag, would swallow what follows.
    for row in re.findall(r"^\| .*$", page, re.MULTILINE):
        assert len(re.findall(r"(?<!\\)\|", row)) == 3
        assert "<" not in row


def test_links_lead_to_pages_of_the_site_and_to_nothing_else():
    text = (
        "[a](../README.md) [b](../skills/x/SKILL.md#y) [c](../LICENSE) [d](https://e.org) [e](#f)"
    )
    shown = with_site_links(text, "install.md", {"index.md", "skills/x/SKILL.md"})
    assert shown == "[a](index.md) [b](skills/x/SKILL.md#y) c [d](https://e.org) [e](#f)"


def test_every_relative_link_of_a_document_leads_to_a_file():
    for name in ["README.md", *(f"docs/{name}" for name in KEPT)]:
        text = (ROOT / name).read_text(encoding="utf-8")
        targets = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text)
        folder = (ROOT / name).parent
        assert [target for target in targets if not (folder / target).exists()] == [], name


def test_the_readme_is_a_door_with_pictures_that_load_fast():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 50
    for picture in re.findall(r"!\[[^\]]+\]\((docs/images/[^)]+)\)", readme):
        assert (ROOT / picture).stat().st_size <= 200_000
    assert readme.count("![") == 2
