"""The dashboard as a web application: its routes, the headers of its responses, its server."""

import functools
import mimetypes
import secrets
import socket
import sys
import webbrowser
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stillroom import __version__, api
from stillroom.errors import EngineError, InputError
from stillroom.report import drawing
from stillroom.report.data_pages import conversations
from stillroom.report.environment import page_environment, page_styles
from stillroom.settings import Workspace
from stillroom.trace.origins import MAX_BYTES
from stillroom_mcp.dashboard import views
from stillroom_mcp.dashboard.live import read_metrics_from
from stillroom_mcp.dashboard.row_files import RowFiles
from stillroom_mcp.dashboard.rows import OUTCOME_FILTERS, FileSummaries, row_figures, rows_page
from stillroom_mcp.http.guard import Guard
from stillroom_mcp.http.listening import bound_socket, run_app

_HOST = "127.0.0.1"
_STOP_S = 2
_FOLDER = Path(__file__).parent
_STATIC = _FOLDER / "static"
_SCRIPTS = ("htmx.min.js", "uPlot.iife.min.js", "charts.js", "dashboard.js")
_LOG_LINES = 200
_MAX_STUDENTS = 8
_MAX_BYTES_AT_FIRST = 64 << 20
"""The number of bytes that are hashed for the newest output, whose lineage nobody asked for."""
_MAX_COMPARED = 200
"""The number of runs, newest first, that the page Compare offers."""
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}


def serve_dashboard(workspace: Workspace, *, port: int, opens_browser: bool) -> None:
    """Serves the dashboard until the process is interrupted, and prints the address to open.

    Raises InputError if the port is taken.
    """
    token = secrets.token_urlsafe(24)
    listener = listen(port)
    url = f"http://{_HOST}:{listener.getsockname()[1]}/?token={token}"
    sys.stdout.write(
        f"dashboard of {workspace.root}, read-only, for browsers on this machine:\n{url}\n"
    )
    sys.stdout.write("stop it with Ctrl-C; runs continue without it\n")
    sys.stdout.flush()
    if opens_browser:
        webbrowser.open(url)
    with listener:
        run_app(build_dashboard(workspace, token), listener, stop_s=_STOP_S)


def listen(port: int) -> socket.socket:
    """Returns a socket that listens on a port of the loopback address; 0 means any free port.

    Raises InputError if another program uses the port, or if there is no such port.
    """
    try:
        return bound_socket(socket.AF_INET, (_HOST, port))
    except OSError as error:
        raise InputError(
            f"port {port} of {_HOST} cannot be used: {error.strerror}",
            "choose another port with --port, or 0 for any free one",
        ) from error


def build_dashboard(workspace: Workspace, token: str) -> ASGIApp:
    """Returns the dashboard of a workspace, for clients that send the token."""
    pages = _Pages(workspace)
    routes = [
        Route("/", pages.runs),
        Route("/parts/runs", pages.run_list),
        Route("/runs/{run_id}", pages.run),
        Route("/runs/{run_id}/live", pages.run_live),
        Route("/runs/{run_id}/metrics", pages.run_metrics),
        Route("/runs/{run_id}/log", pages.run_log),
        Route("/evaluations", pages.evaluations),
        Route("/compare", pages.compare),
        Route("/data", pages.data),
        Route("/data/file", pages.data_file),
        Route("/rows", pages.rows),
        Route("/row", pages.row),
        Route("/row/tokens", pages.row_tokens),
        Route("/lineage", pages.lineage),
        Route("/static/{name}", _static),
    ]
    app = Starlette(
        routes=routes, exception_handlers={EngineError: pages.problem, OSError: pages.problem}
    )
    return _with_headers(Guard(app, token=token, is_for_browsers=True))


def _with_headers(app: ASGIApp) -> ASGIApp:
    """Adds security headers to every response, so that a page contacts no other site."""

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                headers.setdefault("cache-control", "no-store")
            await send(message)

        await app(scope, receive, send_with_headers)

    return wrapped


@functools.cache
def _styles() -> str:
    own = (_STATIC / "dashboard.css").read_text(encoding="utf-8")
    return f"{page_styles()}\n{own}"


def _static(request: Request) -> Response:
    """Returns one of the dashboard's static files."""
    name = request.path_params["name"]
    if name == "dashboard.css":
        return PlainTextResponse(_styles(), media_type="text/css")
    if name not in {*_SCRIPTS, "uPlot.min.css", "THIRD_PARTY.txt"}:
        return PlainTextResponse("file not found", status_code=404)
    media_type = mimetypes.guess_type(name)[0] or "text/plain"
    return Response((_STATIC / name).read_bytes(), media_type=media_type)


