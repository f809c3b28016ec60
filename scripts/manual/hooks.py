"""MkDocs calls these while it builds the site (`mkdocs.yml`)."""

import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parents[1]))

from manual.calls import with_tabs, with_wide_lists
from manual.pages import generated_pages, with_site_links, with_skill_links
from manual.python_api import api_reference


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that are made rather than kept."""
    for address, text in generated_pages().items():
        files.append(File.generated(config, address, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Makes a document of the repository one of the site: its links, lists and calls."""
    address, known = page.file.src_uri, set(files.src_uris)
    if address == "python.md":
        markdown += api_reference()
    linked = with_skill_links(with_site_links(markdown, address, known), address, known)
    return with_wide_lists(with_tabs(linked))
