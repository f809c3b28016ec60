"""What a worker tells of alarms, and who sees them."""

import signal
import sys
import threading
import time

import msgspec
import pytest

from stillroom.api import GetRun, LogPage
from stillroom.api.runs import get_run
from stillroom.errors import RunCancelledError
from stillroom.jobs import worker
from stillroom.jobs.operations import Operation, RunWork
from stillroom.jobs.reporter import JobReporter
from stillroom.run_folder import create_run
from stillroom.settings import Workspace
from stillroom.types import RunKind, RunStatus
from stillroom_mcp.next_steps import after_run


def test_alarms_stand_in_the_run_until_they_are_over_and_each_once_in_its_events(tmp_path):
    workspace = Workspace(tmp_path)
    folder = create_run(workspace, RunKind.DISTILL, {})
    reporter = JobReporter(folder, folder.read())

    reporter.alarms(["truncation: 30% are cut off"])
    reporter.alarms(["truncation: 32% are cut off", "repetition: 40% of it"])
    reported = reporter.state.alarms
    reporter.alarms([])
    reporter.alarms(["truncation: 28% are cut off"])
    reporter.close()

    assert reported == ["truncation: 32% are cut off", "repetition: 40% of it"]
    assert reporter.state.alarms == ["truncation: 28% are cut off"]
    events = [event.text for event in folder.read_events() if event.event == "alarm"]
    assert events == [
        "truncation: 30% are cut off",
        "repetition: 40% of it",
        "truncation: 28% are cut off",
    ]


def test_an_agent_that_polls_is_told_of_alarms(tmp_path):
    workspace = Workspace(tmp_path)
    folder = create_run(workspace, RunKind.DISTILL, {})
    state = msgspec.structs.replace(
        folder.read(), status=RunStatus.SUCCEEDED, alarms=["truncation: raise rollout.max_tokens"]
    )
    folder.write(state)

    report = get_run(workspace, GetRun(run_id=folder.run_id))

    assert report.alarms == ["truncation: raise rollout.max_tokens"]
    assert "alarms" in after_run(None, report)
    going = msgspec.structs.replace(report, status=RunStatus.RUNNING)
    assert "cancel_run" in after_run(None, going)
    calm = msgspec.structs.replace(going, alarms=[])
    assert "alarm" not in after_run(None, calm)


def test_an_evaluation_tells_what_the_model_does_at_temperature_1_if_that_is_much_less(tmp_path):
    workspace = Workspace(tmp_path)
    folder = create_run(workspace, RunKind.EVALUATE, {})
    folder.write(msgspec.structs.replace(folder.read(), status=RunStatus.SUCCEEDED))
    report = get_run(workspace, GetRun(run_id=folder.run_id))

    def following(sampled):
        result = {"accuracy": {"value": 0.74, "low": 0.68, "high": 0.79}, **sampled}
        return after_run(None, msgspec.structs.replace(report, result=result))

    far = following({"sampled_accuracy": {"value": 0.03, "low": 0.01, "high": 0.09}})
    assert "solves 74% of the tasks at temperature 0, but 3% at temperature 1: serve it" in far
    assert "compare_evaluations" in far
    near = following({"sampled_accuracy": {"value": 0.66, "low": 0.5, "high": 0.77}})
    assert near == following({}) == following({"sampled_accuracy": None})
    assert "temperature" not in near


def test_what_a_step_reports_last_is_seen_although_the_next_step_takes_long(tmp_path):
    folder = create_run(Workspace(tmp_path), RunKind.SFT, {})
    reporter = JobReporter(folder, folder.read())

    reporter.metrics(1, {"loss": 2.0})
    reporter.alarms(["truncation: 30% are cut off"])
    reporter.progress(1, 9, unit="steps", phase="train")
    reporter.close()

    seen = folder.read()
    assert seen.progress is not None
    assert (seen.progress.done, seen.alarms) == (1, ["truncation: 30% are cut off"])
    assert seen.metrics == {"loss": 2.0}


def test_the_remaining_time_is_as_given_or_extrapolated_from_the_rate(tmp_path):
    folder = create_run(Workspace(tmp_path), RunKind.RECIPE, {})
    reporter = JobReporter(folder, folder.read())

    reporter.progress(3, 24, unit="stages", phase="train", eta_s=90.0)
    assert reporter.state.progress.eta_s == 90.0
    reporter.progress(3, 24, unit="stages", phase="train 1/8")
    assert reporter.state.progress.eta_s is None
    reporter.close()


def stops_early(workspace, request, *, folder, reporter):
    reporter.progress(1, 1320, unit="steps", phase="train")
    reporter.progress(528, 1320, unit="steps", phase="train")
    return LogPage(
        run_id="", source="log", path="", lines=[], size_bytes=0, has_more=False
    )  # any result


def gives_up(workspace, request, *, folder, reporter):
    stops_early(workspace, request, folder=folder, reporter=reporter)
    raise RunCancelledError


def never_looks(workspace, request):
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        time.sleep(0.01)


def test_work_that_never_looks_for_a_cancel_is_cancelled_at_once(tmp_path, monkeypatch):
    folder = create_run(Workspace(tmp_path), RunKind.FILTER, {"run_id": "x"})
    operation = Operation(
        function=f"{__name__}:never_looks",
        request=GetRun,
        result=LogPage,
        title="Long",
        description="",
        run_if_large=RunKind.FILTER,
    )
    monkeypatch.setattr(sys, "argv", ["worker", str(folder.path)])
    handler = signal.getsignal(signal.SIGTERM)
    timer = threading.Timer(0.3, folder.ask_to_cancel)
    timer.start()
    started = time.monotonic()
    try:
        worker.main(lambda _kind: operation)
    finally:
        signal.signal(signal.SIGTERM, handler)

    assert folder.read().status is RunStatus.CANCELLED
    assert time.monotonic() - started < 150


@pytest.mark.parametrize(
    ("work", "status", "total"),
    [(stops_early, RunStatus.SUCCEEDED, 528), (gives_up, RunStatus.CANCELLED, 1320)],
)
def test_a_run_that_stops_early_reads_as_finished(tmp_path, monkeypatch, work, status, total):
    folder = create_run(Workspace(tmp_path), RunKind.SFT, {"run_id": "x"})
    operation = Operation(
        function=f"{__name__}:early",
        request=GetRun,
        result=LogPage,
        title="Early",
        description="",
        run=RunWork((RunKind.SFT,), f"{__name__}:{work.__name__}"),
    )
    monkeypatch.setattr(sys, "argv", ["worker", str(folder.path)])
    handler = signal.getsignal(signal.SIGTERM)
    try:
        worker.main(lambda _kind: operation)
    finally:
        signal.signal(signal.SIGTERM, handler)

    state = folder.read()
    assert state.status is status
    assert state.progress is not None
    assert (state.progress.done, state.progress.total) == (528, total)
    assert state.progress.eta_s is None
