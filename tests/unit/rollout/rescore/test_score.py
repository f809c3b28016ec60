import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from fakes.chat_endpoint import completion, refused, serve
from fakes.folders import names_in
from fakes.foreign_rollouts import FOREIGN_ROWS, GYM_ROW, RNOW_ROW, TUTORIAL_ROW, write_rnow
from fakes.judges import judgement
from fakes.reporters import KeptReporter
from fakes.rollout_lines import BAD_LINES, encoded, rollout_lines
from fakes.rollout_rows import assistant, read_rows, rollout_row, user, write_lines
from fakes.user_files import write_tools
from fakes.waiting import run_async
from stillroom.api.spending import UnlimitedSpending, unlimited_spending
from stillroom.curate.convert import ConvertRollouts, convert_rollouts
from stillroom.data.layouts.detect import as_rollout
from stillroom.errors import DataError, InputError, RunCancelledError, RunError, TeacherError
from stillroom.importing.request import ImportRollouts
from stillroom.importing.run import import_rollouts
from stillroom.lineage import manifest_path
from stillroom.rollout.request import GenerateRollouts
from stillroom.rollout.rescore.request import ScoreRollouts, plan_scoring
from stillroom.rollout.rescore.score import ScoreResult, score_rollouts
from stillroom.settings import Workspace
from stillroom.types import Usage

JUDGE = {
    "model": "m",
    "rubric": "Be right.",
    "base_url": "http://judge/v1",
}
Answer = Callable[[dict[str, Any]], httpx.Response]


def write_judge(folder: Path, judge: dict[str, Any]) -> str:
    (folder / "judge.yml").write_text(json.dumps(judge), encoding="utf-8")
    return "judge.yml"


def scored(
    folder: Path,
    source: str = "rollouts.jsonl",
    *,
    answer: Answer | None = None,
    reporter: KeptReporter | None = None,
    judge: dict[str, Any] | None = None,
    **options: Any,
) -> ScoreResult:
    if judge is not None:
        options["judge"] = write_judge(folder, judge)
    request = ScoreRollouts(input=source, **{"output": "scored.jsonl", **options})

    async def reply(requested: httpx.Request) -> httpx.Response:
        assert answer is not None, "no judge may be asked"
        return answer(json.loads(requested.content))

    async def main() -> ScoreResult:
        async with serve(reply):
            return await score_rollouts(
                Workspace(folder),
                request,
                folder=folder / "runs" / "r1",
                reporter=reporter or KeptReporter(),
            )

    return run_async(main)


def the_error(error: BaseException) -> BaseException:
    """What was raised, out of the groups that task groups make."""
    while isinstance(error, BaseExceptionGroup):
        [error] = error.exceptions
    return error


def rollout(answer: str, *, task_id: str = "t", **changes: Any) -> dict[str, Any]:
    messages = [user("How much?"), assistant(answer)]
    metadata = {"expected_answer": "12"}
    return rollout_row(**{"task_id": task_id, "messages": messages, "metadata": metadata} | changes)


def test_rewards_are_given_anew_and_nothing_else_is_touched(tmp_path: Path) -> None:
    same = rollout("12")
    wrong = rollout("13", task_id="wrong", extra={"z": 1, "a": [1.50]})
    unjudged = rollout("12", task_id="unjudged", metadata={}, reward=0.25)
    failed = rollout("12", task_id="x", error={"class": "timeout", "message": "x"}, reward=None)
    lines = [*map(encoded, [same, wrong, unjudged, failed]), b"{broken"]
    write_lines(tmp_path / "rollouts.jsonl", lines)
    reporter = KeptReporter()

    result = scored(tmp_path, reporter=reporter)

    assert (result.read, result.changed, result.kept, result.failed) == (5, 1, 4, 0)
    assert result.kept_by_reason == {
        "same reward": 1,
        "nothing judges it": 1,
        "ended by an infrastructure failure": 1,
        "not a rollout row": 1,
    }
    assert (result.mean_before, result.mean_after, result.num_success) == (0.75, 0.5, 1)
    assert [problem.split(": ")[0] for problem in result.problems] == [
        f"{tmp_path}/rollouts.jsonl:5"
    ]
    written = (tmp_path / "scored.jsonl").read_bytes().splitlines()
    assert [written[0], *written[2:]] == [lines[0], *lines[2:]]
    changed = {"reward": 0.0, "rewards": {"expected_answer": 0.0}, "success": False}
    assert json.loads(written[1]) == {**wrong, **changed}
    assert reporter.progressed[-1] == (5, 5)
    manifest = json.loads(manifest_path(tmp_path / "scored.jsonl").read_bytes())
    assert manifest["operation"] == "score_rollouts"
    assert manifest["counts"] == {"read": 5, "changed": 1, "failed": 0}
    assert not [name for name in names_in(tmp_path) if "scores" in name or "partial" in name]


