"""Runs as they are listed and shown, whatever lies in their folders."""

import math
import re
import types
import typing
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from fakes.run_folders import write_run
from stillroom import api
from stillroom.errors import DataError, InputError
from stillroom.files import write_json
from stillroom.lineage import now
from stillroom.run_folder import RunFolder, RunState
from stillroom.settings import Workspace
from stillroom.train.config.schema import CONFIGS
from stillroom.types import RunKind, RunStatus
from stillroom.validation import describe_errors

DAMAGED = {
    "torn": b'{"run_id": "torn", "kind": "sf',
    "foreign": b'{"lap": 12, "pace": "5:10"}',
    "nested": b'{"result":' * 10_000 + b"1" + b"}" * 10_000,
    "binary": b"\xff\xfe\x00",
    "empty": b"",
}


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path)


def test_damaged_run_folders_are_named_and_break_no_list(workspace: Workspace) -> None:
    write_run(workspace.runs, "sft-good")
    for name, data in DAMAGED.items():
        (workspace.runs / name).mkdir()
        (workspace.runs / name / "run.json").write_bytes(data)
    page = api.list_runs(workspace, api.ListRuns())
    assert [run.run_id for run in page.runs] == ["sft-good"]
    assert [run.folder for run in page.unreadable] == sorted(f"runs/{name}" for name in DAMAGED)
    assert all("run.json is damaged" in run.problem for run in page.unreadable)
    with pytest.raises(DataError, match=r"torn/run\.json is damaged: .*\nfix: "):
        api.get_run(workspace, api.GetRun(run_id="torn"))
    api.write_report(workspace, api.WriteReport())
    text = (workspace.root / "report.html").read_text(encoding="utf-8")
    assert all(f"{name}/run.json" in text for name in DAMAGED)


def test_a_list_says_how_long_each_run_took(workspace: Workspace) -> None:
    write_run(workspace.runs, "sft-good")
    write_run(workspace.runs, "sft-queued", started_at=None, minute=1)
    page = api.list_runs(workspace, api.ListRuns())
    assert {run.run_id: run.duration_s for run in page.runs} == {
        "sft-good": 30.5,
        "sft-queued": None,
    }


def request_of(folder: Path, **request: Any) -> None:
    kind = folder.name.split("-", maxsplit=1)[0]
    write_json(folder / "request.json", {"kind": kind, "workspace": "", "request": request})


def test_a_list_names_each_run(workspace: Workspace) -> None:
    runs = workspace.runs
    request_of(write_run(runs, "evaluate-a"), name="after", data="h.jsonl")
    request_of(write_run(runs, "rollouts-b"), name=None, output="out.jsonl")
    request_of(write_run(runs, "sft-c"), config="sft.yml")
    write_run(runs, "sft-d")

    page = api.list_runs(workspace, api.ListRuns())

    assert {run.run_id: run.name for run in page.runs} == {
        "evaluate-a": "after",
        "rollouts-b": "out.jsonl",
        "sft-c": "sft.yml",
        "sft-d": None,
    }


@pytest.mark.parametrize("data", [None, *DAMAGED.values()], ids=["missing", *DAMAGED])
def test_an_interrupted_run_is_shown_without_a_readable_request(
    workspace: Workspace, data: bytes | None
) -> None:
    folder = write_run(workspace.runs, "rollouts-first", status="interrupted")
    request_of(write_run(workspace.runs, "rollouts-again", minute=1), output="out.jsonl")
    if data is not None:
        (folder / "request.json").write_bytes(data)

    run = api.get_run(workspace, api.GetRun(run_id="rollouts-first"))

    assert (run.status, run.resumed_by) == ("interrupted", None)


def test_a_run_that_ended_early_names_the_run_that_went_on_with_it(workspace: Workspace) -> None:
    runs = workspace.runs
    request_of(write_run(runs, "sft-first", status="cancelled"), config="c.yml")
    request_of(write_run(runs, "sft-again", minute=1), config="c.yml", resume="sft-first")
    request_of(write_run(runs, "rollouts-first", status="interrupted"), output="out.jsonl")
    request_of(write_run(runs, "rollouts-other", minute=1), output="another.jsonl")
    request_of(write_run(runs, "rollouts-again", minute=2), output="out.jsonl")

    def resumed_by(run_id: str) -> str | None:
        return api.get_run(workspace, api.GetRun(run_id=run_id)).resumed_by

    assert resumed_by("sft-first") == "sft-again"
    assert resumed_by("rollouts-first") == "rollouts-again"
    assert resumed_by("sft-again") is resumed_by("rollouts-other") is None


