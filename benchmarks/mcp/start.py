"""From the start of the server's process to its list of tools, and the time of a small call. start.py [--runs 7] [--calls 300]

Beside a bare server of the same SDK with one tool (bare_server.py), in turns, over standard input and output. `ratio` is ours over the
bare one's, of the medians of processor seconds; `wall_ratio` the same of the clock, which other programs on the machine disturb. The
small call is list_runs in an empty workspace, whose answer is as long as an echo's.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BARE = Path(__file__).parent / "bare_server.py"
HELLO = {
    "protocolVersion": "2025-11-25",
    "capabilities": {},
    "clientInfo": {"name": "bench", "version": "0"},
}


class Server:
    """A server's process, and what it took."""

    def __init__(self, command: list[str]) -> None:
        self.started = time.perf_counter()
        self.process = subprocess.Popen(
            [sys.executable, "-P", *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )  # fmt: skip
        self._number = 0
        self.request("initialize", HELLO)
        self.send({"method": "notifications/initialized"})
        self.request("tools/list", {})
        self.wall_s, self.cpu_s = time.perf_counter() - self.started, self.processor_s()

    def send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
        self.process.stdin.flush()

    def request(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        self._number += 1
        self.send({"id": self._number, "method": method, "params": params})
        assert self.process.stdout is not None
        while True:
            answer = json.loads(self.process.stdout.readline())
            if answer.get("id") == self._number:
                return answer["result"]

    def processor_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory_mb(self) -> float:
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024

    def calls(self, tool: str, arguments: dict[str, Any], number: int) -> dict[str, float]:
        """Returns the milliseconds of a call: by the clock, and of the server's processor."""
        walls = []
        for count in range(20 + number):
            if count == 20:
                before_s = self.processor_s()
            began = time.perf_counter()
            answer = self.request("tools/call", {"name": tool, "arguments": arguments})
            walls.append(1000 * (time.perf_counter() - began))
            assert not answer.get("isError"), answer
        walls = sorted(walls[20:])
        return {
            "p50_ms": round(statistics.median(walls), 2),
            "p10_ms": round(walls[number // 10], 2),
            "cpu_ms": round(1000 * (self.processor_s() - before_s) / number, 2),
        }

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--calls", type=int, default=300)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as workspace:
        ours = ["-m", "stillroom_mcp", "serve", "--workspace", workspace]
        commands = {"bare": [str(BARE)], "ours": ours}
        tools = {"bare": ("echo", {"text": "hello"}), "ours": ("list_runs", {})}
        seen: dict[str, list[Server]] = {name: [] for name in commands}
        # The first start compiles what it imports.
        for run in range(-1, options.runs):
            for name, command in commands.items():
                server = Server(command)
                if run >= 0:
                    seen[name].append(server)
                if run == options.runs - 1:
                    result = {"memory_mb": round(server.memory_mb(), 1)}
                    result |= server.calls(*tools[name], options.calls)
                    print(json.dumps({"server": name, **result}), flush=True)
                server.stop()
    cpu = {name: statistics.median(one.cpu_s for one in servers) for name, servers in seen.items()}
    wall = {
        name: statistics.median(one.wall_s for one in servers) for name, servers in seen.items()
    }
    print(
        json.dumps(
            {
                "bare_s": round(cpu["bare"], 2),
                "ours_s": round(cpu["ours"], 2),
                "ratio": round(cpu["ours"] / cpu["bare"], 2),
                "wall_ratio": round(wall["ours"] / wall["bare"], 2),
                "runs": options.runs,
            }
        )
    )


if __name__ == "__main__":
    main()
