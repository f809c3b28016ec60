"""Runs the commands and prints their results; the progress of runs goes to stderr."""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, Self, cast

import msgspec
from pydantic import BaseModel
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from stillroom import api, fences
from stillroom.api import OPERATIONS, Operation
from stillroom.settings import Workspace
from stillroom_mcp.answers import structured_content
from stillroom_mcp.busy_line import BusyLine
from stillroom_mcp.fencing import quoted_for
from stillroom_mcp.shell_steps import as_cli_commands, as_cli_step

_POLL_S = 0.3
_LINE_INTERVAL_S = 10.0
_ACTIVE_STATUSES = ("starting", "running")

TOOLSETS: dict[str, tuple[str, ...]] = {
    "core": (
        "run_recipe",
        "create_project",
        "generate_rollouts",
        "filter_dataset",
        "convert_rollouts",
        "start_training",
        "evaluate_model",
        "compare_evaluations",
        "get_run",
        "cancel_run",
    ),
    "data": (
        "validate_dataset",
        "import_rollouts",
        "score_rollouts",
        "sample_for_review",
        "filter_dataset",
        "convert_rollouts",
        "make_dpo_pairs",
        "inspect_examples",
        "show_lineage",
    ),
    "training": (
        "check_setup",
        "list_machines",
        "plan_training",
        "start_training",
        "evaluate_model",
        "compare_evaluations",
        "export_model",
    ),
    "runs": ("get_run", "list_runs", "get_run_logs", "cancel_run", "write_report"),
}
"""The tools of each toolset, for agents with a short context."""
ALL = "all"


def chosen_operations(
    toolsets: Sequence[str] = (ALL,), *, is_read_only: bool = False
) -> list[Operation]:
    """Returns the operations of the named toolsets, in the order of OPERATIONS.

    With `is_read_only`, only operations that write nothing and start no run.
    """
    names = {name for toolset in toolsets if toolset != ALL for name in TOOLSETS[toolset]}
    return [
        operation
        for operation in OPERATIONS
        if (ALL in toolsets or operation.name in names)
        and (operation.is_read_only or not is_read_only)
    ]


def print_prices(
    workspace: Workspace, models: Sequence[str], *, is_refreshed: bool, as_json: bool
) -> int:
    """Prints the prices of models and returns the exit code, which is 1 if a price is unknown.

    With `is_refreshed`, it downloads the current price list first.
    """
    with BusyLine("prices"):
        price_report = api.show_prices(workspace, models, refresh=is_refreshed)
    if as_json:
        _print(json.dumps(msgspec.to_builtins(price_report)))
    else:
        if price_report.written is not None:
            _print(f"written: {price_report.written}")
        _print(
            f"prices of {price_report.as_of}, {price_report.num_models} models; prices.yml "
            "takes precedence"
        )
        for entry in price_report.prices:
            price = entry.price
            text = (
                "unknown: add it to prices.yml"
                if price is None
                else f"input {price.prompt:g}, output {price.completion:g} US dollars per million"
            )
            _print(f"{entry.model}: {text}")
    return 1 if any(entry.price is None for entry in price_report.prices) else 0


def print_docs(page: str | None) -> int:
    """Prints a page of the documentation, or the names of all pages if none is given."""
    from stillroom_mcp.resources.texts import page_text, page_titles

    if page is not None:
        _print(page_text(page))
        return 0
    for name, title in page_titles().items():
        _print(f"{name}: {title}")
    return 0


def run_operation(
    workspace: Workspace,
    operation: Operation,
    request: BaseModel,
    *,
    as_json: bool,
    wait: bool,
) -> int:
    """Runs one operation, prints its result and returns the exit code.

    With `wait`, it first waits for the end of the run that the operation started.
    """
    with BusyLine(operation.command) as line, api.report_progress_to(line.show):
        result = api.carry_out(workspace, operation, request)
    if isinstance(result, api.RunReport):
        wait_s = request.wait_s if isinstance(request, api.GetRun) else None
        if wait or wait_s:
            result = _follow(workspace, result, as_json=as_json, wait_s=wait_s)
        if operation.may_become_run and result.status == "succeeded":
            # Printed like the result of an operation that did not start a run.
            result = msgspec.convert(result.result, operation.result)
    answer = structured_content(workspace, operation, request, result)
    if as_json:
        _print(json.dumps(answer, ensure_ascii=False))
    elif isinstance(result, api.Lineage):
        _print(quoted_for(sys.stdout, "\n".join(lineage_lines(result))))
        _print(f"next: {as_cli_step(answer['next_step'])}")
    else:
        _show(answer)
    return _exit_code(result, wait=wait)


