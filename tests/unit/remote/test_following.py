"""Runs on another machine, from the start here to the last file back, whatever breaks meanwhile."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.rollout_rows import read_rows
from fakes.runs_elsewhere import Elsewhere
from fakes.waiting import wait_until
from stillroom.jobs import remote_runs

TESTS = Path(__file__).parents[2]


@pytest.fixture
def elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_program: Path
) -> Iterator[Elsewhere]:
    """A workspace and another machine; see fakes/local_follower.py."""
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    monkeypatch.setenv("STILLROOM_PYTHON_THERE", str(warm_program))
    monkeypatch.setattr(remote_runs, "_FOLLOWER", "fakes.local_follower")
    monkeypatch.setattr(remote_runs, "_AGAIN_AFTER_S", 0.0)
    project = Elsewhere(tmp_path)
    yield project
    project.close()


def test_a_run_elsewhere_leaves_here_what_a_run_here_leaves(elsewhere: Elsewhere) -> None:
    elsewhere.open()
    run = elsewhere.start()
    ended = elsewhere.ended(run)

    assert ended.status == "succeeded", ended.error
    rows = read_rows(elsewhere.home / "scored.jsonl")
    assert [row["reward"] for row in rows] == [0.0, 0.1]
    manifest = (elsewhere.home / "scored.jsonl.manifest.json").read_text()
    assert str(elsewhere.home / "rollouts.jsonl") in manifest
    for number in range(2):
        weights = run.path / "checkpoints" / f"step_{number:06d}" / "model.safetensors"
        assert weights.read_bytes() == bytes([number]) * 1000
    # What it printed names the paths here.
    assert f"begin 1 {elsewhere.home}\n" in run.log.read_text()
    for text in (run.log, run.events, run.state_file, elsewhere.home / "scored.jsonl"):
        assert str(elsewhere.there) not in text.read_text()
    assert list((elsewhere.there / "runs").iterdir()) == []
    wait_until(lambda: elsewhere.processes() == [])
