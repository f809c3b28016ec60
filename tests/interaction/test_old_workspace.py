"""A workspace that the code of commit c2f333a left is read, resumed and finished."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from fakes.http_endpoint import ScriptedEndpoint
from fakes.old_workspace import move_endpoint, run_named, unpack_old_workspace
from fakes.projects import read_rows, rollouts_request
from fakes.reporters import KeptReporter
from fakes.waiting import wait_until
from stillroom import api
from stillroom.api.operations import operation_of_run
from stillroom.jobs import remote_runs
from stillroom.jobs.operations import run_operation
from stillroom.run_folder import create_run
from stillroom.settings import Workspace
from stillroom.train.config.request import resolve_resume
from stillroom.types import RunKind

FINISHED_SFT = "sft-vdtzejvq4mm74muz4bncyyebsz"
KILLED_SFT = "sft-zfyt2vd2agnfmxtzk5xjvfd3zm"
WAITING_SFT = "sft-gj4dbngd74bg3up33a4zubr26d"
REMOTE_SCORE = "score-qe4id2c6gdw48avw5xk82t2fv2"
RUNS = {
    "dpo": "cancelled",
    "distill": "interrupted",
    "evaluate": "succeeded",
    "score-ttraknu6sikxx86ppf52u66iry": "succeeded",
    REMOTE_SCORE: "starting",
    "rollouts-w8hmpsg6bzzgj9jtntmexchdfd": "succeeded",
    "rollouts-j7gswy3kyeahs7ft8admjef25h": "interrupted",
    FINISHED_SFT: "succeeded",
    KILLED_SFT: "interrupted",
    WAITING_SFT: "interrupted",
}
TURNS_ON_RECORD = 22
TURNS_IN_ALL = 8 * 4


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workspace]:
    """The workspace; the machine of its remote run does not answer as long as `cut` is there."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setattr(remote_runs, "_FOLLOWER", "fakes.local_follower")
    workspace = unpack_old_workspace(tmp_path)
    (tmp_path / "there" / "cut").touch()
    yield workspace
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if any(str(tmp_path) in word for word in process.cmdline()):
                process.kill()


def report(workspace: Workspace, run_id: str) -> api.RunReport:
    return api.get_run(workspace, api.GetRun(run_id=run_id))


def losses(workspace: Workspace, run_id: str) -> dict[int, float]:
    """Returns each step's loss, as the run's events.jsonl holds it."""
    events = read_rows(workspace.runs / run_id / "events.jsonl")
    return {e["step"]: e["values"]["loss"] for e in events if e["event"] == "metrics"}


def test_every_run_is_listed_and_read(workspace: Workspace) -> None:
    page = api.list_runs(workspace, api.ListRuns(limit=100))

    listed = {run.run_id: str(run.status) for run in page.runs}
    assert listed == {run_named(workspace, name): status for name, status in RUNS.items()}
    for run_id, status in listed.items():
        read = report(workspace, run_id)
        assert (read.result is not None) == (status == "succeeded")
        assert (read.error is not None) == (status == "interrupted")
        if run_id == KILLED_SFT:
            assert KILLED_SFT in read.error.fix
        events = api.get_run_logs(workspace, api.GetRunLogs(run_id=run_id, source="events"))
        assert all("event" in json.loads(line) for line in events.lines)


@pytest.mark.parametrize(
    ("path", "made_by"),
    [
        ("good.jsonl", "filter_dataset"),
        ("train.jsonl", "convert_rollouts"),
        ("pairs.jsonl", "make_dpo_pairs"),
        ("rollouts/scored.jsonl", "score_rollouts"),
        (FINISHED_SFT, "start_training"),
    ],
)
def test_lineage_is_followed_back_and_every_hash_is_right(
    workspace: Workspace, path: str, made_by: str
) -> None:
    lineage = api.show_lineage(workspace, api.ShowLineage(path=path))

    nodes = [lineage.root]
    for node in nodes:
        nodes += node.inputs
    assert lineage.root.made_by == made_by
    files = [node for node in nodes if node.role is None]
    assert any(node.path == "prompts.jsonl" for node in files)
    assert {str(node.state) for node in files} == {"same"}
    assert lineage.problems == []


def test_a_tag_still_names_the_content_it_was_given_for(workspace: Workspace) -> None:
    before = (workspace.root / "train.jsonl").read_bytes()
    (workspace.root / "train.jsonl").write_text("", encoding="utf-8")

    kept = workspace.existing("train@v1", label="input")

    assert kept.read_bytes() == before


def test_old_rollouts_are_curated_to_the_rows_they_were(workspace: Workspace) -> None:
    root = workspace.root
    request = api.FilterDataset(
        input="rollouts/done.jsonl", output="good2.jsonl", min_reward=1, dedupe="exact"
    )
    api.filter_dataset(workspace, request)
    api.convert_rollouts(workspace, api.ConvertRollouts(input="good2.jsonl", output="train2.jsonl"))
    api.make_dpo_pairs(
        workspace, api.MakeDpoPairs(input="rollouts/done.jsonl", output="pairs2.jsonl")
    )

    for name in ("good", "train"):
        assert (root / f"{name}2.jsonl").read_bytes() == (root / f"{name}.jsonl").read_bytes()
    # Since then pairs give the names of their rollouts, and no longer ids that others may have.
    names = {"chosen_id", "rejected_id"}
    old, new = (
        [{key: row[key] for key in row.keys() - names} for row in read_rows(root / file)]
        for file in ("pairs.jsonl", "pairs2.jsonl")
    )
    assert new == old
    for file in ("pairs.jsonl", "pairs2.jsonl"):
        steps = api.show_lineage(workspace, api.ShowLineage(path=file, row=1)).row
        assert {"chosen rollout", "rejected rollout"} <= {step.kind for step in steps}


