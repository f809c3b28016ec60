"""A scripted endpoint whose replies are streams: a head, then --events events --gap-ms apart. Prints {"port": …}.

Each event is a chunk of its own, and says when it was sent (`"t"`, on the clock that all processes of a machine share). GET /counters tells how many replies it has sent whole. Ends on SIGTERM.
"""

import argparse
import asyncio
import json
import signal
import time

import uvloop

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(delta: dict, reason: str | None = None) -> bytes:
    body = {
        "t": round(time.perf_counter(), 7),
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "scripted",
        "choices": [{"index": 0, "delta": delta, "finish_reason": reason}],
    }
    return chunk(b"data: " + json.dumps(body).encode() + b"\n\n")


class Connection(asyncio.Protocol):
    def __init__(self, counts: dict, options: argparse.Namespace) -> None:
        self.counts, self.options, self.buffer, self.left = counts, options, bytearray(), 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport, self.loop = transport, asyncio.get_running_loop()

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        end = self.buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self.buffer[:end]).lower()
        start = head.find(b"content-length:")
        length = int(head[start + 15 :].split(b"\r\n")[0]) if start >= 0 else 0
        if len(self.buffer) < end + 4 + length:
            return
        del self.buffer[: end + 4 + length]
        if head.startswith(b"get"):
            body = json.dumps(self.counts).encode()
            self.transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
            )
            return
        self.left = self.options.events
        self.loop.call_later(self.options.first_ms / 1000, self.first)

    def first(self) -> None:
        self.transport.write(HEAD + event({"role": "assistant", "content": ""}))
        self.loop.call_later(self.options.gap_ms / 1000, self.more)

    def more(self) -> None:
        if self.transport.is_closing():
            return
        self.left -= 1
        if self.left > 0:
            self.transport.write(event({"content": f" word{self.left}"}))
            self.loop.call_later(self.options.gap_ms / 1000, self.more)
            return
        self.counts["whole"] += 1
        done = chunk(b"data: [DONE]\n\n")
        self.transport.write(event({}, "stop") + done + b"0\r\n\r\n")


async def serve(options: argparse.Namespace) -> None:
    loop, counts = asyncio.get_running_loop(), {"whole": 0}
    server = await loop.create_server(
        lambda: Connection(counts, options), "127.0.0.1", 0, backlog=4096
    )
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    print(json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)
    await stop.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=100)
    parser.add_argument("--gap-ms", type=float, default=20)
    parser.add_argument("--first-ms", type=float, default=50)
    uvloop.run(serve(parser.parse_args()))
