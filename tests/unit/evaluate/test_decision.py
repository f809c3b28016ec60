"""Whether a distillation is worth it, what the guard set shows, and when a student has paid off."""

from pathlib import Path

import msgspec
import pytest

from fakes.rollout_rows import rollout_row
from fakes.run_folders import evaluation_result, write_run
from stillroom.evaluate.compare import compare
from stillroom.evaluate.costs import break_even, compare_costs, cost_of_runs
from stillroom.evaluate.decision import decide, gap_closed
from stillroom.evaluate.files import Evaluation, GuardScore, TaskCost, TaskScore
from stillroom.evaluate.intervals import share_estimate
from stillroom.evaluate.scores import count_truncated, guard_result
from stillroom.files import write_json
from stillroom.settings import Workspace
from stillroom.types import Trajectory


def evaluation(name: str, right: int, of: int = 100, **fields: object) -> Evaluation:
    """An evaluation in which the first `right` tasks are solved."""
    tasks = [
        TaskScore(task_id=f"t{i}", success=float(i < right), reward=float(i < right), groups={})
        for i in range(of)
    ]
    result = evaluation_result(name, share_estimate(right, of), **({"model": "student"} | fields))
    return Evaluation(result=result, tasks=tasks, sampled=tasks)


STUDENT = evaluation("base", 40)
PROMPTED = evaluation("with the policy", 88, instruction="system message")


@pytest.mark.parametrize(
    ("teacher", "others", "verdict", "because"),
    [
        (evaluation("t", 90, model="t"), [], "go", "no better prompt was tried"),
        (
            evaluation("t", 90, model="t"),
            [evaluation("p", 50, instruction="p")],
            "go",
            "40 points above the student's with the prompt of 'p'",
        ),
        (evaluation("t", 88, model="t"), [PROMPTED], "no_go", "does as well as the teacher"),
        (evaluation("t", 90, model="t"), [PROMPTED], "unclear", "too few to tell the teacher from"),
        (evaluation("t", 20, model="t"), [], "no_go", "use another teacher"),
        (evaluation("t", 43, model="t"), [], "unclear", "evaluate all on about"),
        (evaluation("t", 40, 9000, model="t"), [], "no_go", "at most 2 points better"),
        # Another student is no better prompt.
        (evaluation("t", 90, model="t"), [evaluation("sft", 90, model="s")], "go", "no better"),
    ],
)
def test_whether_to_distil_is_decided_against_the_student_and_against_a_better_prompt(
    teacher: Evaluation, others: list[Evaluation], verdict: str, because: str
) -> None:
    student = evaluation("base", 40, len(teacher.tasks))
    decision = decide(student, others, teacher)
    assert (decision.verdict, because in decision.because) == (verdict, True), decision
    if "about" in because:
        assert decision.tasks_needed is not None
        assert decision.tasks_needed > 100
    assert (decision.gap_left is not None) == any(one.result.instruction for one in others)


def test_a_trained_student_has_closed_a_share_of_the_gap() -> None:
    trained, teacher = evaluation("sft", 80, model="s"), evaluation("t", 90, model="t")
    assert gap_closed(compare(STUDENT, trained), trained, teacher) == pytest.approx(0.8)
    assert gap_closed(compare(teacher, trained), trained, STUDENT) is None
    assert compare(STUDENT, trained).sampled_difference == compare(STUDENT, trained).difference


def guarded(num_right: int, num_calls: int) -> Evaluation:
    scores = [
        GuardScore(
            task_id=f"g{i}", success=i < num_right if i < 30 else None, calls_tool=i < num_calls
        )
        for i in range(40)
    ]
    return msgspec.structs.replace(STUDENT, guard=scores)


def test_a_guard_set_shows_what_was_forgotten_and_needless_tool_calls() -> None:
    result = guard_result(guarded(27, 4).guard, "guard.jsonl")
    assert result.accuracy is not None
    assert (result.accuracy.value, result.accuracy.n) == (0.9, 30)
    assert (result.over_calling.value, result.over_calling.n) == (0.1, 40)

    worse = compare(guarded(27, 4), guarded(12, 30)).guard
    assert worse is not None
    assert (worse.forgets, worse.over_calls) == (True, True)
    assert worse.over_calling.value == pytest.approx(26 / 40)
    same = compare(guarded(27, 4), guarded(26, 4)).guard
    assert same is not None
    assert (same.forgets, same.over_calls) == (False, False)
    assert compare(STUDENT, guarded(1, 1)).guard is None


def cost(usd: float | None, *, is_local: bool = False) -> TaskCost:
    return TaskCost(usd=usd, seconds=2.0, machine_seconds=0.5, tokens=300.0, is_local=is_local)