def test_every_other_value_keeps_its_very_bytes(tmp_path: Path) -> None:
    rest = rb'"messages":[{"role":"user","content":"\u00fc"},{"role":"assistant","content":"12"}]'
    more = rb'"z":1.50,"big":123456789012345678901234567890,"e":1E2,"n":{ "b" : null,"a":1}'
    head = b'{"id":"a","task_id":"t","stop_reason":"answered","reward":%s,"metadata":'
    line = head % b"null" + b'{"expected_answer":12.0,"answer_match":"numeric"},'
    write_lines(tmp_path / "rollouts.jsonl", [line + rest + b"," + more + b"}"])

    scored(tmp_path)

    [written] = (tmp_path / "scored.jsonl").read_bytes().splitlines()
    assert written == (
        line.replace(b"null", b"1.0")
        + rest
        + b","
        + more
        + b',"rewards":{"expected_answer":1.0},"success":true}'
    )


def test_the_request_says_how_answers_are_compared(tmp_path: Path) -> None:
    write_lines(tmp_path / "rollouts.jsonl", [encoded(rollout("It is 12."))])

    assert scored(tmp_path, answer_match="exact").num_success == 0
    assert scored(tmp_path, answer_match="numeric").num_success == 1


def test_a_rewards_file_may_judge_and_a_reward_that_fails_is_null(tmp_path: Path) -> None:
    code = """
        @reward
        def exact(args, messages):
            if messages[-1]["content"] == "?":
                raise KeyError("lamp")
            return float(messages[-1]["content"] == args.metadata["expected_answer"]) / 2
        """
    write_tools(tmp_path, code, name="rewards.py")
    rows = [rollout("12"), rollout("13"), rollout("?", reward=0.75)]
    write_lines(tmp_path / "rollouts.jsonl", map(encoded, rows))

    result = scored(tmp_path, rewards="rewards.py")

    assert (result.read, result.changed, result.failed) == (3, 2, 1)
    assert result.failed_by_class == {"reward": 1}
    assert "KeyError" in result.problems[0]
    written = read_rows(tmp_path / "scored.jsonl")
    assert [row["reward"] for row in written] == [0.5, 0.0, None]
    assert (written[2]["rewards"], written[2]["success"]) == ({}, None)
    notes = read_rows(tmp_path / "runs" / "r1" / "judgements.jsonl")
    assert [note["class"] for note in notes] == ["reward"]


def test_a_judge_may_judge_and_its_cost_is_counted(tmp_path: Path) -> None:
    rows = [rollout("12"), rollout("13", task_id="b"), rollout("?", task_id="c")]
    write_lines(tmp_path / "rollouts.jsonl", map(encoded, rows))

    def answer(requested: dict[str, Any]) -> httpx.Response:
        content = requested["messages"][1]["content"]
        if len(requested["messages"]) == 2 and "\n13\n</answer" in content:
            return completion("hm")
        is_right = "\n12\n</answer" in content
        reported = {"model": "j-2026-09"}
        return completion(
            judgement(0.75, "fine") if is_right else judgement(0.25), reported=reported
        )

    result = scored(tmp_path, answer=answer, concurrency=1, judge=JUDGE)

    assert (result.changed, result.failed, result.judge_calls) == (3, 0, 4)
    assert result.judge_usage == Usage(prompt_tokens=40, completion_tokens=20)
    [judge] = json.loads(manifest_path(tmp_path / "scored.jsonl").read_bytes())["models"]
    assert (judge["role"], judge["name"]) == ("judge", JUDGE["model"])
    assert judge["answered_by"] == [{"model": "j-2026-09", "rows": 3, "fingerprints": []}]
    written = read_rows(tmp_path / "scored.jsonl")
    assert [row["rewards"] for row in written] == [{"judge": r} for r in (0.75, 0.25, 0.25)]
    notes = read_rows(tmp_path / "runs" / "r1" / "judgements.jsonl")
    assert [note["reasoning"] for note in notes] == ["fine", "because", "because"]


