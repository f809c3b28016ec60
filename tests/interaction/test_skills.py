"""Every command and example of the skills, carried out on the demo project."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client, StdioServerParameters
from mcp.client.stdio import get_default_environment
from skills_ref import validate

from fakes.documents import Block, blocks_of
from fakes.rollout_rows import read_rows
from fakes.sshd import SshUser
from fakes.waiting import wait_until
from stillroom.api import OPERATIONS
from stillroom.remote.known_machines import remote_runs
from stillroom.remote.machines import MACHINES_FILE, all_machines
from stillroom.settings import Workspace
from stillroom.train.config.file import load_config
from stillroom.train.config.schema import CONFIGS, keys_of
from stillroom_mcp.app import INSTRUCTIONS

SKILLS = Path(__file__).parents[2] / "skills"
_FEW_ROLLOUTS = 24
_FEW_ANSWERS = 8
_FILES = ("jsonl", "python")
"""The languages of blocks that are files, whose names stand behind them."""
# The examples' own sizes take minutes; what is called and with which settings stays.
_SHORT_TRAINING = {
    "sft.yml": ["trainer.num_epochs=1"],
    "dpo.yml": [],
    "distill.yml": ["trainer.max_steps=1", "data.batch_size=8", "algorithm.substeps=1"],
}
followed = pytest.mark.timeout(300)
"""Of a test that follows a skill: some twenty calls, each of which may wait for a run."""


class Agent:
    """Follows a skill: makes its calls in order and remembers the runs it named."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._runs: dict[str, str] = {}
        self._has_project = False
        self.num_calls = 0
        """All calls so far, those that wait for a run too."""

    async def follow(self, block: Block) -> None:
        tool, _, name = block.info.partition(" as=")
        if tool == "create_project" and self._has_project:
            return  # that of the document before
        self._has_project = True
        text = re.sub(r"<(\w+)>", lambda found: self._runs[found[1]], block.text)
        answer = await self.call(tool, self._shortened(tool, json.loads(text)))
        if "run_id" in answer and tool != "get_run":
            answer = await self._finished(answer["run_id"])
            self._runs[name or tool] = answer["run_id"]
            if answer["kind"] == "sft":
                self._runs.setdefault("sft", answer["run_id"])

    async def call(self, tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
        self.num_calls += 1
        result = await self._client.call_tool(tool, arguments)
        assert not result.is_error, (tool, arguments, result.content)
        assert result.structured_content is not None
        return result.structured_content

    async def _finished(self, run_id: str) -> dict[str, Any]:
        with anyio.fail_after(110):
            while True:
                run = await self.call("get_run", {"run_id": run_id, "wait_s": 110})
                if run["status"] not in ("starting", "running"):
                    break
        assert run["status"] == "succeeded", run["error"]
        return run

    @staticmethod
    def _shortened(tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
        # Nothing is made of an evaluation but its figures.
        most = _FEW_ANSWERS if tool == "evaluate_model" else _FEW_ROLLOUTS
        if arguments.get("n", 0) > most:
            arguments["n"] = most
        if "config" in arguments:
            more = _SHORT_TRAINING[arguments["config"]]
            arguments["overrides"] = [*arguments.get("overrides", []), *more]
        if "teacher" in arguments and "data" in arguments:
            arguments["kl_prompts"] = 8
        return arguments


def write_file(block: Block, project: Path) -> None:
    (project / block.info).write_text(block.text, encoding="utf-8")


def run_commands(block: Block, project: Path) -> None:
    for line in block.text.splitlines():
        program, *arguments = shlex.split(line)
        assert program == "stillroom"
        finished = subprocess.run(
            [sys.executable, "-P", "-m", "stillroom_mcp", *arguments],
            cwd=project, capture_output=True, text=True, timeout=180, check=False,
        )  # fmt: skip
        assert finished.returncode == 0, (line, finished.stderr)


def follow_documents(
    project: Path, *documents: Path, environment: Mapping[str, str] | None = None
) -> list[int]:
    """Carries out all blocks of the documents over stdio; returns the calls that each took."""

    async def follow() -> list[int]:
        num_calls: list[int] = []
        server = StdioServerParameters(
            command=sys.executable,
            args=["-P", "-m", "stillroom_mcp", "serve", "--workspace", str(project)],
            cwd=project,
            env={**get_default_environment(), **(environment or {})},
        )
        async with Client(server) as client:
            agent = Agent(client)
            for document in documents:
                for block in blocks_of(document):
                    if block.language in _FILES:
                        write_file(block, project)
                    elif block.language == "json" and block.info:
                        await agent.follow(block)
                    elif block.language == "bash":
                        await anyio.to_thread.run_sync(run_commands, block, project)
                num_calls.append(agent.num_calls - sum(num_calls))
        return num_calls

    return anyio.run(follow)


def test_the_instructions_name_skills_that_there_are_and_the_import() -> None:
    named = re.findall(r"skill://([\w-]+)/SKILL\.md", INSTRUCTIONS)
    assert "import-traces" in named
    assert all((SKILLS / name / "SKILL.md").is_file() for name in named)
    assert len(INSTRUCTIONS) <= 1500
    assert {"distil", "on-policy-distillation", "import-traces", "remote-training"} <= set(named)
    assert "import_rollouts" in INSTRUCTIONS
    assert "stillroom setup HOST" in INSTRUCTIONS


@pytest.mark.parametrize("skill", sorted(p.name for p in SKILLS.iterdir()))
def test_the_skill_is_valid(skill: str) -> None:
    assert validate(SKILLS / skill) == []
    text = (SKILLS / skill / "SKILL.md").read_text(encoding="utf-8")
    assert text.count("\n") < 150


@pytest.mark.parametrize("document", sorted(SKILLS.rglob("*.md")), ids=lambda p: p.stem)
def test_every_example_names_a_tool_or_is_a_configuration(document: Path, tmp_path: Path) -> None:
    requests = {operation.name: operation.request for operation in OPERATIONS}
    for number, block in enumerate(blocks_of(document)):
        assert block.language in ("json", "yaml", "bash", *_FILES)
        if block.language in _FILES:
            assert Path(block.info).suffix == {"jsonl": ".jsonl", "python": ".py"}[block.language]
        if block.language == "json":
            requests[block.info.split(" ")[0]].model_validate_json(block.text)
        if block.info == MACHINES_FILE:
            (tmp_path / MACHINES_FILE).write_text(block.text, encoding="utf-8")
            assert all_machines(Workspace(tmp_path))
        elif block.language == "yaml":
            config = tmp_path / f"{number}.yml"
            config.write_text(block.text, encoding="utf-8")
            load_config(config)


MAX_CALLS = 30
"""A flow takes an agent at most so many calls, those that wait counted."""


@followed
@pytest.mark.usefixtures("warm_python")
def test_the_off_policy_skill_works_as_written(tmp_path: Path) -> None:
    skill = SKILLS / "off-policy-distillation"
    names = ("preferences", "refine", "export")
    references = (skill / f"references/{name}.md" for name in names)
    calls = follow_documents(tmp_path, skill / "SKILL.md", *references)
    off_policy, preferences, refine, export = calls
    assert off_policy + preferences <= MAX_CALLS, calls
    assert refine <= MAX_CALLS, calls
    assert export == 2


@followed
@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize(
    "skill",
    [
        "own-rollouts",
        "import-traces",
        "rollout-quality",
        "on-policy-distillation",
        "prompt-distillation",
        "distillation-config",
    ],
)
def test_the_skill_works_as_written(tmp_path: Path, skill: str) -> None:
    (calls,) = follow_documents(tmp_path, SKILLS / skill / "SKILL.md")
    assert 2 <= calls <= MAX_CALLS


@followed
@pytest.mark.usefixtures("warm_python")
def test_the_skills_on_rows_rewards_and_tools_work_as_written(tmp_path: Path) -> None:
    names = ("train-jsonl", "rollout-rewards", "rollout-tools")
    calls = follow_documents(tmp_path, *(SKILLS / name / "SKILL.md" for name in names))
    assert max(calls) <= MAX_CALLS

    rewards = [row["reward"] for row in read_rows(tmp_path / "rollouts/judged.jsonl")]
    assert set(rewards) <= {0.0, 1.0, 2.0}
    assert rewards.count(2.0) > len(rewards) / 2
    called = (tmp_path / "rollouts/tools.jsonl").read_text(encoding="utf-8")
    assert '"content":"218"' in called


@followed
@pytest.mark.usefixtures("warm_python")
def test_the_skill_on_other_machines_works_as_written(ssh_user: SshUser, tmp_path: Path) -> None:
    project, config, state = (tmp_path / name for name in ("project", "config", "state"))
    for folder in (project, config, state):
        folder.mkdir()
    # What the skill's line of machines.yml says, of a machine that is there; this test's torch.
    machine = {
        "ssh": {"host": "box", "options": ["-F", str(ssh_user.config)]},
        "price_per_hour": 2.40,
        "python": sys.executable,
    }
    (config / MACHINES_FILE).write_text(json.dumps({"gpu-box": machine}), encoding="utf-8")
    environment = {"STILLROOM_CONFIG": str(config), "XDG_STATE_HOME": str(state)}

    (calls,) = follow_documents(
        project, SKILLS / "remote-training/SKILL.md", environment=environment
    )

    assert calls <= MAX_CALLS
    workspace = Workspace(project)
    # The followers still tidy up there.
    wait_until(lambda: {view.phase for *_, view in remote_runs(workspace) if view} == {"over"})
    kinds = {run.run_id.partition("-")[0] for run, *_ in remote_runs(workspace)}
    assert kinds == {"sft", "evaluate"}
    [trained] = project.glob("runs/sft-*/checkpoints/final/model.safetensors")
    assert trained.stat().st_size > 100_000
    # Nothing of the runs stays there.
    assert list(ssh_user.home.glob(".stillroom-remote/runs/*")) == []


def test_the_configuration_skill_names_every_key_and_no_other() -> None:
    text = (SKILLS / "distillation-config" / "SKILL.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    named = [key for row in rows for key in re.findall(r"`([\w.]+)`", row)]

    known = {key for config in CONFIGS.values() for key in keys_of(config)}
    # A section is named by the keys in it.
    sections = {key.rpartition(".")[0] for key in known}
    assert sorted(named) == sorted(known - sections)
