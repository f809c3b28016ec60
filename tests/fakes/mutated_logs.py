"""Samples of trace formats with broken rows, imported as a user would."""

import copy
import csv
import io
import json
import random
import shutil
from pathlib import Path
from typing import Any

from fakes.trace_files import SAMPLES, places_in, sample_files
from stillroom.data.validate import ValidateDataset, validate_dataset
from stillroom.errors import DataError
from stillroom.importing.formats.table import FORMATS
from stillroom.importing.request import ImportRollouts
from stillroom.importing.run import import_rollouts
from stillroom.settings import Workspace

MUTATED_FORMATS = tuple(form.name for form in FORMATS if form.name != "parquet")
ODD_VALUES = (None, 0, -1.5, True, "", "x", "[", '{"a": [', [], {}, [[]], [None], {"a": 1}, 10**30,
    "2026", "\u0000", "\ud800", {"type": []}, [{"type": 5}], {"type": "x"}, [{"type": "text"}],
    ["x"], [{"role": "user"}], {"role": "assistant"}, [{"role": "assistant", "content": "b"}],
)  # fmt: skip


def mutated(rows: list[Any], draw: random.Random) -> list[Any]:
    """Rows with a few values replaced, taken out, copied elsewhere or cut off."""
    rows = copy.deepcopy(rows)
    for _ in range(draw.randint(1, 6)):
        places = list(places_in(rows))
        holder, key = draw.choice(places)
        change = draw.randrange(6)
        if change == 0 and isinstance(holder, dict):
            del holder[key]
        elif change == 1:
            holder[key] = copy.deepcopy(draw.choice(places)[0])
        elif change == 2 and isinstance(holder[key], list):
            holder[key] = holder[key][draw.randint(0, len(holder[key])) :]
        else:
            holder[key] = copy.deepcopy(draw.choice(ODD_VALUES))
    return rows


def mutated_log(folder: Path, name: str, draw: random.Random, num_files: int) -> None:
    """Writes broken copies of a format's samples to a folder."""
    samples = [path for path in sample_files() if path.is_relative_to(SAMPLES / name)]
    for number in range(num_files):
        path = draw.choice([path for path in samples if path.suffix != ".eval"])
        copied = folder / str(number) / path.relative_to(SAMPLES / name)
        copied.parent.mkdir(parents=True)
        text = path.read_text("utf-8")
        if path.suffix in (".csv", ".tsv"):
            rows = mutated([list(row) for row in csv.reader(io.StringIO(text))], draw)
            text = "\n".join(",".join(map(str, row)) if isinstance(row, list) else str(row)
                             for row in rows)  # fmt: skip
            copied.write_text(text, "utf-8", errors="replace")
        elif path.suffix == ".jsonl":
            rows = mutated([json.loads(line) for line in text.splitlines()], draw)
            copied.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        else:
            copied.write_text(json.dumps(mutated([json.loads(text)], draw)[0]), "utf-8")


def check_import(root: Path, name: str) -> int:
    """Imports the logs in `root / "logs"` and returns how many rows they have.

    Each is kept, merged or refused with a reason, and what is kept is sound.
    """
    request = ImportRollouts(
        input="logs", output="out.jsonl", format=name, prompts=True, infer_tools=True
    )
    try:
        made = import_rollouts(Workspace(root), request)
    except DataError as error:  # every row is refused
        if "rows has a readable conversation" not in error.problem:
            raise
        return 1
    assert made.read == made.kept + made.merged + made.refused
    refused = [json.loads(line) for line in (root / "out.jsonl.refused").read_bytes().splitlines()]
    assert all(row["reason"] for row in refused)
    assert len(refused) == made.refused
    report = validate_dataset(Workspace(root), ValidateDataset(path="out.jsonl")).report
    assert (report.good, report.bad) == (made.kept, 0), report.problems
    return made.read


def check_mutated(root: Path, name: str, seed: int, num_files: int) -> int:
    """Imports broken logs of a format and returns how many rows they have."""
    mutated_log(root / "logs", name, random.Random(f"{name} {seed}"), num_files)
    num_rows = check_import(root, name)
    shutil.rmtree(root / "logs")
    return num_rows
