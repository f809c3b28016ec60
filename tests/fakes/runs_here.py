"""Runs and plans that are done in this process, so that no library is loaded again."""

import signal
import sys
from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest
from pydantic import BaseModel

from stillroom.api import start_runs
from stillroom.api.operations import operation_of_run
from stillroom.jobs import supervise, worker
from stillroom.jobs.operations import ChildWork, load
from stillroom.run_folder import NewRun, RunFolder, RunState, create_run
from stillroom.settings import Workspace
from stillroom.types import RunKind


def do_run(folder: RunFolder, secrets: Mapping[str, str] | None = None) -> None:
    """Does in this process all that a run's own process would do."""
    stop_signal = signal.getsignal(signal.SIGTERM)
    try:
        with mock.patch.object(sys, "argv", ["worker", str(folder.path)]):
            worker.main(operation_of_run, secrets)
    finally:
        signal.signal(signal.SIGTERM, stop_signal)


def do_runs_here(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Makes each start of a run do the run, and plan_training plan without a child process.

    Returns the list to which each start adds the run's kind.
    """
    started: list[str] = []

    def start_run(
        workspace: Workspace,
        kind: RunKind,
        request: dict[str, Any],
        *,
        secrets: Mapping[str, str] | None = None,
        new: NewRun | None = None,
        **_environment: object,
    ) -> RunState:
        started.append(kind)
        folder = create_run(workspace, kind, request, new)
        do_run(folder, secrets)
        return folder.read()

    monkeypatch.setattr(supervise, "start_run", start_run)
    monkeypatch.setattr(start_runs, "run_in_child", _call_here)
    return started


def _call_here(
    workspace: Workspace, work: ChildWork, request: BaseModel, **_options: object
) -> Any:
    return load(work.function)(workspace, request)
