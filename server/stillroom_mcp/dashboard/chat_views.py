"""The dashboard's views inside a chat, as MCP Apps: the curves of a run, and rows of a file.

Hosts that support MCP Apps show a view next to a tool's result; others show only the result. A view
gets the result from its host, and calls the server's tools through the host for more.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mcp.server.apps import APP_MIME_TYPE, Apps
from mcp.server.mcpserver.resources import FunctionResource

_STATIC = Path(__file__).parent / "static"
RUN_VIEW = "ui://stillroom/run.html"
ROWS_VIEW = "ui://stillroom/rows.html"
_VIEWS = (
    (RUN_VIEW, "A run, live: its progress, spend and curves", "chat_run.js"),
    (
        ROWS_VIEW,
        "Rows: conversations with collapsed tool calls, and trained tokens",
        "chat_rows.js",
    ),
)
# A view loads nothing from the network: all its data comes through its host.
_UI = {"csp": {"connectDomains": [], "resourceDomains": []}, "prefersBorder": True}


def chat_views() -> Apps:
    """Returns the MCP Apps extension with the views, whose pages are built at their first read."""
    apps = Apps()
    for uri, title, script in _VIEWS:
        apps.add_resource(
            FunctionResource(
                uri=uri,
                name=script.removesuffix(".js"),
                title=title,
                description=f"{title}. For hosts that show MCP Apps.",
                mime_type=APP_MIME_TYPE,
                meta={"ui": _UI},
                fn=functools.partial(view_html, script),
            )
        )
    return apps


def view_meta(name: str, *, starts_run: bool) -> dict[str, Any] | None:
    """Returns the `_meta` that links a tool to the view of its result; None if it has none."""
    if name == "inspect_examples":
        return {"ui": {"resourceUri": ROWS_VIEW}}
    return {"ui": {"resourceUri": RUN_VIEW}} if starts_run or name == "get_run" else None


@functools.cache
def view_html(script: str) -> str:
    """Returns a view as one HTML page that contains its styles and scripts."""
    # Imported here so that a server whose host shows no views does not load the templates.
    from stillroom.report.environment import page_styles

    styles = "\n".join([_read(["uPlot.min.css"]), page_styles(), _read(["dashboard.css"])])
    code = _read(["uPlot.iife.min.js", "charts.js", "chat.js", script])
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<title>stillroom</title>\n<style>\n{styles}\n</style>\n</head>\n<body class="in-chat">\n'
        f'<main id="view"><p class="muted">Waiting for the result…</p></main>\n'
        f"<script>\n{code}\n</script>\n</body>\n</html>\n"
    )


def _read(names: Sequence[str]) -> str:
    return "\n".join((_STATIC / name).read_text(encoding="utf-8") for name in names)
