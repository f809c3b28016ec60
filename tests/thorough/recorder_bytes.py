"""Clients and an upstream send damaged bytes through `stillroom record`: does it serve on, and is each call recorded once? recorder_bytes.py [--cases 1500] [--minutes 20]

Of each three cases one is sound, in one the upstream's reply is damaged, and in one the client's request; eight pass at once. A sound reply
reaches its client byte for byte and is recorded as it was; any other ends the client's request within seconds. Each call that the upstream has
seen is in the journal, none is there twice, and no key is.
"""

import base64
import gzip
import json
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import brotli
from fuzz import Fuzzing, arguments, damaged
from scenes import report

from fakes.raw_endpoint import CHUNK_END, RawEndpoint, RawRequest, Step, chunk, json_reply
from fakes.recording import RawClient
from stillroom.processes import end_process
from stillroom.recording.records import RecordedCall, call_kind, decode_call

BOUND_S, WORKERS = 30.0, 8
WARM_UP = 3 << 40
"""The seed of a sound case."""
PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/chat/completions/")
CASE = re.compile(r"case=([0-9a-f]{16})(?![0-9a-f])")
KEY_HEADERS = ("Authorization: Bearer ", "x-api-key: ", "api-key: ")
ENCODERS = {
    "gzip": lambda data: gzip.compress(data, mtime=0),
    "deflate": zlib.compress,
    "br": brotli.compress,
}
FIELDS = (
    b"x-request-id: r1",
    b"X-Two: 1\r\nX-Two: 2",
    b"x-empty:",
    b"set-cookie: a=b",
    b"x-u: \xc3\xbc",
)


@dataclass(frozen=True)
class Reply:
    """What an upstream sends, and what the client is to get."""

    status: int
    sent: bytes
    body: bytes
    plain: bytes
    """The body without its encoding, which is recorded."""
    ends_connection: bool = False


