"""What create_project writes."""

import re
import shutil
import tomllib
from pathlib import Path
from typing import get_args

import pytest

from fakes.rollout_rows import read_rows
from fakes.waiting import run_async
from stillroom.api import (
    CheckSetup,
    CreateProject,
    ImportRollouts,
    check_setup,
    create_project,
    import_rollouts,
)
from stillroom.data.formats import load_tasks
from stillroom.data.validate import ValidateDataset, validate_dataset
from stillroom.projects import create
from stillroom.settings import Workspace
from stillroom.tools.user.file import read_user_file
from stillroom.tools.user.pool import UserPool
from stillroom.train.config.file import load_config

TEMPLATES = get_args(CreateProject.model_fields["template"].annotation)
KINDS = ("tools", "rewards")


@pytest.mark.thorough
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_project_keeps_its_keys_and_locks_out_of_git(tmp_path: Path, template: str) -> None:
    create_project(Workspace(tmp_path), CreateProject.model_validate({"template": template}))

    ignored = (tmp_path / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert {".env", "runs/", ".*.jsonl/", ".*.lock"} <= set(ignored)


@pytest.mark.parametrize("template", TEMPLATES)
def test_every_configuration_of_a_project_is_one(tmp_path: Path, template: str) -> None:
    create_project(Workspace(tmp_path), CreateProject.model_validate({"template": template}))

    kinds = {path.name: load_config(path).dataset_type for path in tmp_path.glob("*.yml")}
    assert kinds["sft.yml"] == "sft"
    assert kinds.get("distill.yml", "distill") == "distill"


def test_nobody_has_tools_or_rewards_that_they_did_not_write(tmp_path: Path) -> None:
    """A tools.py beside config.yml is used in training, so an example must not be called that."""
    create_project(Workspace(tmp_path), CreateProject(template="starter"))

    assert {path.name for path in tmp_path.glob("*.py")} == {f"{kind}_example.py" for kind in KINDS}


def test_the_examples_of_tools_and_rewards_can_be_loaded(tmp_path: Path) -> None:
    create_project(Workspace(tmp_path), CreateProject(template="starter"))
    tools, rewards = (read_user_file(tmp_path / f"{kind}_example.py") for kind in KINDS)

    async def main() -> tuple[list[str], list[str]]:
        async with UserPool(tools_file=tools, rewards_file=rewards) as pool:
            names = [schema["function"]["name"] for schema in pool.schemas]
            return names, [reward.name for reward in pool.rewards]

    assert run_async(main) == (["free_space", "task_note"], ["mentions_expected"])


def test_a_starter_project_has_no_rows_that_stand_in_for_the_users_own(tmp_path: Path) -> None:
    result = create_project(Workspace(tmp_path), CreateProject(template="starter"))

    assert [name for name in result.files if name.endswith(".jsonl")] == ["guard.jsonl"]
    rows = re.findall(r"`(\{.*\})`", (tmp_path / "CLAUDE.md").read_text(encoding="utf-8"))
    (tmp_path / "shown.jsonl").write_text("\n".join(rows), encoding="utf-8")
    assert len(load_tasks(tmp_path / "shown.jsonl")) == 2


def test_files_that_an_installer_compiles_are_not_part_of_a_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    templates = tmp_path / "templates"
    shutil.copytree(create._TEMPLATES, templates)
    (templates / "starter/__pycache__").mkdir()
    (templates / "starter/__pycache__/tools_example.cpython-311.pyc").write_bytes(b"compiled")
    monkeypatch.setattr(create, "_TEMPLATES", templates)

    result = create_project(Workspace(tmp_path), CreateProject(path="new", template="starter"))

    assert [name for name in result.files if "pyc" in name] == []
    assert not (tmp_path / "new/__pycache__").exists()


def test_the_guard_set_of_a_starter_project_is_one(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    create_project(workspace, CreateProject(template="starter"))
    request = ValidateDataset(path="guard.jsonl", format="prompts", report="none")

    report = validate_dataset(workspace, request).report

    assert (report.bad, report.good) == (0, 28)
    expected = [
        task.metadata.get("expected_answer") for task in load_tasks(tmp_path / "guard.jsonl")
    ]
    assert sum(answer is not None for answer in expected) == 22


def test_the_logs_of_the_traces_project_become_the_conversations_that_they_were(
    tmp_path: Path,
) -> None:
    workspace = Workspace(tmp_path)
    create_project(workspace, CreateProject(template="traces"))

    request = ImportRollouts(input="traces", output="app.jsonl", split_heldout=0.25, prompts=True)
    result = import_rollouts(workspace, request)

    assert (result.kept, result.refused_by_reason) == (380, {"failed call": 6})
    assert result.read == result.kept + result.merged + result.refused
    assert set(result.formats) == {"openai_chat", "anthropic_messages", "otel_genai"}
    assert result.losses == {}
    assert result.removed == {"email address": 8}
    assert result.heldout is not None
    assert result.heldout.rollouts == 95
    rows = read_rows(tmp_path / "app.jsonl") + read_rows(tmp_path / "app.heldout.jsonl")
    assert len(rows) == 380
    assert sum(row["messages"][-1]["role"] == "assistant" for row in rows) == 380
    # The conversations are whole: each begins with its question, and no call is left out.
    calls = sum(message["role"] == "assistant" for row in rows for message in row["messages"])
    copies = 10
    assert result.read - 6 == calls + copies


def test_check_setup_names_every_extra_of_all(tmp_path: Path) -> None:
    pyproject = Path(__file__).parents[2] / "pyproject.toml"
    extras = tomllib.loads(pyproject.read_text("utf-8"))["project"]["optional-dependencies"]
    (of_all,) = extras["all"]
    names = of_all.removeprefix("stillroom[").removesuffix("]").split(",")

    checked = {check.name for check in check_setup(Workspace(tmp_path), CheckSetup()).checks}

    assert {"curate", "traces", "qlora", "gguf"} <= set(names)
    assert {f"[{name}]" for name in names} <= checked
