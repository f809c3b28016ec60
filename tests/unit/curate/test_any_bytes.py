"""Whatever the bytes are: each line is counted once, good rows are kept, and errors are ours."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from fakes.foreign_rollouts import GYM_ROW, RNOW_ROW
from fakes.rollout_lines import BAD_LINES, encoded, mutated
from fakes.rollout_rows import assistant, rollout_row, tool_call, tool_reply, user
from stillroom.api import (
    ConvertRollouts,
    FilterDataset,
    MakeDpoPairs,
    ValidateDataset,
    convert_rollouts,
    filter_dataset,
    make_dpo_pairs,
    validate_dataset,
)
from stillroom.data.formats import load_dpo_rows, load_sft_rows
from stillroom.errors import EngineError
from stillroom.settings import Workspace

TALK = [user("a"), assistant(None, tool_call()), tool_reply("7"), assistant("7 ü\u2028")]
GOOD = [
    encoded(rollout_row(messages=TALK)),
    encoded(rollout_row(sample=1, reward=0.0, success=False)),
    encoded({**RNOW_ROW, "task_id": "task"}),
    encoded(GYM_ROW),
    encoded({"messages": TALK, "tools": [], "metadata": {"a": 1}, "reward": 1.0}),
]


def content(chance: random.Random) -> bytes:
    lines = [chance.choice(GOOD) for _ in range(chance.randint(1, 8))]
    lines = [mutated(chance, line) if chance.random() < 0.5 else line for line in lines]
    lines += chance.sample(BAD_LINES, chance.randint(0, 2))
    chance.shuffle(lines)
    data = chance.choice([b"\n", b"\r\n", b"\n\n"]).join(lines)
    if chance.random() < 0.3:
        data = b"\xef\xbb\xbf" + data
    return data[: chance.randrange(len(data))] if chance.random() < 0.2 else data


def num_lines(data: bytes) -> int:
    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    return sum(bool(line.strip(b"\r\n \t")) for line in lines)


def outcome(folder: Path, call: Any, request: Any) -> Any:
    """The result, or None after an error of ours that has left nothing behind."""
    before = set(folder.iterdir())
    try:
        return call(Workspace(folder), request)
    except EngineError as error:
        reported = error
    assert reported.problem
    assert reported.fix
    assert set(folder.iterdir()) == before
    return None


@pytest.mark.parametrize("seed", range(60))
def test_every_operation_takes_any_bytes(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    data = content(chance)
    name = chance.choice(["rows.jsonl", "rows.json"])
    (tmp_path / name).write_bytes(data)
    read = num_lines(data)

    report = outcome(tmp_path, validate_dataset, ValidateDataset(path=name))
    if report is not None:
        assert report.good + report.bad == report.rows
        assert name == "rows.json" or report.rows == read

    kept = outcome(tmp_path, filter_dataset, FilterDataset(input=name, output="kept.jsonl"))
    assert kept is not None
    assert kept.kept + sum(kept.dropped.values()) == kept.read
    assert name == "rows.json" or kept.read == read
    copied = (tmp_path / "kept.jsonl").read_bytes().split(b"\n")[:-1]
    assert len(copied) == kept.kept
    assert name == "rows.json" or all(line in data for line in copied)

    requested = ConvertRollouts(input=name, output="sft.jsonl", include_failed=True)
    converted = outcome(tmp_path, convert_rollouts, requested)
    if converted is not None:
        assert converted.converted + sum(converted.left_out.values()) == converted.read == kept.read
        assert len(load_sft_rows(tmp_path / "sft.jsonl")) == converted.converted

    paired = outcome(tmp_path, make_dpo_pairs, MakeDpoPairs(input=name, output="dpo.jsonl"))
    if paired is not None:
        assert paired.read == kept.read
        assert len(load_dpo_rows(tmp_path / "dpo.jsonl")) == paired.pairs


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
def test_text_in_another_encoding_is_counted_as_no_rollouts(tmp_path: Path, encoding: str) -> None:
    rows = "\n".join(json.dumps(rollout_row(sample=n)) for n in range(3))
    (tmp_path / "rows.jsonl").write_bytes(rows.encode(encoding))

    requested = FilterDataset(input="rows.jsonl", output="kept.jsonl")
    result = filter_dataset(Workspace(tmp_path), requested)

    assert (result.read, result.kept) == (3, 0)
