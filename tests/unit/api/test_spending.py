"""The budget of a workspace, which all of its runs share."""

import json
import os
import shutil
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import pytest

from fakes.colours import ColourTeacher, things
from fakes.machines import add_remote_run
from fakes.rollout_rows import write_rows
from fakes.run_folders import record_cost, spent_run
from fakes.runs_here import do_runs_here
from stillroom.api.placement import pack_job
from stillroom.api.spending import limit_budget, within_workspace_budget
from stillroom.api.start_runs import generate_rollouts
from stillroom.errors import DocumentError, InputError
from stillroom.jobs import supervise
from stillroom.remote.bundle.needs import Needs
from stillroom.remote.machines import find_machine
from stillroom.rollout.journal.journal import journal_path
from stillroom.rollout.journal.records import OutstandingRecord
from stillroom.rollout.plan import plan_generation
from stillroom.rollout.request import GenerateRollouts
from stillroom.rollout.rescore.request import ScoreRollouts, plan_scoring
from stillroom.rollout.rescore.rows import ScoreJournal, scores_path
from stillroom.run_folder import RemoteView, RunFolder, RunState, WorkspaceShare, create_run
from stillroom.settings import Workspace
from stillroom.types import RunKind

PRICES = """big: {input: 3, output: 15}
own: {input: 0, output: 0}
workspace: {budget_usd: 2}
"""


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    monkeypatch.setenv("VLLM_API_KEY", "key")
    (tmp_path / "prices.yml").write_text(PRICES, encoding="utf-8")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "How much?"}\n', encoding="utf-8")
    return Workspace(tmp_path)


def limited(workspace: Workspace, **changes: Any) -> tuple[float | None, str]:
    fields = {"input": "prompts.jsonl", "output": "new.jsonl", "provider": "openai", **changes}
    request = GenerateRollouts.model_validate(fields)
    plan = plan_generation(workspace, request)
    limited = within_workspace_budget(workspace, request, plan.rollouts)
    return limited.request.budget_usd, " ".join(limited.notes)


CALLED = {"model": "big", "base_url": "http://127.0.0.1:9/v1"}


def test_each_run_gets_at_most_what_the_others_leave(workspace: Workspace) -> None:
    assert limited(workspace, **CALLED, budget_usd=1.5) == (1.5, "")
    budget, note = limited(workspace, **CALLED)
    assert budget == 2
    assert "$0 of the $2 that the workspace's runs may cost together" in note

    ended = {"cost_usd": 0.4, "unconfirmed_usd": 0.1}
    spent_run(workspace, "rollouts-a", asked={"output": "new.jsonl"}, result=ended)
    active = spent_run(workspace, "evaluate-b", asked={"budget_usd": 0.3}, status="running")
    owner = RunFolder(active).owner_lock()
    assert owner.try_acquire()
    # Its stages are the runs above.
    spent_run(workspace, "recipe-c", asked={"budget_usd": 2}, status="running")

    assert limited(workspace, **CALLED, output="other.jsonl")[0] == pytest.approx(1.2)
    assert limited(workspace, **CALLED, budget_usd=1) == (1, "")
    assert limit_budget(workspace, None, num_runs=2)[0] == pytest.approx(0.6)

    # One whose process is gone has no more to spend; a damaged one may have spent all.
    owner.release()
    assert limit_budget(workspace, None)[0] == pytest.approx(1.5)
    (active / "run.json").write_text("{", encoding="utf-8")
    assert limit_budget(workspace, None)[0] == pytest.approx(1.2)


