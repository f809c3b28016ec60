"""docs/migrate.md names everything that the other systems have, and says of it what is true."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from stillroom.data.formats import CHECKS, RowFormat, unread_key_problems
from stillroom.errors import ConfigError
from stillroom.importing.formats.table import FORMATS
from stillroom.train.config.file import config_notes, load_config
from stillroom_mcp.cli import build_parser
from stillroom_mcp.other_names import COMMANDS, NO_ACCOUNT, OPTIONS

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/migrate.md").read_text(encoding="utf-8")
OUTCOMES = ("same", "taken", "other name", "refused", "differs")

INVENTORY = """
    rnow init, rnow test, rnow run, rnow eval, rnow status, rnow stop, rnow download, rnow login,
    rnow logout, rnow orgs, --force, --api-url, --template, --name, --yes, --dir, -d, --debug,
    --model, -m, --epochs, -e, --batch-size, -b, --lr, --learning-rate, --save-model,
    --num-rollouts, -n, --max-context-window, --entry, --all, --verbose, --pass1, --pass4, --pass8,
    --max-samples, --project-id, --eval-id, --pass1-temp, --pass4-temp, --pass8-temp, -t,
    --temperature, --reasoning-mode, --max-turns, --termination-policy, --max-tool-response,
    --mcp-url, --max-billing, --output, -o, --keep-archive, --input, -i, --tools, --system, -s,
    --concurrency, -c, --max-tokens, --timeout, --samples, --num, --include-failed,
    --filter-success, generate_teacher_data.py, generate_distillation_data.py, convert_rollouts.py,
    convert_hf_dataset.py, convert_dataset.py, project_id, project_name, description,
    organization_id, dataset_type: sft, dataset_type: rl, dataset_type: distill,
    dataset_type: midtrain, data.train_file, data.batch_size, data.group_size, data.val_split,
    model.path, model.qlora_rank, model.qlora_alpha, model.name, model.description, teacher.path,
    teacher.agentic, algorithm.loss_fn, algorithm.adv_estimator, algorithm.kl_penalty_coef,
    rollout.max_turns, rollout.max_tokens, rollout.max_context_window, rollout.termination_policy,
    rollout.reasoning_mode, rollout.mcp_url, rollout.tool_timeout, rollout.reward_timeout,
    rollout.max_tool_response, rollout.include_thinking, rollout.rollout_timeout,
    trainer.num_epochs, trainer.learning_rate, trainer.save_step, trainer.max_billing,
    wandb_project, wandb_name, evals.eval_id, evals.step, evals.name, evals.pass1, evals.pass4,
    evals.pass8, evals.pass1_temp, evals.pass4_temp, evals.pass8_temp, config.yml, train.jsonl,
    prompts.txt, prompts.jsonl, tools.py, rewards.py, requirements.txt, .env, Dockerfile.NAME,
    messages, prompt, system, tools, rewards, metadata, variables, docker, docker_env, docker_cmd,
    conversation, completed, success, total_reward, errors, turns, truncated, totalTokens,
    promptTokens, latency, metadata.teacher, metadata.turns, llm_judge(…), get_response(messages),
    args.metadata, args.variables, args.secrets, @tool(sandbox=True), @reward(sandbox=True),
    @reward(precondition=True), REWARD_REGISTRY, TOOL_REGISTRY, ng_collect_rollouts,
    filter_rollouts, sample_for_review, process_sft_data, create_dpo_pairs, balance_dataset,
    responses_create_params, output, response, reward, task_id, chosen, rejected,
    quality_difference, quality_score, min_reward, min_turns, max_turns, min_success_rate,
    require_tool_usage, sample_size, max_per_category
"""
"""The commands, flags, keys, files and fields of rnow 0.4.37 and its skills on distillation, of the
OpenRouter scripts, and of NeMo Gym's tutorial on offline training."""

CONFIG: dict[str, Any] = {
    "dataset_type": "distill",
    "data": {"batch_size": 4},
    "model": {"path": "m"},
    "teacher": {"path": "t"},
    "trainer": {"num_epochs": 1},
}
VALUES: dict[str, Any] = {
    "data.train_file": "train.jsonl", "data.batch_size": 4, "data.group_size": 4,
    "data.val_split": 0, "model.qlora_rank": 32, "model.qlora_alpha": 64,
    "teacher.agentic": True, "algorithm.loss_fn": "ppo", "algorithm.adv_estimator": "grpo",
    "algorithm.kl_penalty_coef": 0.1, "rollout.max_turns": 4, "rollout.max_tokens": 64,
    "rollout.max_context_window": 4096, "rollout.termination_policy": "last_tool",
    "rollout.reasoning_mode": "disabled", "rollout.mcp_url": "localhost:8931",
    "rollout.tool_timeout": 60, "rollout.reward_timeout": 60, "rollout.rollout_timeout": 60,
    "rollout.max_tool_response": 100, "rollout.include_thinking": False, "trainer.num_epochs": 3,
    "trainer.learning_rate": 1e-4, "trainer.save_step": 50, "trainer.max_billing": 10.0,
    "trainer": None,
}  # fmt: skip


