"""One connection to a machine through the system's ssh, shared by all commands.

Processes share it (ControlMaster) through a socket in a private folder of the user. The ssh process
that owns the connection runs a command whose input is a pipe from this process: when this process
exits for any reason, the pipe closes, and with it the command and the connection.
"""

import os
import re
import secrets
import shutil
import stat
import subprocess
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, cast

from stillroom import bounds
from stillroom.errors import EngineError
from stillroom.processes import end_process
from stillroom.remote.channel import SHELL_LINE, PipedProcess
from stillroom.remote.frames import MARK, BrokenStreamError, Frames
from stillroom.remote.host import MachineError, UnreachableError
from stillroom.remote.machine import SshAddress
from stillroom.secrecy.environments import ssh_environment

_CONNECT_S = 20
_LOGIN_S = bounds.LOGIN.limit
_ALIVE_EVERY_S = 3
_ALIVE_TRIES = 3
_HOLD_COMMAND = f"echo {MARK.decode().strip()}; exec cat >/dev/null"
_SSH_ERROR = 255
"""ssh's exit code for its own errors, as opposed to those of the command."""
_OPTIONS = {
    "BatchMode": "yes",
    "ConnectTimeout": str(_CONNECT_S),
    "ServerAliveInterval": str(_ALIVE_EVERY_S),
    "ServerAliveCountMax": str(_ALIVE_TRIES),
    "ControlPersist": "no",
    "LogLevel": "ERROR",
    # Overrides settings in the user's ssh config that are for interactive sessions.
    "RemoteCommand": "none",
    "RequestTTY": "no",
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "ClearAllForwardings": "yes",
    "PermitLocalCommand": "no",
}
"""A dead connection is detected within about 12 seconds; ssh never prompts for a password."""


class SshChannel:
    """Runs commands on a machine over one ssh connection, which is opened when needed.

    Thread-safe.
    """

    def __init__(self, name: str, address: SshAddress) -> None:
        self._name, self._address = name, address
        self._owner: PipedProcess | None = None
        self._socket: Path | None = None
        """The socket of the shared connection; None if the user's own open connection is used."""
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """The machine's name in error messages."""
        return self._name

    def open(self) -> PipedProcess:
        """Starts a shell on the machine that reads one line and executes it.

        Raises UnreachableError or MachineError if no connection can be opened.
        """
        with self._lock:
            if self._owner is None or self._owner.poll() is not None:
                self._connect()
        return self._start(is_owner=False)

    def explain(self, exit_code: int | None, stderr: str) -> EngineError | None:
        """Returns the connection error that made a command fail; None if it failed by itself."""
        owner = self._owner
        if exit_code == _SSH_ERROR or owner is None or owner.poll() is not None:
            return connection_error(self._name, self._address, stderr)
        return None

    def close(self) -> None:
        """Closes the connection and all commands that still run over it."""
        with self._lock:
            self._disconnect()

    def _connect(self) -> None:
        """Opens the shared connection, or uses one that the user holds open."""
        self._disconnect()
        self._socket = _socket_folder() / secrets.token_hex(6)
        try:
            self._log_in()
        except LoginRefusedError:
            # With one-time codes, the user may hold a shared connection open.
            self._socket = None
            if not self._is_held_by_user():
                raise
            self._log_in()

    def _log_in(self) -> None:
        """Starts the ssh process that owns the connection; returns once it is logged in."""
        owner = self._start(is_owner=True)
        self._owner = owner
        # The login may hang, and reading has no timeout of its own.
        timeout = threading.Timer(_LOGIN_S, owner.kill)
        timeout.start()
        try:
            _wait_for_login(owner)
        except BrokenStreamError as broken:
            with suppress(subprocess.TimeoutExpired):
                owner.wait(_ALIVE_EVERY_S)
            ssh_output = f"{owner.stderr_tail()}\n{broken.output}".strip()
            self._disconnect()
            raise connection_error(self._name, self._address, ssh_output) from broken
        finally:
            timeout.cancel()

    def _disconnect(self) -> None:
        """Closes the connection, if there is one."""
        if (owner := self._owner) is None:
            return
        self._owner = None
        for stream in (owner.stdin, owner.stdout):
            with suppress(OSError):
                cast("IO[bytes]", stream).close()
        # ssh itself would wait until the other commands exit.
        end_process(owner, grace_s=_ALIVE_EVERY_S)
        if self._socket is not None:
            self._socket.unlink(missing_ok=True)

    def _start(self, *, is_owner: bool) -> PipedProcess:
        """Starts ssh: to own the shared connection, or to run a command over it."""
        options = dict(_OPTIONS)
        if self._socket is not None:
            options |= {"ControlMaster": "yes" if is_owner else "no"}
            options |= {"ControlPath": str(self._socket)}
        return PipedProcess([*self._arguments(options), SHELL_LINE], ssh_environment())

    def _is_held_by_user(self) -> bool:
        """Returns whether the user's ssh config shares a connection that is open now."""
        program, *arguments = self._arguments({})
        try:
            check = subprocess.run(
                [program, "-O", "check", *arguments],
                check=False,
                capture_output=True,
                env=ssh_environment(),
                timeout=_LOGIN_S,
            )
        except subprocess.TimeoutExpired:
            return False
        return check.returncode == 0

    def _arguments(self, options: Mapping[str, str]) -> list[str]:
        """Returns the ssh command line up to the host; `options` override those of the user."""
        program = shutil.which("ssh")
        if program is None:
            raise MachineError(
                f"`ssh`, which is needed to connect to {self._name}, is not installed here",
                "install the OpenSSH client (Debian/Ubuntu: apt-get install openssh-client)",
            )
        flags = [flag for name, value in options.items() for flag in ("-o", f"{name}={value}")]
        port = [] if self._address.port is None else ["-p", str(self._address.port)]
        # ssh uses the first value of an option, so these come before the user's.
        return [program, "-T", *flags, *self._address.options, *port, "--", self._address.host]


