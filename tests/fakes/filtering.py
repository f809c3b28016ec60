"""Filtering rows of a folder."""

from pathlib import Path
from typing import Any

from fakes.rollout_lines import encoded
from fakes.rollout_rows import assistant, read_rows, tool_call, tool_reply, user, write_lines
from stillroom.curate.filter.request import FilterDataset, FilterResult
from stillroom.curate.filter.run import filter_dataset
from stillroom.settings import Workspace

TALK = [user("a"), assistant(None, tool_call()), tool_reply("7"), assistant("7")]


def filtered(
    folder: Path, source: str | tuple[str, ...] = "rollouts.jsonl", **options: Any
) -> FilterResult:
    """Filters one or more files of a folder into kept.jsonl."""
    request = FilterDataset(input=source, **{"output": "kept.jsonl", **options})
    return filter_dataset(Workspace(folder), request)


def kept_of(folder: Path, rows: list[dict], **options: Any) -> list[str]:
    """The task ids of what passes."""
    write_lines(folder / "rollouts.jsonl", map(encoded, rows))
    filtered(folder, **options)
    return [row["task_id"] for row in read_rows(folder / "kept.jsonl")]
