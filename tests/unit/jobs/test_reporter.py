"""What a worker tells of alarms, and who sees them."""

import msgspec

from stillroom.api import GetRun
from stillroom.api.runs import get_run
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
