"""The command line as people and scripts use it."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fakes.http_endpoint import ScriptedEndpoint
from fakes.lineages import Lineages
from fakes.projects import endpoint_project, read_rows
from stillroom.api import OPERATIONS
from stillroom_mcp.cli import build_parser, main

pytestmark = pytest.mark.usefixtures("warm_python")

Command = Callable[..., subprocess.CompletedProcess[str]]
PYTHON = sys.executable
"""The real one, for what depends on how a process ends."""


def stillroom(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "stillroom_mcp", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """Calls the command line in this process, in the test's folder."""
    monkeypatch.chdir(tmp_path)

    def called(*arguments: str) -> subprocess.CompletedProcess[str]:
        with pytest.raises(SystemExit) as ending:
            main(arguments)
        assert isinstance(ending.value.code, int)
        return subprocess.CompletedProcess(arguments, ending.value.code, *capsys.readouterr())

    return called


def test_every_operation_is_a_command_with_the_same_words() -> None:
    _, by_command = build_parser()
    for operation in OPERATIONS:
        options = by_command[operation.name.replace("_", "-")]._actions
        words = {action.dest for action in options}
        assert set(operation.request.model_fields) <= words


@pytest.mark.parametrize(
    "given",
    [
        ("--workspace", "project", "list-runs", "--json"),
        ("--workspace=project", "list-runs", "--json"),
        ("-d", "project", "--json", "list-runs"),
        ("--json", "--workspace", "project", "list-runs"),
    ],
)
def test_the_workspace_and_json_may_be_given_before_the_command(
    command: Command, tmp_path: Path, given: tuple[str, ...]
) -> None:
    (tmp_path / "project" / "runs").mkdir(parents=True)
    done = command(*given)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["runs"] == []


def test_a_run_is_waited_for_and_its_result_is_one_json_line(tmp_path: Path) -> None:
    endpoint_project(tmp_path, num_prompts=3)
    with ScriptedEndpoint() as endpoint:
        finished = stillroom(
            "generate-rollouts", "prompts.jsonl", "--provider", "openai", "--model", "scripted",
            "--base-url", endpoint.base_url, "--tools", "tools.py", "--json", cwd=tmp_path,
        )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    answer = json.loads(finished.stdout)
    assert answer["status"] == "succeeded"
    assert answer["result"]["succeeded"] == 3
    assert len(read_rows(tmp_path / "rollouts/rollouts.jsonl")) == 3


def test_a_detached_run_returns_at_once_and_can_be_followed(tmp_path: Path) -> None:
    endpoint_project(tmp_path, num_prompts=3)
    with ScriptedEndpoint() as endpoint:
        endpoint.hold.clear()
        started = stillroom(
            "generate-rollouts", "prompts.jsonl", "--provider", "openai", "--model", "scripted",
            "--base-url", endpoint.base_url, "--tools", "tools.py", "--json", "--detach",
            cwd=tmp_path,
        )  # fmt: skip
        run = json.loads(started.stdout)
        assert run["status"] in ("starting", "running")
        endpoint.hold.set()
        ended = stillroom("get-run", run["run_id"], "--wait-s", "30", "--json", cwd=tmp_path)
    assert json.loads(ended.stdout)["status"] == "succeeded"


def test_a_failed_run_exits_with_1_and_shows_the_fix(tmp_path: Path) -> None:
    endpoint_project(tmp_path, num_prompts=3)
    with ScriptedEndpoint(status=404) as endpoint:
        finished = stillroom(
            "generate-rollouts", "prompts.jsonl", "--provider", "openai", "--model", "unknown",
            "--base-url", endpoint.base_url, cwd=tmp_path,
        )  # fmt: skip
    assert finished.returncode == 1
    assert "status: failed" in finished.stdout
    assert "check base_url and the model's name" in finished.stdout


def test_a_file_with_problems_makes_validation_exit_with_1(
    command: Command, tmp_path: Path
) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n{"prompt": 3}\n', encoding="utf-8")
    finished = command("validate-dataset", "p.jsonl")
    assert finished.returncode == 1
    assert "p.jsonl:2" in finished.stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["generat-rollouts"], "did you mean 'generate-rollouts'?"),
        (["evaluate-model", "x", "--modle", "y", "--model", "z"], "did you mean '--model'?"),
        (["get-run", "--wait", "3", "x"], "did you mean '--wait-s'?"),
        (["get-run"], "required: RUN_ID"),
        (["list-runs", "--limit", "many"], "limit: input should be a valid integer"),
    ],
)
def test_wrong_usage_exits_with_2_and_names_what_was_meant(
    command: Command, tmp_path: Path, arguments: list[str], expected: str
) -> None:
    finished = command(*arguments)
    assert finished.returncode == 2
    assert expected in finished.stderr
    assert "--help" in finished.stderr
    assert not list(tmp_path.iterdir())


