"""kill -9 of `stillroom record` while clients stream through it: is every call in the journal whose end a client saw? kills.py [--kills 50]

So many clients call all the time, through one proxy that is killed at random moments and started again on the same folder; each call has a
text of its own. A call counts as ended for its client at `[DONE]`, after which programs read no more. Prints a JSON line; exits with 1 if a
call that ended is not recorded as whole, one is recorded twice, a line is torn, or a kill did not happen.
"""

import argparse
import asyncio
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


class Clients:
    """Clients of a port that is at times closed; `ended` holds the texts of the calls that they saw end."""

    def __init__(self, port: int, num: int) -> None:
        self.port, self.num = port, num
        self.ended: list[str] = []
        self.num_broken = 0
        self.is_stopping = False

    async def run(self) -> None:
        await asyncio.gather(*(self.client(number) for number in range(self.num)))

    async def client(self, number: int) -> None:
        calls = 0
        while not self.is_stopping:
            text, calls = f"client {number} call {calls}", calls + 1
            try:
                await self.call(text)
            except (OSError, asyncio.IncompleteReadError):
                self.num_broken += 1
                await asyncio.sleep(0.1)

    async def call(self, text: str) -> None:
        body = json.dumps({"model": "m", "stream": True, "messages": [{"role": "user", "content": text}]}).encode()  # fmt: skip
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            await reader.readuntil(b"data: [DONE]\n\n")
            self.ended.append(text)
        finally:
            writer.close()


def start(port: int, upstream: str, folder: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "stillroom_mcp", "record", "--upstream", upstream]
    process = subprocess.Popen(
        [*command, "--port", str(port), "--workspace", folder],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    process.stdout.readline()
    process.stdout.close()
    return process


async def killing(options: argparse.Namespace, upstream: str, folder: str) -> tuple[Clients, int]:
    draw, kills = random.Random(options.seed), 0
    clients = Clients(free_port(), options.clients)
    process = await asyncio.to_thread(start, clients.port, upstream, folder)
    running = asyncio.create_task(clients.run())
    for _ in range(options.kills):
        # Within the time in which a call of each client begins and ends.
        await asyncio.sleep(draw.uniform(0.02, 0.4))
        kills += process.poll() is None
        process.kill()
        process.wait()
        process = await asyncio.to_thread(start, clients.port, upstream, folder)
    await asyncio.sleep(0.3)
    clients.is_stopping = True
    await running
    process.terminate()
    process.wait()
    return clients, kills


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    began = time.perf_counter()
    script = ["--events", "10", "--gap-ms", "10", "--first-ms", "10"]
    endpoint = subprocess.Popen(
        [sys.executable, str(HERE / "endpoint.py"), *script], stdout=subprocess.PIPE
    )
    try:
        url = f"http://127.0.0.1:{json.loads(endpoint.stdout.readline())['port']}"
        with tempfile.TemporaryDirectory(dir=".") as folder:
            clients, kills = asyncio.run(killing(options, url, folder))
            lines = [
                line
                for path in Path(folder, "traces").glob("calls-*.jsonl")
                for line in path.read_bytes().splitlines()
            ]
    finally:
        endpoint.terminate()
        endpoint.wait()
    ends, recorded, torn = Counter(), Counter(), 0
    for line in lines:
        try:
            call = json.loads(line)
        except ValueError:
            torn += 1
            continue
        ends[call["end"]] += 1
        if call["end"] == "whole":
            recorded[json.loads(call["request"]["content"]["text"])["messages"][0]["content"]] += 1
    lost = [text for text in clients.ended if text not in recorded]
    figures = {
        "kills": kills,
        "ended": len(clients.ended),
        "lost": len(lost),
        "recorded_twice": sum(count > 1 for count in recorded.values()),
        "torn_lines": torn,
        "broken_for_clients": clients.num_broken,
        "recorded": dict(ends),
        "seconds": round(time.perf_counter() - began, 1),
    }
    print(json.dumps(figures), flush=True)
    is_kept = not lost and not torn and not figures["recorded_twice"] and kills == options.kills
    return 0 if is_kept else 1


if __name__ == "__main__":
    sys.exit(main())
