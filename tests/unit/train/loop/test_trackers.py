"""Metrics beside events.jsonl: TensorBoard, W&B offline, trackio on this machine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fakes.conversations import answer, user
from fakes.reporters import KeptReporter
from fakes.training import make_project
from stillroom.settings import Workspace, tracking_environment
from stillroom.train.loop.trackers import TrackedReporter, Tracker

ROWS = [{"messages": [user(f"Item {i}?"), answer(f"It costs {i}.")]} for i in range(8)]


def train_script(root: Path) -> str:
    """Trains in a process of its own, whose settings are those that api.start_training gives."""
    return (
        "import json\n"
        "from pathlib import Path\n"
        "from fakes.reporters import KeptReporter\n"
        "from stillroom.settings import Workspace\n"
        "from stillroom.train.config.request import StartTraining\n"
        "from stillroom.train.run import train\n"
        f"root = Path({str(root)!r}); reporter = KeptReporter()\n"
        "folder = root / 'runs' / 'run-1'; folder.mkdir(parents=True)\n"
        "train(Workspace(root), StartTraining(), folder=folder, reporter=reporter)\n"
        "told = {'losses': [m['loss'] for m in reporter.measured], 'notes': reporter.notes}\n"
        "(root / 'told.json').write_text(json.dumps(told), encoding='utf-8')\n"
    )


@pytest.fixture(scope="module")
def tracked(tmp_path_factory, tiny_models) -> tuple[Path, list[float]]:
    """A run with all three trackers and no key."""
    root = tmp_path_factory.mktemp("tracked")
    project = make_project(
        root,
        "sft",
        tiny_models.folder("llama", "chatml"),
        trainer={"tensorboard": True, "wandb_project": "shop", "trackio_project": "shop"},
    )
    project.write(ROWS)
    project.write_config()
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(root),
        "PYTHONPATH": ":".join(sys.path),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        **tracking_environment(Workspace(root), has_wandb=True),
    }
    finished = subprocess.run(
        [sys.executable, "-c", train_script(root)],
        env=environment, cwd=root, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    reported = json.loads((root / "told.json").read_text(encoding="utf-8"))
    assert reported["notes"] == []
    return root, reported["losses"]


def test_tensorboard_shows_every_step(tracked) -> None:
    root, losses = tracked
    events = EventAccumulator(str(root / "runs/run-1/tensorboard"))
    events.Reload()

    shown = events.Scalars("loss")

    assert [point.step for point in shown] == list(range(1, len(losses) + 1))
    assert [point.value for point in shown] == pytest.approx(losses, abs=1e-5)
    assert "memory_gb" in events.Tags()["scalars"]


def test_without_a_key_wandb_writes_offline_into_the_runs_folder(tracked) -> None:
    root, _ = tracked

    (folder,) = (root / "runs/run-1/wandb").glob("offline-run-*")

    assert (folder / "run-run-1.wandb").stat().st_size > 0


def test_trackio_writes_into_the_workspace(tracked) -> None:
    root, _ = tracked

    written = [file for file in (root / "runs/trackio").rglob("*") if file.is_file()]

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
    assert own.notes == ["broken is left out from here: no network"]
    assert closed == ["good"]
