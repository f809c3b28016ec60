"""Evaluations of a model behind a scripted endpoint: budget, forecast, temperature 1, guard set."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest

from fakes.http_endpoint import ScriptedEndpoint
from fakes.judges import judgement
from fakes.projects import endpoint_project
from fakes.reporters import KeptReporter
from stillroom.errors import DataError, EngineError, RunCancelledError
from stillroom.evaluate.files import Evaluation, EvaluationResult, other_measures
from stillroom.evaluate.request import EvaluateModel, plan_evaluation
from stillroom.evaluate.run import evaluate_model
from stillroom.files import read_json
from stillroom.rollout.forecast import Forecast
from stillroom.settings import Workspace


def evaluated(
    root: Path,
    endpoint: ScriptedEndpoint,
    reporter: KeptReporter | None = None,
    *,
    run_id: str = "evaluate-1",
    **fields: Any,
) -> Any:
    request = EvaluateModel(
        **{"data": "prompts.jsonl", "model": "scripted", "base_url": endpoint.base_url,
           "tools": "tools.py", "concurrency": 1, **fields}
    )  # fmt: skip
    folder = root / "runs" / run_id
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").touch()

    async def run() -> EvaluationResult | Forecast:
        with anyio.fail_after(60):
            return await evaluate_model(
                Workspace(root), request, folder=folder, reporter=reporter or KeptReporter()
            )

    return anyio.run(run)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    endpoint_project(tmp_path, num_prompts=6)
    (tmp_path / "prices.yml").write_text("scripted: {input: 1000, output: 1000}\n", "utf-8")
    rows = [
        {"prompt": "What is 6 times 7?", "metadata": {"expected_answer": "42"}},
        {"prompt": "Name a colour.", "metadata": {"expected_answer": "blue"}},
        {"prompt": "Say hello."},
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "guard.jsonl").write_text(text, "utf-8")
    return tmp_path


def test_one_evaluation_measures_temperature_1_the_guard_set_and_what_a_task_costs(
    project: Path,
) -> None:
    with ScriptedEndpoint() as endpoint:
        result = evaluated(project, endpoint, sampled_prompts=4, guard="guard.jsonl")
        assert sum(endpoint.served.values()) == 2 * (6 + 4 + 3)

    assert result.accuracy.value == 1.0
    assert result.sampled_accuracy.n == 4
    # The expected answer is only asked of rows that have one, and no row needs the tool.
    assert (result.guard.accuracy.value, result.guard.accuracy.n) == (0.5, 2)
    assert (result.guard.over_calling.value, result.guard.over_calling.n) == (1.0, 3)
    # 10 and 20 prompt tokens, 5 of each answer, at $1000 a million.
    assert result.per_task.tokens == 40
    assert result.per_task.usd == pytest.approx(0.04)
    assert result.cost_usd == pytest.approx(0.04 * 13)
    assert not result.per_task.is_local
    kept = read_json(project / "runs" / "evaluate-1" / "evaluation.json", Evaluation)
    assert (len(kept.tasks), len(kept.sampled), len(kept.guard)) == (6, 4, 3)
    assert kept.result == result


class FailingEndpoint(ScriptedEndpoint):
    """Serves a model and its judge, one call at a time; one of them fails on `question 3`."""

    def __init__(self, failing: str) -> None:
        super().__init__()
        self._failing = failing

    def answer(self, body: dict[str, Any]) -> tuple[tuple[str, int], dict[str, Any]]:
        key, reply = super().answer(body)
        fails = body["model"] == self._failing and "question 3" in str(body["messages"])
        if body["model"] == "judge":
            text = "no judgement" if fails else judgement(1)
            reply["choices"][0]["message"] = {"role": "assistant", "content": text}
            reply["usage"] = {"prompt_tokens": 10, "completion_tokens": 10}
            return key, reply
        self.status = 400 if fails and key[1] == 1 else 200
        return key, reply


@pytest.mark.parametrize(
    ("failing", "failed_usd"), [("scripted", 0.015), ("judge", 0.04 + 3 * 0.02)]
)
def test_the_calls_of_a_failed_rollout_are_part_of_what_an_evaluation_costs(
    project: Path, failing: str, failed_usd: float
) -> None:
    prices = "{model}: {{input: 1000, output: 1000}}\n"
    text = "".join(prices.format(model=model) for model in ("scripted", "judge"))
    (project / "prices.yml").write_text(text, "utf-8")
    reporter = KeptReporter()

    with FailingEndpoint(failing) as endpoint:
        judge = {"model": "judge", "base_url": endpoint.base_url, "rubric": "Be right."}
        (project / "judge.yml").write_text(json.dumps(judge), "utf-8")
        result = evaluated(project, endpoint, reporter, judge="judge.yml", max_concurrency=1)

    assert (result.failed, result.accuracy.n) == (1, 5)
    assert result.cost_usd == pytest.approx(5 * 0.06 + failed_usd)
    assert reporter.measured[-1]["cost_usd"] == pytest.approx(result.cost_usd)
    assert result.per_task.usd == pytest.approx(0.06)


def test_what_an_evaluation_costs_is_known_while_it_runs(project: Path) -> None:
    reporter = KeptReporter()

    with ScriptedEndpoint() as endpoint:
        result = evaluated(project, endpoint, reporter)

    assert reporter.measured[-1]["cost_usd"] == pytest.approx(result.cost_usd)


def test_tasks_that_nothing_judges_are_left_out_and_counted(project: Path) -> None:
    rows = [json.loads(row) for row in (project / "prompts.jsonl").read_text("utf-8").splitlines()]
    for row in rows[:2]:
        row["metadata"].pop("expected_answer")
    (project / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    reporter = KeptReporter()

    with ScriptedEndpoint() as endpoint:
        result = evaluated(project, endpoint, reporter, sampled_prompts=3)

    assert (result.unjudged, result.omitted, result.accuracy.n) == (2, 0, 4)
    assert result.sampled_accuracy.n == 1
    (note,) = [note for note in reporter.notes if "left out" in note]
    assert note.startswith("left out: 2 of 6 tasks (e.g. ")
    assert "left out: 2 tasks without" in " ".join(other_measures(result))


def test_tasks_that_need_the_expected_answer_somewhere_in_the_text_are_counted(
    project: Path,
) -> None:
    rows = [json.loads(row) for row in (project / "prompts.jsonl").read_text("utf-8").splitlines()]
    rows[0]["metadata"]["answer_match"] = "numeric"
    answer = rows[1]["metadata"]["expected_answer"]
    rows[1]["metadata"]["expected_answer"] = {"price": answer, "city": "Rome"}
    (project / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    reporter = KeptReporter()

    with ScriptedEndpoint() as endpoint:
        result = evaluated(project, endpoint, reporter)

    assert (result.contained, result.accuracy.n) == (5, 6)
    assert result.accuracy.value == pytest.approx(5 / 6)
    (note,) = [note for note in reporter.notes if "answer_match" in note]
    assert note.startswith("for 5 of 6 tasks an answer counts as right if it contains the expected")
    assert "if it contains the expected one: 5 tasks" in " ".join(other_measures(result))


class JsonEndpoint(ScriptedEndpoint):
    """Answers with a JSON object, from `question 3` on with words around it."""

    def answer(self, body: dict[str, Any]) -> tuple[tuple[str, int], dict[str, Any]]:
        key, reply = super().answer(body)
        is_bare = any(f"question {number}" in str(body["messages"]) for number in range(3))
        text = ' {"price": 42, "city": "Rome"}\n'
        reply["choices"][0]["message"] = {
            "role": "assistant",
            "content": text if is_bare else f"Sure! Here it is:{text}",
        }
        return key, reply


@pytest.mark.parametrize("is_object", [True, False])
def test_answers_that_say_more_than_the_expected_json_are_not_counted_as_exact(
    project: Path, *, is_object: bool
) -> None:
    rows = [json.loads(row) for row in (project / "prompts.jsonl").read_text("utf-8").splitlines()]
    expected = {"price": 42, "city": "Rome"}
    for row in rows:
        row["metadata"]["expected_answer"] = expected if is_object else json.dumps(expected)
    (project / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")

    with JsonEndpoint() as endpoint:
        result = evaluated(project, endpoint)
        stricter = evaluated(project, endpoint, run_id="evaluate-2", answer_match="exact")

    assert (result.accuracy.value, result.exact_accuracy.value) == (1.0, 0.5)
    assert "accuracy if it must say nothing else: 50.0%" in " ".join(other_measures(result))
    assert stricter.exact_accuracy is None


@pytest.mark.parametrize(
    ("expected", "commonest"),
    [
        (["42", "42", "42", "blue", "blue", "42"], 4 / 6),
        (["42", "42", "1", "2", "3", "4"], None),
        (["42", "42", "42", "42", "42", ["42", "43"]], None),
    ],
)
def test_always_giving_the_commonest_answer_is_a_baseline_where_answers_repeat(
    project: Path, expected: list[Any], commonest: float | None
) -> None:
    rows = [json.loads(row) for row in (project / "prompts.jsonl").read_text("utf-8").splitlines()]
    for row, answer in zip(rows, expected, strict=True):
        row["metadata"]["expected_answer"] = answer
    (project / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")

    with ScriptedEndpoint() as endpoint:
        result = evaluated(project, endpoint)

    found = result.commonest_answer
    assert (found and found.value) == (commonest and pytest.approx(commonest))
    is_told = "always giving the commonest answer: 66.7%" in " ".join(other_measures(result))
    assert is_told == (commonest is not None)


def test_tasks_of_which_none_is_judged_are_refused_before_any_call(project: Path) -> None:
    (project / "prompts.jsonl").write_text('{"prompt": "Say hello."}\n', "utf-8")
    with ScriptedEndpoint() as endpoint, pytest.raises(EngineError) as caught:
        evaluated(project, endpoint)
    assert (
        "no reward function, judge or expected answer for any task, e.g. " in caught.value.problem
    )
    assert not endpoint.served


def test_a_budget_ends_an_evaluation_and_what_is_measured_stays(project: Path) -> None:
    with ScriptedEndpoint() as endpoint:
        result = evaluated(project, endpoint, budget_usd=0.65, max_tokens=16, guard="guard.jsonl")
    assert result.stopped_by == "budget_usd"
    assert 0 < result.accuracy.n < 6
    assert result.omitted == 6 - result.accuracy.n
    assert result.cost_usd <= 0.65
    assert result.guard is None


def test_a_budget_too_small_for_one_task_is_an_error_with_the_next_step(project: Path) -> None:
    with ScriptedEndpoint() as endpoint, pytest.raises(EngineError) as caught:
        evaluated(project, endpoint, budget_usd=0.001)
    assert "budget_usd was reached before the first task" in caught.value.problem
    assert "dry_run forecasts" in caught.value.fix
    assert not endpoint.served


def test_a_budget_needs_a_price(project: Path) -> None:
    (project / "prices.yml").unlink()
    with ScriptedEndpoint() as endpoint, pytest.raises(EngineError, match="needs the price"):
        evaluated(project, endpoint, budget_usd=1)


def test_a_dry_run_forecasts_all_parts_needs_no_key_and_calls_nothing(project: Path) -> None:
    with ScriptedEndpoint() as endpoint:
        forecast = evaluated(
            project,
            endpoint,
            dry_run=True,
            sampled_prompts=4,
            guard="guard.jsonl",
            api_key_env="VLLM_API_KEY",
        )
        assert not endpoint.served
    assert (forecast.dry_run, forecast.requested, forecast.todo) == (True, 13, 13)
    assert forecast.calls.low == 13
    assert forecast.cost_usd.expected > 0
    assert not (project / "runs" / "evaluate-1" / "evaluation.json").exists()


def test_a_group_that_no_prompt_has_is_refused_with_the_fields_that_they_have(
    project: Path,
) -> None:
    request = EvaluateModel(
        data="guard.jsonl", model="scripted", base_url="http://a/v1", group_by=("topic",)
    )

    with pytest.raises(DataError, match="no row has the metadata field topic") as refused:
        plan_evaluation(Workspace(project), request)
    assert "rows have: expected_answer" in refused.value.problem
    plan_evaluation(Workspace(project), request.model_copy(update={"group_by": ()}))


@pytest.mark.parametrize(
    ("given", "calls_usd", "is_local"), [({}, 6 * 0.04, False), ({"provider": "ollama"}, 0, True)]
)
def test_the_time_of_the_machine_is_priced_apart_from_the_calls(
    project: Path, given: dict[str, str], calls_usd: float, is_local: bool
) -> None:
    prices = "machine: {usd_per_hour: 3600}\nscripted: {input: 1000, output: 1000}\n"
    (project / "prices.yml").write_text(prices, "utf-8")

    with ScriptedEndpoint() as endpoint:
        result = evaluated(project, endpoint, **given)

    assert result.cost_usd == pytest.approx(calls_usd)
    assert result.machine_time_usd == (pytest.approx(result.seconds, 0.01) if is_local else None)


@dataclass
class Interrupted:
    """A project whose evaluation `evaluate-1` was cancelled during the third of six rollouts."""

    root: Path
    endpoint: ScriptedEndpoint
    reporter: KeptReporter = field(default_factory=KeptReporter)

    def repeat(self, **fields: Any) -> EvaluationResult:
        return evaluated(self.root, self.endpoint, self.reporter, run_id="evaluate-2", **fields)


@pytest.fixture
def interrupted(project: Path) -> Iterator[Interrupted]:
    with ScriptedEndpoint() as endpoint:
        # Two rollouts of two calls, and the first call of the third.
        endpoint.hold_after(5)
        reporter = KeptReporter(lambda: endpoint.num_asked == 6)
        with pytest.raises(RunCancelledError):
            evaluated(project, endpoint, reporter, max_concurrency=1)
        endpoint.hold.set()
        yield Interrupted(project, endpoint)


def test_a_repeated_evaluation_pays_for_no_finished_call_again(interrupted: Interrupted) -> None:
    texts = (interrupted.root / "prompts.jsonl").read_text("utf-8").splitlines()
    prompts = [json.loads(text)["prompt"] for text in texts]

    result = interrupted.repeat(name="again", group_by=(), concurrency=2)

    served = interrupted.endpoint.served
    # The call that was in flight may have been answered after the cancellation.
    assert {call for call, times in served.items() if times > 1} <= {("question 2", 1)}
    assert len(served) == 2 * 6
    assert (result.reused, result.accuracy.n) == (2, 6)
    assert result.cost_usd == pytest.approx(0.025 + 3 * 0.04)
    assert result.per_task is not None
    assert result.per_task.usd == pytest.approx(0.04)
    assert "answers from an unfinished evaluation: 2" in " ".join(other_measures(result))
    assert "reuses the answers of evaluate-1, which did not finish" in interrupted.reporter.notes
    rows = (interrupted.root / "runs" / "evaluate-2" / "rollouts.jsonl").read_text("utf-8")
    asked = [json.loads(row)["messages"] for row in rows.splitlines()]
    assert [messages[0]["content"] for messages in asked] == prompts
    assert not list((interrupted.root / "runs").glob("*/answers-*"))


def test_the_time_of_a_task_counts_how_many_of_the_reused_answers_ran_at_once(
    interrupted: Interrupted,
) -> None:
    [file] = (interrupted.root / "runs").glob("*/answers-*/main.jsonl")
    rows = [json.loads(row) | {"duration_s": 1000} for row in file.read_text("utf-8").splitlines()]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")

    result = interrupted.repeat(concurrency=4)

    assert result.per_task is not None
    # The two reused rollouts, four at once, and the seconds of the four new ones.
    assert 500 < 6 * result.per_task.machine_seconds < 600


def test_answers_that_cannot_be_read_are_named(interrupted: Interrupted) -> None:
    [file] = (interrupted.root / "runs").glob("*/answers-*/main.jsonl")
    first, *rows = file.read_text("utf-8").splitlines()
    file.write_text("\n".join([first.replace('"messages"', '"texts"'), *rows, ""]), "utf-8")

    with pytest.raises(DataError, match=r"main\.jsonl:1 is not a rollout") as caught:
        interrupted.repeat()
    assert "delete this line" in caught.value.fix


def test_of_several_unfinished_evaluations_the_one_with_the_most_answers_is_continued(
    interrupted: Interrupted,
) -> None:
    [kept] = (interrupted.root / "runs").glob("*/answers-*")
    for number in range(3, 8):
        fewer = shutil.copytree(kept, interrupted.root / f"runs/evaluate-{number}" / kept.name)
        (fewer.parent / "run.json").touch()
        (fewer / "main.jsonl").write_bytes((kept / "main.jsonl").read_bytes()[: -number * 100])

    interrupted.repeat()

    assert "reuses the answers of evaluate-1, which did not finish" in interrupted.reporter.notes


def with_another_prompt(root: Path) -> dict[str, Any]:
    with (root / "prompts.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"prompt": "One more?", "metadata": {"expected_answer": "42"}}\n')
    return {}


def with_edited_tools(root: Path) -> dict[str, Any]:
    with (root / "tools.py").open("a", encoding="utf-8") as file:
        file.write("# edited\n")
    return {}


def without_prices(root: Path) -> dict[str, Any]:
    """A server without a price may now serve other weights under the same name."""
    (root / "prices.yml").unlink()
    return {}


@pytest.mark.parametrize(
    "change",
    [
        with_another_prompt,
        with_edited_tools,
        without_prices,
        {"seed": 7},
        {"context_file": "prices.yml"},
        {"answer_match": "exact"},
        {"tool_timeout": 5},
        {"browse_allow": ("127.0.0.1:1",)},
        {"guard": "guard.jsonl"},
    ],
)
def test_answers_are_not_reused_if_anything_that_shapes_them_has_changed(
    interrupted: Interrupted, change: dict[str, Any] | Callable[[Path], dict[str, Any]]
) -> None:
    result = interrupted.repeat(
        **(change if isinstance(change, dict) else change(interrupted.root))
    )

    assert result.reused == 0
    assert interrupted.endpoint.served["question 0", 0] == 2
    assert not [note for note in interrupted.reporter.notes if "reuses" in note]


def test_answers_are_not_reused_if_the_file_of_the_tools_now_rewards_them(project: Path) -> None:
    with (project / "tools.py").open("a", encoding="utf-8") as file:
        file.write("@reward\ndef none(args: RewardArgs, messages: list) -> float:\n    return 0\n")
    with ScriptedEndpoint() as endpoint:
        evaluated(project, endpoint, budget_usd=0.65, max_tokens=16)
        rewarded = {"budget_usd": 5, "max_tokens": 16, "rewards": "tools.py"}
        result = evaluated(project, endpoint, run_id="evaluate-2", **rewarded)

    assert (result.reused, result.accuracy.value) == (0, 0)


class JudgeEndpoint(ScriptedEndpoint):
    """A judge for whom each answer is right."""

    def answer(self, body: dict[str, Any]) -> tuple[tuple[str, int], dict[str, Any]]:
        key, reply = super().answer(body)
        reply["choices"][0]["message"] = {"role": "assistant", "content": judgement(1)}
        return key, reply


@pytest.mark.parametrize("price", ["", "judge: {input: 1000, output: 1000}\n"])
def test_answers_that_a_server_without_a_price_has_judged_are_not_reused(
    project: Path, price: str
) -> None:
    with (project / "prices.yml").open("a", encoding="utf-8") as file:
        file.write(price)
    with ScriptedEndpoint() as endpoint, JudgeEndpoint() as judging:
        judge = {"model": "judge", "base_url": judging.base_url, "rubric": "Be right."}
        (project / "judge.yml").write_text(json.dumps(judge), "utf-8")
        options = {"judge": "judge.yml", "max_concurrency": 1}
        judging.hold_after(1)
        reporter = KeptReporter(lambda: judging.num_asked == 2)
        with pytest.raises(RunCancelledError):
            evaluated(project, endpoint, reporter, **options)
        judging.hold.set()
        result = evaluated(project, endpoint, run_id="evaluate-2", **options)

    assert (result.reused > 0) == bool(price)


def test_answers_of_a_local_server_are_not_reused_because_its_name_has_a_list_price(
    project: Path,
) -> None:
    listed = "as_of: '2999-01-01'\nmodels: {scripted: {input: 1000, output: 1000}}\n"
    (project / "list_prices.yml").write_text(listed, "utf-8")
    (project / "prices.yml").unlink()
    with ScriptedEndpoint() as endpoint:
        evaluated(project, endpoint, budget_usd=0.65, max_tokens=16)
        result = evaluated(project, endpoint, run_id="evaluate-2", budget_usd=5, max_tokens=16)

    assert result.reused == 0


def test_the_cost_of_an_evaluation_is_known_before_its_first_rollout_ends(project: Path) -> None:
    with ScriptedEndpoint() as endpoint:
        endpoint.hold_after(1)
        reporter = KeptReporter(lambda: endpoint.num_asked == 2)
        with pytest.raises(RunCancelledError):
            evaluated(project, endpoint, reporter, max_concurrency=1)

    assert [measured["cost_usd"] for measured in reporter.measured] == [pytest.approx(0.015)]


def test_an_evaluation_that_its_budget_ended_goes_on_with_a_larger_one(project: Path) -> None:
    with ScriptedEndpoint() as endpoint:
        first = evaluated(project, endpoint, budget_usd=0.65, max_tokens=16)
        second = evaluated(project, endpoint, run_id="evaluate-2", budget_usd=5, max_tokens=16)
        assert max(endpoint.served.values()) == 1

    assert first.stopped_by == "budget_usd"
    assert (second.stopped_by, second.reused) == (None, first.accuracy.n)
    assert second.accuracy.n == 6
    assert first.cost_usd + second.cost_usd == pytest.approx(6 * 0.04)