def test_verdicts_that_were_paid_for_are_not_paid_for_again(tmp_path: Path) -> None:
    rows = [rollout(str(number), task_id=str(number)) for number in range(6)]
    write_lines(tmp_path / "rollouts.jsonl", map(encoded, rows))
    requested: list[str] = []

    def broken(body: dict[str, Any]) -> httpx.Response:
        requested.append(body["messages"][1]["content"])
        return completion(judgement(0.5)) if len(requested) <= 4 else refused(401)

    with pytest.raises(BaseException) as caught:  # noqa: PT011
        scored(tmp_path, answer=broken, concurrency=1, judge=JUDGE)
    assert isinstance(the_error(caught.value), TeacherError)
    assert not (tmp_path / "scored.jsonl").exists()

    result = scored(tmp_path, answer=lambda _: completion(judgement(1)), concurrency=1, judge=JUDGE)

    assert (result.judge_calls, result.judge_calls_replayed) == (2, 4)
    rewards = [row["reward"] for row in read_rows(tmp_path / "scored.jsonl")]
    assert rewards == [0.5] * 4 + [1.0] * 2
    # Once the output is there, the same command judges anew; so does another rubric.
    again = scored(tmp_path, answer=lambda _: completion(judgement(1)), judge=JUDGE)
    assert (again.judge_calls, again.judge_calls_replayed) == (6, 0)


def test_a_budget_holds_over_all_calls_for_an_output(tmp_path: Path) -> None:
    rows = [rollout(str(number), task_id=str(number)) for number in range(6)]
    write_lines(tmp_path / "rollouts.jsonl", map(encoded, rows))
    # A reply costs $0.005, and may cost $1.024.
    (tmp_path / "prices.yml").write_text("m: {input: 0, output: 1000}", encoding="utf-8")

    def score(budget_usd: float) -> ScoreResult:
        return scored(
            tmp_path,
            answer=lambda _: completion(judgement(1)),
            concurrency=1,
            judge=JUDGE,
            budget_usd=budget_usd,
        )

    for num_calls in (2, 0):
        with pytest.raises(BaseException) as caught:  # noqa: PT011
            score(1.03)
        problem = the_error(caught.value)
        assert isinstance(problem, RunError)
        assert f"budget_usd would be exceeded, after {num_calls} calls" in str(problem)
    assert not (tmp_path / "scored.jsonl").exists()

    result = score(2)

    assert (result.judge_calls, result.judge_calls_replayed) == (4, 2)
    assert result.cost_usd == pytest.approx(0.02)


def test_replies_that_are_no_judgement_count_too(tmp_path: Path) -> None:
    write_lines(
        tmp_path / "rollouts.jsonl", [encoded(rollout(str(n), task_id=str(n))) for n in "12"]
    )
    (tmp_path / "prices.yml").write_text("m: {input: 0, output: 1000}", encoding="utf-8")
    num_calls, reporter = 0, KeptReporter()

    def answer(_: dict[str, Any]) -> httpx.Response:
        nonlocal num_calls
        num_calls += 1
        return completion("hm")

    for _ in range(3):
        with pytest.raises(BaseException):  # noqa: B017, PT011
            scored(
                tmp_path,
                answer=answer,
                concurrency=1,
                judge=JUDGE,
                budget_usd=1.03,
                reporter=reporter,
            )

    # A reply costs $0.005, and may cost $1.024.
    assert num_calls == 2
    assert max(one.get("cost_usd", 0.0) for one in reporter.measured) == pytest.approx(0.01)


