"""Renders a template to one self-contained HTML file in which every text is escaped."""

import base64
import hashlib
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from stillroom import __version__
from stillroom.files import write_atomic
from stillroom.lineage import now
from stillroom.outputs import marked_page
from stillroom.report.wording import (
    count,
    dollars,
    moment,
    number,
    number_interval,
    percent,
    percent_interval,
    place,
    plural,
    short_name,
)

_FOLDER = Path(__file__).parent
_FILTERS = (
    count,
    dollars,
    moment,
    number,
    number_interval,
    percent,
    percent_interval,
    place,
    plural,
    short_name,
)


def page_environment(*folders: Path) -> jinja2.Environment:
    """Returns the environment of all pages: its templates, and `folders` before them, are escaped.

    Models write part of the pages, so no text may ever become markup.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([*folders, _FOLDER]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Any] = environment.filters
    filters.update((show.__name__, show) for show in _FILTERS)
    return environment


def page_styles() -> str:
    """Returns the style sheet that all pages share."""
    names = ("style.css", "pages.css")
    return "\n".join((_FOLDER / name).read_text(encoding="utf-8") for name in names)


def render_page(template: str, *, script: str | None = None, **shown: Any) -> str:
    """Returns a page as HTML; every text in it is escaped.

    script: a file of this folder. It is the only one that the page lets a browser run.
    """
    environment = page_environment()
    code = (_FOLDER / script).read_text(encoding="utf-8") if script else ""
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    return environment.get_template(template).render(
        script=Markup(code),  # noqa: S704 - our own file
        script_policy=f"script-src 'sha256-{digest}'; " if code else "",
        written_at=moment(now()),
        version=__version__,
        **shown,
    )


def write_page(path: Path, html: str) -> None:
    """Writes a page atomically, with the mark by which it is known as ours."""
    write_atomic(path, marked_page(html))
