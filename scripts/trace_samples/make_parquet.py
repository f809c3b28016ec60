"""Writes the parquet samples of the tests.

Run it in the repository: `python scripts/trace_samples/make_parquet.py tests/fixtures/traces`.
"""

import sys
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet


def main(folder: Path) -> None:
    """Writes a table of conversations and one of questions into the folder of parquet samples."""
    calls = [{"id": "call_a", "function": {"name": "price", "arguments": '{"item": "lamp"}'}}]
    chats: list[dict[str, Any]] = [
        {
            "id": "row-1",
            "messages": [
                {"role": "user", "content": "Price of a lamp?"},
                {"role": "assistant", "content": None, "tool_calls": calls},
                {"role": "tool", "content": "12", "tool_call_id": "call_a"},
                {"role": "assistant", "content": "12 euros."},
            ],
            "num_tokens": 31,
            "picture": b"\x89PNG",
        },
        {
            "id": "row-2",
            "messages": [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Hello."},
            ],
            "num_tokens": 7,
            "picture": None,
        },
    ]
    _write(folder / "parquet" / "chats.parquet", chats)
    questions = [{"q": f"{n} plus {n}?", "a": str(2 * n), "good": n > 1} for n in (1, 2, 3)]
    _write(folder / "parquet" / "questions.parquet", questions)


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
