"""Filter, convert and pairs over one file of rollouts, and a filter of the supervised rows: ours beside json, orjson, polars and datasets scripts.

disk_speed.py [--mb 1000] [--peers PYTHON] [--core 1] [--repeats 3] [--slow]: PYTHON is an interpreter with orjson
(and polars, datasets for --slow). Every measurement is a process of its own on one core, in turn; the best of the
repeats counts. Ours are the public operations with manifest, fsync and side files; `no_hash` is the same without the
manifest's hashes. Prints one JSON line each, with whether the rows are those of the orjson script.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from make_rollouts import write

HERE = Path(__file__).parent


def measured(command: list[str], core: int) -> dict:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    lines = done.stdout.splitlines()
    return (
        json.loads(lines[-1]) if done.returncode == 0 and lines else {"failed": done.stderr[-400:]}
    )


def contents(path: Path) -> Counter[int]:
    """How often each row of a file is there; pairs without the names of their rollouts, which only we give."""
    counts: Counter[int] = Counter()
    with path.open("rb") as lines:
        for row in map(json.loads, lines):
            named = {
                key: value for key, value in row.items() if key not in ("chosen_id", "rejected_id")
            }
            counts[hash(json.dumps(named, sort_keys=True))] += 1
    return counts


def differing(one: Path, other: Path) -> int:
    """How many rows are in only one of two files."""
    ours, peers = contents(one), contents(other)
    return ((ours - peers) + (peers - ours)).total()


def run(folder: Path, options: argparse.Namespace) -> None:
    write(str(folder / "rollouts.jsonl"), options.mb)
    slow = ["polars", "datasets"] if options.slow else []
    peers = ["orjson", "json", *slow] if options.peers else []
    for operation in ("filter", "convert", "pairs", "filter_sft"):
        source = folder / ("ours_convert.jsonl" if operation == "filter_sft" else "rollouts.jsonl")
        size_mb = source.stat().st_size / 1e6
        ours = [sys.executable, str(HERE / "ours.py"), str(folder), operation]
        commands = {"ours": ours, "ours_no_hash": [*ours, "--no-hash"]}
        for peer in peers:
            if operation in ("pairs", "filter_sft") and peer in slow:
                continue
            out = folder / f"{peer}_{operation}.jsonl"
            arguments = [peer, operation, str(source), str(out)]
            commands[peer] = [options.peers, str(HERE / "peer.py"), *arguments]
        runs_of: dict[str, list[dict]] = {who: [] for who in commands}
        for _ in range(options.repeats):
            for who, command in commands.items():
                runs_of[who].append(measured(command, options.core))
        best = {who: min(runs, key=lambda r: r.get("wall_s", 1e9)) for who, runs in runs_of.items()}
        for who, result in best.items():
            if "wall_s" in result:
                result |= {
                    "mb_per_s": round(size_mb / result["wall_s"]),
                    "mb_per_cpu_s": round(size_mb / result["cpu_s"]),
                }
                if "wall_s" in best.get("orjson", {}):
                    result["of_orjson"] = round(best["orjson"]["wall_s"] / result["wall_s"], 2)
            if who == "orjson":
                ours_file, script_file = (
                    folder / f"{w}_{operation}.jsonl" for w in ("ours", "orjson")
                )
                # In a process of its own: those that are measured inherit this one's peak.
                with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as apart:
                    result["rows_that_differ"] = apart.submit(
                        differing, ours_file, script_file
                    ).result()
            print(
                json.dumps({"operation": operation, "who": who, "mb": round(size_mb), **result}),
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=float, default=1000)
    parser.add_argument("--peers")
    parser.add_argument("--core", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--slow", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder), options)


if __name__ == "__main__":
    main()
