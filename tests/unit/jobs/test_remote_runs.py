"""When the process is started that follows a run on another machine, and with which secrets."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stillroom.files import write_json
from stillroom.jobs import remote_runs, supervise
from stillroom.processes import RUN_MARK_VARIABLE
from stillroom.run_folder import KILL_MARK, NewRun, RunFolder, create_run
from stillroom.settings import Workspace
from stillroom.types import RunKind, RunStatus


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[str, str]]:
    """The secrets of each follower that would be started."""
    started: list[Mapping[str, str]] = []
    monkeypatch.setattr(
        remote_runs, "start_detached", lambda *_, secrets, **__: started.append(secrets)
    )
    monkeypatch.delenv(RUN_MARK_VARIABLE, raising=False)
    return started


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    order = msgspec.json.encode({"key_names": ["A_KEY"]})
    return create_run(
        Workspace(tmp_path), RunKind.SFT, {}, NewRun(run_files={"remote.json": order})
    )


def view(run: RunFolder, **fields: Any) -> None:
    write_json(run.path / "remote_view.json", {"where": "box", **fields})


def long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 60)


def test_a_dead_follower_is_started_again_with_the_keys_by_name(
    run: RunFolder, starts: list[Mapping[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_KEY", "sk-123")
    assert supervise.read_run(run).status is RunStatus.STARTING
    assert starts == [{"A_KEY": "sk-123"}]
    assert "sk-123" not in (run.path / "follower.json").read_text()


def test_one_that_dies_at_once_is_not_started_at_every_look(
    run: RunFolder, starts: list[Mapping[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(5):
        supervise.read_run(run)
    assert len(starts) == 1
    long_ago(monkeypatch)
    supervise.read_run(run)
    assert len(starts) == 2


@pytest.mark.parametrize(("phase", "num_starts"), [("bringing_back", 1), ("over", 0)])
def test_a_run_that_has_ended_is_followed_until_nothing_of_it_is_left_there(
    run: RunFolder, starts: list[Mapping[str, str]], phase: str, num_starts: int
) -> None:
    run.write(msgspec.structs.replace(run.read(), status=RunStatus.SUCCEEDED))
    view(run, phase=phase)
    assert supervise.read_run(run).status is RunStatus.SUCCEEDED
    assert len(starts) == num_starts


def test_the_process_of_another_run_starts_none_which_would_end_with_it(
    run: RunFolder, starts: list[Mapping[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_MARK_VARIABLE, "a mark")
    supervise.read_run(run)
    assert starts == []


def test_a_run_elsewhere_is_never_interrupted_because_nobody_here_has_its_lock(
    run: RunFolder, starts: list[Mapping[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run.write(msgspec.structs.replace(run.read(), status=RunStatus.RUNNING))
    view(run, phase="running", has_started=True, problem="it does not answer")
    long_ago(monkeypatch)
    assert supervise.read_run(run).status is RunStatus.RUNNING
    assert supervise.cancel_run(run).status is RunStatus.RUNNING
    assert run.cancel_mark.exists()
    assert not (run.path / KILL_MARK).exists()


def test_the_hubs_token_comes_through_the_pipe_into_the_workers_own_environment() -> None:
    code = (
        "import os; from stillroom.jobs.worker import piped_secrets; secrets = piped_secrets(); "
        "print(sorted(secrets), os.environ['HF_TOKEN'], os.environ.get('A_KEY'), "
        "os.environ.get('STILLROOM_PIPED_VARIABLES'))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code],
        input=b'{"HF_TOKEN": "hf_1", "A_KEY": "sk"}',
        env={**os.environ, "STILLROOM_PIPED_VARIABLES": "HF_TOKEN,NOT_GIVEN"},
        capture_output=True,
        check=True,
        timeout=60,
    )
    assert printed.stdout.decode().split() == ["['A_KEY',", "'HF_TOKEN']", "hf_1", "None", "None"]