def _exit_code(result: msgspec.Struct, *, wait: bool) -> int:
    if isinstance(result, api.RunReport) and wait:
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

    With `wait_s`, it returns earlier if an alarm or progress is due (see `RunWatch`), and at the
    latest after `wait_s` seconds.
    """
    watch = None if wait_s is None else api.RunWatch(run, wait_s)
    status_request, started = api.GetRun(run_id=run.run_id), time.monotonic()
    with _ProgressView(is_bar=sys.stderr.isatty() and not as_json) as view:
        view.start(run)
        while run.status in _ACTIVE_STATUSES:
            if watch and (reason := watch.reason(run, time.monotonic() - started)):
                return msgspec.structs.replace(run, answered_at=reason)
            time.sleep(_POLL_S)
            run = api.get_run(workspace, status_request)
            view.show(run)
    return run


class _ProgressView:
    """Shows a run's progress: a bar on a terminal, otherwise a line every ten seconds."""

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
        self._last_line_at = 0.0

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def start(self, run: api.RunReport) -> None:
        """Prints the run's id and log path, so that the run can be found again."""
        machine = f" on {run.where}" if run.where is not None else ""
        sys.stderr.write(f"run {run.run_id}{machine} ({run.log_path})\n")
        if self._bar is not None:
            # Loading libraries and models takes some seconds without any progress.
            self._task = self._bar.add_task(str(run.status), total=1, unit="")

    def show(self, run: api.RunReport) -> None:
        """Shows the progress of the run's current phase."""
        if (
            run.unreachable is not None
            and time.monotonic() - self._last_line_at >= _LINE_INTERVAL_S
        ):
            last = f"last contact: {run.last_contact or 'never'}"
            why = quoted_for(sys.stderr, run.unreachable)
            sys.stderr.write(
                f"{run.where} does not answer ({last}), but the run continues there: {why}\n"
            )
            self._last_line_at = time.monotonic()
        progress = run.progress
        if progress is None:
            return
        if self._bar is not None:
            self._bar.update(
                self._task,
                description=fences.safe_name(progress.phase),
                total=progress.total,
                completed=progress.done,
                unit=progress.unit,
            )
        elif time.monotonic() - self._last_line_at >= _LINE_INTERVAL_S:
            eta = "" if progress.eta_s is None else f", about {progress.eta_s:.0f} s left"
            done = f"{progress.done}/{progress.total} {fences.safe_name(progress.unit)}"
            sys.stderr.write(f"{fences.safe_name(progress.phase)}: {done}{eta}\n")
            self._last_line_at = time.monotonic()


def _show(answer: dict[str, Any]) -> None:
    """Prints a result for a person: one field per line, nested values as compact JSON."""
    next_step = answer.pop("next_step")
    for name, value in answer.items():
        if value is None or value in ([], {}):
            continue
        if isinstance(value, list) and all(isinstance(item, dict) for item in cast("Any", value)):
            _print(f"{name}:")
            for item in cast("list[Any]", value):
                _print(f"  {_item_text(item)}")
        elif isinstance(value, dict) and name in ("result", "error"):
            _print(f"{name}:")
            for key, item in cast("dict[str, Any]", value).items():
                _print(f"  {key}: {_field_text(key, item)}")
        else:
            _print(f"{name}: {_field_text(name, value)}")
    _print(f"next: {as_cli_step(next_step)}")


def _item_text(item: dict[str, Any]) -> str:
    return "  ".join(
        f"{name}={_field_text(name, value)}" for name, value in item.items() if value is not None
    )


def _field_text(name: str, value: Any) -> str:
    """Returns the text of a field; a fix names commands instead of tools."""
    return as_cli_commands(value) if name == "fix" and isinstance(value, str) else _text(value)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")


_STATE_NOTES = {"same": "", "grown": " (grown since)", "unchecked": ""}
"""The note after a file, by the file's state; other states are shown in capitals."""


def lineage_lines(lineage: api.Lineage) -> Iterator[str]:
    """Yields the lines that show a lineage: the tree, the steps of a row, the tag, the problems."""
    yield from _tree(lineage.root, "", "")
    if lineage.row:
        yield "row:"
        for step in lineage.row:
            parts = [step.kind, step.at, step.row, step.id, step.decision, "; ".join(step.reasons)]
            if step.like:
                parts.append(f"like {step.like}")
            if step.also_at:
                parts.append(f"the same row is at {', '.join(step.also_at)}")
            note = _STATE_NOTES.get(step.state, f" ({step.state.upper()})")
            yield "  " + "  ".join(part for part in parts if part) + note
    if lineage.tagged:
        yield f"tagged: {lineage.tagged}"
    if lineage.sources:
        yield f"sources: {lineage.num_sources} rows in {lineage.sources}"
    for problem in lineage.problems:
        yield f"problem: {problem}"


def _tree(node: api.LineageNode, prefix: str, child_prefix: str) -> Iterator[str]:
    """Yields the lines of a node, after `prefix`, and of its inputs, after `child_prefix`."""
    yield prefix + _node_text(node)
    omitted = [f"{count} more, {state}" for state, count in node.more_inputs.items()]
    last = len(node.inputs) + len(omitted) - 1
    for index, child in enumerate(node.inputs):
        is_last = index == last
        yield from _tree(
            child,
            child_prefix + ("└─ " if is_last else "├─ "),
            child_prefix + ("   " if is_last else "│  "),
        )
    for index, text in enumerate(omitted, len(node.inputs)):
        yield child_prefix + ("└─ " if index == last else "├─ ") + text


def _node_text(node: api.LineageNode) -> str:
    note = _STATE_NOTES.get(node.state, f" ({node.state.upper()})")
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
    return "  ".join(parts) + note