def test_an_error_exits_with_1_and_says_what_to_do(command: Command) -> None:
    finished = command("get-run", "nope")
    assert finished.returncode == 1
    assert "there is no run 'nope'" in finished.stderr
    assert "fix: list the runs" in finished.stderr


def test_a_page_of_the_documentation_is_printed_and_all_are_named(command: Command) -> None:
    page = command("docs", "traces")
    assert page.stdout.startswith("# Traces")
    assert "traces: Traces: logs that can be imported\n" in command("docs").stdout
    unknown = command("docs", "docs/trace.md")
    assert unknown.returncode == 1
    assert "(did you mean 'traces'?)" in unknown.stderr


def test_a_lineage_is_shown_as_a_tree(command: Command, tmp_path: Path) -> None:
    project = Lineages(tmp_path)
    project.all()
    finished = command("show-lineage", "sft-run", "--row", "1")
    assert finished.returncode == 0, finished.stderr
    # An agent reads a pipe, so the tree with names that others chose is between marks.
    warning, opening, *lines = finished.stdout.splitlines()
    assert opening.split()[2] in warning
    assert lines[0].startswith("runs/sft-run/checkpoints/final  ")
    assert lines[1].startswith("├─ config.yml")
    assert lines[2].startswith("├─ sft.jsonl")
    assert lines[3].startswith("│  └─ good.jsonl")
    assert "by filter_dataset (read 8, kept 4)" in lines[3]
    assert "row:" in lines
    assert lines[-1].startswith("next: stillroom inspect-examples")


def test_a_version_is_named_by_its_tag_from_the_command_line(
    command: Command, tmp_path: Path
) -> None:
    project = Lineages(tmp_path)
    project.all()
    tagged = command("show-lineage", "sft.jsonl", "--tag", "v1.0")
    assert "tagged: sft@v1.0" in tagged.stdout.splitlines()
    (tmp_path / "sft.jsonl").write_text("", encoding="utf-8")
    checked = command("validate-dataset", "sft@v1.0", "--json")
    assert json.loads(checked.stdout)["good"] == 4, checked.stderr


def without_marks(text: str) -> str:
    return re.sub(r"\b[0-9a-f]{16}\b", "MARK", text)


@pytest.mark.parametrize(
    ("by_place", "by_name"),
    [
        (["get-run", "nope"], ["get-run", "--run-id", "nope"]),
        (["get-run", "--wait-s", "1", "nope"], ["get-run", "--wait-s", "1", "--run-id=nope"]),
        (["compare-evaluations", "a", "b"], ["compare-evaluations", "a", "--candidates", "b"]),
        (["export-model", "m", "out"], ["export-model", "--output", "out", "m"]),
        (["inspect-examples", "no.jsonl"], ["inspect-examples", "--path", "no.jsonl"]),
    ],
)
def test_a_field_that_has_a_place_is_a_flag_too(
    command: Command, by_place: list[str], by_name: list[str]
) -> None:
    first, second = (command(*words) for words in (by_place, by_name))
    assert first.returncode == second.returncode == 1
    assert without_marks(first.stderr) == without_marks(second.stderr) != ""


def test_every_positional_field_is_a_flag_if_it_is_given_as_one() -> None:
    for operation in OPERATIONS:
        for name in operation.positional:
            flag = "--" + name.replace("_", "-")
            _, by_command = build_parser([flag])
            assert flag in by_command[operation.command]._option_string_actions


def shell(command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    python = f"{PYTHON} -P -m stillroom_mcp"
    return subprocess.run(
        ["/bin/bash", "-c", command.replace("stillroom", python, 1)],
        cwd=cwd, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


def test_a_reader_that_has_enough_ends_the_command_quietly(tmp_path: Path) -> None:
    done = shell("stillroom list-runs | true; stillroom --help > /dev/null | true", tmp_path)
    assert "Traceback" not in done.stderr
    assert "Broken" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is always full is Linux's")
def test_a_full_disk_is_an_error_in_words(tmp_path: Path) -> None:
    done = shell("stillroom list-runs > /dev/full", tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("error: operating system error: ")
    assert "No space left" in done.stderr
    assert "Traceback" not in done.stderr
    both = shell("stillroom list-runs > /dev/full 2>&1", tmp_path)
    assert both.returncode == 1
