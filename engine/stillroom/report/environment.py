"""Renders templates to self-contained HTML pages, in which all text is escaped."""

import base64
import functools
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
    machine_status,
    moment,
    number,
    number_interval,
    percent,
    percent_interval,
    plural,
    short_ids,
    short_name,
)
from stillroom.types import dollars

_FOLDER = Path(__file__).parent
_FILTERS = (
    count,
    dollars,
    moment,
    number,
    number_interval,
    percent,
    percent_interval,
    machine_status,
    plural,
    short_ids,
    short_name,
)


@functools.cache
def page_environment(*folders: Path) -> jinja2.Environment:
    """Returns the Jinja environment of all pages; templates in `folders` take precedence.

    It escapes all text, since pages contain text from models.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([*folders, _FOLDER]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Any] = environment.filters
    filters.update((function.__name__, function) for function in _FILTERS)
    return environment


def page_styles() -> str:
    """Returns the CSS that all pages share."""
    names = ("style.css", "pages.css")
    return "\n".join((_FOLDER / name).read_text(encoding="utf-8") for name in names)


def render_page(template: str, *, script: str | None = None, **values: Any) -> str:
    """Returns a page as HTML, with all text escaped.

    script: a file in this folder, the only script that the page allows a browser to run.
    """
    environment = page_environment()
    code = (_FOLDER / script).read_text(encoding="utf-8") if script else ""
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    return environment.get_template(template).render(
        script=Markup(code),  # noqa: S704 - a file of this package
        script_policy=f"script-src 'sha256-{digest}'; " if code else "",
        written_at=moment(now()),
        version=__version__,
        **values,
    )


def write_page(path: Path, html: str) -> None:
    """Writes a page atomically, with the hash that identifies it as Stillroom's."""
    write_atomic(path, marked_page(html))
