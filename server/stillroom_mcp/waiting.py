"""`stillroom wait`: waits in a background shell until runs have ended, and prints their status."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from stillroom import api
from stillroom.api import operation_named
from stillroom.errors import EngineError
from stillroom.fences import printable, safe_name
from stillroom.settings import Workspace, open_workspace
from stillroom_mcp.answers import structured_content
from stillroom_mcp.busy_line import BusyLine
from stillroom_mcp.fencing import error_for, quoted_for
from stillroom_mcp.shell_steps import as_cli_step

EXIT_CODE_BY_STATUS = {"succeeded": 0, "failed": 1, "cancelled": 3, "interrupted": 4}
"""The exit code for the status of a run; with several runs, the highest code counts."""
EXIT_UNKNOWN = 2
EXIT_ALARM = 5
EXIT_TIMEOUT = 124
EXIT_CODES_HELP = (
    "exit codes: 0 succeeded, 1 failed, 2 unknown run or usage error, 3 cancelled, 4 interrupted, "
    "5 an alarm or nearly spent budget (--alarms), 124 timeout"
)
_FIRST_POLL_S, _LONGEST_POLL_S = 0.2, 5.0
_FOREVER_S = float("inf")


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Adds the parser of the command to the CLI's subparsers, and returns it."""
    text = "Wait until runs have ended; for a background shell."
    parser = subparsers.add_parser(
        "wait", help=text, description=text, epilog=EXIT_CODES_HELP, allow_abbrev=False
    )
    parser.add_argument("run_id", nargs="+", metavar="RUN", help="id, or a unique prefix of it")
    parser.add_argument(
        "--timeout", type=float, metavar="S", help="give up after this many seconds"
    )
    parser.add_argument(
        "--alarms",
        action="store_true",
        help="also stop waiting at a new alarm or a nearly spent budget",
    )
    parser.add_argument("--workspace", help="the project's folder (default: this folder)")
    parser.add_argument("--json", action="store_true", help="print each run as one JSON line")
    return parser


def run(options: argparse.Namespace) -> int:
    """Runs the command and returns the exit code."""
    return wait(
        open_workspace(options.workspace),
        options.run_id,
        timeout_s=options.timeout,
        stops_at_alarms=options.alarms,
        as_json=options.json,
    )


def wait(
    workspace: Workspace,
    run_ids: Sequence[str],
    *,
    timeout_s: float | None,
    stops_at_alarms: bool,
    as_json: bool,
) -> int:
    """Waits for the runs one after another, prints their status and returns the exit code."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    codes: list[int] = []
    try:
        # Checks all ids first, so that a misspelt one is reported immediately.
        requests = [api.GetRun(run_id=run_id) for run_id in run_ids]
        runs = [api.get_run(workspace, request) for request in requests]
    except EngineError as error:
        sys.stderr.write(f"error: {error_for(sys.stderr, error)}\n")
        return EXIT_UNKNOWN
    for first in runs:
        with BusyLine(first.run_id) as line:
            run, reason = _wait_for_run(
                workspace, first, deadline, line, stops_at_alarms=stops_at_alarms
            )
        _print_status(workspace, run, reason, as_json=as_json)
        codes.append(
            EXIT_CODE_BY_STATUS.get(run.status, EXIT_TIMEOUT if reason == "time" else EXIT_ALARM)
        )
        if run.status not in EXIT_CODE_BY_STATUS:
            break
    return max(codes)


def _wait_for_run(
    workspace: Workspace,
    run: api.RunReport,
    deadline: float | None,
    line: BusyLine,
    *,
    stops_at_alarms: bool,
) -> tuple[api.RunReport, str]:
    """Polls a run; returns its last report and why the wait ended."""
    watch, poll_s = api.RunWatch(run, _FOREVER_S), _FIRST_POLL_S
    while True:
        if sys.stderr.isatty():
            line.show(f"{run.run_id} {run.status}{_done(run)}")
        reason = watch.reason(run, 0.0)
        if reason == "ended" or (reason is not None and stops_at_alarms):
            return run, reason
        if deadline is not None and time.monotonic() >= deadline:
            return run, "time"
        remaining_s = _FOREVER_S if deadline is None else deadline - time.monotonic()
        time.sleep(max(0.0, min(poll_s, remaining_s)))
        poll_s = min(2 * poll_s, _LONGEST_POLL_S)
        run = api.get_run(workspace, api.GetRun(run_id=run.run_id))


def _done(run: api.RunReport) -> str:
    """Returns the progress of a run in parentheses, or "" without any."""
    progress = run.progress
    if progress is None:
        return ""
    return f" ({progress.done}/{progress.total} {safe_name(progress.unit)})"


def _print_status(workspace: Workspace, run: api.RunReport, reason: str, *, as_json: bool) -> None:
    answer = structured_content(
        workspace, operation_named("get_run"), api.GetRun(run_id=run.run_id), run
    )
    if as_json:
        sys.stdout.write(json.dumps({**answer, "answered_at": reason}, ensure_ascii=False) + "\n")
        return
    reasons = [f"alarm: {alarm}" for alarm in run.alarms]
    if run.error is not None:
        reasons.insert(0, f"error: {run.error.problem}")
    lines = [f"{run.run_id} {run.status}{_done(run)}"]
    if reasons:
        text = workspace.redactor().redact_text("\n".join(reasons))
        lines.append(quoted_for(sys.stdout, text))
    lines.append(f"next: {as_cli_step(answer['next_step'])}")
    sys.stdout.write(printable("\n".join(lines)) + "\n")
