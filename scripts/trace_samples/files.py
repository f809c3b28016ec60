"""Where the samples lie, and how their rows are written."""

import json
from pathlib import Path

from trace_samples.scripted_endpoint import Json

SAMPLES = Path(__file__).parents[2] / "tests" / "fixtures" / "traces"
KEY = "none"
"""The key that clients show the scripted endpoint."""


def write_rows(name: str, rows: list[Json]) -> None:
    """Writes the rows of a sample, one on each line."""
    path = SAMPLES / name
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")
