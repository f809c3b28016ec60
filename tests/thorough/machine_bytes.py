"""Another machine sends bytes that are no messages: is each refused, within bounds? machine_bytes.py [--cases 20000] [--minutes 20]

Streams of real messages are damaged at random and read as a follower reads them. In each tenth the bytes are right and what they say is odd:
then it goes where a follower puts it, and nothing outside of the run and its outputs may change. Last, machines print without end, into each
of the places where something is read from them.
"""

import copy
import io
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from fuzz import Fuzzing, arguments
from scenes import report

from fakes.trace_files import places_in
from stillroom.errors import EngineError
from stillroom.remote.channel import LocalChannel, PipedProcess, run_command, run_script
from stillroom.remote.follower.download import Download
from stillroom.remote.follower.local_run import FollowRecord
from stillroom.remote.follower.mirror import Mirror, OutOfSyncError
from stillroom.remote.frames import MARK, BrokenStreamError, Frames
from stillroom.remote.machine import Machine, SshAddress
from stillroom.remote.records import (
    AppendedLines,
    Heartbeat,
    JobSpec,
    MissingBlobs,
    RemoteFile,
    RemoteFiles,
    RemoteState,
    RunUpdate,
)
from stillroom.remote.ssh.probe import probe
from stillroom.run_folder import Progress, RunFailure, RunFolder, RunState
from stillroom.types import RunKind, RunStatus

GROWTH_BYTES, TIME_S = 64 << 20, 30.0
UPDATES = [
    RemoteState(run_json=b'{"run_id": "r"}' * 20, elapsed_s=1.0, root="/r", clock=1.0),
    AppendedLines(path="runs/r/log.txt", offset=0, data=b"a line\n" * 50),
    Heartbeat(),
    RemoteFiles(files=[RemoteFile(path="a", sha256="0" * 64, num_bytes=1)] * 20, is_last=True),
]
HOSTILE = [
    b"-1",
    b"9" * 30,
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\x91" * 5000,
    b"\n",
]


def stream(draw: random.Random) -> bytes:
    """Returns what an agent writes, damaged at a few places."""
    frames = Frames(io.BytesIO(), sink := io.BytesIO())
    frames.begin()
    for update in UPDATES:
        frames.send(update, is_compressed=draw.random() < 0.5)
    frames.send({"0" * 64: 5})
    frames.end()
    data = bytearray(sink.getvalue())
    for _ in range(draw.randrange(1, 4)):
        at = draw.randrange(len(data))
        match draw.randrange(4):
            case 0:
                data[at] = draw.randrange(256)
            case 1:
                del data[at : at + draw.randrange(1, 200)]
            case 2:
                data[at:at] = draw.choice(HOSTILE)
            case _:
                data[at : at + 2] = draw.choice(HOSTILE)
    return bytes(data)


def read(data: bytes) -> None:
    """Reads a stream to its end, as a follower does; raises what is no answer to bad bytes."""
    try:
        frames = Frames(io.BytesIO(data), io.BytesIO())
        frames.skip_greeting()
        for kind in (*[RunUpdate] * len(UPDATES), MissingBlobs):
            frames.receive(kind)
    except (BrokenStreamError, EngineError):
        return


RUN = "sft-r"
STATE = RunState(
    run_id=RUN, kind=RunKind.SFT, status=RunStatus.RUNNING, created_at="2026-11-20T12:00:00.000Z",
    started_at="2026-11-20T12:00:00.000Z", ended_at="2026-11-20T12:00:00.000Z", notes=["a note"],
    progress=Progress(phase="train", done=1, total=2, unit="steps", eta_s=None), error=RunFailure(problem="p", fix="f"),
)  # fmt: skip
TRUE_UPDATES = [
    RemoteState(run_json=msgspec.json.encode(STATE), elapsed_s=1.0, root="/r", clock=1.0),
    AppendedLines(path=f"runs/{RUN}/log.txt", offset=0, data=b"a line\n"),
    AppendedLines(path=f"runs/{RUN}/log.txt", offset=7, data=b"/r/workspace\n"),
    AppendedLines(path="out.jsonl", offset=0, data=b"{}\n"),
    RemoteFiles(
        files=[
            RemoteFile(path="out.jsonl", sha256="0" * 64, num_bytes=3),
            RemoteFile(path=f"runs/{RUN}/checkpoints/step_1/a", sha256="1" * 64, num_bytes=3),
        ],
        is_last=True,
    ),
]
ODD = [
    None, 0, -1, -1.5, 1e300, float("nan"), float("inf"), 2**63, 2**64 - 1, "", "..", "../x", "a/../../x",
    "/etc/x", "\0", "out.jsonl/x", "out.jsonl", f"runs/{RUN}", f"runs/{RUN}/", f"runs/{RUN}/run.json",
    f"runs/{RUN}/log.txt/x", f"runs/{RUN}/checkpoints/step_1", f"runs/{RUN}/checkpoints/step_1/a/b",
    "\udcff", "x" * 300, "x/" * 2000, "0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z", "2026-01-01",
    "2026-01-01T00:00:00", "succeeded", "failed", True, [], {}, b"", b"\xff", [[]] * 3,
]  # fmt: skip


