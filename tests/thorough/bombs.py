"""Small inputs that mean much: how much time and memory do they take, and are they refused? bombs.py [--megabytes 1024]

Each bomb is given to an operation in a process of its own, whose most memory is compared with that
of the same operation on a harmless input.
"""

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scenes import report, workspace

from stillroom import api
from stillroom.errors import EngineError
from stillroom.settings import Workspace

GROWTH_BYTES, TIME_S = 256 << 20, 20.0
MESSAGES = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "Gone."}]
ROW = json.dumps({"messages": MESSAGES}).encode()


def aliases() -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    return "\n".join(lines)


def nested(depth: int = 10_000) -> bytes:
    return b'{"messages":' + b"[" * depth + b"]" * depth + b"}"


def write_long_line(path: Path, num_bytes: int) -> None:
    """Writes a good row, one of `num_bytes` bytes, and another good one."""
    block = b"x" * (1 << 20)
    with path.open("wb") as stream:
        stream.write(ROW + b'\n{"messages": [{"role": "user", "content": "')
        for _ in range(num_bytes >> 20):
            stream.write(block)
        stream.write(b'"}]}\n' + ROW + b"\n")


def measured(work: Callable[[], Any]) -> dict[str, Any]:
    """Returns the time, the most memory, and what the work said, done in a fork of this process."""
    reading, writing = os.pipe()
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        try:
            said = repr(work())[:200]
        except EngineError as error:
            said = f"refused: {error.problem[:200]}"
        # Whatever else a bomb sets off is what this script looks for.
        except BaseException as error:
            said = f"broken: {type(error).__name__}: {error}"[:200]
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        inner = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        os.write(writing, json.dumps([said, max(own, inner) * 1024]).encode())
        os._exit(0)
    os.close(writing)
    data = os.read(reading, 1 << 16)
    os.waitpid(child, 0)  # no limit: run.py ends the script after an hour
    os.close(reading)
    said, memory = json.loads(data) if data else ("broken: it was killed", 0)
    return {"seconds": round(time.monotonic() - started, 1), "bytes": memory, "said": said}


def row_calls(space: Workspace, name: str) -> dict[str, Callable[[], Any]]:
    """The operations that read a file of rows, on the file of this name."""
    return {
        "validate": lambda: api.validate_dataset(space, api.ValidateDataset(path=name)),
        "inspect": lambda: api.inspect_examples(space, api.InspectExamples(path=name)),
        "filter": lambda: api.filter_dataset(
            space, api.FilterDataset(input=name, output=f"filter-{name}", min_turns=1)
        ),
        "convert": lambda: api.convert_rollouts(
            space, api.ConvertRollouts(input=name, output=f"convert-{name}")
        ),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1024, help="of the long line")
    options = parser.parse_args()
    bombs: dict[str, dict[str, Any]] = {}
    with workspace() as space:
        root = space.root
        (root / "good.jsonl").write_bytes(ROW + b"\n" + ROW + b"\n")
        write_long_line(root / "long.jsonl", options.megabytes << 20)
        (root / "nested.jsonl").write_bytes(ROW + b"\n" + nested() + b"\n")
        base = {
            name: measured(call)["bytes"] for name, call in row_calls(space, "good.jsonl").items()
        }
        for file in ("long.jsonl", "nested.jsonl"):
            for name, call in row_calls(space, file).items():
                bombs[f"{name} {file}"] = {**measured(call), "base": base[name]}
        (root / "aliases.yml").write_text(aliases(), encoding="utf-8")
        (root / "nested.yml").write_text("[" * 10_000, encoding="utf-8")
        (root / "nested.json").write_bytes(nested())
        (root / "prompts.jsonl").write_text('{"prompt": "a"}\n', encoding="utf-8")
        for file in ("aliases.yml", "nested.yml", "nested.json"):
            train = api.StartTraining(config=file)
            judged = api.GenerateRollouts(
                input="prompts.jsonl", output="o.jsonl", model="m", base_url="http://127.0.0.1:1", judge=file
            )  # fmt: skip
            bombs[f"train {file}"] = measured(lambda r=train: api.start_training(space, r))
            bombs[f"judge {file}"] = measured(lambda r=judged: api.generate_rollouts(space, r))
        run = root / "runs" / "sft-nested"
        run.mkdir(parents=True)
        (run / "run.json").write_bytes(b'{"result":' * 10_000 + b"1" + b"}" * 10_000)
        bombs["list_runs"] = measured(lambda: len(api.list_runs(space, api.ListRuns()).unreadable))
    for bomb in bombs.values():
        bomb["growth"] = max(0, bomb["bytes"] - bomb.pop("base", min(base.values())))
    broken = {
        name: bomb
        for name, bomb in bombs.items()
        if bomb["growth"] > GROWTH_BYTES
        or bomb["seconds"] > TIME_S
        or bomb["said"].startswith("broken")
    }
    growth = max(bomb["growth"] for bomb in bombs.values()) >> 20
    slowest = max(bomb["seconds"] for bomb in bombs.values())
    return report(
        22,
        f"{len(bombs)} bombs (a line of {options.megabytes} MB, JSON 10,000 deep, YAML that stands for 9^10 values): {len(broken)} broke through; "
        f"at most {growth} MB more memory and {slowest} s",
        not broken,
        broken=broken, bombs={name: bomb["said"] for name, bomb in bombs.items()},
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
