"""A machine behind a channel, as `RunHost` has it: every thing wanted is a command there."""

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import msgspec

from stillroom.remote.agent.store import Piece, Stored, WantedContent
from stillroom.remote.channel import Channel, RemoteCommand, run_command, shell_words
from stillroom.remote.frames import MARK
from stillroom.remote.host import MachineError, UnreachableError
from stillroom.remote.machine import Machine, SshAddress
from stillroom.remote.records import (
    Blob,
    JobSpec,
    LaunchRequest,
    MachineFacts,
    RunUpdate,
)
from stillroom.remote.ssh.bootstrap import look, prepare, ready_python
from stillroom.remote.ssh.connection import SshChannel
from stillroom.remote.ssh.requirements import LocalPackages

_PIECE_BYTES = 1 << 20
_MOST_UNANSWERED = 200
"""Answers that wait in the pipe while we still send; they must fit into it."""


class ChannelHost:
    """A machine on which everything is done by commands through one channel."""

    def __init__(
        self,
        machine: Machine,
        channel: Channel,
        *,
        python: str | None = None,
        home: LocalPackages | None = None,
    ) -> None:
        """`python`: an interpreter there that has this code already; else `prepare` finds one.

        home: what is installed at home, where that is not here.
        """
        self.machine, self._channel, self._python = machine, channel, python
        self._home = home
        self._has_all = python is not None
        self._fetching: _Fetching | None = None

    def provision(self) -> None:
        """Connects; the machine is not ours to start."""
        with run_command(self._channel, _HELLO):
            pass

    def price_per_hour(self) -> float | None:
        """Returns the US dollars for an hour of the machine, as machines.yml says."""
        return self.machine.price_per_hour

    def facts(self) -> MachineFacts:
        """Looks at the machine without changing anything there."""
        found = look(self._channel, self.machine)
        if found.ready is None:
            return found.facts
        self._python = found.ready
        begun = time.monotonic()
        with self.command("have") as have:
            have.send([])
            have.expect(dict[str, int])
        return msgspec.structs.replace(found.facts, start_s=round(time.monotonic() - begun, 2))

    def prepare(self, spec: JobSpec, say: Callable[[str], None]) -> None:
        """Puts this code and the run's packages there, in environments that are made once."""
        if not self._has_all:
            self._python = prepare(self._channel, self.machine, spec, say, self._home)

    def missing(self, blobs: Sequence[Blob]) -> dict[str, int]:
        """Returns the hashes that are not there yet, with the bytes of each that already are."""
        wanted = [WantedContent(sha256=b.sha256, num_bytes=b.num_bytes) for b in blobs]
        with self.command("have") as have:
            have.send(wanted)
            return have.expect(dict[str, int])

    def send(self, blobs: Sequence[Blob], have: Mapping[str, int]) -> Iterator[int]:
        """Sends contents, each from where an earlier call broke off; yields bytes as they go."""
        with self.command("put") as put:
            sender = _Sender(put)
            for blob in {blob.sha256: blob for blob in blobs}.values():
                yield from sender.send(blob, have.get(blob.sha256, 0))
            yield from sender.finish()

    def start(self, run: LaunchRequest) -> None:
        """Starts a run's detached worker there. A run that was started before is left alone."""
        with self.command("start") as start:
            start.send(run)
            start.finish()

    def follow(self, run_id: str, seen: Mapping[str, int]) -> Generator[RunUpdate]:
        """Yields a run's news until it has ended there, at least a Heartbeat every few seconds."""
        with self.command("follow") as follow:
            follow.send((run_id, dict(seen)))
            while (news := follow.receive(RunUpdate)) is not None:
                yield news

    def fetch(self, run_id: str, path: str, offset: int) -> Generator[bytes]:
        """Yields the bytes of a finished file of a run there, from `offset` on.

        One command there serves one file after another: to start it takes longer than most files.
        """
        fetching, self._fetching = self._fetching or _Fetching(self.command("fetch")), None
        try:
            yield from fetching.fetch(run_id, path, offset)
        except BaseException:
            # What comes next over it would be the rest of this file.
            fetching.close()
            raise
        self._fetching = fetching

    def cancel(self, run_id: str, *, kill: bool) -> None:
        """Asks a run there to stop; with `kill` ends its processes."""
        with self.command("cancel") as cancel:
            cancel.send((run_id, kill))
            cancel.finish()

    def remove(self, run_id: str) -> None:
        """Deletes a run's folder there; contents that other runs may need stay."""
        with self.command("remove") as remove:
            remove.send(run_id)
            remove.finish()

    def release(self) -> None:
        """Does nothing: the machine is not ours to stop."""

    def close(self) -> None:
        """Ends the connection; what runs there goes on."""
        if self._fetching is not None:
            self._fetching.close()
            self._fetching = None
        self._channel.close()

    @contextmanager
    def command(self, name: str) -> Generator[RemoteCommand]:
        """Starts a command of the program there; `agent/__main__.py` has their names."""
        python = self._python or self._find_python()
        words = [python, "-P", "-m", "stillroom.remote.agent", self.machine.folder, name]
        line = "unset PYTHONPATH PYTHONHOME; exec " + shell_words(words)
        try:
            with run_command(self._channel, line) as command:
                yield command
        except UnreachableError:
            # It may be the environment that is gone; to find it again is quick.
            self._python = python if self._has_all else None
            raise

    def _find_python(self) -> str:
        """Returns the environment of an earlier preparation, or makes the least that there can be.

        To look after a run takes none of the extras that the run itself needs.
        """
        ready = ready_python(self._channel, self.machine)
        if ready is None:
            ready = prepare(self._channel, self.machine, None, lambda _text: None, self._home)
        self._python = ready
        return ready


