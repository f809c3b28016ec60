"""What `stillroom record` adds to a call, and what many streams at once cost it. streams.py [--streams 500]

A scripted endpoint streams the same reply to all, and each event says when it was sent. In one run, half of the clients call it directly and
half through the proxy, at the same time, so that whatever else the machine does slows both. `added_ms` are differences of medians: `first`,
from the request to the first event; `lag`, from when an event was sent to when it was read; `end`, the same of the end of the reply, which the
proxy passes on only once the call is on the disk (`disk_sync_ms` is what the disk alone takes for that, before and after). First at a moderate load (--moderate clients on each side), then --streams clients, all
through the proxy, and for comparison (`without_it`) all directly: so many keep the endpoint and the clients themselves busy. Exits with 1 if a call that a client saw whole is not in the journal.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles

import psutil
import uvloop

HERE = Path(__file__).parent
BODY = json.dumps({"model": "scripted", "stream": True, "messages": [{"role": "user", "content": "Tell me a story. " * 100}]}).encode()  # fmt: skip


@contextmanager
def process(*command: str) -> Iterator[tuple[dict, psutil.Process]]:
    """Starts a program, and yields the JSON of its first line and the process."""
    started = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        yield json.loads(started.stdout.readline()), psutil.Process(started.pid)
    finally:
        started.terminate()
        started.wait(20)


class Client(asyncio.Protocol):
    """Makes calls one after another on one connection, and times each."""

    def __init__(self, num_calls: int, done: asyncio.Future, start_s: float) -> None:
        self.left, self.done, self.start_s = num_calls, done, start_s
        self.first_ms: list[float] = []
        self.lag_ms: list[float] = []
        self.end_ms: list[float] = []
        self.num_blocks = 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        asyncio.get_running_loop().call_later(self.start_s, self.call)

    def call(self) -> None:
        self.is_first, self.began = True, time.perf_counter()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer sk-of-this-benchmark\r\n"
        self.transport.write(
            head
            + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
        )

    def data_received(self, data: bytes) -> None:
        self.num_blocks += 1
        now = time.perf_counter()
        if (start := data.find(b'"t": ')) >= 0:
            self.sent = float(data[start + 5 : data.index(b",", start)])
            self.lag_ms.append(1000 * (now - self.sent))
        if self.is_first and b"data: " in data:
            self.is_first = False
            self.first_ms.append(1000 * (time.perf_counter() - self.began))
        # Servers send the end with the last block, or by itself.
        if data.endswith(b"\r\n0\r\n\r\n") or data == b"0\r\n\r\n":
            self.end_ms.append(1000 * (now - self.sent))
            self.left -= 1
            if self.left:
                self.call()
            else:
                self.transport.close()
                self.done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or ConnectionError("broken off"))


async def load(
    ports: dict[str, int], num_clients: int, num_calls: int, spread_s: float
) -> dict[str, list[Client]]:
    """Runs so many clients of each port at once, whose calls begin, and end, evenly spread."""
    loop, clients, ends = asyncio.get_running_loop(), {}, []
    for number, (name, port) in enumerate(ports.items()):
        clients[name] = []
        for i in range(num_clients):
            start_s = spread_s * (i + number / len(ports)) / num_clients
            end = loop.create_future()
            client = Client(num_calls, end, start_s)
            await loop.create_connection(lambda c=client: c, "127.0.0.1", port)
            clients[name].append(client)
            ends.append(end)
    await asyncio.gather(*ends)
    return clients


def figures(clients: list[Client]) -> dict:
    row: dict = {"calls": sum(len(client.end_ms) for client in clients)}
    for what in ("first", "lag", "end"):
        found = [ms for client in clients for ms in getattr(client, f"{what}_ms")]
        row[f"{what}_ms_p50"] = round(median(found), 3)
        row[f"{what}_ms_p95"] = round(quantiles(found, n=20)[-1], 3)
    return row


def measured(
    ports: dict[str, int], proxy: psutil.Process, clients: int, calls: int, spread_s: float
) -> dict:
    """Loads the ports at once; says what each saw, what the proxy added and what it cost."""
    before, began = proxy.cpu_times(), time.perf_counter()
    seen = uvloop.run(load(ports, clients, calls, spread_s))
    after, wall_s = proxy.cpu_times(), time.perf_counter() - began
    cpu_s = after.user + after.system - before.user - before.system
    row: dict = {name: figures(found) for name, found in seen.items()}
    blocks = sum(client.num_blocks for client in seen["proxied"])
    num_calls = row["proxied"]["calls"]
    if "direct" in row:
        row["added_ms"] = {
            what: round(row["proxied"][f"{what}_ms_p50"] - row["direct"][f"{what}_ms_p50"], 3)
            for what in ("first", "lag", "end")
        }
    row["proxy"] = {
        "cores": round(cpu_s / wall_s, 3),
        "cpu_ms_per_call": round(1000 * cpu_s / num_calls, 3),
        "of_it_in_the_kernel": round((after.system - before.system) / cpu_s, 2) if cpu_s else 0.0,
        "cpu_us_per_block": round(1e6 * cpu_s / blocks, 2),
        "blocks_per_s": round(blocks / wall_s),
        "rss_mb": round(proxy.memory_info().rss / 1e6, 1),
    }
    return row


def disk_sync_ms(folder: str) -> float:
    """What the disk itself takes to make a call durable, which is within `end`: the median of 50."""
    took = []
    with tempfile.TemporaryFile(dir=folder) as stream:
        for _ in range(50):
            os.write(stream.fileno(), bytes(30_000))
            began = time.perf_counter()
            os.fdatasync(stream.fileno())
            took.append(1000 * (time.perf_counter() - began))
            time.sleep(0.005)
    return round(median(took), 3)


def num_recorded(folder: Path) -> int:
    lines = (line for path in folder.glob("calls-*.jsonl") for line in path.open("rb"))
    return sum(json.loads(line)["end"] == "whole" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--moderate", type=int, default=20)
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--events", type=int, default=100)
    parser.add_argument("--gap-ms", type=float, default=20)
    options = parser.parse_args()
    script = ["--events", str(options.events), "--gap-ms", str(options.gap_ms)]
    row: dict = {
        "events": options.events,
        "gap_ms": options.gap_ms,
        "moderate": options.moderate,
        "many": options.streams,
    }
    lost, spread_s = 0, options.events * options.gap_ms / 1000
    with (
        tempfile.TemporaryDirectory(dir=".") as name,
        process(sys.executable, str(HERE / "endpoint.py"), *script) as (upstream, _),
    ):
        url = f"http://127.0.0.1:{upstream['port']}"
        ours = (sys.executable, "-m", "stillroom_mcp", "record", "--upstream", url, "--port", "0", "--workspace", name)  # fmt: skip
        with process(*ours) as (said, proxy):
            port = int(said["recording"].rpartition(":")[2])
            both = {"direct": upstream["port"], "proxied": port}
            uvloop.run(load({"proxied": port}, options.moderate, 1, 1.0))
            sync_ms = disk_sync_ms(name)
            moderate = measured(both, proxy, options.moderate, options.calls, spread_s)
            row["disk_sync_ms"] = [sync_ms, disk_sync_ms(name)]
            many = measured({"proxied": port}, proxy, options.streams, options.calls, spread_s)
            alone = uvloop.run(load({"direct": both["direct"]}, options.streams, 1, spread_s))
        row["moderate"] = moderate
        row["many"] = many | {"without_it": figures(alone["direct"])}
        seen = sum(part["proxied"]["calls"] for part in (moderate, many))
        lost = seen + options.moderate - num_recorded(Path(name) / "traces")
        row["lost"] = lost
    print(json.dumps(row), flush=True)
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
