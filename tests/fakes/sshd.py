"""A real OpenSSH server on the loopback: its own port, keys and settings, run as this user.

A test is given users of it; each is a key of its own with a home folder and a login shell.
"""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from stillroom.processes import end_process
from stillroom.remote.machine import Machine, SshAddress

# Debian keeps it out of the PATH of users.
SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin:/sbin")
MISSING = "no sshd: apt-get install openssh-server"


@dataclass(frozen=True)
class SshUser:
    """Someone who may log in: with one key, to one home folder, with one login shell."""

    home: Path
    config: Path
    """The file for `ssh -F`; it names the server `box`."""
    known_hosts: Path

    @property
    def address(self) -> SshAddress:
        return SshAddress(host="box", options=["-F", str(self.config)])

    def machine(self, **fields: object) -> Machine:
        return Machine(name="gpu-box", ssh=self.address, **fields)

    def set(self, *lines: str) -> None:
        """Puts settings before the others in the user's ssh config."""
        settings = "".join(f"  {line}\n" for line in lines)
        old = self.config.read_text()
        self.config.write_text(old.replace("Host box\n", f"Host box\n{settings}"))


class Sshd:
    """The server. `start` and `stop` may follow one another; the port and the keys stay."""

    def __init__(self, folder: Path, settings: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.port = free_port()
        self._settings = dict(settings or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._num_users = 0
        folder.mkdir(mode=0o700, exist_ok=True)
        (folder / "authorized_keys").touch(mode=0o600)
        make_key(folder / "host_key")
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # It refuses root without it.

    def start(self) -> None:
        """Starts the server and returns when it listens."""
        settings = {
            "Port": self.port,
            "ListenAddress": "127.0.0.1",
            "HostKey": self.folder / "host_key",
            "AuthorizedKeysFile": self.folder / "authorized_keys",
            "PidFile": "none",
            "StrictModes": "no",
            "UsePAM": "no",
            "PasswordAuthentication": "no",
            "KbdInteractiveAuthentication": "no",
            "PermitRootLogin": "prohibit-password",
            "PermitUserEnvironment": "yes",
            "PrintMotd": "no",
            "UseDNS": "no",
        }
        config = self.folder / "sshd_config"
        lines = [f"{name} {value}" for name, value in ({**settings, **self._settings}).items()]
        config.write_text("\n".join(lines) + "\n")
        log = self.folder / "log.txt"
        self._process = subprocess.Popen(
            [str(SSHD), "-D", "-f", config, "-E", log],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for _ in range(500):
            assert self._process.poll() is None, f"sshd ended: {log.read_text()}"
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.01)
        raise AssertionError("sshd does not listen")

    def stop(self) -> None:
        """Stops the server and breaks its connections."""
        if self._process is not None:
            self.cut()
            end_process(self._process)
            self._process = None

    def cut(self) -> None:
        """Breaks the connections; the server stays."""
        assert self._process is not None
        for process in psutil.Process(self._process.pid).children(recursive=True):
            # What they have started goes on, as on a real machine.
            with suppress(psutil.NoSuchProcess):
                if process.name().startswith("sshd"):
                    process.kill()

    def user(self, folder: Path, *, home: str = "home", login: str | None = None) -> SshUser:
        """Lets somebody in whose files lie in `folder`; `login` is a command that takes `-c LINE`.

        Where none is given, the login shell is this system user's own.
        """
        folder.mkdir(exist_ok=True)
        (folder / home).mkdir(exist_ok=True)
        key, known_hosts = folder / "key", folder / "known_hosts"
        make_key(key)
        options = [f'environment="HOME={folder / home}"']
        if login is not None:
            line = f'exec {login} -c \\"$SSH_ORIGINAL_COMMAND\\"'
            options.append(f'command="{line}"')
        with (self.folder / "authorized_keys").open("a") as stream:
            stream.write(f"{','.join(options)} {key.with_suffix('.pub').read_text()}")
        host_key = (self.folder / "host_key.pub").read_text()
        known_hosts.write_text(f"[127.0.0.1]:{self.port} {host_key}")
        config = folder / "ssh_config"
        config.write_text(
            "Host box\n"
            f"  HostName 127.0.0.1\n  Port {self.port}\n  IdentityFile {quoted(key)}\n"
            f"  UserKnownHostsFile {quoted(known_hosts)}\n"
            "  GlobalKnownHostsFile /dev/null\n  IdentitiesOnly yes\n  IdentityAgent none\n"
        )
        return SshUser(folder / home, config, known_hosts)


def quoted(path: Path) -> str:
    return f'"{path}"'


def make_key(path: Path) -> None:
    """Writes a new key and its public half."""
    program = shutil.which("ssh-keygen") or "ssh-keygen"
    subprocess.run([program, "-q", "-t", "ed25519", "-N", "", "-f", path], check=True, timeout=30)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
