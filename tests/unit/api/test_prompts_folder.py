"""What generate_rollouts takes from the folder of its prompts."""

import re
from pathlib import Path
from typing import Any

import pytest

from fakes.projects import endpoint_project
from stillroom import api
from stillroom.api.prompts_folder import complete_evaluation, complete_rollouts
from stillroom.errors import InputError
from stillroom.files import write_json
from stillroom.importing.request import ImportRollouts
from stillroom.importing.run import import_rollouts
from stillroom.projects.create import CreateProject, create_project
from stillroom.rollout.journal.journal import journal_folder
from stillroom.rollout.plan import output_settings, plan_generation
from stillroom.rollout.rewards.judge_plan import JudgeFile
from stillroom.settings import Workspace
from stillroom.teachers.providers import provider_of
from stillroom_mcp.next_steps import after_import_rollouts

CONFIG = """
dataset_type: distill
data: {batch_size: 4}
rollout:
  max_turns: 4
  max_context_window: 4096
  termination_policy: last_tool
  tool_timeout: 120
  mcp_url: localhost:8931
  reasoning_mode: disabled
  max_tool_response: 500
"""


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(endpoint_project(tmp_path, num_prompts=3))


def request(**given: Any) -> api.GenerateRollouts:
    return api.GenerateRollouts(input="prompts.jsonl", model="demo/teacher", **given)


def test_tools_and_the_rollout_section_beside_the_prompts_are_used_and_said(
    workspace: Workspace,
) -> None:
    (workspace.root / "config.yml").write_text(CONFIG, encoding="utf-8")

    found = complete_rollouts(workspace, request(max_turns=7))

    assert found.request.tools == "tools.py"
    assert (found.request.max_turns, found.request.tool_timeout) == (7, 120)
    assert found.request.mcp_servers == ("localhost:8931",)
    assert found.request.reasoning_effort == "none"
    assert found.notes == [
        "tools.py next to the prompts is used (set tools: none to leave it out)",
        (
            "config.yml next to the prompts sets: termination_policy last_tool, "
            "tool_timeout 120.0, mcp_servers localhost:8931, reasoning_effort none "
            "(request options take precedence)"
        ),
        (
            "config.yml: rollout.max_tool_response is ignored, since it counts tokens in "
            "config.yml, but characters in a request"
        ),
        (
            "config.yml: rollout.max_context_window is ignored, since it limits the student's "
            "conversations"
        ),
    ]


def test_settings_that_are_ignored_are_noted_without_any_that_is_used(workspace: Workspace) -> None:
    config = "dataset_type: distill\nrollout: {max_context_window: 4096}\n"
    (workspace.root / "config.yml").write_text(config, encoding="utf-8")

    found = complete_rollouts(workspace, request(tools="none"))

    assert found.notes == [
        (
            "config.yml: rollout.max_context_window is ignored, since it limits the student's "
            "conversations"
        )
    ]


@pytest.mark.parametrize("text", ["just: settings\nrollout: {max_turns: 3}", "rollout: [", ""])
def test_what_is_given_stays_and_other_programs_files_are_not_read(
    workspace: Workspace, text: str
) -> None:
    (workspace.root / "config.yml").write_text(text, encoding="utf-8")
    given = request(tools="none")

    found = complete_rollouts(workspace, given)

    assert (found.request, found.notes) == (given, [])


def test_what_other_systems_do_otherwise_is_said_where_it_happens(workspace: Workspace) -> None:
    (workspace.root / "config.yml").write_text(CONFIG, encoding="utf-8")
    (workspace.root / "rewards.py").write_text("", encoding="utf-8")
    (workspace.root / "prompts.jsonl").write_text('{"prompt": "a", "system": "b"}\n', "utf-8")

    notes = complete_rollouts(workspace, request(n=5, system="c")).notes

    assert notes[:3] == [
        "rewards.py next to the prompts is not used (to use it, set rewards: rewards.py)",
        "n=5 takes the first 5 prompts of the file; to choose others, set entries (e.g. 0,2,5-9)",
        "system replaces the system messages of the rows",
    ]
    assert "max_turns 4 (assistant turns, the final answer included)" in notes[4]


def evaluation(**given: Any) -> api.EvaluateModel:
    return api.EvaluateModel(data="prompts.jsonl", model="gpt-5.2", **given)


def test_an_evaluation_uses_the_tools_and_rewards_beside_its_prompts(workspace: Workspace) -> None:
    (workspace.root / "rewards.py").write_text("", encoding="utf-8")

    found = complete_evaluation(workspace, evaluation())

    assert (found.request.tools, found.request.rewards) == ("tools.py", "rewards.py")
    assert found.notes == [
        "provider openai was inferred from the model's name; set provider to choose another",
        "tools.py next to the prompts is used (set tools: none to leave it out)",
        "rewards.py next to the prompts is used (set rewards: none to leave it out)",
    ]


