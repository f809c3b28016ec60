"""A `RunHost` for a machine with a shell: each method runs a command of its agent."""

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from stillroom.remote.channel import Channel, RemoteCommand, run_command, shell_words
from stillroom.remote.frames import MARK
from stillroom.remote.host import MachineError, UnreachableError
from stillroom.remote.machine import Machine
from stillroom.remote.records import (
    Blob,
    CancelRequest,
    FetchRequest,
    FollowRequest,
    JobSpec,
    LaunchRequest,
    MachineFacts,
    MissingBlobs,
    Piece,
    PieceStored,
    RunUpdate,
)
from stillroom.remote.ssh.bootstrap import prepare, run_probe
from stillroom.remote.ssh.connection import SshChannel
from stillroom.remote.ssh.requirements import LocalPackages

_Reply = TypeVar("_Reply")
_PIECE_BYTES = 1 << 20
_MAX_PENDING = 200
"""The maximum number of unread replies while sending; they must fit into the pipe's buffer."""


class ChannelHost:
    """A machine whose agent is reached through a channel."""

    def __init__(
        self,
        machine: Machine,
        channel: Channel,
        *,
        python: str | None = None,
        local: LocalPackages | None = None,
    ) -> None:
        """python: an interpreter that has this code already; if None, `prepare` finds one.

        local: the packages on the user's machine, if this process runs elsewhere.
        """
        self.machine, self._channel, self._python = machine, channel, python
        self._local = local
        self._is_prepared = python is not None
        self._fetching: tuple[RemoteCommand, ExitStack] | None = None
        """An open `fetch` command, and the stack that closes it."""

    def provision(self) -> None:
        """Connects to the machine, which Stillroom does not manage."""
        with run_command(self._channel, _HELLO):
            pass

    def price_per_hour(self) -> float | None:
        """Returns the machine's price in US dollars per hour, from machines.yml."""
        return self.machine.price_per_hour

    def facts(self) -> MachineFacts:
        """Probes the machine without changing anything on it."""
        probe = run_probe(self._channel, self.machine)
        if probe.ready_python is None:
            return probe.facts
        self._python = probe.ready_python
        started_at = time.monotonic()
        self.missing([])
        return msgspec.structs.replace(probe.facts, start_s=round(time.monotonic() - started_at, 2))

    def prepare(self, spec: JobSpec, report: Callable[[str], None]) -> None:
        """Installs this code and the run's packages on the machine, in reusable environments."""
        if not self._is_prepared:
            self._python = prepare(self._channel, self.machine, spec, report, self._local)

    def missing(self, blobs: Sequence[Blob]) -> dict[str, int]:
        """Returns how many bytes the machine has received of each incomplete blob, by hash."""
        sizes = {blob.sha256: blob.num_bytes for blob in blobs}
        return self._call("have", sizes, MissingBlobs)[0]

    def send(self, blobs: Sequence[Blob], offsets: Mapping[str, int]) -> Iterator[int]:
        """Sends blobs, each from its offset on, and yields the number of bytes of each piece."""
        with self.command("put") as put:
            sender = _Sender(put)
            for blob in {blob.sha256: blob for blob in blobs}.values():
                yield from sender.send(blob, offsets.get(blob.sha256, 0))
            yield from sender.finish()

    def start(self, run: LaunchRequest) -> None:
        """Starts a run's detached worker; does nothing if the run was started before."""
        self._call("start", run)

    def follow(self, run_id: str, seen: Mapping[str, int]) -> Generator[RunUpdate]:
        """Yields a run's updates until it has ended, at least a Heartbeat every few seconds."""
        with self.command("follow") as follow:
            follow.send(FollowRequest(run_id, dict(seen)), is_last=True)
            yield from follow.replies(RunUpdate)

    def fetch(self, run_id: str, path: str, offset: int) -> Generator[bytes]:
        """Yields the bytes of a run's finished file, from `offset` on.

        One command serves many files, because starting it takes longer than most downloads.
        """
        opened, self._fetching = self._fetching or self._open_command("fetch"), None
        command, stack = opened
        try:
            command.send(FetchRequest(run_id, path, offset))
            while data := command.expect(bytes):
                yield data
        except BaseException:
            # Otherwise the next fetch would read the rest of this file.
            stack.close()
            raise
        self._fetching = opened

    def cancel(self, run_id: str, *, kill: bool) -> None:
        """Asks a run to stop; with `kill`, kills its processes."""
        self._call("cancel", CancelRequest(run_id, kill))

    def remove(self, run_id: str) -> None:
        """Deletes a run's folder on the machine; stored blobs stay for other runs."""
        self._call("remove", run_id)

    def release(self) -> None:
        """Does nothing: Stillroom does not manage the machine."""

    def close(self) -> None:
        """Closes the connection; processes on the machine continue."""
        if self._fetching is not None:
            self._fetching[1].close()
            self._fetching = None
        self._channel.close()

    @contextmanager
    def command(self, name: str) -> Generator[RemoteCommand]:
        """Runs a command of the agent, named as in `agent/__main__.py`, during the block."""
        if self._python is None:
            # Following a run needs none of the run's extras.
            self._python = prepare(self._channel, self.machine, None, _ignore_progress, self._local)
        python = self._python
        words = [python, "-P", "-m", "stillroom.remote.agent", self.machine.folder, name]
        line = "unset PYTHONPATH PYTHONHOME; exec " + shell_words(words)
        try:
            with run_command(self._channel, line) as command:
                yield command
        except UnreachableError:
            # The environment may have been deleted, so it is looked up again, which is fast.
            self._python = python if self._is_prepared else None
            raise

    def _open_command(self, name: str) -> tuple[RemoteCommand, ExitStack]:
        """Starts a command of the agent; returns it with the stack that closes it."""
        stack = ExitStack()
        return stack.enter_context(self.command(name)), stack

    def _call(self, name: str, request: object, kind: type[_Reply] | Any = None) -> list[_Reply]:
        """Runs a command with a single request, and returns its replies."""
        with self.command(name) as command:
            command.send(request, is_last=True)
            return list(command.replies(kind))


