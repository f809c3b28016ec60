"""Runs commands on a machine, with pipes to their standard input and output.

There are two kinds of channel: ssh (`ssh/connection.py`), and a subprocess of this machine.
"""

import os
import re
import shlex
import subprocess
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any, Protocol, TypeVar, cast

from stillroom import bounds
from stillroom.errors import EngineError
from stillroom.remote.frames import MARK, BrokenStreamError, Frames
from stillroom.remote.host import (
    FREE_DISK,
    OTHER_FOLDER,
    AccessDeniedError,
    MachineError,
    MachineGoneError,
    UnreachableError,
)

# The command is sent as one line on standard input: so a POSIX shell parses it, whatever the login
# shell (fish and csh quote differently), and it does not appear in lists of processes. `read`
# consumes no byte after the line; the rest is the command's own input.
SHELL_LINE = "exec sh -c 'IFS= read -r line && eval \"$line\"'"
_SCRIPT_END_MARK = "--stillroom-script-end--"
_SCRIPT_END = re.compile(_SCRIPT_END_MARK + r"(\d{1,3})", re.ASCII)
_MAX_SCRIPT_BYTES = bounds.SCRIPT.limit
"""The maximum number of bytes that a script may print; a long installation prints some 100 kB."""
_MAX_STDERR_BYTES = bounds.SCRIPT_ERRORS.limit
_END_WAIT_S = 10.0
_CLOSE_WAIT_S = 2.0

_Message = TypeVar("_Message")


class PipedProcess(subprocess.Popen[bytes]):
    """A process with three pipes; only the tail of its standard error is kept."""

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(
            list(arguments),
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._stderr_tail = b""
        self._reader = threading.Thread(target=self._read_stderr, daemon=True)
        self._reader.start()

    def stderr_tail(self) -> str:
        """Returns the tail of the process's standard error."""
        self._reader.join(_END_WAIT_S / 10)
        return self._stderr_tail.decode("utf-8", errors="replace").strip()

    def _read_stderr(self) -> None:
        # The output is unbounded, so it is neither kept whole nor written to a file.
        with cast("IO[bytes]", self.stderr) as stream:
            while data := os.read(stream.fileno(), _MAX_STDERR_BYTES):
                self._stderr_tail = (self._stderr_tail + data)[-_MAX_STDERR_BYTES:]


class Channel(Protocol):
    """Runs commands on one machine."""

    @property
    def name(self) -> str:
        """The machine's name in error messages."""
        ...

    def open(self) -> PipedProcess:
        """Starts a shell on the machine that reads one line and executes it.

        Raises UnreachableError or MachineError.
        """
        ...

    def explain(self, exit_code: int | None, stderr: str) -> EngineError | None:
        """Returns the connection error behind a failed command's exit code and standard error.

        None if the connection was not the cause.
        """
        ...

    def close(self) -> None:
        """Closes the connection."""
        ...


class LocalChannel:
    """Runs commands on this machine; used inside the container of a Hugging Face job."""

    def __init__(self, *, environment: Mapping[str, str] | None = None) -> None:
        self._environment = dict(os.environ if environment is None else environment)

    @property
    def name(self) -> str:
        """The machine's name in error messages."""
        return "this machine"

    def open(self) -> PipedProcess:
        """Starts a shell that reads one line and executes it."""
        return PipedProcess(["sh", "-c", SHELL_LINE], self._environment)

    def explain(self, exit_code: int | None, stderr: str) -> EngineError | None:
        """Returns None: there is no connection that could fail."""
        return None

    def close(self) -> None:
        """Does nothing; there is no connection."""


class _RemoteProcess:
    """A command line that runs on a machine, with its pipes."""

    def __init__(self, channel: Channel, process: PipedProcess) -> None:
        self._channel, self._process = channel, process
        self._source = cast("IO[bytes]", process.stdout)
        self._sink = cast("IO[bytes]", process.stdin)
        self._frames = Frames(self._source, self._sink)

    def begin(self, line: str) -> None:
        """Starts a command that prints the mark of `frames.py`, and skips the output before it."""
        with suppress(OSError):  # If the shell has exited, the read below finds out why.
            self._sink.write(line.encode() + b"\n")
            self._sink.flush()
        try:
            self._frames.skip_greeting()
        except BrokenStreamError as broken:
            raise self._connection_error(broken) from broken

    def _stderr_at_exit(self) -> str:
        """Waits for the command to exit, and returns the tail of its standard error."""
        try:
            self._process.wait(_CLOSE_WAIT_S)
        except subprocess.TimeoutExpired:
            # A command that prints without end exits only once its pipes are closed.
            _close_pipes(self._process)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_WAIT_S)
        return self._process.stderr_tail()

    def _connection_error(self, broken: BrokenStreamError) -> EngineError:
        """Returns the error for a broken stream: the channel's explanation, if it has one."""
        stderr = self._stderr_at_exit()
        explained = self._channel.explain(self._process.returncode, stderr)
        if explained is not None:
            return explained
        name = self._channel.name
        return UnreachableError(f"connection to {name} lost: {stderr or broken}", _RETRY_FIX)


