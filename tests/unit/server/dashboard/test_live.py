"""The metrics of a run, read piece by piece while it writes them, and its figures."""

import json
from pathlib import Path
from typing import Any

from fakes.machines import add_remote_run
from stillroom.lineage import now
from stillroom.report.folders import Run
from stillroom.run_folder import Progress, RemoteView, RunState
from stillroom.settings import Workspace
from stillroom.types import RunKind, RunStatus
from stillroom_mcp.dashboard.live import figures, read_metrics_from


def event(step: int, **values: float | None) -> str:
    return json.dumps({"time": "t", "event": "metrics", "step": step, "values": values})


def test_metrics_are_read_from_where_the_last_answer_ended(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    events.write_text(event(1, loss=2.0) + "\n" + event(2, loss=None, reward=1.0)[:20], "utf-8")
    first = read_metrics_from(events, 0)
    assert (first.steps, first.values, first.has_more) == ([1], {"loss": [2.0]}, False)
    note = json.dumps({"event": "note", "text": "half"})
    lines = [event(1, loss=2.0), event(2, loss=None, reward=1.0), note, "{broken", event(3, loss=1)]
    events.write_text("\n".join(lines) + "\n", "utf-8")
    second = read_metrics_from(events, first.next)
    assert second.steps == [2, 3]
    assert second.values == {"loss": [None, 1.0], "reward": [1.0, None]}
    assert read_metrics_from(events, second.next).steps == []


def test_a_run_without_events_has_no_metrics(tmp_path: Path) -> None:
    assert read_metrics_from(tmp_path / "events.jsonl", 0).steps == []


def shown(request: dict[str, Any], **fields: Any) -> dict[str, tuple[str, str]]:
    state = RunState(
        run_id="r", kind=RunKind.ROLLOUTS, status=RunStatus.RUNNING,
        created_at="2026-11-20T10:00:00Z", started_at="2026-11-20T10:00:00Z", **fields,
    )  # fmt: skip
    run = Run(Path("r"), state)
    return {figure.label: (figure.value, figure.note) for figure in figures(run, request)}


def test_spend_stands_beside_its_budget_and_time_beside_what_is_left() -> None:
    progress = Progress(phase="p", done=30, total=120, unit="rollouts", eta_s=90.0)
    found = shown({"budget_usd": 5.0}, metrics={"cost_usd": 1.25}, progress=progress)
    assert found["Spent"] == ("$1.25 of $5.00", "25.0\xa0% of the budget")
    assert found["Done"][0] == "25.0\xa0%"
    assert found["Running for"][1] == "about 1\xa0min 30\xa0s left"


def test_what_costs_nothing_shows_no_money() -> None:
    assert "Spent" not in shown({"budget_usd": None}, metrics={"loss": 1.0})


def test_the_machine_that_does_a_run_counts_as_spent(tmp_path: Path) -> None:
    view = RemoteView(where="gpu-box", phase="running", last_contact=now(), machine_usd=0.75)
    workspace = Workspace(tmp_path)
    folder = add_remote_run(workspace, view, metrics={"cost_usd": 0.25})

    found = {f.label: f for f in figures(Run(folder.path, folder.read()), {"budget_usd": 4.0})}

    assert found["Spent"].value == "$1.00 of $4.00"
    assert found["Spent"].note == "25.0\xa0% of the budget, $0.75 for gpu-box"


def test_the_time_of_a_run_elsewhere_says_what_it_leaves_out(tmp_path: Path) -> None:
    view = RemoteView(where="gpu-box", phase="over", last_contact=now())
    times = {"started_at": "2026-11-20T10:00:00.000Z", "ended_at": "2026-11-20T10:00:30.000Z"}
    folder = add_remote_run(Workspace(tmp_path), view, status=RunStatus.SUCCEEDED, **times)

    found = {f.label: f for f in figures(Run(folder.path, folder.read()), {})}

    assert found["Took"].value == "30.0\xa0s"
    assert found["Took"].note == "without installation and transfers"
