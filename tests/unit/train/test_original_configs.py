"""A config.yml as other systems' skills document it runs here, apart from the models' paths."""

import json

import pytest

from fakes.training import PRICE_TOOL, make_project
from stillroom.errors import ConfigError, EngineError
from stillroom.train.config.file import config_notes, load_config

REWARDS = """
from stillroom.tools import reward

@reward
def right(args, messages) -> float:
    "Whether 12 is said."
    return float("12" in (messages[-1]["content"] or ""))
"""
DOCUMENTED = """
project_id: ""
project_name: "On-policy agent"
description: "Distils a tool user"
dataset_type: distill
data:
  train_file: train.jsonl
  batch_size: 2
  group_size: 2
  val_split: 0.0
model:
  path: STUDENT
  qlora_rank: 4
  qlora_alpha: 8
  name: "Student"
  description: "A student"
teacher:
  path: TEACHER
  agentic: false
algorithm:
  LOSS
  adv_estimator: grpo
  kl_penalty_coef: 0.01
rollout:
  max_turns: 3
  max_tokens: 8
  max_context_window: 400
  termination_policy: last_tool
  reasoning_mode: null
  mcp_url: null
  tool_timeout: 60
  reward_timeout: 60
  max_tool_response: 200
  include_thinking: false
  rollout_timeout: 120
trainer:
  num_epochs: 1
  learning_rate: 0.0001
  save_step: -1
evals: []
"""
LOSSES = ("loss_fn: ppo", "")


def project_of(root, tiny_models, text):
    clerk = tiny_models.folder("llama", "clerk")
    project = make_project(root, "distill", clerk)
    teacher = tiny_models.folder("llama", "clerk", seed=1)
    text = text.replace("STUDENT", str(clerk)).replace("TEACHER", str(teacher))
    project.write_config = lambda: (root / "config.yml").write_text(text, encoding="utf-8")
    rows = [
        {
            "messages": [{"role": "user", "content": f"Item {i}?"}],
            "tools": ["price"],
            "rewards": ["right"],
            "metadata": {"answer": 12},
        }
        for i in range(2)
    ]
    (root / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "tools.py").write_text(PRICE_TOOL, encoding="utf-8")
    (root / "rewards.py").write_text(REWARDS, encoding="utf-8")
    return project


@pytest.mark.parametrize("loss", LOSSES)
def test_a_documented_configuration_runs_unchanged(tmp_path, tiny_models, loss):
    project = project_of(tmp_path, tiny_models, DOCUMENTED.replace("LOSS", loss or "# default"))

    result = project.train()

    assert (result.method, result.steps, result.rows) == ("distill", 1, 2)
    (reported,) = project.reporter.measured
    assert reported["turns"] >= 1
    assert reported["reward"] > 0
    assert {"teacher_kl", "ratio", "entropy", "response_tokens"} <= reported.keys()
    assert ("advantage" in reported) == bool(loss)


SKILL_CONFIGS = {
    "whole": """
dataset_type: distill  # <-- REQUIRED for on-policy distillation
data:
  train_file: train.jsonl
  batch_size: 4
  group_size: 4
model:
  path: STUDENT      # Student model
  qlora_rank: 32
teacher:
  path: TEACHER     # Teacher model (larger than student)
algorithm:
  loss_fn: ppo
  adv_estimator: grpo
  kl_penalty_coef: 0.1
rollout:
  max_turns: 10
  max_context_window: 4096
  termination_policy: last_tool
""",
    "quick start": """
dataset_type: distill
data:
  train_file: train.jsonl
  batch_size: 4
  group_size: 4
model:
  path: STUDENT
teacher:
  path: TEACHER
algorithm:
  loss_fn: ppo
  kl_penalty_coef: 0.1
""",
}
"""The configurations of rnow's skill on on-policy distillation, but for the models' names."""


@pytest.mark.parametrize("name", SKILL_CONFIGS)
def test_a_configuration_without_a_trainer_runs_and_says_its_defaults(tmp_path, tiny_models, name):
    project = project_of(tmp_path, tiny_models, SKILL_CONFIGS[name])

    result = project.train("run-1", "rollout.max_tokens=4", "rollout.max_turns=2")

    assert (result.method, result.steps) == ("distill", 1)
    assert project.reporter.notes[0] == (
        "config.yml has no trainer; using the defaults: num_epochs 1, learning_rate 0.0001, "
        "schedule linear, save_step -1"
    )


def test_what_only_a_hosted_service_reads_is_left_out_and_said(tmp_path, tiny_models):
    text = DOCUMENTED.replace("LOSS", LOSSES[0]).replace("agentic: false", "agentic: true")
    project_of(tmp_path, tiny_models, text + "organization_id: org_1\n").write_config()

    config = load_config(tmp_path / "config.yml")
    notes = config_notes(tmp_path / "config.yml")

    assert config.teacher is not None
    assert [note.partition(":")[2].partition(":")[0] for note in notes] == [
        " organization_id is ignored",
        " teacher.agentic is ignored",
        " algorithm.adv_estimator is ignored",
    ]


@pytest.mark.parametrize(
    ("key", "reason", "fix"),
    [
        ("trainer.max_billing=10", "does not bill", "budget_usd"),
        ("wandb_name=student", "it belongs to the section trainer", "trainer.wandb_name"),
        ("trainer.wandb_name=student", "trainer.wandb_project too", "correct"),
        ("evals=[{eval_id: cmla1, step: 100, name: MATH}]", "a hosted service", "heldout.jsonl"),
        ("evals=[{name: m, step: 1, pass1_temp: 1}]", "'pass1_temperature'", "correct"),
        ("dataset_type=rl", "from rewards alone", "distill"),
        ("dataset_type=midtrain", "plain text", "sft"),
    ],
)
def test_a_key_that_asks_for_a_hosted_service_is_refused_with_its_reason(
    tmp_path, tiny_models, key, reason, fix
):
    project_of(tmp_path, tiny_models, DOCUMENTED.replace("LOSS", LOSSES[0])).write_config()

    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "config.yml", [key])

    assert reason in caught.value.problem
    assert fix in caught.value.fix


def test_teachers_that_cannot_score_are_refused_before_a_model_is_loaded(tmp_path, tiny_models):
    text = DOCUMENTED.replace("LOSS", LOSSES[0]).replace("TEACHER", "openai/gpt-5-pro")
    project = project_of(tmp_path, tiny_models, text)

    with pytest.raises(EngineError) as caught:
        project.train()

    assert "Unsupported teacher model" in caught.value.problem
    assert "log-prob" in caught.value.problem
    assert "generate_rollouts" in caught.value.fix
    assert project.reporter.measured == []
    assert project.checkpoints() == []
