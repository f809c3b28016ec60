"""A run on another machine, as calls, lists, pages and costs show it."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest

from fakes.dashboards import client_of
from fakes.machines import add_remote_run, followed, name_machines
from stillroom import api
from stillroom.evaluate.costs import cost_of_runs
from stillroom.run_folder import FOLLOWER_LOG, REMOTE_FILE, VIEW_FILE, RemoteView, RunFailure
from stillroom.settings import Workspace
from stillroom.types import RunStatus
from stillroom_mcp.next_steps import after_cancel_run, after_run

SEEN = "2026-11-23T03:04:05+00:00"
RUNNING = RemoteView(where="gpu-box", phase="running", last_contact=SEEN, machine_usd=1.5)
SILENT = msgspec.structs.replace(RUNNING, problem="no route to host")


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path)


def test_the_files_keep_the_names_by_which_folders_on_disk_are_known() -> None:
    assert REMOTE_FILE == "remote.json"
    assert VIEW_FILE == "remote_view.json"


def test_get_run_and_list_runs_say_where_it_is_and_how_old_the_view_is(workspace) -> None:
    folder = add_remote_run(workspace, RUNNING)
    with followed(folder):
        run = api.get_run(workspace, api.GetRun(run_id=folder.run_id))
        [listed] = api.list_runs(workspace, api.ListRuns()).runs

    assert (run.where, run.last_contact, run.machine_usd) == ("gpu-box", SEEN, 1.5)
    assert run.unreachable is None
    assert (listed.where, listed.last_contact, listed.machine_usd) == ("gpu-box", SEEN, 1.5)


def test_a_machine_that_does_not_answer_makes_no_other_status_and_no_second_start(workspace):
    folder = add_remote_run(workspace, SILENT)
    with followed(folder):
        run = api.get_run(workspace, api.GetRun(run_id=folder.run_id))

    assert (run.status, run.unreachable) == ("running", "no route to host")
    step = after_run(None, run)
    assert "do not start the run again" in step
    assert "machine_usd has been an estimate since last_contact" in step
    assert f"get_run(run_id={folder.run_id}" in step
    assert "check_setup(where=gpu-box)" in step


def test_a_view_from_before_a_night_is_said_to_be_old_and_a_new_one_is_not(workspace):
    def step(seen: str) -> str:
        view = msgspec.structs.replace(RUNNING, last_contact=seen)
        folder = add_remote_run(workspace, view)
        with followed(folder):
            return after_run(None, api.get_run(workspace, api.GetRun(run_id=folder.run_id)))

    eight_hours_ago = datetime.now(UTC) - timedelta(hours=8)
    assert "this report, with its cost, is 480 minutes old" in step(eight_hours_ago.isoformat())
    assert " old" not in step(datetime.now(UTC).isoformat())


def test_a_run_that_cannot_be_told_to_stop_may_go_on_elsewhere_at_once(workspace):
    folder = add_remote_run(workspace, SILENT)
    with followed(folder):
        run = api.get_run(workspace, api.GetRun(run_id=folder.run_id))

    step = after_cancel_run(api.CancelRun(run_id=folder.run_id), run)
    assert "cancellation is queued until gpu-box answers" in step
    assert f"gone for good: start_training(resume={folder.run_id})" in step


def test_a_run_that_ended_early_there_goes_on_there_or_elsewhere(workspace) -> None:
    view = RemoteView(where="gpu-box", phase="over", last_contact=SEEN)
    folder = add_remote_run(workspace, view, status=RunStatus.CANCELLED)
    with followed(folder):
        step = after_run(None, api.get_run(workspace, api.GetRun(run_id=folder.run_id)))

    assert f"start_training(resume={folder.run_id}, where=gpu-box)" in step


@pytest.mark.parametrize(
    ("result", "is_there"),
    [({"parameters": 200_000}, False), ({"parameters": 600_000_000}, True), ({}, True)],
)
def test_only_a_student_that_is_slow_here_is_evaluated_on_its_machine(
    workspace, result, is_there
) -> None:
    view = RemoteView(where="gpu-box", phase="over", last_contact=SEEN)
    folder = add_remote_run(workspace, view, status=RunStatus.SUCCEEDED, result=result)
    with followed(folder):
        step = after_run(None, api.get_run(workspace, api.GetRun(run_id=folder.run_id)))

    assert "evaluate_model(" in step
    assert ("where=gpu-box" in step) == is_there


def test_a_run_that_stopped_at_its_budget_goes_on_where_it_was(workspace) -> None:
    view = RemoteView(where="gpu-box", phase="over", last_contact=SEEN)
    folder = add_remote_run(workspace, view, status=RunStatus.CANCELLED)
    fix = f"raise that limit; then start_training(resume={folder.run_id}) resumes at step_000001"
    error = RunFailure(problem="its budget of $1 is spent", fix=fix)
    folder.write(msgspec.structs.replace(folder.read(), error=error))
    with followed(folder):
        step = after_run(None, api.get_run(workspace, api.GetRun(run_id=folder.run_id)))

    assert f"start_training(resume={folder.run_id}, where=gpu-box) resumes" in step


def test_the_log_that_is_named_exists_before_the_machine_has_written_one(workspace) -> None:
    folder = add_remote_run(workspace, RUNNING)
    (folder.path / FOLLOWER_LOG).write_text("gpu-box: installing packages: torch\n")
    with followed(folder):
        run = api.get_run(workspace, api.GetRun(run_id=folder.run_id))
        logs = api.get_run_logs(workspace, api.GetRunLogs(run_id=folder.run_id))

    assert (workspace.root / run.log_path).is_file()
    assert logs.lines == ["gpu-box: installing packages: torch"]
    folder.log.write_text("begin\n")
    with followed(folder):
        again = api.get_run(workspace, api.GetRun(run_id=folder.run_id))
    assert again.log_path.endswith("log.txt")


def test_what_a_machine_elsewhere_has_cost_is_spent_and_no_time_of_this_one(workspace) -> None:
    times = {"started_at": "2026-11-23T01:00:00Z", "ended_at": "2026-11-23T03:00:00Z"}
    done = RemoteView(where="gpu-box", phase="over", machine_usd=1.5)
    add_remote_run(workspace, done, status=RunStatus.SUCCEEDED, **times)

    spent = cost_of_runs(workspace)

    assert (spent.calls_usd, spent.machine_hours) == (1.5, 0.0)


@pytest.mark.parametrize(("machine_usd", "reason"), [(1.0, None), (3.5, "budget")])
def test_a_nearly_spent_budget_counts_the_machine(workspace, machine_usd, reason) -> None:
    folder = add_remote_run(workspace, RUNNING, budget_usd=4.0)
    with followed(folder):
        run = api.get_run(workspace, api.GetRun(run_id=folder.run_id))
        page = client_of(workspace.root).get(f"/runs/{folder.run_id}/live").text
    assert "$1.50 of $4.00" in page
    watch = api.RunWatch(msgspec.structs.replace(run, machine_usd=0.5), 110.0)

    now = msgspec.structs.replace(run, machine_usd=machine_usd)

    assert watch.reason(now, 1.0) == reason


def test_the_pages_say_where_a_run_is_what_it_costs_and_why_it_is_not_seen(workspace) -> None:
    name_machines(workspace.root, "gpu-box: {ssh: me@host, price_per_hour: 2.4}\n")
    reached, silent = add_remote_run(workspace, RUNNING), add_remote_run(workspace, SILENT)
    with followed(reached), followed(silent):
        client = client_of(workspace.root)
        listed = client.get("/").text
        page, other = (client.get(f"/runs/{run.run_id}/live").text for run in (reached, silent))

    assert "on gpu-box, last contact 23 Nov 2026, 03:04 UTC" in listed
    assert "machines cost $2.40 an hour now" in listed
    assert "$1.50" in listed
    assert "on gpu-box, last contact" in page
    assert "$1.50 for gpu-box" in page
    assert "$1.50 for gpu-box (estimated since the last contact)" in other
    assert "estimated" not in page
    assert "The run cannot be followed at the moment: no route to host" in other
    assert "continues on its machine" in other


def test_the_report_says_where_a_run_was_done_and_adds_its_machine_up(workspace) -> None:
    view = RemoteView(where="gpu-box", phase="over", machine_usd=1.5)
    failure = RunFailure(problem="it broke", fix="-")
    folder = add_remote_run(workspace, view, status=RunStatus.FAILED, error=failure)
    with followed(folder):
        written = api.write_report(workspace, api.WriteReport(output="report.html"))
    text = (workspace.root / written.output).read_text(encoding="utf-8")

    assert "on gpu-box" in text
    assert "and cost $1.50" in text