def _wait_for_login(owner: PipedProcess) -> None:
    """Runs the command that keeps the connection open, and waits until it has started.

    Raises BrokenStreamError if the login fails.
    """
    with suppress(OSError):
        stream = cast("IO[bytes]", owner.stdin)
        stream.write(_HOLD_COMMAND.encode() + b"\n")
        stream.flush()
    Frames(cast("IO[bytes]", owner.stdout), cast("IO[bytes]", owner.stdin)).skip_greeting()


def _socket_folder() -> Path:
    """Returns a private folder for sockets, in /tmp because socket paths must be short."""
    folder = Path("/tmp") / f"stillroom-ssh-{os.getuid()}"  # noqa: S108
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    state = folder.lstat()
    is_safe = stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid()
    if not is_safe or state.st_mode & 0o77:
        raise MachineError(
            f"{folder} is not a folder that you own with mode 0700",
            "delete the folder: it contains only sockets of ssh connections, and is created again",
        )
    return folder


_MACHINES = "machines.yml"
# The text may contain output of the machine, which must not choose the command that users run.
_KEYGEN_COMMAND = re.compile(r"ssh-keygen -f ['\"]?[\w./~ -]+['\"]? -R ['\"]?[\[\]\w.:-]+['\"]?")
_CONFIG_ERROR = re.compile(
    r"Bad (owner|configuration|permissions)|terminating, \d+ bad|percent_expand"
)


class LoginRefusedError(MachineError):
    """The machine did not accept any of the user's keys."""


def connection_error(name: str, address: SshAddress, ssh_output: str) -> EngineError:
    """Returns the error for a connection that failed or was lost, given what ssh printed."""
    text = " ".join(ssh_output.split())[-500:] or "ssh printed nothing"
    command = ssh_command(address)
    if "IDENTIFICATION HAS CHANGED" in ssh_output:
        return _changed_key_error(name, address, ssh_output)
    if "Host key verification failed" in ssh_output or "host key is known" in ssh_output:
        return MachineError(
            f"the host key of {name} ({address.host}) is not in your known_hosts yet: {text}",
            f"run `{command}` once in a terminal, compare the key's fingerprint with the "
            "machine's, and accept it; stillroom never accepts a key for you",
        )
    if "Permission denied" in ssh_output or "Too many authentication failures" in ssh_output:
        return LoginRefusedError(
            f"{name} ({address.host}) rejected the login: {text}",
            f"check the user name (`user@host` in machines.yml, or User in ~/.ssh/config), and "
            f"make `{command}` work without a password: install your public key on the machine "
            "(`ssh-copy-id`), unlock the local key (`ssh-add`), or set IdentityFile in "
            "~/.ssh/config; if the machine asks for a one-time code, keep a shared connection open "
            "(ControlMaster, ControlPath and ServerAliveInterval in ~/.ssh/config): it is reused",
        )
    if _CONFIG_ERROR.search(ssh_output):
        return MachineError(
            f"ssh rejects its configuration for {name}: {text}",
            f"correct the ssh configuration until `{command}` works",
        )
    return _unreachable_error(name, address, ssh_output, text)


def _unreachable_error(
    name: str, address: SshAddress, ssh_output: str, text: str
) -> UnreachableError:
    """Returns the error for a machine that does not answer, given what ssh printed."""
    command = ssh_command(address)
    if "Could not resolve hostname" in ssh_output:
        fix = (
            f"check the local network and the name {address.host!r} in {_MACHINES} and "
            f"~/.ssh/config: `{command}`"
        )
        return UnreachableError(f"cannot resolve the host {address.host!r} ({name}): {text}", fix)
    if "Connection refused" in ssh_output:
        fix = f"check that the machine is up and that its port is right (`port:` in {_MACHINES})"
        return UnreachableError(f"{name} ({address.host}) refuses connections: {text}", fix)
    return UnreachableError(
        f"{name} ({address.host}) does not answer: {text}",
        f"a run retries by itself; if the error persists, check whether `{command}` works",
    )


def _changed_key_error(name: str, address: SshAddress, ssh_output: str) -> MachineError:
    """Returns the error for a host key that differs from the one in known_hosts."""
    quoted = _KEYGEN_COMMAND.search(ssh_output)
    command = quoted[0].strip() if quoted else f"ssh-keygen -R {address.host}"
    return MachineError(
        f"the host key of {name} ({address.host}) has changed: the machine was reinstalled, or "
        "somebody is intercepting the connection",
        "ask whoever runs the machine which of the two happened. Only if it was reinstalled, the "
        f"user (never stillroom) removes the old key with `{command}`, then runs "
        f"`{ssh_command(address)}` to accept the new one",
    )


def ssh_command(address: SshAddress) -> str:
    """Returns the command with which a user can try the same connection."""
    port = [] if address.port is None else ["-p", str(address.port)]
    return " ".join(["ssh", *address.options, *port, address.host])
