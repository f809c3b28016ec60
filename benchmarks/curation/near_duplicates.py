"""Near duplicates: 100,000 rollouts with planted pairs through filter_dataset, in a fresh process.

usage: near_duplicates.py [--rows 100000] [--share 0.15] [--seed 0]
Prints one JSON line: seconds (wall, CPU), peak memory, recall over the planted pairs whose word
triples overlap by at least 0.8, and precision over what was dropped.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

VOCABULARY = [f"w{number:x}" for number in range(20_000)]
WEIGHTS = [1 / rank for rank in range(5, 20_005)]
REQUEST = "FilterDataset(input='rows.jsonl', output='kept.jsonl', dedupe='near')"
PROGRAM = (
    "import json, resource, time; from pathlib import Path;"
    "from stillroom.curate.filter.request import FilterDataset;"
    "from stillroom.curate.filter.run import filter_dataset;"
    "from stillroom.settings import Workspace; start = time.perf_counter();"
    f"result = filter_dataset(Workspace(Path.cwd()), {REQUEST});"
    "used = resource.getrusage(resource.RUSAGE_SELF);"
    "print(json.dumps(dict(read=result.read, kept=result.kept, dropped=result.dropped,"
    " wall_s=round(time.perf_counter() - start, 1), cpu_s=round(used.ru_utime + used.ru_stime, 1),"
    " peak_mb=used.ru_maxrss // 1024)))"
)


def row_of(number: int, chance: random.Random, words: list[str]) -> dict:
    half = len(words) // 3
    messages = [
        {"role": "system", "content": "You are a clerk. " * 20},
        {"role": "user", "content": " ".join(words[:half])},
        {"role": "assistant", "content": None, "tool_calls": [{
            "id": f"call_{number}", "type": "function",
            "function": {"name": "price", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": f"call_{number}", "content": " ".join(chance.choices(VOCABULARY, k=100))},
        {"role": "assistant", "content": " ".join(words[half:])},
    ]  # fmt: skip
    return {
        "id": f"r{number}",
        "task_id": f"t{number}",
        "messages": messages,
        "stop_reason": "answered",
        "reward": round(chance.random(), 3),
    }


def write_rows(
    path: Path, num_rows: int, share: float, chance: random.Random
) -> tuple[list[list[str]], list[tuple[int, int]]]:
    """Writes the rows in random order; returns the words of each and the planted pairs."""
    texts: list[list[str]] = []
    origins: list[int] = []
    while len(texts) < num_rows:
        words = chance.choices(VOCABULARY, WEIGHTS, k=chance.randint(40, 320))
        origin = len(texts)
        texts.append(words)
        origins.append(origin)
        for _ in range((chance.random() < share) * chance.randint(1, 3)):
            copy = list(words)
            for _ in range(chance.randint(0, max(1, len(copy) // 22))):
                copy[chance.randrange(len(copy))] = chance.choice(VOCABULARY)
            texts.append(copy)
            origins.append(origin)
    order = list(range(len(texts)))
    chance.shuffle(order)
    with path.open("w", encoding="utf-8") as stream:
        stream.writelines(json.dumps(row_of(i, chance, texts[i])) + "\n" for i in order)
    place = {number: position for position, number in enumerate(order)}
    pairs = [(place[i], place[o]) for i, o in enumerate(origins) if i != o]
    return [texts[number] for number in order], pairs


def triples(words: list[str]) -> set[str]:
    half = len(words) // 3
    spoken = [*words[:half], "price", *words[half:]]
    return {" ".join(run) for run in zip(spoken, spoken[1:], spoken[2:], strict=False)}


def overlap(one: list[str], other: list[str]) -> float:
    left, right = triples(one), triples(other)
    return len(left & right) / len(left | right)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--share", type=float, default=0.15)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts, pairs = write_rows(
            folder / "rows.jsonl", options.rows, options.share, random.Random(options.seed)
        )
        started = time.perf_counter()
        finished = subprocess.run(
            [sys.executable, "-c", PROGRAM], cwd=folder, capture_output=True, text=True, check=True
        )
        wall_s = time.perf_counter() - started
        dropped: dict[int, int] = {}
        for line in (folder / "kept.jsonl.dropped").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            dropped[row["line"] - 1] = int(row["like"].rpartition(":")[2]) - 1
        megabytes = (folder / "rows.jsonl").stat().st_size / 1e6
    alike = [pair for pair in pairs if overlap(texts[pair[0]], texts[pair[1]]) >= 0.8]
    # A planted pair is settled when one of it is gone; two copies may both repeat a third.
    settled = sum(one in dropped or other in dropped for one, other in alike)
    right = sum(overlap(texts[row], texts[kept]) >= 0.8 for row, kept in dropped.items())
    print(json.dumps({
        "benchmark": "near_duplicates", **json.loads(finished.stdout), "process_wall_s": round(wall_s, 1), "mb": round(megabytes),
        "planted_at_0.8": len(alike), "recall": round(settled / len(alike), 4), "precision": round(right / max(1, len(dropped)), 4),
        "kept_are_kept": not set(dropped.values()) & dropped.keys(),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
