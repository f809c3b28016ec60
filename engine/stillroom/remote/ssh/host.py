"""A machine behind a channel, as a `RunHost`: every method is a command of its agent."""

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from stillroom.remote.channel import Channel, RemoteCommand, run_command, shell_words
from stillroom.remote.frames import MARK
from stillroom.remote.host import MachineError, UnreachableError
from stillroom.remote.machine import Machine, SshAddress
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
from stillroom.remote.ssh.bootstrap import look, prepare
from stillroom.remote.ssh.connection import SshChannel
from stillroom.remote.ssh.requirements import LocalPackages

_Reply = TypeVar("_Reply")
_PIECE_BYTES = 1 << 20
_MOST_UNANSWERED = 200
"""Replies that wait in the pipe while we still send; they must fit into it."""


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
        """`python`: an interpreter that has this code already; else `prepare` finds one.

        local: what is installed on the user's machine, where this process does not run on it.
        """
        self.machine, self._channel, self._python = machine, channel, python
        self._local = local
        self._has_all = python is not None
        self._fetching: tuple[RemoteCommand, ExitStack] | None = None
        """A `fetch` that is open, and what ends it."""

    def provision(self) -> None:
        """Connects; the machine is not ours to start."""
        with run_command(self._channel, _HELLO):
            pass

    def price_per_hour(self) -> float | None:
        """Returns the US dollars for an hour of the machine, as machines.yml says."""
        return self.machine.price_per_hour

    def facts(self) -> MachineFacts:
        """Looks at the machine without changing anything on it."""
        found = look(self._channel, self.machine)
        if found.ready is None:
            return found.facts
        self._python = found.ready
        begun = time.monotonic()
        self.missing([])
        return msgspec.structs.replace(found.facts, start_s=round(time.monotonic() - begun, 2))

    def prepare(self, spec: JobSpec, say: Callable[[str], None]) -> None:
        """Puts this code and the run's packages on the machine, in environments that are reused."""
        if not self._has_all:
            self._python = prepare(self._channel, self.machine, spec, say, self._local)

    def missing(self, blobs: Sequence[Blob]) -> dict[str, int]:
        """Returns the hashes that are not stored yet, with the bytes of each that already are."""
        sizes = {blob.sha256: blob.num_bytes for blob in blobs}
        return self._ask("have", sizes, MissingBlobs)[0]

    def send(self, blobs: Sequence[Blob], have: Mapping[str, int]) -> Iterator[int]:
        """Sends contents, each resumed where an earlier call ended; yields bytes as they go."""
        with self.command("put") as put:
            sender = _Sender(put)
            for blob in {blob.sha256: blob for blob in blobs}.values():
                yield from sender.send(blob, have.get(blob.sha256, 0))
            yield from sender.finish()

    def start(self, run: LaunchRequest) -> None:
        """Starts a run's detached worker. A run that was started before is left alone."""
        self._ask("start", run)

    def follow(self, run_id: str, seen: Mapping[str, int]) -> Generator[RunUpdate]:
        """Yields a run's updates until it has ended, at least a Heartbeat every few seconds."""
        with self.command("follow") as follow:
            follow.send(FollowRequest(run_id, dict(seen)), is_last=True)
            yield from follow.replies(RunUpdate)

    def fetch(self, run_id: str, path: str, offset: int) -> Generator[bytes]:
        """Yields the bytes of a finished file of a run, from `offset` on.

        One command serves one file after another: to start it takes longer than most files.
        """
        opened, self._fetching = self._fetching or self._open("fetch"), None
        command, at_end = opened
        try:
            command.send(FetchRequest(run_id, path, offset))
            while data := command.expect(bytes):
                yield data
        except BaseException:
            # Otherwise the rest of this file would come next.
            at_end.close()
            raise
        self._fetching = opened

    def cancel(self, run_id: str, *, kill: bool) -> None:
        """Asks a run to stop; with `kill` ends its processes."""
        self._ask("cancel", CancelRequest(run_id, kill))

    def remove(self, run_id: str) -> None:
        """Deletes a run's folder; contents that other runs may need stay."""
        self._ask("remove", run_id)

    def release(self) -> None:
        """Does nothing: the machine is not ours to stop."""

    def close(self) -> None:
        """Ends the connection; what runs on the machine continues."""
        if self._fetching is not None:
            self._fetching[1].close()
            self._fetching = None
        self._channel.close()

    @contextmanager
    def command(self, name: str) -> Generator[RemoteCommand]:
        """Starts a command of the agent; `agent/__main__.py` has their names."""
        if self._python is None:
            # Following a run takes none of the extras that the run itself needs.
            self._python = prepare(self._channel, self.machine, None, _say_nothing, self._local)
        python = self._python
        words = [python, "-P", "-m", "stillroom.remote.agent", self.machine.folder, name]
        line = "unset PYTHONPATH PYTHONHOME; exec " + shell_words(words)
        try:
            with run_command(self._channel, line) as command:
                yield command
        except UnreachableError:
            # The environment may have been deleted; looking it up again is quick.
            self._python = python if self._has_all else None
            raise

    def _open(self, name: str) -> tuple[RemoteCommand, ExitStack]:
        opened = ExitStack()
        return opened.enter_context(self.command(name)), opened

    def _ask(self, name: str, request: object, kind: type[_Reply] | Any = None) -> list[_Reply]:
        """Sends the only request of a command, and returns its replies."""
        with self.command(name) as command:
            command.send(request, is_last=True)
            return list(command.replies(kind))


