"""A run over a real ssh connection, from start_… with `where` to the last file back."""

import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from fakes.rollout_lines import encoded
from fakes.rollout_rows import read_rows, rollout_row, write_lines
from fakes.sshd import Sshd, SshUser
from fakes.user_files import write_tools
from fakes.waiting import wait_until
from stillroom import api
from stillroom.settings import Workspace

TOKEN = "canary-7f3a91c2-token"
# The reward is 1 only if the key has reached it; it is given once the gate is open.
REWARDS = """
    import os, time
    from pathlib import Path

    @reward
    def keyed(args, messages):
        while not Path({gate!r}).exists():
            time.sleep(0.02)
        return float(len(os.environ.get("SHOP_TOKEN", "")) == {length})
    """


@pytest.fixture
def user(sshd: Sshd, tmp_path: Path) -> Iterator[SshUser]:
    user = sshd.user(tmp_path / "there", home="my home")
    (user.home / ".bashrc").write_text("echo Welcome to the box\n")
    yield user
    for process in processes_there(user):
        with suppress(psutil.Error):
            process.kill()


@pytest.fixture
def workspace(user: SshUser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    config, root = tmp_path / "config", tmp_path / "here"
    config.mkdir()
    root.mkdir()
    monkeypatch.setenv("STILLROOM_CONFIG", str(config))
    monkeypatch.setenv("SHOP_TOKEN", TOKEN)
    (config / "keys.yml").write_text("- {key: SHOP_TOKEN, tools: true}\n")
    machine = {
        "ssh": {"host": "box", "options": ["-F", str(user.config)]},
        "python": sys.executable,
        "keep_remote": True,
    }
    (config / "machines.yml").write_text(json.dumps({"gpu-box": machine}))
    rows = [rollout_row(task_id=f"t{n}") for n in range(2)]
    write_lines(root / "rollouts.jsonl", map(encoded, rows))
    write_tools(root, REWARDS.format(gate=str(gate(root)), length=len(TOKEN)), name="rewards.py")
    return Workspace(root)


def gate(root: Path) -> Path:
    return root.with_name("gate")


def processes_there(user: SshUser) -> list[psutil.Process]:
    """The processes that were started from the machine's folder."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if any(str(user.home) in word for word in process.cmdline()):
                found.append(process)
    return found


def with_token(user: SshUser) -> list[str]:
    """The files there that hold the key, and the processes there whose command line does."""
    files = [
        str(path)
        for path in user.home.rglob("*")
        if path.is_file() and TOKEN.encode() in path.read_bytes()
    ]
    lines = [" ".join(process.cmdline()) for process in processes_there(user)]
    return [*files, *(line for line in lines if TOKEN in line)]


def commands_with_token(user: SshUser) -> list[str]:
    """The commands of ours there whose environment holds the key; a run's own process may."""
    return [
        " ".join(process.cmdline())
        for process in processes_there(user)
        if "stillroom.remote.agent" in process.cmdline() and TOKEN in process.environ().values()
    ]


def test_a_run_over_ssh_outlives_its_server_and_its_keys_are_in_no_file(
    sshd: Sshd, user: SshUser, workspace: Workspace
):
    request = {"input": "rollouts.jsonl", "output": "scored.jsonl", "rewards": "rewards.py"}
    run = api.score_rollouts(workspace, api.ScoreRollouts(**request, where="gpu-box"))

    def report() -> api.RunReport:
        return api.get_run(workspace, api.GetRun(run_id=run.run_id))

    # The reward's process runs only when the run there has begun.
    wait_until(lambda: report().status == "running")
    assert with_token(user) == []
    assert commands_with_token(user) == []
    sshd.stop()
    wait_until(lambda: report().unreachable is not None)
    assert report().status == "running"
    gate(workspace.root).touch()
    sshd.start()
    wait_until(lambda: report().status != "running")

    assert report().status == "succeeded", report().error
    assert [row["reward"] for row in read_rows(workspace.root / "scored.jsonl")] == [1.0, 1.0]
    wait_until(lambda: processes_there(user) == [])
    assert with_token(user) == []
