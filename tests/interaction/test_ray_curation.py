"""Curation over a local Ray cluster of two workers: the same bytes as in one process."""

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fakes.ray_marks import RAY_MARKS
from fakes.rollout_rows import assistant, rollout_row, user, write_lines
from stillroom import api
from stillroom.curate import convert, pairs
from stillroom.curate.filter import run as filters
from stillroom.curate.ray.filter import filter_on_ray
from stillroom.curate.ray.rollouts import convert_on_ray, pair_on_ray
from stillroom.errors import DataError
from stillroom.settings import Workspace

pytestmark = RAY_MARKS
NUM_SHARDS, ROWS_PER_SHARD, NUM_TASKS = 5, 40, 30
WORDS = [f"word{number}" for number in range(400)]


def row_of(chance: random.Random, number: int) -> bytes:
    """Returns a row; tasks, answers and near answers repeat from shard to shard."""
    if number % 17 == 5:
        return b'{"id": "broken'
    task = chance.randrange(NUM_TASKS)
    words = random.Random(chance.randrange(60)).choices(WORDS, k=80)
    if chance.random() < 0.3:
        words[chance.randrange(80)] = "other"
    reward = chance.choice([0.0, 0.1, 0.3, 0.7, 1.0, None])
    question = f"Question {task} of many about {WORDS[task]}?"
    row = rollout_row(
        id=f"r{number}",
        task_id=f"task-{task}",
        messages=[user(question), assistant(" ".join(words))],
        metadata={"task_type": chance.choice("abc"), "n": chance.choice([1, 1.0, None])},
        reward=reward,
        success=None if reward is None else reward > 0.5,
    )
    # Spacing that an encoder would not write.
    return msgspec.json.encode(row).replace(b'"task_id":', b'"task_id" : ', 1)


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    chance = random.Random(7)
    for shard in range(NUM_SHARDS):
        rows = [row_of(chance, shard * ROWS_PER_SHARD + i) for i in range(ROWS_PER_SHARD)]
        write_lines(tmp_path / "shards" / f"{shard}.jsonl", rows)
    held_out = [{"prompt": f"Question {task} of many about {WORDS[task]}?"} for task in range(4)]
    write_lines(tmp_path / "heldout.jsonl", [msgspec.json.encode(row) for row in held_out])
    verdicts = [{"id": f"r{number}", "verdict": "drop"} for number in (0, 41, 999)]
    write_lines(tmp_path / "verdicts.jsonl", [msgspec.json.encode(row) for row in verdicts])
    return Workspace(tmp_path)


def reported(result: msgspec.Struct) -> dict[str, Any]:
    """Returns a result as it is told, names of the output and last digits of means apart."""

    def plain(value: Any) -> Any:
        if isinstance(value, float):
            return float(f"{value:.12g}")
        if isinstance(value, dict):
            return {key: plain(inner) for key, inner in value.items()}
        return [plain(item) for item in value] if isinstance(value, list) else value

    fields = msgspec.to_builtins(result)
    return {k: plain(v) for k, v in fields.items() if k not in ("output", "dropped_file")}


def manifest(workspace: Workspace, name: str) -> dict[str, Any]:
    found = msgspec.json.decode((workspace.root / f"{name}.manifest.json").read_bytes())
    return {
        "inputs": found["inputs"],
        "counts": found["counts"],
        "output": found["output"]["sha256"],
        "side": [file["sha256"] for file in found["side"]],
    }


def nothing_left(workspace: Workspace) -> bool:
    return not list(workspace.root.glob(".*"))


def test_conversion_gives_the_same_bytes(cluster, workspace: Workspace) -> None:
    requested = {"input": "shards", "include_failed": True}
    alone = convert.convert_rollouts(
        workspace, api.ConvertRollouts(**requested, output="alone.jsonl")
    )
    split = convert_on_ray(
        workspace, api.ConvertRollouts(**requested, output="split.jsonl", ray_address="auto")
    )
    assert reported(split) == reported(alone)
    assert split.converted > 100
    assert manifest(workspace, "split.jsonl") == manifest(workspace, "alone.jsonl")
    assert nothing_left(workspace)


@pytest.mark.parametrize(
    "requested",
    [
        {"input": "shards"},
        {"input": "shards", "strategy": "all", "max_pairs_per_task": 3},
        {"chosen_from": "shards", "rejected_from": "shards/1.jsonl", "cut": "none"},
    ],
)
def test_pairs_are_the_same_bytes(cluster, workspace: Workspace, requested: dict[str, Any]) -> None:
    alone = pairs.make_dpo_pairs(workspace, api.MakeDpoPairs(**requested, output="alone.jsonl"))
    split = pair_on_ray(
        workspace, api.MakeDpoPairs(**requested, output="split.jsonl", ray_address="auto")
    )
    assert reported(split) == reported(alone)
    assert split.pairs > 5
    assert manifest(workspace, "split.jsonl") == manifest(workspace, "alone.jsonl")


FILTERS: list[dict[str, Any]] = [
    {"min_reward": 0.3, "require_final_answer": True},
    {"dedupe": "exact"},
    {"dedupe": "near"},
    {"max_per_category": 20, "seed": 3},
    {"min_success_rate": 0.4},
    {"decontaminate": ("heldout.jsonl",)},
    {"verdicts": "verdicts.jsonl"},
    {"not_contains": "word7 "},
    {
        "min_reward": 0.1,
        "dedupe": "near",
        "max_per_category": 9,
        "min_success_rate": 0.2,
        "decontaminate": ("heldout.jsonl",),
        "drop_secrets": True,
        "verdicts": "verdicts.jsonl",
    },
]


@pytest.mark.parametrize("requested", FILTERS, ids="+".join)
def test_a_filter_keeps_the_same_bytes(
    cluster, workspace: Workspace, requested: dict[str, Any]
) -> None:
    given = {"input": "shards", **requested}
    alone = filters.filter_dataset(workspace, api.FilterDataset(**given, output="alone.jsonl"))
    split = filter_on_ray(
        workspace, api.FilterDataset(**given, output="split.jsonl", ray_address="auto")
    )
    assert reported(split) == reported(alone)
    assert split.read == split.kept + sum(split.dropped.values())
    assert 0 < split.kept < split.read
    assert manifest(workspace, "split.jsonl") == manifest(workspace, "alone.jsonl")
    dropped = [
        (workspace.root / f"{name}.jsonl.dropped").read_bytes() for name in ("split", "alone")
    ]
    assert dropped[0] == dropped[1]
    assert nothing_left(workspace)


def test_an_error_of_a_worker_is_the_drivers_and_nothing_is_left(
    cluster, workspace: Workspace
) -> None:
    (workspace.root / "none").mkdir()
    write_lines(workspace.root / "none" / "a.jsonl", [b"{}"])
    request = api.ConvertRollouts(input="none", output="split.jsonl", ray_address="auto")
    with pytest.raises(DataError, match="none of the 1 rows"):
        convert_on_ray(workspace, request)
    assert not (workspace.root / "split.jsonl").exists()
    assert nothing_left(workspace)


def test_a_cluster_of_this_machine_is_started_for_a_call(workspace: Workspace) -> None:
    request = api.ConvertRollouts(input="shards", output="split.jsonl", ray_address="local")
    result = api.convert_rollouts(workspace, request)
    alone = convert.convert_rollouts(
        workspace, api.ConvertRollouts(input="shards", output="alone.jsonl")
    )
    assert reported(result) == reported(alone)
    assert manifest(workspace, "split.jsonl") == manifest(workspace, "alone.jsonl")
