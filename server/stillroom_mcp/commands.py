"""Carries out the commands and prints their results, with the progress of runs on stderr."""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, Self, cast

import msgspec
from pydantic import BaseModel
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from stillroom import api
from stillroom.api import Operation
from stillroom.fences import printable
from stillroom.settings import Workspace
from stillroom_mcp.answers import structured
from stillroom_mcp.next_steps import in_a_shell

_POLL_S = 0.3
_LINE_EVERY_S = 10.0
_ACTIVE = ("starting", "running")


def serve(workspace: Workspace, offered: Sequence[Operation]) -> int:
    """Runs the MCP server over standard input and output until its client disconnects."""
    from stillroom_mcp.app import build_server

    build_server(workspace, offered).run("stdio")
    return 0


def serve_http(
    workspace: Workspace,
    offered: Sequence[Operation],
    *,
    host: str = "127.0.0.1",
    port: int = 8765,
    token_file: str | None = None,
    allow_host: Sequence[str] = (),
) -> int:
    """Runs the MCP server at an address until the process is asked to stop."""
    from stillroom_mcp.http.serve import serve_http

    return serve_http(
        workspace, offered, host=host, port=port, token_file=token_file, allowed_hosts=allow_host
    )


def dashboard(workspace: Workspace, *, port: int, is_opened: bool) -> int:
    """Serves the dashboard of the workspace until it is interrupted."""
    from stillroom_mcp.dashboard.serve import serve_dashboard

    serve_dashboard(workspace, port=port, is_opened=is_opened)
    return 0


def demo(folder: str | None, *, seed: int, is_smoke: bool, where: str | None) -> int:
    """Runs the demo, which starts a server and drives it with an MCP client of its own."""
    from stillroom_mcp.demo import FULL, SMOKE, run_demo

    return run_demo(folder, seed=seed, settings=SMOKE if is_smoke else FULL, where=where)


def report(workspace: Workspace, request: api.WriteReport, *, as_json: bool) -> int:
    """Writes the HTML report of all runs of the workspace and prints its path."""
    written = api.write_report(workspace, request)
    paths = [written.output, *([written.picture] if written.picture else [])]
    answer = json.dumps({"output": written.output, "picture": written.picture})
    _print(answer if as_json else f"written: {' and '.join(paths)}")
    return 0


def prices(
    workspace: Workspace, models: Sequence[str], *, is_refreshed: bool, as_json: bool
) -> int:
    """Prints what models cost, after fetching the current list if wanted; 1 if one is unknown."""
    shown = api.show_prices(workspace, models, refresh=is_refreshed)
    if as_json:
        _print(json.dumps(msgspec.to_builtins(shown)))
    else:
        if shown.written is not None:
            _print(f"written: {shown.written}")
        _print(f"list of {shown.as_of}, {shown.num_models} models; prices.yml wins over it")
        for one in shown.prices:
            price = one.price
            text = (
                "unknown: write it into prices.yml"
                if price is None
                else f"input {price.prompt:g}, output {price.completion:g} US dollars per million"
            )
            _print(f"{one.model}: {text}")
    return 1 if any(one.price is None for one in shown.prices) else 0


def docs(page: str | None) -> int:
    """Prints a page of the documentation; without a name, the names of all pages."""
    from stillroom_mcp.resources.texts import page_text, page_titles

    if page is not None:
        _print(page_text(page))
        return 0
    for name, title in page_titles().items():
        _print(f"{name}: {title}")
    return 0


def operate(
    workspace: Workspace,
    operation: Operation,
    request: BaseModel,
    *,
    as_json: bool,
    is_waiting: bool,
) -> int:
    """Carries out one operation, prints its result and returns the exit code.

    With `is_waiting` it first follows the run that the operation started until that has ended.
    """
    with api.report_progress_to(_show_progress):
        result = api.carry_out(workspace, operation, request)
    if isinstance(result, api.RunReport):
        wait_s = request.wait_s if isinstance(request, api.GetRun) else None
        if is_waiting or wait_s:
            result = _follow(workspace, result, as_json=as_json, wait_s=wait_s)
        if operation.may_become_run and result.status == "succeeded":
            # Printed as if it had been done in the call.
            result = msgspec.convert(result.result, operation.result)
    answer = structured(workspace, operation, request, result)
    if as_json:
        _print(json.dumps(answer, ensure_ascii=False))
    elif isinstance(result, api.Lineage):
        for line in (*lineage_lines(result), f"next: {in_a_shell(answer['next_step'])}"):
            _print(line)
    else:
        _show(answer)
    return _exit_code(result, is_waiting=is_waiting)


def _show_progress(text: str) -> None:
    sys.stderr.write(printable(text) + "\n")
    sys.stderr.flush()


def _exit_code(result: msgspec.Struct, *, is_waiting: bool) -> int:
    if isinstance(result, api.RunReport) and is_waiting:
        return 0 if result.status == "succeeded" else 1
    if isinstance(result, api.ValidationReport):
        return 1 if result.bad else 0
    if isinstance(result, api.SetupReport):
        return 0 if result.ready else 1
    return 0


