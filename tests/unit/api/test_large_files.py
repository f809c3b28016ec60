"""Operations on files so large that they become runs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from mcp import Client

from fakes.rollout_rows import assistant, rollout_row, user, write_rows
from stillroom import api
from stillroom.api.curation import LARGE_BYTES, carry_out
from stillroom.errors import InputError
from stillroom.outputs import output_lock
from stillroom.settings import Workspace
from stillroom_mcp.app import build_server

NUM_ROWS = 50


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A workspace with rollouts of just over the size from which operations become runs."""
    text = "long " * (LARGE_BYTES // NUM_ROWS // 5)
    rows = [
        rollout_row(
            task_id=f"t{number // 2}",
            sample=number % 2,
            messages=[user(f"{number // 2} {text}"), assistant(f"answer {number}")],
            reward=float(number % 2),
            success=bool(number % 2),
        )
        for number in range(NUM_ROWS)
    ]
    write_rows(tmp_path / "rollouts.jsonl", rows)
    write_rows(tmp_path / "small.jsonl", [rollout_row(), rollout_row(task_id="b", reward=0.0)])
    return tmp_path


LARGE: list[tuple[str, dict[str, Any], str, Any]] = [
    ("validate_dataset", {"path": "rollouts.jsonl"}, "good", NUM_ROWS),
    ("sample_for_review", {"input": "rollouts.jsonl", "output": "review.jsonl"}, "read", NUM_ROWS),
    ("filter_dataset", {"input": "rollouts.jsonl", "output": "good.jsonl", "min_reward": 1.0},
     "kept", NUM_ROWS // 2),
    ("convert_rollouts", {"input": "rollouts.jsonl", "output": "sft.jsonl"},
     "converted", NUM_ROWS // 2),
    ("make_dpo_pairs", {"input": "rollouts.jsonl", "output": "pairs.jsonl"},
     "pairs", NUM_ROWS // 2),
    ("show_lineage", {"path": "rollouts.jsonl", "row": 3}, "tagged", None),
]  # fmt: skip


@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize(("name", "request_fields", "field", "value"), LARGE)
def test_on_a_large_file_a_tool_starts_a_run_whose_result_is_the_operations(
    folder: Path, name: str, request_fields: dict[str, Any], field: str, value: Any
) -> None:
    async def called() -> tuple[Any, Any]:
        async with Client(build_server(Workspace(folder))) as client:
            begun = await client.call_tool(name, request_fields)
            wanted = {"run_id": begun.structured_content["run_id"], "wait_s": 50}
            return begun, await client.call_tool("get_run", wanted)

    begun, ended = anyio.run(called)

    assert "next_step" in begun.structured_content
    assert not begun.is_error
    report = ended.structured_content
    assert (report["status"], report["result"][field]) == ("succeeded", value)
    operation = api.operation_named(name)
    # The same call at once, by the library.
    expected = operation.call(Workspace(folder), operation.request(**request_fields))
    done = api.get_run(Workspace(folder), api.GetRun(run_id=report["run_id"])).result
    assert msgspec.convert(done, operation.result) == expected


@pytest.mark.usefixtures("warm_python")
def test_a_training_on_a_large_file_is_planned_in_a_run(folder: Path) -> None:
    lines = (folder / "rollouts.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [{"messages": json.loads(line)["messages"]} for line in lines]
    write_rows(folder / "sft.jsonl", rows)
    write_rows(folder / "few.jsonl", [{"messages": [user("a"), assistant("b")]}] * 4)
    (folder / "config.yml").write_text(
        "dataset_type: sft\nmodel: {path: demo/student}\ntrainer: {num_epochs: 1}\n"
        "data: {train_file: sft.jsonl, batch_size: 2}\n",
        encoding="utf-8",
    )
    workspace, operation = Workspace(folder), api.operation_named("plan_training")

    begun = carry_out(workspace, operation, api.PlanTraining(config="config.yml"))

    assert isinstance(begun, api.RunReport)
    api.cancel_run(workspace, api.CancelRun(run_id=begun.run_id))
    few = api.PlanTraining(config="config.yml", overrides=("data.train_file=few.jsonl",))
    assert isinstance(carry_out(workspace, operation, few), api.TrainingForecast)


def test_small_files_and_a_few_rows_of_a_large_one_are_answered_at_once(folder: Path) -> None:
    workspace = Workspace(folder)
    small = api.FilterDataset(input="small.jsonl", output="good.jsonl", min_reward=1.0)
    few = api.InspectExamples(path="rollouts.jsonl", n=1)

    kept = carry_out(workspace, api.operation_named("filter_dataset"), small)
    page = carry_out(workspace, api.operation_named("inspect_examples"), few)

    assert isinstance(kept, api.FilterResult)
    assert isinstance(page, api.ExamplesPage)
    assert page.total_count == NUM_ROWS
    assert not workspace.runs.exists()


def test_what_can_be_seen_to_be_wrong_with_an_output_is_refused_at_once(folder: Path) -> None:
    workspace, output = Workspace(folder), folder / "rewards.py"
    output.write_text("by hand", encoding="utf-8")
    request = api.FilterDataset(input="rollouts.jsonl", output="rewards.py", min_reward=1.0)
    operation = api.operation_named("filter_dataset")

    with pytest.raises(InputError, match="stillroom did not write it"):
        carry_out(workspace, operation, request)
    held = request.model_copy(update={"overwrite": True})
    with (
        output_lock(output, "make_dpo_pairs"),
        pytest.raises(InputError, match="is being written by make_dpo_pairs"),
    ):
        carry_out(workspace, operation, held)

    assert output.read_text(encoding="utf-8") == "by hand"
    assert not workspace.runs.exists()


def test_the_command_line_waits_and_prints_the_same(folder: Path) -> None:
    command = [sys.executable, "-m", "stillroom_mcp", "filter-dataset"]
    done = subprocess.run(
        [*command, "rollouts.jsonl", "--output", "good.jsonl", "--min-reward", "1", "--json"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    answer = json.loads(done.stdout)
    assert (answer["kept"], answer["output"]) == (NUM_ROWS // 2, "good.jsonl")
    assert answer["next_step"].startswith(("convert_rollouts", "first read"))
    assert done.stderr.startswith("run filter-")
