"""What an ssh machine is sent arrives, in an environment that is made once."""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from fakes.hosts import blob_of, ready_host
from fakes.sshd import Sshd, SshUser
from stillroom.remote.host import MachineError, UnreachableError
from stillroom.remote.hosts import open_host
from stillroom.remote.records import JobSpec
from stillroom.remote.ssh.host import ChannelHost

MB = 1 << 20
LINE = 'exec sh -c "$1"'


def nothing(_text: str) -> None:
    """Says nothing."""


def host_of(user: SshUser, **fields: object) -> ChannelHost:
    return open_host(user.machine(python=sys.executable, **fields))


def order_for(host: ChannelHost, **fields: object) -> JobSpec:
    return JobSpec(machine=host.machine, files=[], home_paths=[], **fields)


@pytest.fixture
def user(sshd: Sshd, tmp_path: Path) -> SshUser:
    return sshd.user(tmp_path / "user", home="my home")


@pytest.fixture
def host(user: SshUser) -> Iterator[ChannelHost]:
    with closing(host_of(user)) as host:
        yield host


@pytest.fixture
def ready(user: SshUser) -> Iterator[ChannelHost]:
    with closing(ready_host(user.machine())) as host:
        yield host


def test_a_bare_machine_is_made_ready_and_sent_to(tmp_path: Path, user: SshUser, host: ChannelHost):
    """From looking at it, which changes nothing, to the second look, which finds all there."""
    sent = list[str]()
    before = host.facts()
    assert list(user.home.iterdir()) == []

    host.prepare(order_for(host, extras=["train"]), sent.append)
    host.prepare(order_for(host, extras=["train"]), sent.append)
    after = host.facts()

    assert [text for text in sent if text] == ["upload code"]
    assert (before.has_same_code, before.stillroom_version, before.start_s) == (False, None, None)
    assert after.has_same_code
    assert after.stillroom_version is not None
    assert after.start_s is not None
    assert after.python == sys.executable
    assert after.num_processors == os.cpu_count()
    assert abs(after.clock_ahead_s) < 5
    assert after.memory_gb == pytest.approx(psutil.virtual_memory().total / 1e9, rel=0.2)
    assert after.free_disk_gb == pytest.approx(shutil.disk_usage(user.home).free / 1e9, rel=0.2)

    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(b"{}\n" * 1000)
    assert sum(host.send([blob_of(rows)], host.missing([blob_of(rows)]))) == 3000
    assert host.missing([blob_of(rows)]) == {}
    root = user.home / ".stillroom-remote"
    assert (root / "store" / blob_of(rows).sha256).read_bytes() == rows.read_bytes()
    assert [
        path for path in root.rglob("*") if path.stat().st_mode & 0o77 and path.parent == root
    ] == []


def test_files_that_were_deleted_or_changed_there_come_back(user: SshUser, host: ChannelHost):
    """On some machines a job deletes old files; what is left must not be taken for whole."""
    root = user.home / ".stillroom-remote"
    host.prepare(order_for(host), nothing)
    [code] = (root / "code").glob("*/stillroom/__init__.py")
    code.write_text("raise SystemExit")
    [python] = (root / "venvs").glob("*/bin/python")
    python.unlink()
    with pytest.raises(UnreachableError, match=r"not found|No such file"):
        host.missing([])
    said = list[str]()

    host.prepare(order_for(host), said.append)

    assert [text for text in said if text] == ["upload code again"]
    with closing(host_of(user)) as other:  # It finds the environment without making one.
        assert other.missing([]) == {}
    [python] = (root / "venvs").glob("*/bin/python")
    python.unlink()
    with pytest.raises(UnreachableError):
        host.missing([])
    assert host.missing([]) == {}  # Made anew, by somebody who only looks after a run.
    assert [path.name for path in (root / "code").glob(".new-*")] == []