class SshHost(ChannelHost):
    """A machine that the system's own ssh reaches."""

    def __init__(self, machine: Machine, address: SshAddress | None = None) -> None:
        """`address` is given where machines.yml does not know it, as for a rented machine."""
        reached = address or machine.ssh
        if reached is None:
            raise ValueError(f"{machine.name} has no address")
        super().__init__(machine, SshChannel(machine.name, reached))


_HELLO = f"printf '%s\\n' '{MARK.decode().strip()}'"


class _Fetching:
    """A `fetch` that is open, over which one thread asks for one file after another."""

    def __init__(self, opening: AbstractContextManager[RemoteCommand]) -> None:
        self._opened = ExitStack()
        self._command = self._opened.enter_context(opening)

    def fetch(self, run_id: str, path: str, offset: int) -> Generator[bytes]:
        """Yields the bytes of a file; an empty message ends it."""
        self._command.send((run_id, path, offset))
        while data := self._command.expect(bytes):
            yield data

    def close(self) -> None:
        """Ends the command there."""
        self._opened.close()


class _Sender:
    """Sends contents over one `put`, and keeps count of the answers that are still to come."""

    def __init__(self, put: RemoteCommand) -> None:
        self._put = put
        self._unanswered = dict[str, Blob]()
        self._begun_late = set[str]()

    def send(self, blob: Blob, offset: int) -> Iterator[int]:
        """Sends a content from `offset` on, and yields the bytes of each piece."""
        if offset:
            self._begun_late.add(blob.sha256)
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
            yield from self._take_answer()

    def finish(self) -> Iterator[int]:
        """Waits until all contents have been verified there."""
        while self._unanswered:
            yield from self._take_answer()
        self._put.finish()

    def _take_answer(self) -> Iterator[int]:
        stored = self._put.expect(Stored)
        blob = self._unanswered.pop(stored.sha256)
        if stored.is_stored:
            return
        if blob.sha256 not in self._begun_late:
            raise _changed(blob)
        # What an earlier connection had left there was wrong, so all of it is sent again.
        self._begun_late.remove(blob.sha256)
        yield from self.send(blob, 0)


def _changed(blob: Blob) -> MachineError:
    return MachineError(
        f"{blob.source} has changed since this run was started",
        "start the run again: it then sends the file as it is by then",
    )
