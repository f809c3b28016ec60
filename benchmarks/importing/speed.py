"""Imports logs of calls that each repeat their history, and shows the speed and the memory.

`python benchmarks/importing/speed.py [--calls 200000] [--shape chat] [--folder DIR]` writes the logs
once (four files, the conversations interleaved as an endpoint sees them), then imports them in a
process of its own. Rows of the shape `chat` have 7 KB (10 calls in a conversation, 1.4 GB for
200,000 calls), those of `agent` 30 KB (20 calls, more tools, longer results). Prints one JSON line: MB are source bytes, wall seconds are of
the whole import, and `tree_mb` is the largest memory that it had at one time (looked at every 50 ms). `json_loads_cpu_s` is what decoding the same rows with the standard library would take, for machines that differ or are busy.
"""

import argparse
import functools
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

FILES = 4
OPEN_AT_ONCE = 200
IMPORT = (
    "import sys; from pathlib import Path; from stillroom.settings import Workspace;"
    "from stillroom.importing.request import ImportRollouts;"
    "from stillroom.importing.run import import_rollouts; import msgspec;"
    "made = import_rollouts(Workspace(Path(sys.argv[1])),"
    " ImportRollouts(input='logs', output='rollouts.jsonl', overwrite=True));"
    "sys.stdout.buffer.write(msgspec.json.encode(made))"
)


@dataclass(frozen=True)
class Shape:
    """How long conversations and their parts are."""

    calls: int
    result_words: int
    tools: int
    instructions: int


SHAPES = {"chat": Shape(10, 60, 2, 12), "agent": Shape(20, 250, 10, 70)}


class Talk:
    """One conversation of an agent, which grows by one call at a time."""

    def __init__(self, draw, words, number, shape):
        self._draw, self._words, self._number, self._shape = draw, words, number, shape
        self.messages = [
            {"role": "system", "content": SYSTEM * shape.instructions},
            {"role": "user", "content": self._text(40)},
        ]
        self.calls = 0

    def _text(self, num_words):
        return " ".join(self._draw.choices(self._words, k=num_words))

    def next_call(self):
        """Returns the row of the next call and adds its reply, and what follows, to the history."""
        history, self.calls = list(self.messages), self.calls + 1
        reply = {"role": "assistant", "content": self._text(30), "refusal": None}
        is_last = self.calls == self._shape.calls
        if not is_last:
            call_id = f"call_{self._draw.getrandbits(64):016x}"
            arguments = json.dumps({"query": self._text(6), "page": self.calls})
            function = {"name": "search", "arguments": arguments}
            reply["tool_calls"] = [{"id": call_id, "type": "function", "function": function}]
            sent = {key: reply[key] for key in ("role", "content", "tool_calls")}
            result = {
                "role": "tool",
                "tool_call_id": call_id,
                "content": self._text(self._shape.result_words),
            }
            self.messages += [sent, result]
        return {
            "timestamp": 1_760_000_000 + self._number * 60 + self.calls,
            "request": {"model": "gpt-4o-mini", "messages": history, "tools": tools(self._shape.tools),
                        "temperature": 0.2},
            "response": {
                "id": f"chatcmpl-{self._number}-{self.calls}",
                "object": "chat.completion",
                "created": 1_760_000_000 + self._number * 60 + self.calls,
                "model": "gpt-4o-mini-2024-07-18",
                "choices": [{"index": 0, "message": reply, "logprobs": None,
                             "finish_reason": "stop" if is_last else "tool_calls"}],
                "usage": {"prompt_tokens": 900, "completion_tokens": 60, "total_tokens": 960},
            },
            "latency_ms": 812,
        }  # fmt: skip


SYSTEM = "You are the shop's assistant. Look things up before you answer. "


@functools.cache
def tools(count):
    """Returns the schemas of some tools."""
    words = {"query": {"type": "string", "description": "Words to look for"},
             "page": {"type": "integer", "description": "Page of results, from 1"}}  # fmt: skip
    parameters = {"type": "object", "properties": words, "required": ["query"]}
    about = "Searches the shop's catalogue and its orders. " * 4
    names = ["search", *(f"order_{n}" for n in range(1, count))]
    return [{"type": "function", "function": {
        "name": name, "description": about, "parameters": parameters}} for name in names]  # fmt: skip


def write_logs(folder, num_calls, shape):
    """Writes the logs, in which OPEN_AT_ONCE conversations go on at the same time."""
    draw = random.Random(11)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9)))
             for _ in range(5000)]  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    streams = [(folder / f"calls-{n}.jsonl").open("wb") for n in range(FILES)]
    number, open_talks = 0, []
    for index in range(num_calls):
        if len(open_talks) < OPEN_AT_ONCE and number * shape.calls < num_calls:
            open_talks.append(Talk(draw, words, number, shape))
            number += 1
        talk = draw.choice(open_talks)
        row = talk.next_call()
        streams[index * FILES // num_calls].write(json.dumps(row).encode() + b"\n")
        if talk.calls == shape.calls:
            open_talks.remove(talk)
    for stream in streams:
        stream.close()


def json_decoding(logs):
    """Returns the CPU seconds that json.loads alone takes for a tenth of the rows, times ten."""
    started = time.process_time()
    for path in logs.iterdir():
        with path.open("rb") as stream:
            for number, line in enumerate(stream):
                if number % 10 == 0:
                    json.loads(line)
    return 10 * (time.process_time() - started)


def largest_memory(process):
    """Waits for a process, and returns the most bytes that it and its children had at one time."""
    largest = 0
    while process.poll() is None:
        largest = max(largest, sum(map(memory_of, tree_of(process.pid))))
        time.sleep(0.05)
    return largest


def tree_of(pid):
    """Returns a process and those that it has started, and they in turn."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        found = [
            int(child) for thread in threads for child in (thread / "children").read_text().split()
        ]
    except OSError:
        return [pid]
    return [pid, *(each for child in found for each in tree_of(child))]


def memory_of(pid):
    """Returns the bytes of a process, and of what it shares its share; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=200_000)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="chat")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="import-speed-"))
    logs = folder / "logs"
    if not logs.exists():
        write_logs(logs, options.calls, SHAPES[options.shape])
    num_bytes = sum(path.stat().st_size for path in logs.iterdir())
    for path in logs.iterdir():
        with path.open("rb") as stream:  # into the page cache, and not into this process
            while stream.read(1 << 20):
                pass
    decode_cpu_s = json_decoding(logs)
    started = time.monotonic()
    process = subprocess.Popen([sys.executable, "-c", IMPORT, str(folder)], stdout=subprocess.PIPE,
                               env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
    largest = largest_memory(process)
    wall_s = time.monotonic() - started
    if process.returncode:
        raise SystemExit(process.returncode)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    made = json.loads(process.stdout.read())
    print(json.dumps({
        "shape": options.shape, "calls": made["read"], "rollouts": made["kept"], "refused": made["refused"],
        "source_mb": round(num_bytes / 1e6, 1), "wall_s": round(wall_s, 2),
        "mb_per_s": round(num_bytes / 1e6 / wall_s, 1),
        "cpu_s": round(used.ru_utime + used.ru_stime, 2),
        "mb_per_cpu_s": round(num_bytes / 1e6 / (used.ru_utime + used.ru_stime), 1),
        "json_loads_cpu_s": round(decode_cpu_s, 2),
        "largest_process_mb": round(used.ru_maxrss / 1024, 1), "tree_mb": round(largest / 1e6, 1),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
