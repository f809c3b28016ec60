"""Commands go over one connection of the system's ssh, whatever the machine's shell says or is."""

import re
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import pytest

from fakes.sshd import MISSING, SSHD, Sshd, SshUser, free_port, make_key
from fakes.waiting import wait_until
from stillroom.errors import EngineError
from stillroom.processes import end_process
from stillroom.remote.channel import SHELL_LINE, run_command
from stillroom.remote.frames import MARK
from stillroom.remote.host import MachineError, UnreachableError
from stillroom.remote.machine import SshAddress
from stillroom.remote.ssh import connection
from stillroom.remote.ssh.connection import SshChannel

SAY = f"echo {MARK.decode().strip()}; cat"


def talk(channel: SshChannel) -> str:
    with run_command(channel, SAY) as command:
        command.send("hello", is_last=True)
        [answer] = command.replies(str)
    return answer


@contextmanager
def channel_with(folder: Path, settings: dict[str, str]) -> Iterator[SshChannel]:
    if SSHD is None:
        pytest.skip(MISSING)
    server = Sshd(folder / "server", settings)
    server.start()
    try:
        with closing(SshChannel("box", server.user(folder / "user").address)) as channel:
            yield channel
    finally:
        server.stop()


@pytest.fixture
def channel(ssh_user: SshUser):
    channel = SshChannel("gpu-box", ssh_user.address)
    yield channel
    channel.close()


def test_commands_share_one_connection(sshd: Sshd, channel: SshChannel):
    log = sshd.folder / "log.txt"
    before = log.read_text().count("Accepted publickey")

    assert [talk(channel) for _ in range(3)] == ["hello"] * 3
    assert log.read_text().count("Accepted publickey") == before + 1


@pytest.mark.parametrize("shell", ["bash", "dash", "zsh", "fish", "tcsh", "busybox sh"])
def test_the_login_shell_may_be_any(sshd: Sshd, tmp_path: Path, shell: str):
    program = shutil.which(shell.partition(" ")[0])
    if program is None:
        pytest.skip(f"no {shell} on this machine")
    user = sshd.user(tmp_path / "user", login=" ".join([program, *shell.split()[1:]]))
    channel = SshChannel("gpu-box", user.address)

    with closing(channel):
        assert talk(channel) == "hello"


def test_the_line_for_login_shells_has_nothing_that_they_read_in_different_ways():
    # Inside single quotes fish reads a backslash, and csh `!` and a line break.
    assert re.fullmatch(r"exec sh -c '[^'\\!\n]+'", SHELL_LINE)


@pytest.mark.parametrize("name", [".bashrc", ".bash_profile"])
def test_start_files_that_print_break_nothing(ssh_user: SshUser, channel: SshChannel, name: str):
    text = "echo Welcome!\nprintf 'no line end'\necho noise >&2\n"
    (ssh_user.home / name).write_text(text)

    assert talk(channel) == "hello"


def test_a_banner_and_the_machines_greeting_break_nothing(tmp_path: Path):
    banner = tmp_path / "banner"
    banner.write_text("Authorized use only\n" * 100)
    with channel_with(tmp_path, {"Banner": str(banner), "PrintMotd": "yes"}) as channel:
        assert talk(channel) == "hello"


def test_a_machine_that_allows_one_session_a_connection_is_used_all_the_same(tmp_path: Path):
    with channel_with(tmp_path, {"MaxSessions": "1"}) as channel:
        assert talk(channel) == "hello"


def test_settings_for_sessions_by_hand_are_passed_over(ssh_user: SshUser, channel: SshChannel):
    port = free_port()
    ssh_user.set(
        "RemoteCommand tmux attach", "RequestTTY force", "ForwardAgent yes",
        "ControlMaster auto", "ControlPath /nonexistent/%C", "PermitLocalCommand yes",
        "LocalCommand exit 1", f"LocalForward {port} 127.0.0.1:9", "ExitOnForwardFailure yes",
    )  # fmt: skip

    assert talk(channel) == "hello"


@pytest.mark.parametrize("end", ["there", "here"])
def test_a_connection_that_was_cut_is_made_anew(sshd: Sshd, channel: SshChannel, end: str):
    with run_command(channel, SAY) as command:
        if end == "there":
            sshd.cut()
        else:
            channel._owner.kill()
        with pytest.raises(UnreachableError, match="gpu-box"):
            command.receive(str)

    assert talk(channel) == "hello"


def test_no_socket_and_no_process_is_left_behind(sshd: Sshd, channel: SshChannel):
    talk(channel)
    owner, path = channel._owner, channel._socket
    assert path.exists()

    channel.close()

    assert not path.exists()
    assert owner.poll() is not None


