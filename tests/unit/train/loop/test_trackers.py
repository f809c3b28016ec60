"""Metrics beside events.jsonl: TensorBoard, W&B offline, trackio on this machine."""

import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fakes.conversations import answer, user
from fakes.reporters import KeptReporter
from fakes.started_runs import ended, losses, start
from fakes.training import make_project
from stillroom.settings import Workspace, tracking_environment
from stillroom.train.loop.trackers import TrackedReporter, Tracker

ROWS = [{"messages": [user(f"Item {i}?"), answer(f"It costs {i}.")]} for i in range(8)]


@pytest.fixture(scope="module")
def tracked(tmp_path_factory, tiny_models, warm_program) -> tuple[Path, dict[int, float]]:
    """The folder of a run with all three trackers and no key, and its losses by step."""
    root = tmp_path_factory.mktemp("tracked")
    project = make_project(
        root,
        "sft",
        tiny_models.folder("llama", "chatml"),
        trainer={"tensorboard": True, "wandb_project": "shop", "trackio_project": "shop"},
    )
    project.write(ROWS)
    project.write_config()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(warm_program))
        patch.setenv("HOME", str(root))
        patch.delenv("WANDB_API_KEY", raising=False)
        run_id = start(project)
        run = ended(project, run_id)
    assert run.status == "succeeded", run.error
    assert run.notes == []
    return project.workspace.runs / run_id, losses(project, run_id)


def test_tensorboard_shows_every_step(tracked) -> None:
    folder, losses = tracked
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()

    shown = events.Scalars("loss")

    assert [point.step for point in shown] == [*losses]
    assert [point.value for point in shown] == pytest.approx([*losses.values()], abs=1e-5)
    assert "memory_gb" in events.Tags()["scalars"]


def test_without_a_key_wandb_writes_offline_into_the_runs_folder(tracked) -> None:
    run, _ = tracked

    (folder,) = (run / "wandb").glob("offline-run-*")

    assert (folder / f"run-{run.name}.wandb").stat().st_size > 0


def test_trackio_writes_into_the_workspace(tracked) -> None:
    run, _ = tracked

    written = [file for file in (run.parent / "trackio").rglob("*") if file.is_file()]

    assert any("shop" in file.name for file in written)


def test_only_wandbs_own_key_is_handed_on_and_only_where_it_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "canary")
    workspace = Workspace(tmp_path)

    assert "canary" not in tracking_environment(workspace, has_wandb=False).values()
    assert tracking_environment(workspace, has_wandb=True)["WANDB_API_KEY"] == "canary"


def test_a_tracker_that_fails_is_left_out_and_the_run_goes_on() -> None:
    own, seen, closed = KeptReporter(), [], []

    def refuse(step, values):
        raise ConnectionError("no network")

    trackers = [
        Tracker("broken", refuse, lambda: closed.append("broken")),
        Tracker("good", lambda step, values: seen.append((step, dict(values))), closed.append),
    ]
    trackers[1] = Tracker("good", trackers[1].log, lambda: closed.append("good"))
    reporter = TrackedReporter(own, trackers)

    for step in (1, 2):
        reporter.metrics(step, {"loss": 1.0})
    reporter.close()

    assert own.measured == [{"loss": 1.0}] * 2
    assert seen == [(1, {"loss": 1.0}), (2, {"loss": 1.0})]
    assert own.notes == ["broken failed and gets no more metrics: no network"]
    assert closed == ["good"]