@pytest.mark.thorough
def test_the_step_that_an_import_prints_uses_the_tools_and_rewards_of_the_project(
    tmp_path: Path,
) -> None:
    workspace = Workspace(tmp_path)
    create_project(workspace, CreateProject(template="traces"))
    (tmp_path / "rewards.py").write_text("", encoding="utf-8")
    request = ImportRollouts(
        input="traces", output="rollouts/app.jsonl", split_heldout=0.25, prompts=True
    )
    step = after_import_rollouts(request, import_rollouts(workspace, request))
    [data] = re.findall(r"evaluate_model\(data=(\S+?)\)", step)

    found = complete_evaluation(workspace, api.EvaluateModel(data=data, model="gpt-5.2"))

    assert (found.request.tools, found.request.rewards) == ("tools.py", "rewards.py")
    assert (
        "tools.py of the prompts' project is used (set tools: none to leave it out)" in found.notes
    )
    rollouts = api.GenerateRollouts(input=data, model="demo/teacher")
    assert complete_rollouts(workspace, rollouts).request.tools == "tools.py"
    # A folder with a config.yml is a project of its own.
    (tmp_path / "rollouts/config.yml").write_text("dataset_type: sft\n", encoding="utf-8")
    assert complete_rollouts(workspace, rollouts).request.tools == "none"


def test_an_evaluation_leaves_out_what_it_is_given_otherwise(workspace: Workspace) -> None:
    (workspace.root / "rewards.py").write_text("", encoding="utf-8")
    given = evaluation(provider="openai", tools="none", judge="judge.yml")

    found = complete_evaluation(workspace, given)

    assert found.request == given
    assert found.notes == [
        "rewards.py next to the prompts is not used (to use it, set rewards: rewards.py)"
    ]


def test_a_section_that_cannot_be_read_is_refused_by_name(workspace: Workspace) -> None:
    (workspace.root / "config.yml").write_text(CONFIG.replace("max_turns", "max_turn"))

    with pytest.raises(InputError, match="did you mean 'max_turns'"):
        complete_rollouts(workspace, request())


def test_an_output_that_was_begun_without_them_goes_on_without_them(workspace: Workspace) -> None:
    plain = request(tools="none")
    plan = plan_generation(workspace, plain)
    plan.output.parent.mkdir()
    plan.output.write_text("{}\n", encoding="utf-8")
    journal_folder(plan.output).mkdir()
    write_json(journal_folder(plan.output) / "settings.json", output_settings(plan.rollouts, None))
    (workspace.root / "config.yml").write_text(CONFIG, encoding="utf-8")

    found = complete_rollouts(workspace, request())

    again = plan_generation(workspace, found.request)
    assert output_settings(again.rollouts, None) == output_settings(plan.rollouts, None)
    assert found.request.tool_timeout == 120


@pytest.mark.parametrize(
    ("model", "provider"),
    [
        ("gpt-5.2", "openai"),
        ("gpt-4o-mini-2024-07-18", "openai"),
        ("o3", "openai"),
        ("ft:gpt-4o-mini-2024-07-18:acme::abc123", "openai"),
        ("claude-sonnet-4-5", "anthropic"),
        ("gemini-2.5-pro", "google"),
        ("openai/gpt-4o-mini", "openrouter"),
        ("anthropic/claude-sonnet-4", "openrouter"),
        ("google/gemini-2.5-pro", "openrouter"),
        ("qwen/qwen3-32b:free", "openrouter"),
        ("openai/gpt-oss-20b", None),
        ("Qwen/Qwen3-8B", None),
        ("google/gemma-3-4b-it", None),
        ("gpt2", None),
        ("sft-abc123", None),
        ("o3-student", None),
        ("demo/teacher", None),
    ],
)
def test_a_models_name_tells_its_provider_where_only_one_has_it(
    workspace: Workspace, model: str, provider: str | None
) -> None:
    assert provider_of(model) == provider

    given = api.GenerateRollouts(input="prompts.jsonl", model=model, tools="none")

    assert given.provider == (provider or "hf")
    notes = complete_rollouts(workspace, given).notes
    assert [note.startswith(f"provider {provider} ") for note in notes] == [True] * bool(provider)
    assert api.GenerateRollouts(input="p", model=model, provider="vllm").provider == "vllm"
    assert api.EvaluateModel(data="p", model=model, base_url="http://h/v1").provider == "openai"


@pytest.mark.parametrize(
    ("more", "provider"),
    [({}, "anthropic"), ({"provider": "openrouter"}, "openrouter"), ({"base_url": "x"}, "openai")],
)
def test_a_judges_name_tells_its_provider_too(more: dict[str, str], provider: str) -> None:
    given = {"model": "claude-haiku-4-5", "rubric": "Right.", **more}

    assert JudgeFile.model_validate(given).provider == provider