def test_a_killed_process_leaves_no_connection(ssh_user: SshUser, tmp_path: Path):
    program = textwrap.dedent(f"""
        import time
        from stillroom.remote.machine import SshAddress
        from stillroom.remote.ssh.connection import SshChannel
        channel = SshChannel("box", SshAddress(host="box", options={ssh_user.address.options!r}))
        process = channel.open()
        print(channel._owner.pid, process.pid, flush=True)
        time.sleep(60)
    """)
    killed = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    owners = [psutil.Process(int(pid)) for pid in killed.stdout.readline().split()]
    killed.kill()
    killed.wait(10)
    killed.stdout.close()

    assert len(owners) == 2
    assert psutil.wait_procs(owners, timeout=60)[1] == []


def failure(address: SshAddress) -> EngineError:
    channel = SshChannel("gpu-box", address)
    with closing(channel), pytest.raises(EngineError) as caught, run_command(channel, SAY):
        pass
    return caught.value


def test_a_host_that_nobody_knows():
    error = failure(SshAddress(host="no-such-host.invalid"))

    assert isinstance(error, UnreachableError)
    assert "cannot resolve the host 'no-such-host.invalid' (gpu-box)" in error.problem
    assert "machines.yml" in error.fix
    assert "`ssh no-such-host.invalid`" in error.fix


@pytest.mark.parametrize(
    ("setting", "kind", "problem", "fix"),
    [
        ("Port {free}", UnreachableError, "refuses connections", "port"),
        ("NoSuchSetting yes", MachineError, "nosuchsetting", "correct the ssh configuration"),
    ],
)
def test_a_setting_of_the_user_that_leads_nowhere(ssh_user, setting, kind, problem, fix):
    ssh_user.set(setting.format(free=free_port()))
    error = failure(ssh_user.address)

    assert isinstance(error, kind)
    assert problem in error.problem.lower()
    assert fix in error.fix


def test_a_key_that_the_machine_does_not_accept(ssh_user: SshUser, tmp_path: Path):
    make_key(tmp_path / "other")
    ssh_user.set(f"IdentityFile {tmp_path / 'other'}")
    ssh_user.config.write_text(
        ssh_user.config.read_text().replace(f'"{tmp_path}/user/key"', "none")
    )
    error = failure(ssh_user.address)

    assert isinstance(error, MachineError)
    assert "rejected the login" in error.problem
    assert "Permission denied (publickey)" in error.problem
    assert "ssh-copy-id" in error.fix
    assert "ssh-add" in error.fix


def test_a_connection_that_the_user_holds_is_used_where_we_may_not_log_in(ssh_user: SshUser):
    """As of a machine that asks for a code each time."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="held-") as folder:
        ssh_user.set(f"ControlPath {folder}/s")
        words = ["-F", str(ssh_user.config), "-M", "-N", "box"]
        held = subprocess.Popen([shutil.which("ssh"), *words], stdin=subprocess.DEVNULL)
        wait_until(lambda: Path(folder, "s").exists())
        key = next(ssh_user.config.parent.glob("key"))
        key.rename(key.with_name("code"))
        try:
            with closing(SshChannel("gpu-box", ssh_user.address)) as channel:
                assert [talk(channel), talk(channel)] == ["hello", "hello"]
            assert held.poll() is None
        finally:
            end_process(held)
        assert "keep a shared connection open" in failure(ssh_user.address).fix


def test_a_machine_that_refuses_in_its_own_words_is_quoted(sshd: Sshd, tmp_path: Path):
    user = sshd.user(tmp_path / "user", login="echo This account is not available. #")

    assert "This account is not available." in failure(user.address).problem


def test_a_machine_whose_key_was_never_accepted(ssh_user: SshUser):
    ssh_user.known_hosts.write_text("")
    error = failure(ssh_user.address)

    assert isinstance(error, MachineError)
    assert "is not in your known_hosts yet" in error.problem
    assert "never accepts a key for you" in error.fix
    assert ssh_user.known_hosts.read_text() == ""


def test_a_machine_whose_key_has_changed(ssh_user: SshUser, sshd: Sshd, tmp_path: Path):
    make_key(tmp_path / "other")
    old = f"[127.0.0.1]:{sshd.port} {(tmp_path / 'other.pub').read_text()}"
    ssh_user.known_hosts.write_text(old)
    error = failure(ssh_user.address)

    assert isinstance(error, MachineError)
    assert "host key of gpu-box (box) has changed" in error.problem
    assert "ssh-keygen -f" in error.fix
    assert f'-R "[127.0.0.1]:{sshd.port}"' in error.fix
    assert "never stillroom" in error.fix
    assert ssh_user.known_hosts.read_text() == old


def test_a_machine_that_answers_and_says_nothing(ssh_user: SshUser, monkeypatch):
    monkeypatch.setattr(connection, "_LOGIN_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        ssh_user.set(f"Port {silent.getsockname()[1]}")
        error = failure(ssh_user.address)

    assert isinstance(error, UnreachableError)
    assert "does not answer" in error.problem


def test_without_ssh_the_fix_is_its_package(ssh_user: SshUser, monkeypatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    error = failure(ssh_user.address)

    assert "`ssh`, which is needed" in error.problem
    assert "openssh-client" in error.fix