class Case:
    """One call, made from a seed."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        self.seed, self.name = seed, f"{draw.getrandbits(64):016x}"
        self.key = f"sk-canary-{draw.getrandbits(96):024x}"
        self.damaged_side = ("none", "upstream", "client")[seed % 3]
        self.echoes_key = draw.random() < 0.2
        self.path = f"{draw.choice(PATHS)}?case={self.name}"
        self.reply = self._reply()
        self.is_sound = self.damaged_side == "none"
        self.request = self._request()
        if self.damaged_side == "client":
            self.request = damaged(self.request, draw)
        self.steps = self._steps()

    def _text(self) -> str:
        words = self.draw.choice(("yes ", "ü€😀 ", "a\\n\n", "data: [DONE]\n\n", '{"a": [1]} '))
        text = words * self.draw.choice((1, 1, 5, 50, 2000))
        if self.draw.random() < 0.002:
            text = "long " * (self.draw.randrange(1, 5) << 18)
        return f"{text}{self.key if self.echoes_key else ''}"

    def _request(self) -> bytes:
        draw = self.draw
        document = {
            "model": "m",
            "stream": True,
            "messages": [{"role": "user", "content": self._text()}],
        }
        body = json.dumps(document, ensure_ascii=draw.random() < 0.5).encode()
        lines = [f"POST {self.path} HTTP/1.1", "Host: localhost", "Connection: close"]
        lines.append(draw.choice(KEY_HEADERS) + self.key)
        if draw.random() < 0.2:
            body = gzip.compress(body, mtime=0)
            lines.append("Content-Encoding: gzip")
        if draw.random() < 0.3:
            lines.append("Transfer-Encoding: chunked")
            body = b"".join(map(chunk, pieces(body, draw))) + CHUNK_END
        else:
            lines.append(f"Content-Length: {len(body)}")
        return "\r\n".join([*lines, "", ""]).encode() + body

    def _reply(self) -> Reply:
        draw = self.draw
        kind = draw.choice(
            ("json", "json", "stream", "stream", "closed", "empty", "early", "error")
        )
        plain = json.dumps({"choices": [{"message": {"content": self._text()}}]}).encode()
        if kind == "empty":
            return Reply(204, b"HTTP/1.1 204 No Content\r\nx-a: 1\r\n\r\n", b"", b"")
        if kind == "stream":
            events = [
                b"data: %b\n\n" % json.dumps({"choices": [{"delta": {"content": part}}]}).encode()
                for part in map(str, [self._text(), *range(draw.randrange(20))])
            ]
            plain = b"".join([*events, b"data: [DONE]\n\n"])
        body, fields = plain, [draw.choice(FIELDS)]
        if draw.random() < 0.3:
            name = draw.choice(sorted(ENCODERS))
            body, fields = ENCODERS[name](plain), [*fields, b"content-encoding: " + name.encode()]
        if kind == "stream":
            fields.append(b"content-type: text/event-stream\r\ntransfer-encoding: chunked")
            head = b"HTTP/1.1 200 OK\r\n%b\r\n\r\n" % b"\r\n".join(fields)
            return Reply(
                200, head + b"".join(map(chunk, pieces(body, draw))) + CHUNK_END, body, plain
            )
        if kind == "closed":
            head = b"HTTP/1.%d 200 OK\r\n%b\r\n\r\n" % (draw.randrange(2), b"\r\n".join(fields))
            return Reply(200, head + body, body, plain, ends_connection=True)
        early = b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" if kind == "early" else b""
        status = draw.choice((400, 429, 500, 529)) if kind == "error" else 200
        return Reply(
            status, early + json_reply(body, *fields, status=b"%d Words" % status), body, plain
        )

    def _steps(self) -> list[Step]:
        """Returns what the upstream does, whose connection ends behind a damaged reply."""
        draw, sent = self.draw, self.reply.sent
        is_damaged = self.damaged_side == "upstream"
        data = damaged(sent, draw) if is_damaged else sent
        steps: list[Step] = []
        for piece in pieces(data, draw):
            steps += [piece, 0.001] if draw.random() < 0.3 else [piece]
        if is_damaged:
            steps.append(draw.choice((0.0, 0.05)))
        return [*steps, None] if is_damaged or self.reply.ends_connection else steps

    @property
    def shows_key(self) -> bool:
        """Whether the key is in a header made for it, so that it must be in no file."""
        head, _, _ = self.request.partition(b"\r\n\r\n")
        return any(f"\r\n{name}{self.key}\r\n".encode() in head + b"\r\n" for name in KEY_HEADERS)


def pieces(data: bytes, draw: random.Random) -> list[bytes]:
    """Returns the bytes cut at some places."""
    places = sorted(draw.randrange(len(data) + 1) for _ in range(draw.choice((0, 1, 3, 8))))
    cut = [data[begin:end] for begin, end in zip([0, *places], [*places, None], strict=True)]
    return [piece for piece in cut if piece]


class Recorder:
    """`stillroom record` in front of an upstream that answers as the cases say."""

    def __init__(self, folder: Path) -> None:
        self.cases = dict[str, Case]()
        self.seen = Counter[str]()
        """How often the upstream was called, by the name of the case."""
        self.unsent = set[str]()
        """The sound calls that met a closed connection, and never reached the upstream."""
        self.endpoint = RawEndpoint(self._steps_of)
        self.endpoint.__enter__()
        self.folder, self.errors = folder / "traces", folder / "errors.txt"
        command = [sys.executable, "-P", "-m", "stillroom_mcp", "record", "--port", "0"]
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [*command, "--workspace", str(folder), "--upstream", self.endpoint.url],
                stdout=subprocess.PIPE, stderr=errors,
            )  # fmt: skip
        assert self.process.stdout
        self.url = json.loads(self.process.stdout.readline())["recording"]

    def _steps_of(self, request: RawRequest) -> Any:
        self.endpoint.requests.clear()
        method, path = request.first_line.split(" ")[:2]
        found = CASE.search(path)
        case = self.cases.get(found[1]) if found else None
        if case is None:
            return json_reply(b"{}")
        if call_kind(method, path):
            self.seen[case.name] += 1
        return case.steps

    def check(self, seed: int) -> None:
        """Sends the request of a case, and looks at what comes back."""
        case = Case(seed)
        self.cases[case.name] = case
        client = RawClient(self.url)
        client.socket.settimeout(BOUND_S)
        with client:
            if case.damaged_side == "client":
                self._send_damaged(client, case)
                return
            for piece in pieces(case.request, case.draw):
                client.socket.sendall(piece)
            if not case.is_sound:
                read_to_end(client.socket)
                return
            reply = client.read(has_body=case.reply.status != 204)
        if reply.status == 502 and not self.seen[case.name]:
            # A connection that had just been closed took too long to be noticed on a busy machine.
            self.unsent.add(case.name)
            return
        assert (reply.status, reply.is_whole) == (case.reply.status, True), reply.head
        assert reply.body == case.reply.body, f"{len(reply.body)} bytes of {len(case.reply.body)}"

    def _send_damaged(self, client: RawClient, case: Case) -> None:
        leaves = case.draw.random() < 0.3
        try:
            for piece in pieces(case.request, case.draw):
                client.socket.sendall(piece)
            if leaves:
                time.sleep(case.draw.choice((0.0, 0.005, 0.05)))
                return
            client.socket.shutdown(socket.SHUT_WR)
        except OSError:  # the recorder has refused it by now
            return
        read_to_end(client.socket)

    def stop(self) -> None:
        end_process(self.process)
        assert self.process.stdout
        self.process.stdout.close()
        self.endpoint.__exit__()

    def calls(self) -> Iterator[tuple[bytes, RecordedCall]]:
        for path in sorted(self.folder.glob("calls-*.jsonl")):
            with path.open("rb") as stream:
                for line in stream:
                    yield line, decode_call(line)


def read_to_end(stream: socket.socket) -> None:
    """Reads until the recorder ends or resets the connection; raises TimeoutError if it does not."""
    try:
        while stream.recv(1 << 16):
            pass
    except ConnectionError:
        return


def check_journal(recorder: Recorder, fuzzing: Fuzzing) -> int:
    """Compares the journal with what was sent, and returns how many calls it holds."""
    recorded, total = Counter[str](), 0
    for line, call in recorder.calls():
        total += 1
        found = CASE.search(call.path)
        case = recorder.cases.get(found[1]) if found else None
        if case is None:
            continue
        recorded[case.name] += 1
        contents = [call.request.content.data, call.reply.content.data if call.reply else b""]
        key = case.key.encode()
        if case.shows_key and any(key in data for data in (line, *contents)):
            fuzzing.note(f"{case.seed} key", AssertionError("its key is in the journal"))
        if case.shows_key and any(base64.b64encode(key)[:44] in data for data in (line, *contents)):
            fuzzing.note(f"{case.seed} key", AssertionError("its key is in the journal in base64"))
        is_same = call.end == "whole" and (
            # What comes late behind the last event of a stream is not recorded.
            case.echoes_key or contents[1].rstrip() == case.reply.plain.rstrip()
        )
        if case.is_sound and not is_same and case.name not in recorder.unsent:
            fuzzing.note(f"{case.seed} record", AssertionError(f"{call.end}: {line[-1000:]!r}"))
    for name, case in recorder.cases.items():
        least = 1 if case.damaged_side != "client" or recorder.seen[name] else 0
        most = 1 if case.damaged_side != "client" else case.request.count(name.encode())
        if not least <= recorded[name] <= most:
            problem = f"recorded {recorded[name]} times, called {recorder.seen[name]} times"
            fuzzing.note(f"{case.seed} calls", AssertionError(problem))
    return total


def main() -> int:
    options = arguments(__doc__, cases=1500)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        recorder = Recorder(Path(name))
        try:
            recorder.check(WARM_UP)  # what is loaded once is no growth
            fuzzing = Fuzzing(options, recorder.process.pid)
            fuzzing.check_all(recorder.check, WORKERS)
            recorder.check(WARM_UP + 3)
            assert fuzzing.growth_bytes >= 0
        finally:
            recorder.stop()
        total = check_journal(recorder, fuzzing)
        if len(recorder.unsent) > fuzzing.num_cases // 1000:
            fuzzing.note("unsent", AssertionError(f"{len(recorder.unsent)} sound calls got 502"))
        errors = recorder.errors.read_text(encoding="utf-8")
        if "Traceback" in errors or "report it" in errors or "Exception" in errors:
            fuzzing.note("standard error", AssertionError(errors[-2000:]))
    figure = f"{fuzzing.sentence('calls, two thirds of them damaged')}; {total} are in the journal"
    return report(38, figure, fuzzing.passed, **fuzzing.figures())


if __name__ == "__main__":
    sys.exit(main())
