"""A run that did nothing fails, or its next step says so: every way in every operation.

Those of training and of recipes are in other files, which `SHOWN_ELSEWHERE` names.
"""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from fakes.chat_endpoint import ScriptedTeacher, Served, completion, refused, serve
from fakes.judges import judgement
from fakes.reporters import KeptReporter
from fakes.rollout_rows import assistant, read_rows, rollout_row, user, write_rows
from fakes.rollout_runs import GIVEN, run_rollouts
from fakes.source_tree import ROOT
from fakes.user_files import write_tools
from fakes.waiting import run_async
from stillroom import api
from stillroom.api.operations import OPERATIONS
from stillroom.errors import EngineError
from stillroom.evaluate.compare import compare
from stillroom.evaluate.files import RESULT_FILE, Evaluation
from stillroom.evaluate.run import evaluate_model
from stillroom.importing.run import import_rollouts
from stillroom.lineage import now
from stillroom.rollout.rescore.score import score_rollouts
from stillroom.rollout.results import no_success_error
from stillroom.run_folder import RunFolder, RunState
from stillroom.settings import Workspace
from stillroom.types import RunKind, RunStatus
from stillroom_mcp.next_steps import next_step

PROMPTS = [{"prompt": f"prompt {n}", "metadata": {"expected_answer": 12}} for n in range(2)]
RIGHT = rollout_row(task_id="a", metadata={"expected_answer": "12"})
BROKEN_REWARDS = "@reward\ndef broken(args, messages):\n    raise KeyError('lamp')\n"
HALF_REWARDS = (
    "@reward\ndef half(args, messages):\n"
    "    assert messages[-1]['content'] == '12'\n    return 1.0\n"
)


def run_report(kind: RunKind, result: msgspec.Struct) -> api.RunReport:
    return api.RunReport(
        run_id="r",
        kind=kind,
        status=RunStatus.SUCCEEDED,
        created_at="",
        started_at="",
        ended_at="",
        progress=None,
        metrics={},
        alarms=[],
        notes=[],
        error=None,
        folder="",
        log_path="",
        result=msgspec.to_builtins(result),
    )


def answering(answer: str | httpx.Response) -> ScriptedTeacher:
    async def reply(_served: Served) -> httpx.Response:
        return answer if isinstance(answer, httpx.Response) else completion(answer)

    return ScriptedTeacher(tool_turns=0, before=reply)


def generated(workspace: Workspace, teacher: ScriptedTeacher, **options: Any) -> str:
    result = run_rollouts(workspace, teacher.handle, **options)
    if (failure := no_success_error(result)) is not None:
        raise failure
    request = api.GenerateRollouts(**{**GIVEN, **options})
    return told("generate_rollouts", request, run_report(RunKind.ROLLOUTS, result))


def rolled_out(answer: str | httpx.Response, prompts: Any = PROMPTS, **options: Any) -> Any:
    def case(workspace: Workspace) -> str:
        write_rows(workspace.root / "prompts.jsonl", prompts)
        return generated(workspace, answering(answer), **options)

    return case


def done_already(workspace: Workspace) -> str:
    write_rows(workspace.root / "prompts.jsonl", PROMPTS)
    generated(workspace, answering("12"))
    return generated(workspace, answering(refused(400)))


def not_taken_over(workspace: Workspace) -> str:
    write_rows(workspace.root / "prompts.jsonl", PROMPTS)
    generated(workspace, answering("7"), output="student.jsonl")
    return generated(workspace, answering("7"), refine="student.jsonl", output="refined.jsonl")


def nothing_to_refine(workspace: Workspace) -> str:
    write_rows(workspace.root / "prompts.jsonl", PROMPTS)
    generated(workspace, answering("12"), output="student.jsonl")
    return generated(workspace, answering("12"), refine="student.jsonl", output="refined.jsonl")


