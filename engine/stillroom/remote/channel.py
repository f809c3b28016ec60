"""Starts commands on a machine and talks with them through their standard input and output.

There are two kinds of channel: ssh (`ssh/connection.py`), and a subprocess of this machine.
"""

import os
import shlex
import subprocess
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Protocol, TypeVar, cast

from stillroom.errors import EngineError
from stillroom.remote.frames import BrokenStreamError, Frames
from stillroom.remote.host import MachineError, MachineGoneError, UnreachableError

# The command itself comes through standard input, as one line: it is then read by a POSIX shell
# whatever the login shell is (fish and csh quote in other ways), and no list of processes shows it.
# `read` takes no byte after the line; the rest is the command's own input.
SHELL_LINE = "exec sh -c 'IFS= read -r line && eval \"$line\"'"
_MAX_STDERR_BYTES = 1 << 14
_END_WAIT_S = 10.0
_CLOSE_WAIT_S = 2.0

_Message = TypeVar("_Message")


class Channel(Protocol):
    """A way to run commands on one machine."""

    @property
    def name(self) -> str:
        """What errors call the machine."""
        ...

    def open(self) -> subprocess.Popen[bytes]:
        """Starts a shell there that reads one line and carries it out, over three pipes.

        Its standard error goes to a file. Raises UnreachableError or MachineError.
        """
        ...

    def explain(self, exit_code: int | None, printed: str) -> EngineError | None:
        """Returns what a broken command's exit code and standard error say about the connection.

        None if they say nothing about it.
        """
        ...

    def close(self) -> None:
        """Ends the connection."""
        ...


class LocalChannel:
    """Runs the commands on this machine, as the tests of all but the connection do."""

    def __init__(self, *, environment: Mapping[str, str] | None = None) -> None:
        self._environment = dict(os.environ if environment is None else environment)

    @property
    def name(self) -> str:
        """What errors call the machine."""
        return "this machine"

    def open(self) -> subprocess.Popen[bytes]:
        """Starts a shell that reads one line and carries it out."""
        return start_process(["sh", "-c", SHELL_LINE], self._environment)

    def explain(self, exit_code: int | None, printed: str) -> EngineError | None:
        """Returns None: there is no connection that could break."""
        return None

    def close(self) -> None:
        """Does nothing; there is no connection."""


class CommandThere:
    """A command that runs on a machine, to which messages are sent and from which they come."""

    def __init__(self, channel: Channel, process: subprocess.Popen[bytes]) -> None:
        self._channel, self._process = channel, process
        self._frames = Frames(cast("IO[bytes]", process.stdout), cast("IO[bytes]", process.stdin))

    def send(self, message: object) -> None:
        """Sends a message. Raises as `receive` does if the command has ended."""
        try:
            self._frames.send(message)
        except BrokenStreamError as broken:
            # The command may have said why before it ended.
            while self.receive(object) is not None:
                pass
            raise UnreachableError(
                f"{self._channel.name} stopped listening: {broken}", _TRY_AGAIN
            ) from broken

    def receive(self, kind: type[_Message]) -> _Message | None:
        """Returns the next message, or None after the last.

        Raises MachineError with an error of the command, UnreachableError if the connection broke.
        """
        try:
            return self._frames.receive(kind)
        except BrokenStreamError as broken:
            raise self._broken(broken) from broken
        except EngineError as error:
            kind = MachineGoneError if isinstance(error, MachineGoneError) else MachineError
            raise kind(f"{self._channel.name}: {error.problem}", error.fix) from error

    def finish(self) -> None:
        """Says that no message follows, and returns when the command has done its work."""
        self._frames.end()
        while self.receive(object) is not None:
            pass

    def expect(self, kind: type[_Message]) -> _Message:
        """Returns the next message, where there must be one."""
        message = self.receive(kind)
        if message is None:
            raise UnreachableError(f"{self._channel.name} gave no answer", _TRY_AGAIN)
        return message

    def begin(self, line: str) -> None:
        """Has the shell there carry out a command line, which must write frames."""
        with suppress(OSError):  # The reading below finds out why it has ended.
            stream = cast("IO[bytes]", self._process.stdin)
            stream.write(line.encode() + b"\n")
            stream.flush()
        try:
            self._frames.skip_greeting()
        except BrokenStreamError as broken:
            raise self._broken(broken) from broken

    def _broken(self, broken: BrokenStreamError) -> EngineError:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_WAIT_S)
        printed = read_errors(self._process)
        explained = self._channel.explain(self._process.returncode, printed)
        if explained is not None:
            return explained
        return UnreachableError(
            f"the talk with {self._channel.name} broke off: {printed or broken}", _TRY_AGAIN
        )


_TRY_AGAIN = "it is tried again; if it stays so, look at the machine with check_setup"


@contextmanager
def command_there(channel: Channel, line: str) -> Generator[CommandThere]:
    """Runs a command line (POSIX sh, one line) that writes frames, for the length of the block."""
    if "\n" in line:
        raise MachineError(
            f"a path for {channel.name} holds a line break: {line!r}", "give another folder"
        )
    process = channel.open()
    try:
        command = CommandThere(channel, process)
        command.begin(line)
        yield command
    finally:
        _end(process)


def shell_words(words: Sequence[str]) -> str:
    """Returns words as a POSIX shell reads them; a `~/` at a word's start is the home folder."""
    return " ".join(_word(word) for word in words)


def _word(word: str) -> str:
    if word == "~":
        return '"$HOME"'
    if word.startswith("~/"):
        return '"$HOME"/' + shlex.quote(word[2:])
    return shlex.quote(word)


def start_process(
    arguments: Sequence[str], environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Starts a process whose input and output are pipes, and whose errors go to a file."""
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            list(arguments),
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
        process.stderr = os.fdopen(os.dup(errors.fileno()), "rb")
    return process


def read_errors(process: subprocess.Popen[bytes]) -> str:
    """Returns the end of what a process of `start_process` has printed to its standard error."""
    stream = cast("IO[bytes]", process.stderr)
    size = os.fstat(stream.fileno()).st_size
    data = os.pread(stream.fileno(), _MAX_STDERR_BYTES, max(0, size - _MAX_STDERR_BYTES))
    return data.decode("utf-8", errors="replace").strip()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Closes a process's input, which ends the command there, and waits for its end."""
    for stream in (process.stdin, process.stdout):
        with suppress(OSError):
            cast("IO[bytes]", stream).close()
    for end in (lambda: None, process.terminate, process.kill):
        end()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_CLOSE_WAIT_S)
            break
    cast("IO[bytes]", process.stderr).close()
