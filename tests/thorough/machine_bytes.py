"""Another machine sends bytes that are no messages: is each refused, within bounds? machine_bytes.py [--streams 20000]

Streams of real messages are damaged at random and read as a follower reads them. Then machines
print without end, into each of the places where something is read from them.
"""

import argparse
import io
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from scenes import report

from stillroom.errors import EngineError
from stillroom.remote.channel import LocalChannel, PipedProcess, run_command, run_script
from stillroom.remote.frames import MARK, BrokenStreamError, Frames
from stillroom.remote.records import (
    AppendedLines,
    Heartbeat,
    MissingBlobs,
    RemoteFile,
    RemoteFiles,
    RemoteState,
    RunUpdate,
)
from stillroom.remote.ssh.probe import probe

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
        frames.send(update, is_packed=draw.random() < 0.5)
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=20_000)
    options = parser.parse_args()
    broken = dict[str, str]()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for seed in range(options.streams):
        try:
            read(stream(random.Random(seed)))
        # Whatever else bad bytes set off is what this script looks for.
        except BaseException as error:
            broken[f"stream {seed}"] = f"{type(error).__name__}: {error}"[:200]
    slowest_s = 0.0
    for name, look in endless():
        began = time.monotonic()
        try:
            look()
        except BaseException as error:
            broken[name] = f"{type(error).__name__}: {error}"[:200]
        slowest_s = max(slowest_s, time.monotonic() - began)
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    passed = not broken and growth < GROWTH_BYTES and slowest_s < 2 * TIME_S
    return report(
        44,
        f"{options.streams} damaged streams and machines that print without end: {len(broken)} broke through; "
        f"at most {growth >> 20} MB more memory and {slowest_s:.1f} s",
        passed, broken=broken,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
