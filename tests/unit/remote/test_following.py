"""Runs on another machine, from the start here to the last file back, whatever breaks meanwhile."""

import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from fakes.rollout_rows import read_rows
from fakes.runs_elsewhere import Elsewhere
from fakes.started_runs import asked_long_ago
from fakes.user_files import suspend
from fakes.waiting import wait_until
from stillroom import api
from stillroom.jobs import remote_runs, supervise
from stillroom.outputs import OutputHeldError, check_unlocked
from stillroom.run_folder import create_run
from stillroom.types import RunKind, RunStatus

TESTS = Path(__file__).parents[2]


@pytest.fixture
def elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_program: Path
) -> Iterator[Elsewhere]:
    """A workspace and another machine; see fakes/local_follower.py."""
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
    monkeypatch.setenv("STILLROOM_PYTHON_THERE", str(warm_program))
    monkeypatch.setattr(remote_runs, "_FOLLOWER", "fakes.local_follower")
    monkeypatch.setattr(remote_runs, "_RESTART_AFTER_S", 0.0)
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


def test_a_run_goes_on_while_its_machine_cannot_be_reached(elsewhere: Elsewhere) -> None:
    elsewhere.machine = {"keep_remote": True}
    run = elsewhere.start()
    wait_until(lambda: elsewhere.rewarded(run) == ["0"])
    elsewhere.cut()
    wait_until(lambda: elsewhere.report(run).unreachable is not None)
    report = elsewhere.report(run)
    assert (report.status, report.where) == ("running", "box")
    assert "does not answer" in str(report.unreachable)
    elsewhere.open()
    wait_until(lambda: elsewhere.rewarded(run) == ["0", "1"])
    assert elsewhere.report(run).last_contact == report.last_contact

    elsewhere.mend()
    assert elsewhere.ended(run).status == "succeeded"
    assert elsewhere.report(run).unreachable is None
    # Nothing was done twice.
    assert elsewhere.rewarded(run) == ["0", "1"]
    assert (run.path / "checkpoints" / "step_000001" / "model.safetensors").exists()


def test_a_follower_that_is_killed_at_any_moment_is_followed_by_another(
    elsewhere: Elsewhere,
) -> None:
    elsewhere.machine = {"keep_remote": True}
    run = elsewhere.start()
    for moment in range(5):
        # In a start, between files, and while the rewards wait.
        time.sleep(random.Random(moment).uniform(0.2, 1.5))
        for follower in elsewhere.followers():
            follower.send_signal(signal.SIGKILL)
        elsewhere.open(moment)
        assert elsewhere.report(run).status in ("starting", "running", "succeeded")
    elsewhere.open()

    assert elsewhere.ended(run).status == "succeeded"
    assert elsewhere.rewarded(run) == ["0", "1"]
    assert [row["reward"] for row in read_rows(elsewhere.home / "scored.jsonl")] == [0.0, 0.1]
    assert f"begin 0 {elsewhere.home}\nbegin 1 {elsewhere.home}\n" in run.log.read_text()


def test_a_run_is_cancelled_before_it_began_there(elsewhere: Elsewhere) -> None:
    elsewhere.cut()
    run = elsewhere.start()
    wait_until(lambda: elsewhere.report(run).unreachable is not None)
    api.cancel_run(elsewhere.workspace, api.CancelRun(run_id=run.run_id))
    assert elsewhere.ended(run).status == "cancelled"
    assert not (elsewhere.there / "runs").exists()


def test_a_cancellation_reaches_a_machine_that_was_unreachable(elsewhere: Elsewhere) -> None:
    run = elsewhere.start()
    wait_until(lambda: elsewhere.rewarded(run) == ["0"])
    elsewhere.cut()
    wait_until(lambda: elsewhere.report(run).unreachable is not None)
    cancelled = api.cancel_run(elsewhere.workspace, api.CancelRun(run_id=run.run_id))
    assert cancelled.status == "running"
    wait_until(lambda: "cancellation is queued" in str(elsewhere.report(run).unreachable))
    elsewhere.mend()
    assert elsewhere.ended(run).status == "cancelled"
    assert (run.path / "checkpoints" / "step_000000" / "model.safetensors").exists()
    wait_until(lambda: elsewhere.processes() == [])


def test_however_many_servers_look_a_run_has_one_follower(elsewhere: Elsewhere) -> None:
    run = elsewhere.start()

    def num_followers() -> int:
        with ThreadPoolExecutor(8) as servers:
            list(servers.map(lambda _: supervise.read_run(run), range(40)))
        return len(elsewhere.followers())

    for _ in range(2):
        # The lock of one that was killed may be held a moment longer.
        wait_until(lambda: num_followers() > 0)
        assert num_followers() == 1
        elsewhere.kill_followers()
        wait_until(lambda: elsewhere.followers() == [])