def test_the_student_has_paid_off_once_it_has_saved_what_was_spent() -> None:
    assert break_even(0.001, 0.011, 5.0) == 500
    assert break_even(0.0, 0.01, 0.0) == 0
    assert break_even(0.02, 0.01, 5.0) is None
    assert break_even(None, 0.01, 5.0) is None
    assert break_even(0.001, 0.01, None) is None


def test_what_was_spent_is_that_of_all_runs_and_of_the_machines_priced_time(tmp_path) -> None:
    workspace = Workspace(tmp_path)

    def run(name: str, request: dict, **fields: object) -> None:
        folder = write_run(workspace.runs, name, **fields)
        document = {
            "kind": name.split("-", maxsplit=1)[0],
            "workspace": str(tmp_path),
            "request": request,
        }
        write_json(folder / "request.json", document)

    run("rollouts-a", {"provider": "openrouter"}, result={"cost_usd": 3.0})
    run("rollouts-b", {"provider": "openrouter"}, status="failed", metrics={"cost_usd": 1.0})
    run("rollouts-c", {"provider": "openrouter"}, result={"dry_run": True})
    run("evaluate-a", {"provider": "openrouter"}, result={"cost_usd": 0.5})
    run("sft-a", {})
    run("evaluate-b", {"provider": "hf"})
    spent = cost_of_runs(workspace)
    assert spent.calls_usd == 4.5
    assert spent.machine_hours == pytest.approx(2 * 30.5 / 3600)

    student = evaluation("sft", 80, model="s", per_task=cost(None, is_local=True)).result
    teacher = evaluation("t", 90, model="t", per_task=cost(0.01)).result
    unpriced = compare_costs(workspace, student, teacher)
    assert unpriced is not None
    assert (unpriced.break_even_tasks, unpriced.spent_usd) == (None, 4.5)
    assert "machine: {usd_per_hour: 1.2}" in unpriced.note

    (tmp_path / "prices.yml").write_text("machine: {usd_per_hour: 36}\nm: {input: 1, output: 2}\n")
    priced = msgspec.structs.replace(student, per_task=cost(0.005, is_local=True))
    costs = compare_costs(workspace, priced, teacher)
    assert costs is not None
    assert costs.spent_usd == pytest.approx(4.5 + 36 * costs.machine_hours, rel=1e-3)
    assert costs.break_even_tasks == pytest.approx(costs.spent_usd / 0.005, abs=1)
    assert f"after {costs.break_even_tasks} tasks" in costs.note
    dear = msgspec.structs.replace(student, per_task=cost(0.5, is_local=True))
    assert "costs no less" in compare_costs(workspace, dear, teacher).note  # type: ignore[union-attr]
    old = msgspec.structs.replace(student, per_task=None)
    assert compare_costs(workspace, old, teacher) is None


@pytest.mark.parametrize("request_text", [None, "{"])
def test_what_a_run_has_cost_counts_without_a_readable_request(
    tmp_path: Path, request_text: str | None
) -> None:
    workspace = Workspace(tmp_path)
    folder = write_run(workspace.runs, "rollouts-a", result={"cost_usd": 3.0})
    if request_text is not None:
        (folder / "request.json").write_text(request_text, encoding="utf-8")

    assert cost_of_runs(workspace).calls_usd == 3.0


def test_a_students_training_in_another_workspace_is_part_of_what_it_has_cost(tmp_path) -> None:
    workspace, other = Workspace(tmp_path / "here"), Workspace(tmp_path / "there")
    for each, name in ((workspace, "rollouts-a"), (other, "rollouts-b")):
        folder = write_run(each.runs, name, result={"cost_usd": 3.0})
        document = {"kind": "rollouts", "workspace": str(each.root), "request": {"provider": "x"}}
        write_json(folder / "request.json", document)
    model = str(other.runs / "sft-1" / "checkpoints" / "final")
    student = evaluation("sft", 80, model=model, per_task=cost(0.005)).result
    teacher = evaluation("t", 90, model="t", per_task=cost(0.01)).result

    costs = compare_costs(workspace, student, teacher)

    assert costs is not None
    assert (costs.spent_usd, costs.break_even_tasks) == (6.0, 1200)
    assert "the workspace in which the student was trained" in costs.note


def test_cut_answers_are_told_by_what_cut_them() -> None:
    def rollout(stop_reason: str, tokens: int) -> Trajectory:
        usage = {"prompt_tokens": 9, "completion_tokens": tokens}
        row = rollout_row(stop_reason=stop_reason, truncated=stop_reason != "answered", usage=usage)
        return msgspec.convert(row, Trajectory)

    rollouts = [
        rollout("answered", 100), rollout("max_tokens", 100), rollout("max_tokens", 40),
        rollout("context_window", 40), rollout("content_filter", 1),
    ]  # fmt: skip

    assert count_truncated(rollouts, 100) == {
        "max_tokens": 1,
        "context_window": 2,
        "content_filter": 1,
    }
