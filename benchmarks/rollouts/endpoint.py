"""A scripted OpenAI-compatible endpoint in a process of its own: fast, deterministic, with limits and faults.

What it answers is a function of the request alone: `--turns` tool calls, then "Final Answer: <n>". Faults are drawn
from (seed, request, attempt), so that two runs meet the same ones. GET /counters tells what it saw.
Prints {"port": …} once it listens; ends on SIGTERM.
"""

import argparse
import asyncio
import hashlib
import json
import math
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field

import msgspec

FAULTS = ("500", "truncated", "malformed", "hang", None)
UNUSED = random.Random(0)
REASONS = {
    200: b"OK",
    400: b"Bad Request",
    404: b"Not Found",
    429: b"Too Many Requests",
    500: b"Internal Server Error",
}


@dataclass
class Bucket:
    """Refills at `rate` units a second up to `burst`; the rate may follow a schedule of (second, rate)."""

    schedule: list[tuple[float, float]]
    burst: float
    level: float = field(init=False)
    at: float | None = None
    started: float = 0.0
    granted: float = 0.0
    offered: float = 0.0
    """Units that a client could have had until now, the first burst included."""

    def __post_init__(self) -> None:
        self.level = self.offered = self.burst

    def rate(self, now: float) -> float:
        passed = now - self.started
        return [rate for second, rate in self.schedule if second <= passed][-1]

    def wait_s(self, amount: float, now: float) -> float:
        """Takes the amount and returns 0, or returns how long until it would be there."""
        if self.at is None:
            self.at = self.started = now
        rate = self.rate(now)
        self.offered += (now - self.at) * rate
        self.level, self.at = min(self.burst, self.level + (now - self.at) * rate), now
        if self.level >= min(amount, self.burst):
            self.level -= amount
            self.granted += amount
            return 0.0
        return (min(amount, self.burst) - self.level) / rate


class Endpoint:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.counts: Counter[str] = Counter()
        self.attempts: Counter[bytes] = Counter()
        self.answered: Counter[bytes] = Counter()
        self.in_flight = self.most_in_flight = 0
        self.first_at = self.last_at = 0.0
        self.requests_bucket = bucket(options.rps, options.burst)
        self.tokens_bucket = bucket(options.tps, options.token_burst)
        self.long_waits_left = options.long_waits

    def counters(self) -> dict[str, object]:
        repeated = sum(count - 1 for count in self.answered.values())
        buckets = {"requests": self.requests_bucket, "tokens": self.tokens_bucket}
        return {
            **self.counts,
            "unique": len(self.answered),
            "answered_again": repeated,
            "most_in_flight": self.most_in_flight,
            "span_s": round(self.last_at - self.first_at, 4),
            "limits": {
                name: {"granted": b.granted, "offered": b.offered}
                for name, b in buckets.items()
                if b
            },
        }

    def reported(self) -> bytes:
        """The headers that say what is left of each limit."""
        buckets = {b"requests": self.requests_bucket, b"tokens": self.tokens_bucket}
        if not self.options.tell:
            return b""
        now = time.monotonic()
        return b"".join(
            b"x-ratelimit-limit-%b: %d\r\nx-ratelimit-remaining-%b: %d\r\nx-ratelimit-reset-%b: %dms\r\n"
            % (name, b.burst, name, b.level, name, 1000 * (b.burst - b.level) / b.rate(now))
            for name, b in buckets.items()
            if b
        )

    def bill(self, reply: bytes) -> None:
        for name, count in msgspec.json.decode(reply)["usage"].items():
            self.counts[name] += count

    def refusal(self, body: bytes, num_tokens: int) -> tuple[float, str] | None:
        """How long to wait and why, or None where the request is let in."""
        options, now = self.options, time.monotonic()
        if options.max_in_flight and self.in_flight >= options.max_in_flight:
            return 0.1, "too many requests"
        if self.long_waits_left and self.counts["requests"] % 97 == 0:
            self.long_waits_left -= 1
            return options.long_wait_s, "come back later"
        for limit, amount in ((self.requests_bucket, 1), (self.tokens_bucket, num_tokens)):
            if limit and (wait := limit.wait_s(amount, now)) > 0:
                return wait, "rate limit reached"
        return None


def bucket(schedule: str, burst: float) -> Bucket | None:
    """Reads "200" or "0:200,13:100,26:300"."""
    if not schedule:
        return None
    parts = [part.split(":") for part in schedule.split(",")]
    return Bucket(
        [(float(p[0]), float(p[1])) if len(p) == 2 else (0.0, float(p[0])) for p in parts], burst
    )


def response(status: int, body: bytes, extra: bytes = b"") -> bytes:
    head = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\n%bcontent-length: %d\r\n\r\n"
    return head % (status, REASONS[status], extra, len(body)) + body


def answer(request: dict, options: argparse.Namespace, draw: random.Random) -> dict:
    messages = request["messages"]
    turn = sum(m["role"] == "assistant" for m in messages)
    prompt_tokens = sum(len(str(m.get("content") or "")) for m in messages) // 4 + 8 * len(messages)
    number = int.from_bytes(
        hashlib.blake2b(str(messages[1]["content"]).encode(), digest_size=4).digest(), "big"
    )
    message: dict = {"role": "assistant", "content": None}
    if turn < options.turns and request.get("tools"):
        arguments = json.dumps({"query": f"item {number % 1000} step {turn}"})
        if options.bad_arguments and draw.random() < options.bad_arguments:
            arguments = arguments[:-3]
        function = {"name": request["tools"][0]["function"]["name"], "arguments": arguments}
        message["tool_calls"] = [
            {"id": f"call_{number:x}_{turn}", "type": "function", "function": function}
        ]
        completion_tokens = 24
    else:
        message["content"] = (
            "The evidence agrees. " * options.words + f"Final Answer: {number % 1000}"
        )
        completion_tokens = 12 + 5 * options.words
    total = prompt_tokens + completion_tokens
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": total,
    }
    reason = "tool_calls" if message.get("tool_calls") else "stop"
    return {
        "id": "x",
        "object": "chat.completion",
        "created": 0,
        "model": request.get("model"),
        "choices": [{"index": 0, "message": message, "finish_reason": reason}],
        "usage": usage,
    }