def scored(*rows: Any, rewards: str | None = None, judge: bool = False) -> Any:
    def case(workspace: Workspace) -> str:
        write_rows(workspace.root / "rows.jsonl", rows)
        options: dict[str, Any] = {"input": "rows.jsonl", "output": "scored.jsonl"}
        if rewards is not None:
            write_tools(workspace.root, rewards, name="rewards.py")
            options["rewards"] = "rewards.py"
        if judge:
            judge_yml = {"model": "j", "base_url": "http://judge.test/v1", "rubric": "Be right."}
            (workspace.root / "judge.yml").write_text(json.dumps(judge_yml), encoding="utf-8")
            options["judge"] = "judge.yml"
        request = api.ScoreRollouts(**options)
        result = served(answering(judgement(0)), partial(score_rollouts, workspace, request))
        return told("score_rollouts", request, run_report(RunKind.SCORE, result))

    return case


def served(teacher: ScriptedTeacher, work: Callable[..., Any]) -> Any:
    async def main() -> Any:
        async with serve(teacher.handle):
            return await work(folder=folder, reporter=KeptReporter())

    folder = work.args[0].runs / "run"  # type: ignore[attr-defined]
    folder.mkdir(parents=True, exist_ok=True)
    return run_async(main)


def evaluated(answer: str | httpx.Response, prompts: Any = PROMPTS, **options: Any) -> Any:
    def case(workspace: Workspace) -> str:
        write_rows(workspace.root / "prompts.jsonl", prompts)
        (workspace.root / "prices.yml").write_text("m: {input: 9, output: 9}\n", encoding="utf-8")
        given = {"model": "m", "base_url": GIVEN["base_url"], **options}
        request = api.EvaluateModel(data="prompts.jsonl", **given)
        result = served(answering(answer), partial(evaluate_model, workspace, request))
        return told("evaluate_model", request, run_report(RunKind.EVALUATE, result))

    return case


def compared_without_shared_tasks(workspace: Workspace) -> str:
    evaluations: list[Evaluation] = []
    for number in range(2):
        evaluated("12", [{**PROMPTS[0], "prompt": f"other {number}"}])(workspace)
        written = (workspace.runs / "run" / RESULT_FILE).read_bytes()
        evaluations.append(msgspec.json.decode(written, type=Evaluation))
    return str(compare(*evaluations))


def compared(root_answers: tuple[str, str], shares: int = 2) -> Any:
    """Compares two evaluations, of which the second has only some of the first one's prompts."""

    def case(workspace: Workspace) -> str:
        prompts = [{**PROMPTS[0], "prompt": f"prompt {n}"} for n in range(12)]
        for name, answer, chosen in zip(
            "ab", root_answers, (prompts, prompts[:shares]), strict=True
        ):
            evaluated(answer, chosen)(workspace)
            (workspace.runs / "run").rename(workspace.runs / name)
        evaluations = [
            msgspec.json.decode((workspace.runs / name / RESULT_FILE).read_bytes(), type=Evaluation)
            for name in "ab"
        ]
        request = api.CompareEvaluations(baseline="a", candidates=("b",))
        report = api.ComparisonReport(comparisons=[compare(*evaluations)])
        return told("compare_evaluations", request, report)

    return case


def compared_with_itself(workspace: Workspace) -> str:
    evaluated("12")(workspace)
    RunFolder(workspace.runs / "run").write(
        RunState(run_id="run", kind=RunKind.EVALUATE, status=RunStatus.SUCCEEDED, created_at=now())
    )
    request = api.CompareEvaluations(baseline="run", candidates=("run",))
    return str(api.compare_evaluations(workspace, request))


def curated(name: str, request: Callable[..., Any], *rows: Any, **options: Any) -> Any:
    def case(workspace: Workspace) -> str:
        path = "path" if name in ("validate_dataset", "inspect_examples") else "input"
        write_rows(workspace.root / "rows.jsonl", rows)
        outputs = {} if path == "path" else {"output": "out.jsonl"}
        given = request(**{path: "rows.jsonl"}, **outputs, **options)
        return told(name, given, getattr(api, name)(workspace, given))

    return case