class _Pages:
    """The pages of one workspace, which are read-only."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._files = RowFiles(workspace)
        self._summaries = FileSummaries(self._files)
        self._environment = page_environment(_FOLDER / "templates")

    def _render(self, template: str, *, status: int = 200, **values: Any) -> Response:
        """Returns a rendered page, without the secrets that this process knows."""
        html = self._environment.get_template(template).render(
            workspace=self._workspace.root.name, version=__version__, scripts=_SCRIPTS,
            width=drawing.WIDTH, height=drawing.HEIGHT, **values,
        )  # fmt: skip
        text = self._workspace.redactor().redact_text(html)
        return HTMLResponse(text.encode(errors="replace"), status_code=status)

    def problem(self, request: Request, error: Exception) -> Response:
        """Returns the page that shows an error and its fix."""
        engine_error = error if isinstance(error, EngineError) else EngineError(str(error), "")
        template = "problem_part.html.j2" if "hx-request" in request.headers else "problem.html.j2"
        # htmx does not show a response whose status is an error.
        status = 200 if "hx-request" in request.headers else 404
        return self._render(template, status=status, error=engine_error, current="")

    def runs(self, request: Request) -> Response:
        """Returns the page of all runs."""
        machines = views.machines(self._workspace)
        return self._render(
            "runs.html.j2", current="runs", machines=machines, **self._run_list(request)
        )

    def run_list(self, request: Request) -> Response:
        """Returns only the list of runs, which the page requests every two seconds."""
        return self._render("run_list.html.j2", **self._run_list(request))

    def _run_list(self, request: Request) -> dict[str, Any]:
        runs = views.readable_runs(self._workspace)
        first = _int_param(request, "first")
        newest = runs[::-1][first : first + views.RUNS_PER_PAGE]
        return {
            "cards": views.run_cards(newest[::-1]),
            "total": len(runs),
            "first": first,
            "after": first + views.RUNS_PER_PAGE
            if first + views.RUNS_PER_PAGE < len(runs)
            else None,
            "num_open": sum(not run.state.status.is_final for run in runs),
        }

    def _view(self, request: Request) -> views.RunView:
        run = views.load_run(self._workspace, request.path_params["run_id"])
        return views.run_view(self._workspace, run)

    def run(self, request: Request) -> Response:
        """Returns the page of one run."""
        view = self._view(request)
        others = [
            run for run in views.readable_runs(self._workspace) if run.run_id != view.run.run_id
        ]
        same_kind = [run for run in others if run.state.kind is view.run.state.kind][::-1][:40]
        return self._render("run.html.j2", current="runs", view=view, others=same_kind)

    def run_live(self, request: Request) -> Response:
        """Returns the part of a run's page that changes during the run, without the curves."""
        return self._render("run_live.html.j2", view=self._view(request))

    def run_metrics(self, request: Request) -> Response:
        """Returns the metrics that a run recorded after a position in its events, as JSON."""
        run = views.load_run(self._workspace, request.path_params["run_id"])
        metrics = read_metrics_from(run.folder / "events.jsonl", _int_param(request, "from"))
        body = {**msgspec.to_builtins(metrics), "is_final": run.state.status.is_final}
        return Response(msgspec.json.encode(body), media_type="application/json")

    def run_log(self, request: Request) -> Response:
        """Returns the last lines of a run's log."""
        log_request = api.GetRunLogs(run_id=request.path_params["run_id"], lines=_LOG_LINES)
        return self._render("log.html.j2", log=api.get_run_logs(self._workspace, log_request))

    def evaluations(self, request: Request) -> Response:
        """Returns the page of all evaluations with their intervals."""
        board, lineup = views.evaluations(self._workspace)
        return self._render(
            "evaluations_page.html.j2", current="evaluations", scoreboard=board, lineup=lineup
        )

    def compare(self, request: Request) -> Response:
        """Returns two runs side by side, or a form that chooses them."""
        first, second = request.query_params.get("a", ""), request.query_params.get("b", "")
        both = views.side_by_side(self._workspace, first, second) if first and second else None
        newest_first = views.readable_runs(self._workspace)[::-1]
        first, second = views.compared_ids(newest_first, first, second)
        listed = {first, second} | {run.run_id for run in newest_first[:_MAX_COMPARED]}
        runs = [run for run in newest_first if run.run_id in listed]
        return self._render(
            "compare.html.j2", current="compare", runs=runs, first=first, second=second, both=both
        )

    def data(self, request: Request) -> Response:
        """Returns the page that lists the data files."""
        files = views.data_files(self._workspace)
        return self._render("data.html.j2", current="data", files=files)

    def data_file(self, request: Request) -> Response:
        """Returns the page of one data file, with the distributions of its rows."""
        name, path = self._requested_file(request)
        summary = self._summaries.summary_of(path)
        return self._render("data_file.html.j2", current="data", name=name, summary=summary)

    def rows(self, request: Request) -> Response:
        """Returns a page of the rows of a file."""
        name, path = self._requested_file(request)
        filter_name = request.query_params.get("show", "all")
        show = (
            OUTCOME_FILTERS[OUTCOME_FILTERS.index(filter_name)]
            if filter_name in OUTCOME_FILTERS
            else "all"
        )
        query = request.query_params.get("q", "")[:200]
        # The page numbers rows from 1.
        first = max(0, _int_param(request, "row", default=1) - 1)
        page = rows_page(self._files, path, first, show=show, query=query)
        return self._render(
            "rows_page.html.j2", current="data", name=name, page=page, show=show, query=query,
            shows=OUTCOME_FILTERS,
        )  # fmt: skip

    def row(self, request: Request) -> Response:
        """Returns one row: its conversation, with collapsed tool calls."""
        name, path, number, data = self._requested_row(request)
        view = api.view_row(self._workspace, f"{path.name}:{number}", data)
        return self._render(
            "row.html.j2", name=name, row=view, conversations=conversations, number=number,
            at=_int_param(request, "at"), figures=row_figures(data, path.suffix),
            models=self._students(),
        )  # fmt: skip

    def row_tokens(self, request: Request) -> Response:
        """Returns the tokens of one row, with the trained tokens marked."""
        _, path, number, data = self._requested_row(request)
        model = request.query_params.get("model", "").strip()
        if not model:
            raise InputError("no model was given", "give the student's path or hub id")
        view = api.view_row(self._workspace, f"{path.name}:{number}", data, model=model)
        return self._render("row_tokens.html.j2", row=view, model=model)

    def lineage(self, request: Request) -> Response:
        """Returns the tree of what a file or model was made from."""
        name = request.query_params.get("path", "").strip()
        newest = None if name else views.newest_output(self._workspace)
        lineage = None
        if name:
            lineage = self._lineage_of(name)
        elif newest:
            # Nobody asked for this one, so an unreadable manifest only leaves the form.
            with suppress(EngineError, OSError):
                lineage = self._lineage_of(newest, max_bytes=_MAX_BYTES_AT_FIRST)
        return self._render(
            "lineage.html.j2", current="lineage", name=name or newest or "", lineage=lineage,
            is_newest=bool(newest),
        )  # fmt: skip

    def _lineage_of(self, name: str, *, max_bytes: int = MAX_BYTES) -> api.Lineage:
        self._check_in_workspace(name)
        return api.show_lineage(self._workspace, api.ShowLineage(path=name), max_bytes=max_bytes)

    def _requested_file(self, request: Request) -> tuple[str, Path]:
        """Returns the requested data file: its path for display, and its path."""
        path = self._files.path(request.query_params.get("path", ""))
        return self._workspace.shown(path), path

    def _requested_row(self, request: Request) -> tuple[str, Path, int, bytes]:
        """Returns the requested row: its file's name and path, its number, and its bytes."""
        name, path = self._requested_file(request)
        data = self._files.read_at(path, _int_param(request, "at"))
        return name, path, _int_param(request, "number"), data

    def _check_in_workspace(self, name: str) -> None:
        """Raises InputError for a path outside the workspace."""
        if not self._workspace.path(name).resolve().is_relative_to(self._workspace.root):
            raise InputError(f"{name!r} is outside the workspace", "give a path inside it")

    def _students(self) -> list[str]:
        """Returns the students that runs of this workspace trained last, newest first."""
        students: dict[str, None] = {}
        for run in reversed(views.readable_runs(self._workspace)):
            if name := views.student_of(run):
                students[name] = None
            if len(students) == _MAX_STUDENTS:
                break
        return list(students)


def _int_param(request: Request, name: str, *, default: int = 0) -> int:
    text = request.query_params.get(name, "")
    if not text:
        return default
    if not text.isdecimal() or len(text) > 18:
        raise InputError(f"{name}={text[:40]!r} is not a number", "use the links on the page")
    return int(text)