def test_a_secret_that_is_gone_ends_a_run_that_has_not_begun(elsewhere: Elsewhere) -> None:
    elsewhere.cut()
    run = elsewhere.start(secrets={"HIDDEN-1": "a secret"})
    wait_until(lambda: elsewhere.report(run).unreachable is not None)
    elsewhere.kill_followers()
    ended = elsewhere.ended(run)
    assert ended.status == "failed"
    assert ended.error is not None
    assert "HIDDEN-1" in ended.error.problem
    assert "start the run again" in ended.error.fix
    texts = [path.read_bytes() for path in elsewhere.root.rglob("*") if path.is_file()]
    assert not any(b"a secret" in text for text in texts)


def test_a_run_that_nobody_can_reach_stops_at_its_machines_hours_with_its_work(
    elsewhere: Elsewhere,
) -> None:
    elsewhere.machine = {"max_hours": 2.0 / 3600, "price_per_hour": 3600.0}
    run = elsewhere.start()
    wait_until(lambda: elsewhere.rewarded(run) == ["0"])
    elsewhere.cut()
    wait_until(lambda: elsewhere.state_there(run).status.is_final)
    elsewhere.mend()
    ended = elsewhere.ended(run)
    assert ended.status == "cancelled"
    assert ended.error is not None
    assert "max_hours" in ended.error.problem
    assert "raise that limit" in ended.error.problem
    assert (run.path / "checkpoints" / "step_000000" / "model.safetensors").exists()
    # A dollar for each second: those before the start and of bringing back count too.
    assert ended.machine_usd is not None
    assert ended.machine_usd >= 2.0


def test_a_run_on_a_machine_that_cannot_be_opened_here_says_so_and_ends(
    elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = elsewhere.start()
    elsewhere.kill_followers()
    spec = run.path / "remote.json"
    spec.write_bytes(spec.read_bytes().replace(b'"ssh":{', b'"ssh":null,"unknown":{'))
    monkeypatch.setattr(remote_runs, "_FOLLOWER", "stillroom.remote.follower.__main__")
    assert elsewhere.ended(run).status == "failed"
    assert elsewhere.report(run).error is not None


def test_a_run_that_waits_its_turn_sends_nothing_and_is_cancelled(elsewhere: Elsewhere) -> None:
    earlier = create_run(elsewhere.workspace, RunKind.SFT, {})
    owner = earlier.owner_lock()
    assert owner.try_acquire()
    earlier.write(msgspec.structs.replace(earlier.read(), status=RunStatus.RUNNING))
    run = elsewhere.start(start_after=[earlier.run_id])
    wait_until(lambda: elsewhere.report(run).progress is not None)
    progress = elsewhere.report(run).progress
    assert progress is not None
    assert progress.phase == f"wait for {earlier.run_id}"
    api.cancel_run(elsewhere.workspace, api.CancelRun(run_id=run.run_id))
    assert elsewhere.ended(run).status == "cancelled"
    assert list(elsewhere.there.iterdir()) == []
    owner.release()


def test_a_second_cancel_kills_a_run_there_that_does_not_stop(elsewhere: Elsewhere) -> None:
    run = elsewhere.start()
    wait_until(lambda: elsewhere.rewarded(run) == ["0"])
    suspend(elsewhere.worker_there(run).pid)
    api.cancel_run(elsewhere.workspace, api.CancelRun(run_id=run.run_id))
    asked_long_ago(run)
    api.cancel_run(elsewhere.workspace, api.CancelRun(run_id=run.run_id))
    assert elsewhere.ended(run).status == "cancelled"
    wait_until(lambda: elsewhere.processes() == [])


def test_no_second_run_here_writes_the_output_of_a_run_elsewhere(elsewhere: Elsewhere) -> None:
    run = elsewhere.start()
    wait_until(lambda: elsewhere.rewarded(run) == ["0"])
    with pytest.raises(OutputHeldError, match=f"a run on another machine .* run {run.run_id}"):
        check_unlocked(elsewhere.home / "scored.jsonl")
    (elsewhere.home / "scored.jsonl").write_text("by hand\n")
    elsewhere.open()
    ended = elsewhere.ended(run)
    assert ended.status == "failed"
    assert ended.error is not None
    assert "another local process wrote to" in ended.error.problem
    assert (elsewhere.home / "scored.jsonl").read_text() == "by hand\n"
    assert len(read_rows(run.path / "brought_back" / "scored.jsonl")) == 2