def imported(*rows: Any, **options: Any) -> Any:
    def case(workspace: Workspace) -> str:
        write_rows(workspace.root / "log.jsonl", rows)
        request = api.ImportRollouts(input="log.jsonl", output="out.jsonl", **options)
        return told("import_rollouts", request, import_rollouts(workspace, request))

    return case


def told(name: str, request: Any, result: Any) -> str:
    operation = next(one for one in OPERATIONS if one.name == name)
    return next_step(operation, request, result)


CUT = completion("12 an", finish_reason="length")
WAYS: dict[str, tuple[Callable[[Workspace], str], str]] = {
    "rollouts: no prompts": (rolled_out("12", []), "has no prompts"),
    "rollouts: all failed": (
        rolled_out(refused(400, "max_tokens is above 512")),
        "2 failed with bad_request; the last failure: HTTP 400: max_tokens is above 512",
    ),
    "rollouts: the budget is too small for one call": (
        rolled_out("12", max_total_tokens=1),
        "2 were not started or not finished because max_total_tokens was reached",
    ),
    "rollouts: nothing judges them": (
        rolled_out("12", [{"prompt": "a"}]),
        "these rollouts have no rewards",
    ),
    "rollouts: all are wrong": (rolled_out("7"), "none of the 2 rollouts succeeded"),
    "rollouts: all are cut": (rolled_out(CUT), "2 of 2 rollouts were truncated"),
    "rollouts: the model writes nothing": (
        rolled_out(completion("", usage={"prompt_tokens": 5, "completion_tokens": 0})),
        "the model generated no tokens",
    ),
    "rollouts: all were done before": (done_already, "no call was made"),
    "rollouts: the student failed none": (nothing_to_refine, "has a failed rollout in"),
    "rollouts: the teacher takes over in none": (not_taken_over, "the teacher took over in no"),
    "score: no rows": (scored(), "none of the 0 rows"),
    "score: no rollouts": (scored({"a": 1}), "none of the 1 rows"),
    "score: nothing judges them": (
        scored(rollout_row()),
        "no reward function, judge or expected answer for any of the 1 rollouts",
    ),
    "score: no reward can be computed": (
        scored(RIGHT, rewards=BROKEN_REWARDS),
        "no reward could be computed",
    ),
    "score: some rewards can't be computed": (
        scored(RIGHT, rollout_row(messages=[user("?"), assistant("7")]), rewards=HALF_REWARDS),
        "1 rewards could not be computed and are null",
    ),
    "score: the judge refuses all": (scored(RIGHT, judge=True), "no row succeeds with the new"),
    "evaluation: no prompts": (evaluated("12", []), "has no prompts"),
    "evaluation: all failed": (evaluated(refused(400)), "every rollout failed"),
    "evaluation: the budget is too small": (evaluated("12", budget_usd=1e-9), "budget_usd"),
    "evaluation: nothing judges a task": (
        evaluated("12", [{"prompt": "a"}]),
        "no reward function, judge or expected answer",
    ),
    "evaluation: some tasks are not judged": (
        evaluated("12", [*PROMPTS, {"prompt": "a"}]),
        "leaves out 1 task without",
    ),
    "evaluation: all are wrong": (evaluated("7"), "no task was solved"),
    "evaluation: all are cut": (evaluated(CUT, max_tokens=5), "2 answers were truncated"),
    "evaluation: all fill the context": (evaluated(CUT), "2 answers filled the model's context"),
    "comparison: no shared tasks": (compared_without_shared_tasks, "have no task in common"),
    "comparison: with itself": (compared_with_itself, "'run' would be compared with itself"),
    "comparison: no task differs": (
        compared(("12", "12"), shares=12),
        "no task has a different result with",
    ),
    "comparison: few shared tasks": (
        compared(("7", "12")),
        "share only 2 tasks",
    ),
    "filter: no rows": (curated("filter_dataset", api.FilterDataset), "has no rows"),
    "filter: nothing passes": (
        curated("filter_dataset", api.FilterDataset, RIGHT, min_reward=9),
        "no row passed",
    ),
    "filter: no row can be read": (
        curated("filter_dataset", api.FilterDataset, {"a": 1}),
        "no row passed",
    ),
    "conversion: no rows": (
        curated("convert_rollouts", api.ConvertRollouts),
        "no rows, as the input is empty",
    ),
    "conversion: no success": (
        curated("convert_rollouts", api.ConvertRollouts, RIGHT | {"success": False}),
        "none of the 1 rows",
    ),
    "pairs: none": (curated("make_dpo_pairs", api.MakeDpoPairs, RIGHT), "no pairs"),
    "review: no rows": (curated("sample_for_review", api.SampleForReview), "none of the 0 rows"),
    "validation: no rows": (curated("validate_dataset", api.ValidateDataset), "no rows"),
    "validation: all bad": (
        curated("validate_dataset", api.ValidateDataset, {"a": 1}, format="rollouts"),
        "fix the 1 bad rows",
    ),
    "examples: no rows": (
        curated("inspect_examples", api.InspectExamples),
        "start 0 is beyond the 0 rows",
    ),
    "examples: none can be shown": (
        curated("inspect_examples", api.InspectExamples, {"a": 1}),
        "validate_dataset lists every problem",
    ),
    "import: no rollout": (imported({"a": 1}), "log.jsonl"),
}

