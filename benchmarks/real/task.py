"""What a task is: a grammar with forms for training and other forms for testing, and its files."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Task:
    """A task: how its rows are made, and what students and teachers get besides the rows."""

    name: str
    make_row: Callable[[Random, bool], Row]
    """Makes a row from a training form, or from a new form if True."""
    system: str
    max_tokens: int
    """The maximum number of tokens of a turn."""
    context: str | None = None
    """What only the teacher reads, as its system message; None: the teacher reads the same."""
    tools: str | None = None
    """The tools.py of the task; None: it needs none."""
    max_turns: int = 1

    def rows(self, seed: int, count: int, *, is_new: bool) -> list[Row]:
        """Returns `count` rows with different prompts."""
        rng = Random(f"{self.name} {seed} {is_new}")
        rows: dict[str, Row] = {}
        for _ in range(200 * count):
            row = self.make_row(rng, is_new)
            rows.setdefault(row["prompt"], row)
            if len(rows) == count:
                return list(rows.values())
        raise RuntimeError(f"{self.name}: the grammar has fewer than {count} different prompts")


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call of a gold conversation, with the tool's reply."""

    tool: str
    arguments: Row
    reply: str


def prompt_row(task: Task, row: Row) -> Row:
    """Returns the row as a prompt with its expected answer."""
    metadata = {"expected_answer": row["answer"], "answer_match": "exact", "group": row["group"]}
    return {"messages": _prompt(task.system, row), "metadata": metadata}


def gold_row(task: Task, row: Row, schemas: Sequence[Row] = ()) -> Row:
    """Returns the row as a conversation to train on, with what a teacher reads.

    schemas: those of the task's tools.
    """
    messages = _prompt(task.context or task.system, row)
    for number, call in enumerate(row.get("calls", ())):
        function = {"name": call.tool, "arguments": json.dumps(call.arguments)}
        tool_call = {"id": f"c{number}", "type": "function", "function": function}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [tool_call]},
            {"role": "tool", "tool_call_id": f"c{number}", "content": call.reply},
        ]
    messages.append({"role": "assistant", "content": row["answer"]})
    return {"messages": messages, **({"tools": list(schemas)} if schemas else {})}


def _prompt(system: str, row: Row) -> list[Row]:
    before = [{"role": "system", "content": system}] if system else []
    return [*before, {"role": "user", "content": row["prompt"]}]


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