def test_no_list_of_processes_shows_what_a_command_is(ready: ChannelHost):
    with ready.command("have"):
        lines = [" ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])]

    ours = [line for line in lines if "box --" in line or "-- box" in line]
    assert ours
    assert [line for line in ours if ".stillroom-remote" in line or "have" in line] == []


def test_a_model_goes_on_where_the_server_was_stopped(
    sshd: Sshd, tmp_path: Path, ready: ChannelHost
):
    model = tmp_path / "model.safetensors"
    model.write_bytes(os.urandom(MB) * 24)
    blob = blob_of(model)
    sending = ready.send([blob], {})
    assert [next(sending) for _ in range(8)] == [MB] * 8
    sshd.stop()

    with pytest.raises(UnreachableError, match="gpu-box"):
        sum(sending)
    with pytest.raises(UnreachableError, match="refuses connections"):
        ready.missing([blob])
    sshd.start()

    have = ready.missing([blob])
    assert 0 < have[blob.sha256] < 24 * MB
    assert sum(ready.send([blob], have)) == 24 * MB - have[blob.sha256]
    assert ready.missing([blob]) == {}


def limited_to(command: str, sshd: Sshd, folder: Path) -> SshUser:
    """Somebody whose log-in shell carries out its line ($1) by way of a command that limits it."""
    shell = folder / "shell"
    shell.write_text(f"#!/bin/sh\nshift\n{command}\n")
    shell.chmod(0o755)
    return sshd.user(folder / "user", login=str(shell))


def test_a_full_disk_says_so_and_what_was_sent_stays(sshd: Sshd, tmp_path: Path):
    # The limit of a file's size, in blocks of 512 bytes, which the code's archive does not reach.
    model = tmp_path / "model.safetensors"
    model.write_bytes(os.urandom(MB) * 12)
    user = limited_to("ulimit -f 20480; " + LINE, sshd, tmp_path)
    with closing(ready_host(user.machine())) as host:
        with pytest.raises(MachineError, match="gpu-box: the disk is full") as caught:
            list(host.send([blob_of(model)], {}))
        have = host.missing([blob_of(model)])

    assert blob_of(model).sha256 in caught.value.problem
    assert "folder:" in caught.value.problem
    assert have == {blob_of(model).sha256: 10 * MB}


def test_a_disk_without_room_for_the_code_says_so(sshd: Sshd, tmp_path: Path):
    user = limited_to("ulimit -f 100; " + LINE, sshd, tmp_path)

    with (
        closing(host_of(user)) as host,
        pytest.raises(MachineError, match="disk of gpu-box is full"),
    ):
        host.prepare(order_for(host), nothing)
    assert list((user.home / ".stillroom-remote" / "code").glob("*/*")) == []


@pytest.mark.skipif(not Path("/sys").is_dir(), reason="no folder that nobody may write to")
def test_a_folder_that_must_not_be_written_is_named(user: SshUser):
    host = host_of(user, folder="/sys/stillroom")
    with closing(host), pytest.raises(MachineError, match="/sys") as caught:
        host.prepare(order_for(host), nothing)
    assert "set the machine's `folder:`" in caught.value.fix


def test_a_given_python_that_is_not_there(user: SshUser):
    with closing(open_host(user.machine(python="/opt/none/bin/python"))) as host:
        with pytest.raises(MachineError, match="'/opt/none/bin/python' in machines"):
            host.prepare(order_for(host), nothing)
        assert host.facts().python is None


@pytest.mark.parametrize(
    ("folder", "blocked"),
    [
        ("~/file", "{home}/file"),
        ("~/file/inside", "{home}/file"),
        pytest.param(
            "/proc/stillroom",
            "/proc",
            marks=pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="no /proc"),
        ),
    ],
)
def test_a_folder_that_cannot_be_made_is_known_before_anything_is_sent(
    user: SshUser, folder: str, blocked: str
):
    (user.home / "file").touch()
    with closing(host_of(user, folder=folder)) as host:
        assert host.facts().blocked_folder == blocked.format(home=user.home)
