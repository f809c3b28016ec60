"""A user's own model folder, tools and prompts in place of the demo's, with the same calls."""

import json
import shutil
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client

from fakes.projects import read_rows
from stillroom.settings import Workspace
from stillroom_mcp.app import build_server

TOOLS = '''
from stillroom.tools import tool

@tool
def price(item: str) -> int:
    """Price of an item."""
    return 12
'''
ACTING = {"tools": "tools.py", "max_turns": 3, "max_tokens": 16, "concurrency": 8}
CONFIG = "data: {train_file: %s, batch_size: 4, group_size: 2}\ntrainer: {num_epochs: 1}\n"


def write_project(folder: Path, model: Path) -> None:
    shutil.copytree(model, folder / "my-model")
    rows = [
        {"prompt": f"What does lamp {i} cost?", "metadata": {"expected_answer": "12"}}
        for i in range(12)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "mine.jsonl").write_text(text, encoding="utf-8")
    (folder / "tools.py").write_text(TOOLS, encoding="utf-8")
    student = "model: {path: my-model, qlora_rank: 4}\n"
    (folder / "sft.yml").write_text(
        "dataset_type: sft\n" + student + CONFIG % "sft.jsonl", encoding="utf-8"
    )
    distill = "dataset_type: distill\nteacher: {path: my-model}\nrollout: {max_turns: 3, max_tokens: 16}\n"  # noqa: E501
    (folder / "distill.yml").write_text(distill + student + CONFIG % "mine.jsonl", encoding="utf-8")


async def finished(client: Client, tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
    started = await client.call_tool(tool, arguments)
    assert not started.is_error, started.content
    run_id = (started.structured_content or {})["run_id"]
    run: dict[str, Any] = {"status": "starting"}
    while run["status"] in ("starting", "running"):
        ended = await client.call_tool("get_run", {"run_id": run_id, "wait_s": 110})
        run = ended.structured_content or {}
    assert run["status"] == "succeeded", run["error"]
    return run


# Six runs of processes of their own, each of which loads torch.
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("warm_python")
def test_the_chain_runs_on_a_folder_and_prompts_of_ones_own(tmp_path: Path, tiny_models) -> None:
    write_project(tmp_path, tiny_models.folder("llama", "clerk"))

    async def scenario() -> None:
        async with Client(build_server(Workspace(tmp_path))) as client:
            rollouts = {"input": "mine.jsonl", "model": "my-model", "seed": 1, **ACTING}
            made = await finished(client, "generate_rollouts", rollouts)
            assert made["result"]["succeeded"] == 12
            converted = await client.call_tool(
                "convert_rollouts", {"input": made["result"]["output"], "output": "sft.jsonl"}
            )
            assert not converted.is_error, converted.content
            shown = await client.call_tool(
                "inspect_examples", {"path": "sft.jsonl", "model": "my-model", "n": 1}
            )
            assert "⟦" in (shown.structured_content or {})["examples"][0]["text"]
            sft = await finished(client, "start_training", {"config": "sft.yml"})
            distilled = await finished(
                client,
                "start_training",
                {"config": "distill.yml", "overrides": [f"model.path={sft['run_id']}"]},
            )
            evaluated = await finished(
                client,
                "evaluate_model",
                {
                    "model": distilled["run_id"],
                    "data": "mine.jsonl",
                    "teacher": "my-model",
                    "kl_prompts": 6,
                    **ACTING,
                },
            )
            assert evaluated["result"]["accuracy"]["n"] == 12
            # It has learnt from itself, so rounding decides on which side of zero this is.
            assert evaluated["result"]["teacher_kl"]["value"] >= -1e-6
            assert evaluated["result"]["sampled_accuracy"]["n"] == 6
            requested = {"model": distilled["run_id"], "output": "exports/clerk"}
            exported = await finished(client, "export_model", requested)
            assert "vllm serve exports/clerk " in exported["result"]["serve"]
            assert "`serve`" in exported["next_step"]
            assert exported["result"]["teachers"] == ["my-model"]
            assert exported["result"]["evaluations"] == 1
            again = {"input": "mine.jsonl", "output": "rollouts/exported.jsonl", **ACTING}
            said = await finished(client, "generate_rollouts", {**again, "model": "exports/clerk"})
            assert said["result"]["succeeded"] == 12

    anyio.run(scenario)
    card = (tmp_path / "exports/clerk/README.md").read_text("utf-8")
    # The teacher that answered is the one that scored.
    assert "training 2 | on-policy distillation on mine.jsonl" in card
    assert "generate_rollouts by my-model" in card
    assert "synthetic-data" in card
    assert str(tmp_path) not in card
    rows = read_rows(tmp_path / "rollouts/rollouts.jsonl")
    roles = {message["role"] for row in rows for message in row["messages"]}
    assert roles == {"user", "assistant", "tool"}