def _follow(
    workspace: Workspace, run: api.RunReport, *, as_json: bool, wait_s: float | None
) -> api.RunReport:
    """Shows a run's progress on standard error and returns its report once it has ended.

    With `wait_s` it is returned at what matters (`RunWatch`), at the latest after these seconds.
    """
    watch = None if wait_s is None else api.RunWatch(run, wait_s)
    status_request, started = api.GetRun(run_id=run.run_id), time.monotonic()
    with _ProgressView(is_bar=sys.stderr.isatty() and not as_json) as view:
        view.start(run)
        while run.status in _ACTIVE:
            if watch and (reason := watch.reason(run, time.monotonic() - started)):
                return msgspec.structs.replace(run, answered_at=reason)
            time.sleep(_POLL_S)
            run = api.get_run(workspace, status_request)
            view.show(run)
    return run


class _ProgressView:
    """Shows a run's progress: as a bar on a terminal, elsewhere as a line every ten seconds."""

    def __init__(self, *, is_bar: bool) -> None:
        self._bar = (
            Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.completed:.0f}/{task.total:.0f} {task.fields[unit]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            if is_bar
            else None
        )
        self._task: Any = None
        self._line_at = 0.0

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def start(self, run: api.RunReport) -> None:
        """Prints the run's id and log path, so that the run can be found again."""
        place = f" on {run.where}" if run.where is not None else ""
        sys.stderr.write(f"run {run.run_id}{place} ({run.log_path})\n")

    def show(self, run: api.RunReport) -> None:
        """Shows how much of the run's current phase is done."""
        if run.unreachable is not None and time.monotonic() - self._line_at >= _LINE_EVERY_S:
            silent = f"{run.where} does not answer, last at {run.last_contact or 'no time'}"
            sys.stderr.write(f"{silent}; the run continues there: {run.unreachable}\n")
            self._line_at = time.monotonic()
        progress = run.progress
        if progress is None:
            return
        if self._bar is not None:
            self._task = self._task or self._bar.add_task("", total=1, unit="")
            self._bar.update(
                self._task,
                description=progress.phase,
                total=progress.total,
                completed=progress.done,
                unit=progress.unit,
            )
        elif time.monotonic() - self._line_at >= _LINE_EVERY_S:
            eta = "" if progress.eta_s is None else f", about {progress.eta_s:.0f} s left"
            done = f"{progress.done}/{progress.total} {progress.unit}"
            sys.stderr.write(f"{progress.phase}: {done}{eta}\n")
            self._line_at = time.monotonic()


def _show(answer: dict[str, Any]) -> None:
    """Prints a result for a person to read: one field per line, nested values as compact JSON."""
    next_step = answer.pop("next_step")
    for name, value in answer.items():
        if value is None or value in ([], {}):
            continue
        if isinstance(value, list) and all(isinstance(item, dict) for item in cast("Any", value)):
            _print(f"{name}:")
            for item in cast("list[Any]", value):
                _print(f"  {_line(item)}")
        elif isinstance(value, dict) and name in ("result", "error"):
            _print(f"{name}:")
            for inner, item in cast("dict[str, Any]", value).items():
                _print(f"  {inner}: {_text(item)}")
        else:
            _print(f"{name}: {_text(value)}")
    _print(f"next: {in_a_shell(next_step)}")


def _line(item: dict[str, Any]) -> str:
    return "  ".join(f"{name}={_text(value)}" for name, value in item.items() if value is not None)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")


_MARKS = {"same": "", "grown": " (grown since)", "unchecked": ""}


def lineage_lines(lineage: api.Lineage) -> Iterator[str]:
    """Yields a lineage as lines of text: its tree, its row's steps, its tag and its problems."""
    yield from _tree(lineage.root, "", "")
    if lineage.row:
        yield "row:"
        for step in lineage.row:
            words = [step.what, step.at, step.row, step.id, step.decision, "; ".join(step.reasons)]
            if step.like:
                words.append(f"like {step.like}")
            if step.also_at:
                words.append(f"the same row is at {', '.join(step.also_at)}")
            mark = _MARKS.get(step.state, f" ({step.state.upper()})")
            yield "  " + "  ".join(word for word in words if word) + mark
    if lineage.tagged:
        yield f"tagged: {lineage.tagged}"
    if lineage.sources:
        yield f"sources: {lineage.num_sources} rows in {lineage.sources}"
    for problem in lineage.problems:
        yield f"problem: {problem}"


def _tree(node: api.LineageNode, lead: str, below: str) -> Iterator[str]:
    yield lead + _words(node)
    rest = [f"{count} more, {state}" for state, count in node.more_inputs.items()]
    last = len(node.inputs) + len(rest) - 1
    for place, child in enumerate(node.inputs):
        is_last = place == last
        yield from _tree(
            child, below + ("└─ " if is_last else "├─ "), below + ("   " if is_last else "│  ")
        )
    for place, text in enumerate(rest, len(node.inputs)):
        yield below + ("└─ " if place == last else "├─ ") + text


def _words(node: api.LineageNode) -> str:
    mark = _MARKS.get(node.state, f" ({node.state.upper()})")
    parts = [f"{node.role}: {node.path}" if node.role else node.path]
    if node.sha256:
        parts.append(node.sha256)
    if node.made_by:
        counts = ", ".join(f"{name} {count}" for name, count in node.counts.items())
        parts.append(f"by {node.made_by}" + (f" ({counts})" if counts else ""))
    if node.run_id:
        parts.append(node.run_id)
    parts += [f"{name}={value}" for name, value in node.options.items()]
    if node.versions:
        parts.append(f"= {', '.join(node.versions)}")
    if node.note:
        parts.append(f"[{node.note}]")
    return "  ".join(parts) + mark
