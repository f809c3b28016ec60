"""The samples of other systems' traces, and short ways to read them."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stillroom.importing.formats.table import FORMATS
from stillroom.importing.json_rows import read_head
from stillroom.importing.records import LoggedConversation, RefusedRow, SourceRow, TraceFormat

SAMPLES = Path(__file__).parents[1] / "fixtures" / "traces"
"""A folder for each format, with its name; `.seen.json` files say what the endpoint saw."""
LOG_FORMATS = (
    "anthropic_batch",
    "anthropic_messages",
    "gemini",
    "helicone",
    "langfuse",
    "langsmith",
    "litellm",
    "openai_batch",
    "openai_responses",
    "openinference",
    "openrouter",
    "otel_genai",
    "phoenix",
    "span_table",
    "stored_completions",
)
"""The formats of logs and traces whose samples clients or services wrote."""
_NOTES = (".seen.json",)


def sample_files() -> list[Path]:
    """The files of all samples, without notes about them."""
    files = (path for path in SAMPLES.rglob("*") if path.is_file())
    return sorted(path for path in files if not path.name.endswith(_NOTES))


def recognised_by(path: Path) -> list[str]:
    """The names of the formats that recognise a file."""
    head = read_head(path)
    return [form.name for form in FORMATS if form.is_recognised(path, head)]


def format_named(name: str) -> TraceFormat:
    return next(form for form in FORMATS if form.name == name)


def read(name: str, *paths: Path, columns: Mapping[str, str] | None = None) -> list[SourceRow]:
    form = format_named(name)
    if columns is None:
        return list(form.read(paths))
    assert form.read_columns is not None
    return list(form.read_columns(paths, columns))


def conversations(rows: list[SourceRow]) -> list[LoggedConversation]:
    """The conversations of rows, among which there is nothing else."""
    assert all(isinstance(row, LoggedConversation) for row in rows), rows
    return [row for row in rows if isinstance(row, LoggedConversation)]


def refusals(rows: list[SourceRow]) -> list[tuple[int, str]]:
    """The line and the reason of each refused row."""
    return [(row.location.line, row.reason) for row in rows if isinstance(row, RefusedRow)]


def shown(messages: list[dict[str, Any]]) -> list[str]:
    """Each message as its role and text, calls as name and arguments."""
    return [
        " ".join(
            (
                message["role"],
                message["content"],
                *(
                    f"{call['function']['name']}{call['function']['arguments']}"
                    for call in message.get("tool_calls", ())
                ),
            )
        ).strip()
        for message in messages
    ]


def seen_calls(name: str, file: str) -> list[dict[str, Any]]:
    """What the scripted endpoint saw of the calls of a sample, in our shape, in their order."""
    return json.loads((SAMPLES / name / file).read_text(encoding="utf-8"))


def compared(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages without weights, and with the arguments of calls as values: spaces may differ."""
    return [
        {key: value for key, value in message.items() if key not in ("weight", "tool_calls")}
        | {
            "calls": [
                (call["id"], call["function"]["name"], json.loads(call["function"]["arguments"]))
                for call in message.get("tool_calls", ())
            ]
        }
        for message in messages
    ]


def write_lines(path: Path, *rows: object) -> Path:
    """A file with a JSON row a line; bytes are written as they are."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def places_in(value: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """Each container of a value with each of its keys."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        yield value, key
        if isinstance(item, dict | list) and depth < 12:
            yield from places_in(item, depth + 1)