def rows_of(section: str) -> list[tuple[list[str], str]]:
    """The rows of a section's tables: the names in the first cell, and the outcome."""
    text = TEXT.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("| `")
    ]
    return [
        (re.findall(r"`([^`]+)`", first), re.split(r"[:;]", last)[0]) for first, _, last in cells
    ]


def test_every_name_is_there_and_every_row_says_what_becomes_of_it() -> None:
    first_cells = [line.split("|")[1] for line in TEXT.splitlines() if line.startswith("| ")]
    named = {name for cell in first_cells for name in re.findall(r"`([^`]+)`", cell)}
    wanted = {" ".join(name.split()) for name in INVENTORY.split(",")}
    assert wanted - named == set()
    last_cells = [line.rstrip(" |").split("|")[-1] for line in TEXT.splitlines() if "| `" in line]
    assert {re.split(r"[:;]", cell.strip())[0] for cell in last_cells} <= set(OUTCOMES)


def with_key(dotted: str) -> dict[str, Any]:
    """The smallest configuration, with one more key; `name: value` gives its value too."""
    key, _, value = dotted.partition(": ")
    config: dict[str, Any] = yaml.safe_load(yaml.safe_dump(CONFIG))
    if key.startswith("evals."):
        inner = key.removeprefix("evals.")
        config["evals"] = [
            {"name": "heldout", "step": 10, **({inner: 1} if inner != "name" else {})}
        ]
        return config
    holder = config
    *above, last = key.split(".")
    for part in above:
        holder = holder.setdefault(part, {})
    holder[last] = value or VALUES.get(key, "x")
    if key == "dataset_type" and value != "distill":
        del config["teacher"]
    return config


@pytest.mark.parametrize(
    ("key", "outcome"),
    [(name, outcome) for names, outcome in rows_of("config.yml") for name in names],
)
def test_a_key_of_config_yml_does_what_the_page_says(
    tmp_path: Path, key: str, outcome: str
) -> None:
    path = tmp_path / "config.yml"
    path.write_text(yaml.safe_dump(with_key(key)), encoding="utf-8")

    if outcome in ("refused", "other name"):
        with pytest.raises(ConfigError) as caught:
            load_config(path)
        assert key.rsplit(".", maxsplit=1)[-1].partition(":")[0] in caught.value.problem
        return
    load_config(path)
    said = bool(config_notes(path)) or key == "rollout.mcp_url"  # said when tools are opened
    assert said is (outcome == "taken")


def test_a_flag_is_there_under_its_name_or_answered_with_ours() -> None:
    _, by_command = build_parser(["-i", "--input"])
    ours = {
        flag
        for name in ("generate-rollouts", "evaluate-model", "convert-rollouts", "start-training",
                     "create-project", "export-model")
        for flag in by_command[name]._option_string_actions
    }  # fmt: skip
    for names, outcome in rows_of("Flags"):
        flags = [name for name in names if name.startswith("-")]
        assert [flag for flag in flags if flag not in ours and flag not in OPTIONS] == []
        if flags and outcome == "same":
            assert flags[0] in ours
    theirs = [name for names, _ in rows_of("Commands") for name in names if "rnow" in name]
    for name in theirs:
        assert name.removeprefix("rnow ") in (*COMMANDS, *NO_ACCOUNT)


ROW: dict[str, Any] = {
    "messages": [{"role": "user", "content": "a"}], "rewards": ["r"], "metadata": {"a": 1},
    "variables": {"b": 1}, "tools": ["t"], "docker": "local/playwright",
    "docker_env": {"DEBUG": "true"},
}  # fmt: skip


def test_a_row_with_every_field_of_theirs_is_read_and_others_are_named() -> None:
    assert [*CHECKS[RowFormat.PROMPTS](ROW), *unread_key_problems(ROW)] == []
    script = {"prompt": "a", "system": "b", "metadata": {}}
    assert [*CHECKS[RowFormat.PROMPTS](script), *unread_key_problems(script)] == []
    others = {**ROW, "docker_cmd": ["python"], "category": "math"}
    assert list(CHECKS[RowFormat.PROMPTS](others)) == []
    assert {problem.field for problem in unread_key_problems(others)} == {"docker_cmd", "category"}


def test_the_page_on_hosted_fine_tuning_names_formats_options_and_keys_that_there_are(
    tmp_path: Path,
) -> None:
    text = (ROOT / "docs/migrate-hosted.md").read_text(encoding="utf-8")
    formats = {known.name for known in FORMATS}
    named = set(re.findall(r"`(openai_\w+)`", text))
    assert named <= formats
    assert {"openai_fine_tuning", "openai_preferences", "openai_evals", "openai_chat"} <= named
    for line in re.findall(r"^ *stillroom (.*)$", text, re.MULTILINE):
        given = line.split()
        parser, _ = build_parser(given)
        assert parser.parse_args(given).command == given[0]
    (config,) = re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    path = tmp_path / "config.yml"
    path.write_text(config, encoding="utf-8")
    assert load_config(path).trainer.early_stop == 2
    for wanted in ("n_epochs", "batch_size", "learning_rate_multiplier", "beta", "weight"):
        assert f"| `{wanted}`" in text


def test_the_commands_of_the_page_are_understood() -> None:
    for line in re.findall(r"^stillroom (.*)$", TEXT, re.MULTILINE):
        given = line.split()
        assert build_parser(given)[0].parse_args(given).command == given[0]
