"""The same operations as scripts people write: peer.py json|orjson|polars|datasets filter|convert|pairs|filter_sft IN OUT.

One process each; prints one JSON line. polars and datasets only filter and convert rollouts.
"""

import json
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path

impl, operation, source, output = sys.argv[1:5]


def num_turns(messages) -> int:
    return sum(message["role"] == "assistant" for message in messages)


def passes(row) -> bool:
    if operation == "filter_sft":
        return row["reward"] >= 0.7 and 3 <= num_turns(row["messages"]) <= 15
    return (
        row["error"] is None
        and row["success"]
        and row["reward"] >= 0.7
        and 3 <= num_turns(row["messages"]) <= 15
    )


def supervised(row) -> dict:
    return {
        "messages": row["messages"], "tools": row.get("tools") or [], "metadata": row["metadata"],
        "reward": row["reward"], "task_id": row["task_id"], "rollout_id": row["id"],
    }  # fmt: skip


def shared(one: list, other: list) -> int:
    return next(
        (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


def pair(rows: list) -> dict | None:
    best, worst = (
        max(rows, key=lambda r: r["reward"]),
        min(rows, key=lambda r: r["reward"]),
    )
    difference = best["reward"] - worst["reward"]
    chosen, rejected = best["messages"], worst["messages"]
    start = shared(chosen, rejected)
    if difference < 0.1 or start >= min(len(chosen), len(rejected)):
        return None
    if not chosen[start]["role"] == rejected[start]["role"] == "assistant":
        return None
    return {
        "prompt": chosen[:start], "chosen": chosen[start:], "rejected": rejected[start:], "tools": [],
        "metadata": best["metadata"], "quality_difference": difference, "task_id": best["task_id"],
        "chosen_id": best["id"], "rejected_id": worst["id"],
    }  # fmt: skip


def script(loads, dumps) -> None:
    groups: dict[str, list] = {}
    with (
        Path(source).open("rb", 1 << 20) as lines,
        Path(output).open("wb", 1 << 20) as out,
    ):
        for line in lines:
            row = loads(line)
            if operation in ("filter", "filter_sft") and passes(row):
                out.write(line)
            elif operation == "convert" and row["error"] is None and row["success"]:
                out.write(dumps(supervised(row)) + b"\n")
            elif operation == "pairs" and row["error"] is None:
                groups.setdefault(row["task_id"], []).append(row)
        for rows in groups.values():
            if (made := pair(rows)) is not None:
                out.write(dumps(made) + b"\n")


def with_polars() -> None:
    import polars as pl

    turns = (
        pl.col("messages").list.eval(pl.element().struct.field("role") == "assistant").list.sum()
    )
    rows = pl.scan_ndjson(source, infer_schema_length=1000).filter(pl.col("success"))
    if operation == "filter":
        rows.filter((pl.col("reward") >= 0.7) & turns.is_between(3, 15)).sink_ndjson(output)
    else:
        names = {"id": "rollout_id"}
        rows.select("messages", "metadata", "reward", "task_id", "id").rename(names).sink_ndjson(
            output
        )


def with_datasets() -> None:
    import datasets

    datasets.disable_progress_bars()
    cache = tempfile.mkdtemp()
    rows = datasets.load_dataset("json", data_files=source, split="train", cache_dir=cache)
    rows = rows.filter(passes if operation == "filter" else lambda row: row["success"])
    if operation == "convert":
        rows = rows.map(supervised, remove_columns=rows.column_names)
    rows.to_json(output)
    shutil.rmtree(cache)


def main() -> None:
    if impl == "orjson":
        import orjson
    started, cpu_before_s = time.perf_counter(), time.process_time()
    if impl == "json":
        script(json.loads, lambda row: json.dumps(row).encode())
    elif impl == "orjson":
        script(orjson.loads, orjson.dumps)
    else:
        {"polars": with_polars, "datasets": with_datasets}[impl]()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps({
        "wall_s": round(time.perf_counter() - started, 3), "cpu_s": round(time.process_time() - cpu_before_s, 2),
        "rss_mb": round(usage.ru_maxrss / 1024),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
