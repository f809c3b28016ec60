"""MkDocs calls these while it builds the site (`mkdocs.yml`)."""

import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parents[1]))

from manual.pages import generated_pages, with_site_links


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that are made rather than kept."""
    for address, text in generated_pages().items():
        files.append(File.generated(config, address, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Leads links between documents of the repository to pages of the site."""
    return with_site_links(markdown, page.file.src_uri, set(files.src_uris))