class SshHost(ChannelHost):
    """A machine that the system's own ssh reaches."""

    def __init__(self, machine: Machine, address: SshAddress | None = None) -> None:
        """`address` is given where machines.yml does not know it, as for a rented machine."""
        reached = address or machine.ssh
        if reached is None:
            raise ValueError(f"{machine.name} has no address")
        super().__init__(machine, SshChannel(machine.name, reached))


_HELLO = f"printf '%s\\n' '{MARK.decode().strip()}'"


def _say_nothing(_text: str) -> None:
    """Nobody waits to hear how an environment is prepared."""


class _Sender:
    """Sends contents over one `put`, and keeps count of the replies that are still to come."""

    def __init__(self, put: RemoteCommand) -> None:
        self._put = put
        self._unanswered = dict[str, Blob]()
        self._resumed = set[str]()

    def send(self, blob: Blob, offset: int) -> Iterator[int]:
        """Sends a content from `offset` on, and yields the bytes of each piece."""
        if offset:
            self._resumed.add(blob.sha256)
        with Path(blob.source).open("rb") as stream:
            stream.seek(offset)
            while True:
                data = stream.read(min(_PIECE_BYTES, blob.num_bytes - offset))
                if not data and offset < blob.num_bytes:
                    raise _changed(blob)
                self._put.send(
                    Piece(sha256=blob.sha256, num_bytes=blob.num_bytes, offset=offset, data=data)
                )
                offset += len(data)
                yield len(data)
                if offset == blob.num_bytes:
                    break
        self._unanswered[blob.sha256] = blob
        while len(self._unanswered) > _MOST_UNANSWERED:
            yield from self._take_reply()

    def finish(self) -> Iterator[int]:
        """Waits until the machine has verified all contents."""
        while self._unanswered:
            yield from self._take_reply()

    def _take_reply(self) -> Iterator[int]:
        reply = self._put.expect(PieceStored)
        blob = self._unanswered.pop(reply.sha256)
        if reply.is_stored:
            return
        if blob.sha256 not in self._resumed:
            raise _changed(blob)
        # What an earlier connection had stored was wrong, so all of it is sent again.
        self._resumed.remove(blob.sha256)
        yield from self.send(blob, 0)


def _changed(blob: Blob) -> MachineError:
    return MachineError(
        f"{blob.source} has changed since this run was started",
        "start the run again: the new run sends the changed file",
    )