def test_half_done_rollouts_are_finished_and_no_call_is_paid_for_again(
    workspace: Workspace,
) -> None:
    finished = read_rows(workspace.root / "rollouts/half.jsonl")
    with ScriptedEndpoint(tool_turns=3) as endpoint:
        move_endpoint(workspace, "rollouts/half.jsonl", endpoint.base_url)
        request = rollouts_request(
            endpoint,
            output="rollouts/half.jsonl",
            tools="echo_tools.py",
            concurrency=4,
            max_concurrency=4,
        )
        run_id = api.generate_rollouts(workspace, request).run_id
        wait_until(lambda: report(workspace, run_id).status not in ("starting", "running"))
        num_calls = sum(endpoint.served.values())

    ended = report(workspace, run_id)
    assert ended.status == "succeeded", ended.error
    assert ended.result is not None
    assert ended.result["already_done"] == len(finished) == 4
    assert num_calls == ended.result["calls"] == TURNS_IN_ALL - TURNS_ON_RECORD
    rows = read_rows(workspace.root / "rollouts/half.jsonl")
    assert rows[:4] == finished
    assert len({row["task_id"] for row in rows}) == len(rows) == 8
    assert all(row["turns"] == 4 and row["success"] for row in rows)


@pytest.mark.parametrize(
    ("beginning", "last_step", "num_steps"),
    [(KILLED_SFT, 2, 36), ("dpo", 3, 24), ("distill", 1, 12)],
)
def test_training_goes_on_from_its_checkpoint_and_is_finished(
    workspace: Workspace, beginning: str, last_step: int, num_steps: int
) -> None:
    run_id = run_named(workspace, beginning)
    request = resolve_resume(
        workspace, api.StartTraining(resume=run_id, overrides=("trainer.save_step=-1",))
    )
    kind = RunKind(run_id.partition("-")[0])
    folder = create_run(workspace, kind, request.model_dump(mode="json"))

    result = run_operation(operation_of_run(kind), folder, reporter := KeptReporter(), {})

    assert result.steps == len(reporter.measured) == num_steps
    assert reporter.progressed[0] == (last_step + 1, num_steps)
    # What was measured before the run was stopped is told again, as it was.
    for step, loss in losses(workspace, run_id).items():
        assert reporter.measured[step - 1]["loss"] == loss
    assert (folder.path / "checkpoints/final/adapter_model.safetensors").is_file()


@pytest.mark.usefixtures("warm_python")
def test_a_waiting_run_begins_once_the_run_before_it_has_ended(workspace: Workspace) -> None:
    """A process takes the folder up as it is; the run before it was killed, which is an end too."""
    folder = workspace.runs / WAITING_SFT
    command = [sys.executable, "-P", "-m", "stillroom.api.worker", str(folder)]

    subprocess.run(command, cwd=workspace.root, check=True, timeout=120, capture_output=True)

    ended = report(workspace, WAITING_SFT)
    assert ended.status == "succeeded", ended.error
    assert max(losses(workspace, WAITING_SFT)) == 36
    used = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert used["model"]["path"] == "models/teacher"


def test_a_run_that_ended_on_its_machine_meanwhile_is_copied_back(workspace: Workspace) -> None:
    (workspace.root.parent / "there" / "cut").unlink()
    wait_until(lambda: report(workspace, REMOTE_SCORE).status not in ("starting", "running"))

    ended = report(workspace, REMOTE_SCORE)
    assert ended.status == "succeeded", ended.error
    assert [row["reward"] for row in read_rows(workspace.root / "scored.jsonl")] == [0.0, 0.1]
    for number in range(2):
        step = workspace.runs / REMOTE_SCORE / f"checkpoints/step_{number:06d}"
        assert (step / "model.safetensors").read_bytes() == bytes([number]) * 1000
    # The manifest was written on the machine, with the path that the workspace had then.
    lineage = api.show_lineage(workspace, api.ShowLineage(path="scored.jsonl"))
    (rollouts,) = [n for n in lineage.root.inputs if n.path.endswith("rollouts.jsonl")]
    assert str(rollouts.state) == "same"


def test_the_calls_of_a_killed_recorder_are_imported(workspace: Workspace) -> None:
    request = api.ImportRollouts(input="traces/app", output="imported.jsonl")

    api.import_rollouts(workspace, request)

    questions = [
        row["messages"][0]["content"] for row in read_rows(workspace.root / request.output)
    ]
    assert sorted(questions) == [f"recorded question {number}?" for number in range(4)]


def test_the_report_of_all_runs_is_written(workspace: Workspace) -> None:
    api.write_report(workspace, api.WriteReport())

    page = (workspace.root / "report.html").read_text(encoding="utf-8")
    assert all(run_named(workspace, name) in page for name in RUNS)