OPERATION_OF = {
    "rollouts": "generate_rollouts",
    "score": "score_rollouts",
    "evaluation": "evaluate_model",
    "comparison": "compare_evaluations",
    "filter": "filter_dataset",
    "conversion": "convert_rollouts",
    "pairs": "make_dpo_pairs",
    "review": "sample_for_review",
    "validation": "validate_dataset",
    "examples": "inspect_examples",
    "import": "import_rollouts",
}
SHOWN_ELSEWHERE = {
    "start_training": "unit/train/test_nothing_learnt.py",
    "run_recipe": "unit/api/test_recipe.py::test_a_student_that_gained_nothing_is_not_exported",
}
FAILS_OR_IS_DONE = {
    # Its files load and answer as the student does, or it fails.
    "export_model",
    "create_project",
    "cancel_run",
    "write_report",
}
ONLY_SHOWS = {
    "check_setup",
    "list_machines",
    "plan_training",
    "get_run",
    "list_runs",
    "get_run_logs",
    "show_lineage",
}


def test_each_operation_is_looked_at() -> None:
    tried = {OPERATION_OF[way.partition(":")[0]] for way in WAYS}
    assert tried | SHOWN_ELSEWHERE.keys() | FAILS_OR_IS_DONE | ONLY_SHOWS == {
        operation.name for operation in OPERATIONS
    }
    for place in SHOWN_ELSEWHERE.values():
        file, _, test = place.partition("::")
        assert test in (ROOT / "tests" / file).read_text(encoding="utf-8")


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path)


def problems_of(error: BaseException) -> Iterator[str]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from problems_of(inner)
    else:
        assert isinstance(error, EngineError), error
        yield error.problem


@pytest.mark.parametrize("way", WAYS)
def test_a_run_that_did_nothing_fails_or_says_so(workspace: Workspace, way: str) -> None:
    case, text = WAYS[way]

    try:
        said = case(workspace)
    except (EngineError, BaseExceptionGroup) as error:
        said = " ".join(problems_of(error))
        outputs = [path for path in workspace.root.glob("out.jsonl") if read_rows(path)]
        assert outputs == [] or way.startswith("rollouts")

    assert text in said