def oddly_said(updates: list[Any], draw: random.Random) -> Iterator[bytes]:
    """Yields the messages, encoded, with odd values in a few places."""
    said: list[Any] = []
    for update in updates:
        fields = msgspec.msgpack.decode(msgspec.msgpack.encode(update))
        if "run_json" in fields:
            fields["run_json"] = msgspec.json.decode(fields["run_json"])
        said.append(fields)
    for _ in range(draw.randrange(1, 5)):
        holder, key = draw.choice(list(places_in(said)))
        holder[key] = copy.deepcopy(draw.choice(ODD))
    for fields in said:
        if isinstance(fields, dict) and isinstance(fields.get("run_json"), dict):
            with suppress(UnicodeEncodeError, msgspec.MsgspecError, TypeError):
                fields["run_json"] = msgspec.json.encode(fields["run_json"])
        with suppress(UnicodeEncodeError):
            yield msgspec.msgpack.encode(fields)


def take_oddly_said(draw: random.Random) -> None:
    """Puts updates with odd values where a follower puts them, in a folder of their own."""
    with tempfile.TemporaryDirectory() as name:
        outside, root = Path(name), Path(name, "workspace")
        (root / "mine").mkdir(parents=True)
        folder = RunFolder(root / "runs" / RUN)
        folder.path.mkdir(parents=True)
        folder.write(STATE)
        machine = Machine(name="box", ssh=SshAddress(host="box"))
        spec = JobSpec(machine=machine, files=[], home_paths=[], outputs=["out.jsonl"])
        record = FollowRecord()
        mirror = Mirror(folder, spec, root, record)
        download = Download(folder, root, spec.outputs, record, fetched)
        for said in oddly_said(TRUE_UPDATES, draw):
            # What a follower records as a problem, and tries again.
            with suppress(BrokenStreamError, EngineError, OutOfSyncError, OSError):
                take(mirror, download, said)
        folder.read()
        assert {path.name for path in outside.iterdir()} == {"workspace"}
        written = {path.name for path in root.iterdir()} - {"mine", "runs"}
        assert all("out.jsonl" in path for path in written), written
        assert [path.name for path in (root / "runs").iterdir()] == [RUN]
        assert not list((root / "mine").iterdir())


def take(mirror: Mirror, download: Download, said: bytes) -> None:
    frames = Frames(io.BytesIO(b'{"length":%d}\n%b' % (len(said), said)), io.BytesIO())
    match frames.receive(RunUpdate):
        case RemoteState() as update:
            mirror.write_state(update)
        case AppendedLines() as update:
            mirror.append_lines(update)
        case RemoteFiles() as update:
            download.download_missing(
                update.files, is_last=update.is_last, is_stopped=lambda: False
            )
        case _:
            pass


def fetched(_path: str, _offset: int) -> Generator[bytes]:
    yield b"abc"


def check(seed: int) -> None:
    draw = random.Random(seed)
    if seed % 10 == 0:
        take_oddly_said(draw)
    else:
        read(stream(draw))


class NoisyChannel(LocalChannel):
    """A machine whose shell runs a command of its own before ours, with or without our mark."""

    def __init__(self, noise: str, *, is_marked: bool) -> None:
        super().__init__()
        mark = f"echo {MARK.decode().strip()}; " if is_marked else ""
        self._line = f'IFS= read -r line; {mark}{noise}; eval "$line"'

    def open(self) -> PipedProcess:
        return PipedProcess(["sh", "-c", self._line])


def print_without_end(noise: str, *, is_marked: bool) -> None:
    channel = NoisyChannel(noise, is_marked=is_marked)
    for look in (probed, commanded):
        try:
            look(channel)
        except EngineError:
            continue


def probed(channel: NoisyChannel) -> None:
    with tempfile.TemporaryDirectory() as folder:
        probe(channel, str(Path(folder)), code="none", pythons=["python3"])


def commanded(channel: NoisyChannel) -> None:
    with run_command(channel, "exec true") as command:
        for _ in command.replies(RunUpdate):
            pass
    with run_script(channel, "true") as script:
        for _ in script.lines():
            pass


def endless() -> Iterator[tuple[str, Callable[[], None]]]:
    noises = {
        "one line": "yes x | tr -d '\\n'",
        "lines": "yes 'gpu 1, 2, 3'",
        "nothing but zeros": "cat /dev/zero",
        "errors": "yes error | head -c 200000000 >&2",
    }
    for name, noise in noises.items():
        for is_marked in (True, False):
            place = "after the mark" if is_marked else "as a greeting"
            yield f"{name} {place}", lambda n=noise, m=is_marked: print_without_end(n, is_marked=m)


def main() -> int:
    options = arguments(__doc__, cases=20_000)
    for seed in range(20):  # what is loaded once is no growth
        check(seed)
    fuzzing, slowest_s = Fuzzing(options, os.getpid()), 0.0
    fuzzing.check_all(check)
    for name, look in endless():
        began = time.monotonic()
        try:
            look()
        # Whatever else bad bytes set off is what this script looks for.
        except BaseException as error:
            fuzzing.note(name, error)
        slowest_s = max(slowest_s, time.monotonic() - began)
    passed = fuzzing.passed and fuzzing.growth_bytes < GROWTH_BYTES and slowest_s < 2 * TIME_S
    figure = f"{fuzzing.sentence('damaged streams, and machines that print without end')}, {slowest_s:.1f} s"
    return report(44, figure, passed, **fuzzing.figures())


if __name__ == "__main__":
    sys.exit(main())