def test_a_dry_run_costs_nothing(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    do_runs_here(monkeypatch)
    fields = {"input": "prompts.jsonl", "output": "new.jsonl", "provider": "openai", **CALLED}
    request = GenerateRollouts.model_validate({**fields, "dry_run": True})
    dry_run = generate_rollouts(workspace, request)
    assert dry_run.result is not None
    assert dry_run.result["cost_usd"]["expected"] > 0
    assert limited(workspace, **CALLED)[0] == 2


def rescored(workspace: Workspace) -> tuple[WorkspaceShare, float]:
    """The share and budget of a scoring run of new.jsonl with a judge that costs money."""
    (workspace.root / "old.jsonl").write_text("{}\n", encoding="utf-8")
    judge = {"rubric": "Is it right?", **CALLED}
    (workspace.root / "judge.yml").write_text(json.dumps(judge), encoding="utf-8")
    fields = {"input": "old.jsonl", "output": "new.jsonl", "judge": "judge.yml"}
    request = ScoreRollouts.model_validate(fields)
    limited = within_workspace_budget(workspace, request, plan_scoring(workspace, request))
    assert limited.share is not None
    assert limited.request.budget_usd is not None
    assert limited.added_usd == pytest.approx(
        limited.request.budget_usd - limited.share.earlier_usd
    )
    return limited.share, limited.request.budget_usd


def test_a_rerun_counts_what_its_output_has_cost_once(workspace: Workspace) -> None:
    # A killed run may have spent more than it had reported.
    record_cost(workspace.root / "new.jsonl", 0.5)
    spent_run(
        workspace, "rollouts-a", asked={"output": "new.jsonl"}, status="failed",
        metrics={"cost_usd": 0.4},
    )  # fmt: skip

    assert limited(workspace, **CALLED, output="other.jsonl")[0] == pytest.approx(1.5)
    # Its budget covers what the first run has spent: half a dollar, and the dollar and a half left.
    assert limited(workspace, **CALLED)[0] == pytest.approx(2)
    assert limited(workspace, **CALLED, budget_usd=1.9) == (1.9, "")

    # While it is active, it may add what its budget leaves.
    share = WorkspaceShare(earlier_usd=0.5)
    asked = {"output": str(workspace.root / "new.jsonl"), "budget_usd": 1.9}
    again = spent_run(workspace, "rollouts-b", asked=asked, share=share, status="running")
    owner = RunFolder(again).owner_lock()
    assert owner.try_acquire()
    assert limited(workspace, **CALLED, output="other.jsonl")[0] == pytest.approx(0.1)

    # Once it has ended, it has cost what it added.
    owner.release()
    spent_run(workspace, "rollouts-b", asked=asked, share=share, result={"cost_usd": 0.7})
    assert limited(workspace, **CALLED, output="other.jsonl")[0] == pytest.approx(0.8)


def test_an_overwritten_output_counts_with_what_it_had_cost(workspace: Workspace) -> None:
    asked, other = {"output": "new.jsonl"}, {**CALLED, "output": "other.jsonl"}
    # Of the half dollar on record, the first run had not reported a part.
    spent_run(workspace, "score-c", asked=asked, status="failed", metrics={"cost_usd": 0.4})
    share = WorkspaceShare(earlier_usd=0.5)
    spent_run(workspace, "score-b", asked=asked, share=share, result={"cost_usd": 0.2})
    # This one found a new journal.
    spent_run(workspace, "score-a", asked=asked, share=WorkspaceShare(), result={"cost_usd": 0.2})
    assert limited(workspace, **other)[0] == pytest.approx(2 - 0.9)
    # A copy of the workspace has other times.
    os.utime(workspace.runs / "score-c/request.json")
    assert limited(workspace, **other)[0] == pytest.approx(2 - 0.9)


@pytest.mark.parametrize("name", ["loop/new.jsonl", "x" * 300, "~nobody-here/new.jsonl"])
def test_an_output_that_can_no_longer_be_used_stops_no_other_run(
    workspace: Workspace, name: str
) -> None:
    (workspace.root / "loop").symlink_to("loop")
    for run_id in ("rollouts-a", "score-b"):
        reported = {"cost_usd": 0.4}
        spent_run(workspace, run_id, asked={"output": name}, status="failed", metrics=reported)
    assert limited(workspace, **CALLED)[0] == pytest.approx(1.2)


def test_a_scoring_run_counts_what_its_output_has_cost_once(workspace: Workspace) -> None:
    with ScoreJournal(scores_path(workspace.root / "new.jsonl"), "settings") as journal:
        journal.record_unused_cost(0.5)
    asked = {"output": "new.jsonl"}
    spent_run(workspace, "score-a", asked=asked, status="failed", metrics={"cost_usd": 0.4})

    share, budget_usd = rescored(workspace)
    assert (share.earlier_usd, budget_usd) == (0.5, pytest.approx(2))
    # The rollouts of that name are others.
    assert limited(workspace, **CALLED)[0] == pytest.approx(1.5)


def test_what_a_deleted_or_damaged_run_has_spent_on_an_output_still_counts(
    workspace: Workspace,
) -> None:
    record_cost(workspace.root / "new.jsonl", 0.5)
    asked, other = {"output": "new.jsonl", "budget_usd": 0.8}, {**CALLED, "output": "other.jsonl"}
    first = spent_run(workspace, "rollouts-a", asked=asked, result={"cost_usd": 0.5})

    # The budget of the damaged run, of which half a dollar is on record.
    (first / "run.json").write_text("{", encoding="utf-8")
    assert limited(workspace, **CALLED)[0] == pytest.approx(0.5 + 1.2)
    # What it had reported, if it had no budget.
    spent_run(workspace, "evaluate-b", asked={}, status="running")
    (workspace.runs / "evaluate-b/run.json").write_text("{", encoding="utf-8")
    event = {"event": "metrics", "step": 1, "values": {"cost_usd": 0.2}}
    (workspace.runs / "evaluate-b/events.jsonl").write_text(json.dumps(event), encoding="utf-8")
    assert limited(workspace, **other)[0] == pytest.approx(1.0)
    shutil.rmtree(workspace.runs / "evaluate-b")

    shutil.rmtree(first)
    budget_usd, _ = limited(workspace, **CALLED)
    assert budget_usd == pytest.approx(2)
    # After the rerun, its request tells what the deleted run had cost.
    share = WorkspaceShare(earlier_usd=0.5)
    spent_run(workspace, "rollouts-b", asked=asked, share=share, result={"cost_usd": 0.3})
    (workspace.root / "new.jsonl").unlink(missing_ok=True)
    shutil.rmtree(workspace.root / ".new.jsonl")
    assert limited(workspace, **other)[0] == pytest.approx(1.2)
    assert limited(workspace, **CALLED)[0] == pytest.approx(1.2)


def test_calls_in_flight_when_a_run_was_killed_count_once(workspace: Workspace) -> None:
    output = workspace.root / "new.jsonl"
    record_cost(output, 0.5)
    lost = OutstandingRecord(calls=2, tokens=9, usd=0.3, begins=True)
    with journal_path(output).open("ab") as stream:
        stream.write(msgspec.json.encode(lost) + b"\n")
    other = {**CALLED, "output": "other.jsonl"}
    spent_run(workspace, "rollouts-a", asked={"output": "new.jsonl"}, status="interrupted")
    assert limited(workspace, **other)[0] == pytest.approx(1.2)

    # The run that resumes it counts them as its own.
    assert limited(workspace, **CALLED)[0] == pytest.approx(2)
    result = {"cost_usd": 0.1, "unconfirmed_usd": 0.3}
    share = WorkspaceShare(earlier_usd=0.5)
    spent_run(workspace, "rollouts-b", asked={"output": "new.jsonl"}, share=share, result=result)
    assert limited(workspace, **other)[0] == pytest.approx(1.1)


@pytest.mark.parametrize("is_deleted", [False, True])
def test_a_rerun_spends_what_is_left_and_no_more(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, is_deleted: bool
) -> None:
    def write_budget(usd: float) -> None:
        # A reply costs $0.002, and may cost up to $0.016.
        text = f"t: {{input: 100, output: 0.01}}\nworkspace: {{budget_usd: {usd}}}\n"
        (workspace.root / "prices.yml").write_text(text, encoding="utf-8")

    monkeypatch.setenv("OPENAI_API_KEY", "key")
    write_rows(workspace.root / "prompts.jsonl", [{"prompt": text} for text in things(0, 80)])
    do_runs_here(monkeypatch)
    with ColourTeacher() as teacher:
        fields = {"input": "prompts.jsonl", "output": "new.jsonl", "model": "t"}
        request = GenerateRollouts.model_validate({**fields, "base_url": teacher.base_url})
        write_budget(0.05)
        first = generate_rollouts(workspace, request)
        assert first.result is not None
        assert first.result["stopped_by"] == "budget_usd"
        assert 0.03 < teacher.num_calls * 0.002 < 0.05

        write_budget(0.1)
        start_run = supervise.start_run

        def delete_and_start(*arguments: Any, **options: Any) -> RunState:
            """Deletes the output between the call and the start of the run's process."""
            if is_deleted:
                (workspace.root / "new.jsonl").unlink()
                shutil.rmtree(workspace.root / ".new.jsonl")
            return start_run(*arguments, **options)

        monkeypatch.setattr(supervise, "start_run", delete_and_start)
        again = generate_rollouts(workspace, request)
        assert again.result is not None
        assert again.result["stopped_by"] == "budget_usd"
        assert 0.08 < teacher.num_calls * 0.002 < 0.1


def test_two_starts_in_one_moment_share_what_is_left(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    others, budgets = list[Thread](), list[float]()

    def start(name: str) -> None:
        fields = {"input": "prompts.jsonl", "output": name, "provider": "openai", **CALLED}
        asked = GenerateRollouts.model_validate({**fields, "budget_usd": 1.5})
        generate_rollouts(workspace, asked)

    def start_run(
        place: Workspace, kind: RunKind, request: dict[str, Any], **_: object
    ) -> RunState:
        """Creates the run, but lets another start try to come in between before that."""
        if not others:
            others.append(Thread(target=start, args=("other.jsonl",), daemon=True))
            others[0].start()
            others[0].join(0.3)
        budgets.append(request["budget_usd"])
        return create_run(place, kind, request).read()

    monkeypatch.setattr(supervise, "start_run", start_run)
    start("new.jsonl")
    others[0].join(60)
    assert not others[0].is_alive()
    assert budgets == [1.5, pytest.approx(0.5)]


def test_nothing_that_may_cost_money_starts_once_it_is_spent(workspace: Workspace) -> None:
    spent_run(workspace, "rollouts-a", asked={"output": "new.jsonl"}, metrics={"cost_usd": 2.0})
    with pytest.raises(InputError, match=r"have used or reserved \$2.00 of the \$2"):
        limited(workspace, **CALLED)
    for free in (
        {"model": "own", "base_url": "http://127.0.0.1:9/v1"},
        {"model": "teacher", "provider": "demo"},
        {**CALLED, "dry_run": True},
    ):
        assert limited(workspace, **free) == (None, "")


def test_a_price_must_be_known(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    with pytest.raises(InputError, match="needs the price of 'unheard-of'"):
        limited(workspace, model="unheard-of")


def test_machines_count(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STILLROOM_CONFIG", str(workspace.root))
    machines = "box: {ssh: me@gpu.test, price_per_hour: 2}\nown: {ssh: me@own.test}\n"
    (workspace.root / "machines.yml").write_text(machines, encoding="utf-8")

    def budget(name: str) -> float | None:
        job = pack_job(workspace, find_machine(workspace, name), Needs, budget_usd=None)
        assert job is not None
        return job.spec.budget_usd

    assert (budget("box"), budget("own")) == (2, None)
    # A training has its budget from its machine, whatever becomes of its run.json.
    view = RemoteView(where="box", phase="running", machine_usd=0.3)
    run = add_remote_run(workspace, view, budget_usd=0.5)
    (run.path / "run.json").write_text("{", encoding="utf-8")
    assert budget("box") == pytest.approx(1.5)


@pytest.mark.parametrize("entry", ["20", "{usd: 20}", "{budget_usd: -1}", "{budget_usd: x}"])
def test_a_faulty_budget_is_refused(workspace: Workspace, entry: str) -> None:
    (workspace.root / "prices.yml").write_text(f"workspace: {entry}\n", encoding="utf-8")
    with pytest.raises(DocumentError, match=r"prices\.yml"):
        limited(workspace, **CALLED)