def open_ssh(machine: Machine, _run: Path | None = None) -> ChannelHost:
    """Returns the host for a machine that is reached with the system's ssh."""
    if machine.ssh is None:
        raise ValueError(f"{machine.name} has no address")
    return ChannelHost(machine, SshChannel(machine.name, machine.ssh))


_HELLO = f"printf '%s\\n' '{MARK.decode().strip()}'"


def _ignore_progress(_text: str) -> None:
    """Ignores a progress report."""


class _Sender:
    """Sends blobs over one `put` command, and tracks the replies that are still outstanding."""

    def __init__(self, put: RemoteCommand) -> None:
        self._put = put
        self._pending = dict[str, Blob]()
        self._resumed = set[str]()

    def send(self, blob: Blob, offset: int) -> Iterator[int]:
        """Sends a blob from `offset` on, and yields the size of each piece sent."""
        if offset:
            self._resumed.add(blob.sha256)
        with Path(blob.source).open("rb") as stream:
            stream.seek(offset)
            while True:
                data = stream.read(min(_PIECE_BYTES, blob.num_bytes - offset))
                if not data and offset < blob.num_bytes:
                    raise _changed_error(blob)
                self._put.send(
                    Piece(sha256=blob.sha256, num_bytes=blob.num_bytes, offset=offset, data=data)
                )
                offset += len(data)
                yield len(data)
                if offset == blob.num_bytes:
                    break
        self._pending[blob.sha256] = blob
        while len(self._pending) > _MAX_PENDING:
            yield from self._handle_reply()

    def finish(self) -> Iterator[int]:
        """Waits until the machine has verified all blobs; yields the sizes of pieces sent again."""
        while self._pending:
            yield from self._handle_reply()

    def _handle_reply(self) -> Iterator[int]:
        """Reads one reply; sends a resumed blob again if its hash was wrong."""
        reply = self._put.expect(PieceStored)
        blob = self._pending.pop(reply.sha256)
        if reply.is_stored:
            return
        if blob.sha256 not in self._resumed:
            raise _changed_error(blob)
        # The part from an earlier connection was wrong, so the whole blob is sent again.
        self._resumed.remove(blob.sha256)
        yield from self.send(blob, 0)


def _changed_error(blob: Blob) -> MachineError:
    return MachineError(
        f"{blob.source} has changed since this run was started",
        "start the run again: the new run uploads the changed file",
    )