class RemoteCommand(_RemoteProcess):
    """A command of the agent on a machine, which receives requests and sends replies."""

    def send(self, request: object, *, is_last: bool = False) -> None:
        """Sends a request. Raises the errors of `receive` if the command has exited."""
        try:
            self._frames.send(request)
            if is_last:
                self._frames.end()
        except BrokenStreamError as broken:
            # The command may have sent an error before it exited.
            for _ in self.replies(object):
                pass
            raise UnreachableError(
                f"the agent on {self._channel.name} exited: {broken}", _RETRY_FIX
            ) from broken

    def receive(self, kind: type[_Message] | Any) -> _Message | None:
        """Returns the next reply, or None after the last.

        Raises MachineError, AccessDeniedError or MachineGoneError if the command sent an error, and
        UnreachableError if the connection was lost.
        """
        try:
            return self._frames.receive(kind)
        except BrokenStreamError as broken:
            raise self._connection_error(broken) from broken
        except EngineError as error:
            problem = f"{self._channel.name}: {error.problem}"
            is_special = isinstance(error, MachineGoneError | AccessDeniedError)
            raise (type(error) if is_special else MachineError)(problem, error.fix) from error

    def expect(self, kind: type[_Message]) -> _Message:
        """Returns the next reply. Raises UnreachableError if there is none."""
        message = self.receive(kind)
        if message is None:
            raise UnreachableError(f"the agent on {self._channel.name} sent no reply", _RETRY_FIX)
        return message

    def replies(self, kind: type[_Message] | Any) -> Generator[_Message]:
        """Yields all replies."""
        while (message := self.receive(kind)) is not None:
            yield message


class RemoteScript(_RemoteProcess):
    """A shell script that runs on a machine without the agent, and prints lines of text."""

    def write(self, data: bytes, *, is_last: bool = True) -> None:
        """Writes to the script's standard input, and closes it if `is_last`."""
        with suppress(OSError):  # The script has exited; its exit code tells why.
            self._sink.write(data)
            self._sink.flush()
            if is_last:
                self._sink.close()

    def lines(self) -> Generator[str]:
        """Yields the lines that the script prints.

        Raises MachineError if the script fails, and UnreachableError if the connection is lost.
        """
        bytes_left = _MAX_SCRIPT_BYTES
        while line := self._source.readline(bytes_left):
            bytes_left -= len(line)
            if bytes_left <= 0:
                limit = f"{_MAX_SCRIPT_BYTES >> 20} MB"
                raise self._script_error(
                    f"it printed more than {limit}, where a few lines are expected"
                )
            text = line.decode("utf-8", errors="replace").rstrip("\n")
            if ended := _SCRIPT_END.fullmatch(text):
                if code := int(ended[1]):
                    raise self._script_error(
                        self._stderr_at_exit() or f"it exited with code {code}"
                    )
                return
            yield text
        raise self._connection_error(BrokenStreamError("the script's output ended early"))

    def _script_error(self, output: str) -> EngineError:
        return script_error(self._channel.name, output)


def script_error(name: str, output: str) -> MachineError:
    """Returns the error for a script that failed on a machine, given the end of its output."""
    problem = f"{name}: {output[-1500:]}"
    if _DISK_FULL.search(output):
        return MachineError(f"the disk of {name} is full: {output[-500:]}", FREE_DISK)
    if _NOT_PERMITTED.search(output):
        return MachineError(problem, OTHER_FOLDER)
    return MachineError(problem, "fix the cause on the machine, then try again")


_DISK_FULL = re.compile("No space left|Disk quota|File too large|File size limit")
_NOT_PERMITTED = re.compile("cannot create directory|denied|not permitted|Read-only file system")
_RETRY_FIX = "a run retries by itself; if the error persists, check the machine with check_setup"


@contextmanager
def run_command(channel: Channel, line: str) -> Generator[RemoteCommand]:
    """Runs a command line (POSIX sh) that exchanges frames, for the duration of the block."""
    process = channel.open()
    try:
        command = RemoteCommand(channel, process)
        command.begin(_one_line(line))
        yield command
    finally:
        _end_process(process)


@contextmanager
def run_script(channel: Channel, script: str) -> Generator[RemoteScript]:
    """Runs a script (POSIX sh) that needs no agent, for the duration of the block."""
    # Errors are recognised by their English text.
    header = f"export LC_ALL=C\necho {MARK.decode().strip()}"
    text = f"{header}\n({script}\n)\nprintf '\\n{_SCRIPT_END_MARK}%s\\n' $?\n"
    process = channel.open()
    try:
        running = RemoteScript(channel, process)
        running.begin(_one_line(text))
        yield running
    finally:
        _end_process(process)


def _one_line(script: str) -> str:
    """Returns a script as a single line of sh."""
    if "\n" not in script:
        return script
    escaped = script.replace("\\", "\\\\").replace("\n", "\\n")
    return f'eval "$(printf %b {shlex.quote(escaped)})"'


def shell_words(words: Sequence[str]) -> str:
    """Quotes and joins words for a POSIX shell; a leading `~/` becomes the home folder."""
    return " ".join(_quote_word(word) for word in words)


def _quote_word(word: str) -> str:
    """Quotes a word for a POSIX shell, except for a leading `~/`."""
    if word.startswith("~/"):
        return '"$HOME"/' + shlex.quote(word[2:])
    return shlex.quote(word)


def _close_pipes(process: PipedProcess) -> None:
    for stream in (process.stdin, process.stdout):
        with suppress(OSError):
            cast("IO[bytes]", stream).close()


def _end_process(process: PipedProcess) -> None:
    """Ends a process: closes its pipes, and terminates or kills it if it does not exit.

    The remote command ends when its pipes close.
    """
    _close_pipes(process)
    for end in (lambda: None, process.terminate, process.kill):
        end()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_CLOSE_WAIT_S)
            break