def test_the_end_of_a_huge_log_is_shown_in_little_space(workspace: Workspace) -> None:
    folder = write_run(workspace.runs, "sft-loud")
    with (folder / "log.txt").open("wb") as stream:
        stream.truncate(400 << 20)
        stream.seek(0, 2)
        stream.write(b"\n" + b"x" * (60 << 20) + b"\nlast\n")
    page = api.get_run_logs(workspace, api.GetRunLogs(run_id="sft-loud", lines=2))
    assert page.lines[-1] == "last"
    assert len(page.lines[0]) < 2100
    assert f"{60 << 20:,} bytes" in page.lines[0]
    assert page.has_more
    assert page.size_bytes == (460 << 20) + 7


def numbers_of(model: type[BaseModel], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The paths of all fields of a model, and of the models in it, that may hold a float."""
    found: list[tuple[str, ...]] = []
    for name, field in model.model_fields.items():
        kinds = [field.annotation]
        while kinds:
            kind = kinds.pop()
            if typing.get_origin(kind) in (typing.Union, types.UnionType, typing.Annotated):
                kinds += typing.get_args(kind)
            elif kind is float:
                found.append((*path, name))
            elif isinstance(kind, type) and issubclass(kind, BaseModel):
                found += numbers_of(kind, (*path, name))
    return found


MODELS = [*(operation.request for operation in api.OPERATIONS), *CONFIGS.values()]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_no_number_is_infinite_or_none_at_all(model: type[BaseModel]) -> None:
    for path in numbers_of(model):
        for value in (math.inf, -math.inf, math.nan, "Infinity", "nan"):
            given: Any = value
            for name in reversed(path):
                given = {name: given}
            with pytest.raises(ValidationError) as caught:
                model.model_validate(given)
            faults = {".".join(map(str, e["loc"])): e["type"] for e in caught.value.errors()}
            assert faults[".".join(path)] == "finite_number", path


def test_numbers_that_json_cannot_hold_are_refused_with_words() -> None:
    assert ("tool_timeout",) in numbers_of(api.GenerateRollouts)
    with pytest.raises(ValidationError) as caught:
        api.GenerateRollouts(
            input="p", model="m", tool_timeout=math.inf, seed=10**30, output="o.jsonl"
        )
    words = describe_errors(caught.value, api.GenerateRollouts)
    assert "tool_timeout: input should be a finite number, not inf" in words
    assert "seed: the number does not fit into 64 bits" in words


def test_an_address_alone_means_an_endpoint() -> None:
    request = api.GenerateRollouts(input="p", model="m", base_url="http://127.0.0.1:1/v1")
    assert request.provider == "openai"
    assert api.GenerateRollouts(input="p", model="m").provider == "hf"
    vllm = api.EvaluateModel(data="p", model="m", base_url="http://127.0.0.1:1", provider="vllm")
    assert vllm.provider == "vllm"


@pytest.mark.parametrize(
    ("kind", "status", "problem", "fix"),
    [
        (RunKind.EVALUATE, RunStatus.RUNNING, "has not finished", "get_run(run_id='run', wait_s"),
        (RunKind.EVALUATE, RunStatus.FAILED, "is not a finished evaluation", "is succeeded"),
        (RunKind.SFT, RunStatus.RUNNING, "is not a finished evaluation", "is succeeded"),
    ],
)
def test_a_comparison_with_a_run_that_is_no_finished_evaluation_says_what_to_do(
    workspace: Workspace, kind: RunKind, status: RunStatus, problem: str, fix: str
) -> None:
    run = RunFolder(workspace.runs / "run")
    run.path.mkdir(parents=True)
    run.write(RunState(run_id="run", kind=kind, status=status, created_at=now()))
    request = api.CompareEvaluations(baseline="run", candidates=("other",))
    with pytest.raises(InputError, match=problem) as caught:
        api.compare_evaluations(workspace, request)
    assert fix in caught.value.fix
    # A call with a longer wait is refused.
    for seconds in re.findall(r"wait_s=(\d+)", caught.value.fix):
        api.GetRun(run_id="run", wait_s=float(seconds))
