"""The steps of NeMo Gym's tutorial on offline training: filter, sample, SFT rows, pairs."""

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes.rollout_rows import read_rows, write_rows
from stillroom.curate.convert import ConvertRollouts, convert_rollouts
from stillroom.curate.filter.request import FilterDataset, FilterResult
from stillroom.curate.filter.run import filter_dataset
from stillroom.curate.pairs import MakeDpoPairs, make_dpo_pairs
from stillroom.data.formats import load_dpo_rows, load_sft_rows
from stillroom.errors import DataError
from stillroom.settings import Workspace

REWARDS = (1.0, 0.9, 0.8, 0.75, 0.7, 0.6, 0.4, 0.2, 0.0)


def output(num_calls: int, answer: str) -> list[dict[str, Any]]:
    """The items of a response that makes so many calls: 2 for each call, and the answer."""
    items: list[dict[str, Any]] = []
    for index in range(num_calls):
        call = {"call_id": f"c{index}", "name": "price", "arguments": "{}"}
        items += [
            {"type": "function_call", **call},
            {"type": "function_call_output", "call_id": f"c{index}", "output": "7"},
        ]
    text = {"type": "output_text", "text": answer, "annotations": []}
    return [*items, {"type": "message", "role": "assistant", "content": [text]}]


def rollouts() -> Iterator[dict[str, Any]]:
    """Two rollouts of each task, of several rewards and lengths."""
    for task in range(60):
        for sample in range(2):
            reward = REWARDS[(task * (sample + 1) + sample) % len(REWARDS)]
            yield {
                "responses_create_params": {"input": f"What is {task}?"},
                "task_id": f"task-{task}",
                "output": output(task % 4, f"{task}-{sample}"),
                "reward": reward,
                "success": reward >= 0.5 and task % 7 > 0,
                "metadata": {"task_type": "price" if task % 2 else "stock"},
            }


@pytest.fixture
def rows(tmp_path: Path) -> list[dict[str, Any]]:
    written = list(rollouts())
    write_rows(tmp_path / "raw.jsonl", written)
    return written


def filtered(folder: Path, **options: Any) -> FilterResult:
    request = FilterDataset(input="raw.jsonl", output="filtered.jsonl", **options)
    return filter_dataset(Workspace(folder), request)


def test_the_filter_keeps_what_the_tutorials_does(
    tmp_path: Path, rows: list[dict[str, Any]]
) -> None:
    expected = [
        row for row in rows
        if row["reward"] >= 0.7 and row["success"] and 3 <= len(row["output"]) <= 15
    ]  # fmt: skip

    # 3 items are a call, its reply and the answer: 2 turns of the assistant.
    result = filtered(tmp_path, min_reward=0.7, success=True, min_turns=2, max_turns=8)

    assert read_rows(tmp_path / "filtered.jsonl") == expected
    assert 0 < len(expected) == result.kept < len(rows)
    assert "120 rows are from NeMo Gym" in result.warnings[0]
    # No option counts turns here.
    assert not any("items" in text for text in filtered(tmp_path, min_reward=0.7).warnings)


def test_an_sft_row_has_the_prompt_too(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    filtered(tmp_path, min_reward=0.7, success=True)

    convert_rollouts(
        Workspace(tmp_path), ConvertRollouts(input="filtered.jsonl", output="sft.jsonl")
    )

    kept = read_rows(tmp_path / "filtered.jsonl")
    for row, trained in zip(kept, read_rows(tmp_path / "sft.jsonl"), strict=True):
        first, *answer = trained["messages"]
        assert first == {"role": "user", "content": row["responses_create_params"]["input"]}
        assert answer[-1]["content"] == row["output"][-1]["content"][0]["text"]
        assert sum(m["role"] == "tool" for m in answer) == (len(row["output"]) - 1) // 2
        assert (trained["reward"], trained["metadata"]) == (row["reward"], row["metadata"])


def test_the_pairs_are_the_tutorials(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    by_task: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_task[row["task_id"]].append(row)
    expected: dict[str, tuple[str, str]] = {}
    for first, second in by_task.values():
        better, worse = (first, second) if first["reward"] > second["reward"] else (second, first)
        # The tutorial compares floats: 1.0 and 0.9 are not 0.1 apart there, and are here.
        if better["reward"] - worse["reward"] >= 0.1 - 1e-9:
            expected[better["responses_create_params"]["input"]] = (
                better["output"][-1]["content"][0]["text"],
                worse["output"][-1]["content"][0]["text"],
            )

    result = make_dpo_pairs(
        Workspace(tmp_path), MakeDpoPairs(input="raw.jsonl", output="pairs.jsonl", cut="none")
    )

    found = {
        row["prompt"][0]["content"]: (row["chosen"][-1]["content"], row["rejected"][-1]["content"])
        for row in read_rows(tmp_path / "pairs.jsonl")
    }
    assert found == expected
    assert result.pairs == len(expected) > 20
    assert json.loads((tmp_path / "pairs.jsonl").read_text("utf-8").splitlines()[0])["chosen"]


def test_the_rows_that_the_tutorial_shows_are_trained_as_they_are(tmp_path: Path) -> None:
    sft = {
        "messages": [
            {"role": "user", "content": "What's the weather in Paris?"},
            {
                "role": "assistant",
                "tool_calls": [
                    {"function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
                ],
            },
            {"role": "tool", "content": "Temperature: 22°C, sunny"},
            {"role": "assistant", "content": "The weather in Paris is 22°C and sunny."},
        ],
        "quality_score": 0.95,
    }
    pair = {
        "prompt": [{"role": "user", "content": "Solve this math problem: 2x + 5 = 13"}],
        "chosen": [{"role": "assistant", "content": "x = 4"}],
        "rejected": [{"role": "assistant", "content": "The answer is x = 3"}],
        "quality_difference": 0.7,
    }
    write_rows(tmp_path / "sft.jsonl", [sft])
    write_rows(tmp_path / "dpo.jsonl", [pair])

    assert load_sft_rows(tmp_path / "sft.jsonl")[0].messages == sft["messages"]
    assert load_dpo_rows(tmp_path / "dpo.jsonl")[0].chosen == pair["chosen"]


def test_rows_of_items_are_told_to_be_converted(tmp_path: Path) -> None:
    # What the tutorial's own script writes where the rollouts called tools.
    write_rows(tmp_path / "sft_data.jsonl", [{"messages": output(1, "7"), "reward": 1.0}])

    with pytest.raises(DataError, match="is an item of the Responses API") as caught:
        load_sft_rows(tmp_path / "sft_data.jsonl")

    assert "convert_rollouts" in caught.value.fix
