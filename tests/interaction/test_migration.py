"""A project of rnow goes its whole way here, its files as they are but for models' names."""

import json
from pathlib import Path
from typing import Any

import pytest

from fakes.http_endpoint import ScriptedEndpoint
from fakes.rollout_rows import read_rows
from fakes.waiting import wait_until
from stillroom import api
from stillroom.curate.convert import ConvertRollouts, convert_rollouts
from stillroom.settings import Workspace
from stillroom.train.config.request import PlanTraining, plan_request

TOOLS = '''
from rnow.core.tool import tool


@tool
def echo(text: str) -> str:
    """Say the text again."""
    return text
'''
REWARDS = """
from rnow.core import RewardArgs, get_response, reward


@reward(precondition=True)
def used_tools(args: RewardArgs, messages: list) -> float:
    for msg in messages:
        if msg.get("role") == "assistant":
            for tc in msg.get("tool_calls") or []:
                if tc.get("function", {}).get("name", "") == "echo":
                    return 1.0
    return 0.0


@reward
def accuracy(args: RewardArgs, messages: list) -> float:
    return 1.0 if args.metadata["expected_answer"] in get_response(messages) else 0.0
"""
CONFIG = """
project_id: ""
project_name: "off-distill-agent"
organization_id: "org_1"
dataset_type: sft
data:
  train_file: train.jsonl
  batch_size: 4
model:
  path: demo/student
  qlora_rank: 32
  name: "Distilled Assistant"
rollout:
  max_turns: 4
  max_context_window: 4096
  termination_policy: last_tool
  tool_timeout: 120
trainer:
  num_epochs: 3
  learning_rate: 0.00005
  save_step: 100
"""


@pytest.fixture
def project(tmp_path: Path) -> Workspace:
    rows: list[dict[str, Any]] = [
        {
            "messages": [
                {"role": "system", "content": "Answer step by step."},
                {"role": "user", "content": f"What is {number}?"},
            ],
            "tools": ["echo"],
            "rewards": ["used_tools", "accuracy"],
            "metadata": {"expected_answer": "42"},
        }
        for number in range(3)
    ]
    files = {
        "tools.py": TOOLS,
        "rewards.py": REWARDS,
        "config.yml": CONFIG,
        "prompts.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return Workspace(tmp_path)


@pytest.mark.usefixtures("warm_python")
def test_an_off_policy_project_goes_from_prompts_to_a_training_that_can_start(
    project: Workspace,
) -> None:
    with ScriptedEndpoint() as endpoint:
        request = api.GenerateRollouts(
            input="prompts.jsonl", output="rollouts/out.jsonl", model="scripted", n=2,
            base_url=endpoint.base_url, rewards="rewards.py",
        )  # fmt: skip
        run_id = api.generate_rollouts(project, request).run_id
        wait_until(lambda: api.get_run(project, api.GetRun(run_id=run_id)).status.is_final)
    run = api.get_run(project, api.GetRun(run_id=run_id))

    assert run.error is None
    assert [note.split(":")[0] for note in run.notes[:3]] == [
        "n=2 takes the first 2 prompts of the file; to choose others, set entries (e.g. 0,2,5-9)",
        "tools.py next to the prompts is used (set tools",
        "config.yml next to the prompts sets",
    ]
    assert "tools.py: stillroom provides the rnow modules that it imports" in run.notes
    assert "rewards.py: stillroom provides the rnow modules that it imports" in run.notes
    rows = read_rows(project.root / "rollouts/out.jsonl")
    assert [row["rewards"] for row in rows] == [{"used_tools": 1.0, "accuracy": 1.0}] * 2

    convert_rollouts(project, ConvertRollouts(input="rollouts/out.jsonl", output="train.jsonl"))
    # The OpenRouter script writes the names of the tools alone.
    written = read_rows(project.root / "train.jsonl")
    lines = (json.dumps({**row, "tools": ["echo"]}) + "\n" for row in written)
    (project.root / "train.jsonl").write_text("".join(lines), encoding="utf-8")
    plan = plan_request(project, PlanTraining(config="config.yml"))

    assert [row.tools for row in plan.load_rows(plan.train_file)] == [
        row["tools"] for row in written
    ]
    assert [note.split(":")[1] for note in plan.notes] == [
        " organization_id is ignored",
        " the schemas are taken from tools.py",
    ]