class Connection(asyncio.Protocol):
    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint, self.options = endpoint, endpoint.options
        self.buffer, self.pending = bytearray(), 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport, self.loop = transport, asyncio.get_running_loop()

    def connection_lost(self, error: Exception | None) -> None:
        self.endpoint.counts["hung_up"] += self.pending

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = bytes(self.buffer[:end]).lower()
            start = head.find(b"content-length:")
            length = int(head[start + 15 :].split(b"\r\n")[0]) if start >= 0 else 0
            if len(self.buffer) < end + 4 + length:
                return
            body = bytes(self.buffer[end + 4 : end + 4 + length])
            del self.buffer[: end + 4 + length]
            self.handle(head, body)

    def handle(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"get /counters"):
            return self.transport.write(
                response(200, json.dumps(self.endpoint.counters()).encode())
            )
        if b"/chat/completions" not in head.split(b"\r\n")[0]:
            return self.transport.write(response(404, b"{}"))
        return self.chat(body)

    def chat(self, body: bytes) -> None:
        endpoint, options = self.endpoint, self.options
        endpoint.first_at = endpoint.first_at or time.monotonic()
        endpoint.counts["requests"] += 1
        refusal = endpoint.refusal(body, len(body) // 4)
        if refusal is not None:
            wait, why = refusal
            endpoint.counts["refused"] += 1
            error = json.dumps({"error": {"message": why, "type": "rate_limit_exceeded"}}).encode()
            extra = b"retry-after: %.3f\r\n%b" % (wait, endpoint.reported())
            return self.transport.write(response(429, error, extra))
        key = hashlib.blake2b(body, digest_size=8).digest()
        draw = UNUSED
        if options.draws:
            draw = random.Random(int.from_bytes(key, "big") + options.seed + endpoint.attempts[key])
        endpoint.attempts[key] += 1
        endpoint.in_flight += 1
        self.pending += 1
        endpoint.most_in_flight = max(endpoint.most_in_flight, endpoint.in_flight)
        latency = options.latency
        if options.sigma:
            latency = draw.lognormvariate(math.log(latency) - options.sigma**2 / 2, options.sigma)
        data, fault = self.reply_to(body, draw, endpoint.reported())
        if fault == "hang":
            return None
        self.loop.call_later(latency, self.send, data, key if fault is None else None)
        return None

    def reply_to(self, body: bytes, draw: random.Random, extra: bytes) -> tuple[bytes, str | None]:
        fault = None
        if self.options.draws:
            fault = draw.choices(FAULTS, self.options.faults)[0]
            self.endpoint.counts[f"fault_{fault}"] += 1
        if fault == "500":
            return response(500, b'{"error": "boom"}'), fault
        reply = msgspec.json.encode(answer(msgspec.json.decode(body), self.options, draw))
        if fault == "truncated":
            return response(200, reply)[: -len(reply) // 3], fault
        if fault == "malformed":
            return response(200, reply[: -len(reply) // 3]), fault
        self.endpoint.bill(reply)
        return response(200, reply, extra), fault

    def send(self, data: bytes, key: bytes | None) -> None:
        endpoint = self.endpoint
        endpoint.in_flight -= 1
        self.pending -= 1
        endpoint.last_at = time.monotonic()
        if self.transport.is_closing():
            return
        if key is not None:
            endpoint.answered[key] += 1
            endpoint.counts["answered"] += 1
        self.transport.write(data)
        if key is None and data.startswith(b"HTTP/1.1 200"):
            # A truncated answer is one whose connection goes away.
            self.transport.close()


async def serve(options: argparse.Namespace) -> None:
    endpoint, loop = Endpoint(options), asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(endpoint), "127.0.0.1", 0, backlog=4096)
    stop = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stop.set)
    print(json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)
    await stop.wait()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--latency", type=float, default=0.05)
    parser.add_argument(
        "--sigma", type=float, default=0.0, help="of a log-normal latency; 0 = fixed"
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--words", type=int, default=8)
    parser.add_argument("--rps", default="", help="requests per second: 200, or 0:200,13:100")
    parser.add_argument("--burst", type=float, default=20)
    parser.add_argument("--tps", default="", help="request tokens per second")
    parser.add_argument("--token-burst", type=float, default=10_000)
    parser.add_argument("--tell", action="store_true", help="say in x-ratelimit-* what is left")
    parser.add_argument("--max-in-flight", type=int, default=0)
    parser.add_argument("--long-waits", type=int, default=0, help="so many 429s say --long-wait-s")
    parser.add_argument("--long-wait-s", type=float, default=60)
    parser.add_argument("--faults", default="", help="shares of 500,truncated,malformed,hang")
    parser.add_argument("--bad-arguments", type=float, default=0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    shares = [float(part) for part in options.faults.split(",")] if options.faults else [0.0] * 4
    options.faults = [*shares, 1 - sum(shares)]
    options.draws = bool(options.sigma or options.bad_arguments or sum(shares))
    return options


if __name__ == "__main__":
    try:
        import uvloop

        uvloop.run(serve(parse()))
    except ImportError:
        asyncio.run(serve(parse()))