def test_a_judge_that_may_be_billed_is_unlimited_without_a_budget(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    write_lines(tmp_path / "rollouts.jsonl", [encoded(rollout("12"))])
    (tmp_path / "prices.yml").write_text("m: {input: 1, output: 1}", encoding="utf-8")
    judge = write_judge(tmp_path, JUDGE)
    score = ScoreRollouts(input="rollouts.jsonl", output="o.jsonl", judge=judge)
    write_lines(tmp_path / "prompts.jsonl", [b'{"prompt": "How much?"}'])
    sample = GenerateRollouts(
        input="prompts.jsonl", output="p.jsonl", model="teacher", provider="demo", judge=judge
    )
    for request in (score, sample):
        assert unlimited_spending(workspace, request) == UnlimitedSpending("m", "judge")
        capped = request.model_copy(update={"budget_usd": 1.0})
        assert unlimited_spending(workspace, capped) is None
        (workspace.root / "prices.yml").write_text("workspace: {budget_usd: 2}", encoding="utf-8")
        assert unlimited_spending(workspace, request) is None
        (workspace.root / "prices.yml").unlink()
    unjudged = score.model_copy(update={"judge": "none"})
    assert unlimited_spending(workspace, unjudged) is None


def test_after_failures_only_those_are_judged_again(tmp_path: Path) -> None:
    rows = [rollout("12"), rollout("13", task_id="b")]
    write_lines(tmp_path / "rollouts.jsonl", map(encoded, rows))

    def picky(body: dict[str, Any]) -> httpx.Response:
        is_right = "\n12\n</answer" in body["messages"][1]["content"]
        return completion(judgement(0.5)) if is_right else refused(400)

    first = scored(tmp_path, answer=picky, judge=JUDGE)
    assert (first.changed, first.failed_by_class) == (1, {"bad_request": 1})
    assert [row["reward"] for row in read_rows(tmp_path / "scored.jsonl")] == [0.5, None]

    second = scored(tmp_path, answer=lambda _: completion(judgement(1)), judge=JUDGE)
    assert (second.changed, second.judge_calls, second.judge_calls_replayed) == (2, 1, 1)
    other = {**JUDGE, "rubric": "Be brief."}
    assert scored(tmp_path, answer=picky, judge=other).judge_calls_replayed == 0


def test_a_damaged_record_is_paid_for_again_and_nothing_else(tmp_path: Path) -> None:
    write_lines(tmp_path / "rollouts.jsonl", [encoded(rollout("12"))])
    (tmp_path / ".scored.jsonl.scores").write_bytes(b'{}\n\xff\n{"settings": "x", "torn')

    result = scored(tmp_path, answer=lambda _: completion(judgement(1)), judge=JUDGE)

    assert (result.judge_calls, result.judge_calls_replayed) == (1, 0)


def test_where_no_reward_can_be_computed_nothing_is_written(tmp_path: Path) -> None:
    write_lines(tmp_path / "rollouts.jsonl", [encoded(rollout("12"))])
    (tmp_path / "scored.jsonl").write_bytes(b"before\n")

    with pytest.raises(RunError, match="3 tries"):
        scored(tmp_path, answer=lambda _: completion("hm"), judge=JUDGE, overwrite=True)

    assert (tmp_path / "scored.jsonl").read_bytes() == b"before\n"


def test_a_cancelled_run_writes_nothing(tmp_path: Path) -> None:
    write_lines(tmp_path / "rollouts.jsonl", [encoded(rollout("13"))])

    with pytest.raises(RunCancelledError):
        scored(tmp_path, reporter=KeptReporter(lambda: True))

    assert not (tmp_path / "scored.jsonl").exists()


def test_rollouts_of_other_systems_keep_their_layout(tmp_path: Path) -> None:
    answer = {"metadata": {**RNOW_ROW["metadata"], "expected_answer": 35}}
    late = {**RNOW_ROW, **answer, "rewards": {"accuracy": "timeout"}, "total_reward": 0}
    crashed = {**RNOW_ROW, **answer, "completed": "error", "success": False}
    write_rnow(tmp_path / "rollouts", {**RNOW_ROW, **answer}, late, crashed)
    gym = [{**GYM_ROW, "expected_answer": "8"}, {**TUTORIAL_ROW, "expected_answer": "7"}]
    write_lines(tmp_path / "rollouts" / "a.jsonl", map(encoded, gym))

    result = scored(tmp_path, "rollouts")

    assert (result.read, result.changed, result.kept) == (5, 4, 1)
    rows = read_rows(tmp_path / "scored.jsonl")
    judged = {"rewards": {"expected_answer": 1.0}, "success": True}
    lost = {"rewards": {"expected_answer": 0.0}, "success": False}
    assert rows == [
        {**gym[0], "reward": 0.0, **lost},
        {**gym[1], "reward": 1.0, **judged},
        {**RNOW_ROW, **answer, "total_reward": 1.0, **judged},
        {**late, "total_reward": 1.0, **judged},
        crashed,
    ]
    assert [as_rollout(row)["reward"] for row in rows] == [0.0, 1.0, 1.0, 1.0, None]


def test_what_is_wrong_is_told_before_anything_is_spent(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rollouts.jsonl", [encoded(rollout("12"))])
    (tmp_path / "link.jsonl").symlink_to(path)
    for options, reported in (
        ({"output": "rollouts.jsonl"}, "is also an input"),
        ({"output": "link.jsonl"}, "is also an input"),
        ({"rewards": "missing.py"}, "does not exist"),
        ({"judge": "missing.yml"}, "does not exist"),
    ):
        request = ScoreRollouts(input="rollouts.jsonl", **{"output": "o.jsonl", **options})
        with pytest.raises(InputError, match=reported):
            plan_scoring(Workspace(tmp_path), request)
    for judge, reported in (
        ({"model": "m"}, "rubric"),
        ({"rubric": "x"}, "model"),
        ({**JUDGE, "rubrik": "x"}, "did you mean 'rubric'"),
        ({**JUDGE, "rubric": "missing.md"}, "does not exist"),
        ({**JUDGE, "rubric": " "}, "empty"),
        ({**JUDGE, "base_url": "judge"}, "not an http"),
        ({**JUDGE, "api_key_env": "VLLM_NO_SUCH_KEY"}, "VLLM_NO_SUCH_KEY"),
    ):
        name = write_judge(tmp_path, judge)
        request = ScoreRollouts(input="rollouts.jsonl", output="o.jsonl", judge=name)
        with pytest.raises(InputError, match=reported):
            plan_scoring(Workspace(tmp_path), request)
    priceless = {"judge": write_judge(tmp_path, {**JUDGE, "model": "unheard-of"})}
    for options, reported in (({}, "no judge is given"), (priceless, "needs the price")):
        limited = ScoreRollouts(input="rollouts.jsonl", output="o.jsonl", budget_usd=1, **options)
        with pytest.raises(InputError, match=reported):
            plan_scoring(Workspace(tmp_path), limited)
    with pytest.raises(ValidationError):
        ScoreRollouts(input="a", output="b", jugde="m")  # type: ignore[call-arg]


def test_an_answer_that_cannot_be_compared_is_told_before_anything_is_spent(
    tmp_path: Path,
) -> None:
    odd = rollout("12", metadata={"expected_answer": "twelve", "answer_match": "numeric"})
    write_lines(tmp_path / "rollouts.jsonl", map(encoded, [rollout("13"), odd]))

    with pytest.raises(DataError, match="holds no number"):
        scored(tmp_path)

    assert not (tmp_path / "scored.jsonl").exists()


@given(
    st.lists(
        rollout_lines() | st.sampled_from([*BAD_LINES, *map(encoded, FOREIGN_ROWS)]), max_size=6
    ),
    st.integers(1, 3),
)
def test_the_counts_add_up_and_no_row_is_lost(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], concurrency: int
) -> None:
    folder = tmp_path_factory.mktemp("score")
    lines = [encoded(rollout("12")), *lines]
    write_lines(folder / "rollouts.jsonl", lines)

    result = scored(folder, concurrency=concurrency)

    assert result.read == len(lines) == result.changed + result.kept + result.failed
    assert result.kept == sum(result.kept_by_reason.values())
    # The first has its reward already and no other an expected answer, so every line stays.
    assert (folder / "scored.jsonl").read_bytes().split(b"\n")[:-1] == lines


LATE = {"class": "reward_timeout", "message": "reward correct took longer than 60 s"}


@pytest.mark.parametrize("is_imported", [False, True])
@pytest.mark.parametrize("layout", ["stillroom", "rnow"])
def test_a_rollout_whose_reward_alone_failed_is_scored_and_converted_imported_or_not(
    tmp_path: Path, layout: str, is_imported: bool
) -> None:
    known = {"metadata": {"expected_answer": "35"}}
    if layout == "rnow":
        row = {**RNOW_ROW, **known, "rewards": {"accuracy": "timeout"}, "total_reward": 0}
        crashed = {**row, "rewards": {}, "completed": "error"}
    else:
        row = rollout("35", error=LATE, reward=None, success=None) | known
        crashed = {**row, "id": "other", "error": {"class": "timeout", "message": "x"}}
    write_lines(tmp_path / "rollouts.jsonl", [encoded(row), encoded(crashed)])
    workspace, source = Workspace(tmp_path), "rollouts.jsonl"
    if is_imported:
        import_rollouts(workspace, ImportRollouts(input=source, output="imported.jsonl"))
        source = "imported.jsonl"
    before = ConvertRollouts(input=source, output="before.jsonl", include_failed=True)
    with pytest.raises(DataError, match="ended by an infrastructure failure: 2"):
        convert_rollouts(workspace, before)

    result = scored(tmp_path, source)

    assert (result.changed, result.num_success) == (1, 1)
    assert result.kept_by_reason == {"ended by an infrastructure failure": 1}
    after = convert_rollouts(workspace, ConvertRollouts(input="scored.jsonl", output="sft.jsonl"))
    assert (after.converted, after.left_out) == (1, {"ended by an infrastructure failure": 1})
    [first, _] = read_rows(tmp_path / "scored.jsonl")
    assert as_rollout(first)["stop_reason"] == "answered"
