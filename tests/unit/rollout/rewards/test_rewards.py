from pathlib import Path
from typing import Any

import pytest

from fakes.judges import ScriptedJudge, judgement
from fakes.rollout_rows import assistant, tool_call, tool_reply, user
from fakes.user_files import write_tools
from fakes.waiting import run_async
from stillroom.data.formats import Task, task_from_row
from stillroom.errors import DataError
from stillroom.rollout.rewards.judge import AnswerJudge
from stillroom.rollout.rewards.matchers import AnswerMatch
from stillroom.rollout.rewards.rewards import Judgement, Rewarder, last_answer
from stillroom.tools.user.file import read_user_file
from stillroom.tools.user.pool import UserPool

REWARDS = """
    @reward
    def right(args, messages):
        return float(args.metadata.get("answer") == messages[-1]["content"])

    @reward
    def brief(args, messages):
        return 0.25

    @reward(precondition=True)
    def polite(args, messages):
        return float("please" in messages[-1]["content"])

    @reward
    def fail(args, messages):
        raise KeyError("lamp")
    """


def said(text: str) -> list[Any]:
    return [user("How much?"), assistant(text)]


def test_the_last_answer_is_the_last_assistant_text() -> None:
    call = assistant("thinking aloud", tool_call())

    assert last_answer([user("a"), assistant("b"), user("c")]) == "b"
    assert last_answer([user("a"), assistant("b"), call]) == ""
    assert last_answer([user("a"), assistant("b"), call, tool_reply("7")]) == ""
    assert last_answer([user("a")]) == ""
    assert last_answer([user("a"), assistant(None)]) == ""
    assert last_answer([assistant("<think>7</think> 12")]) == "12"
    assert last_answer([assistant("7</think>\n12")]) == "12"
    assert last_answer([assistant('<tool_call>{"name": "add", "arguments": [12')]) == ""
    assert last_answer([assistant("<think>it is 12, I thi")]) == ""
    picture = {"type": "image_url", "image_url": {"url": "data:"}}
    parts = [{"type": "text", "text": "12"}, picture, {"type": "text", "text": "3"}]
    assert last_answer([{"role": "assistant", "content": parts}]) == "123"


def test_success_begins_at_one_half() -> None:
    assert Judgement(0.5, {}).success is True
    assert Judgement(0.49, {}).success is False
    assert Judgement(None, {}).success is None


def task(**row: Any) -> Task:
    return task_from_row({"prompt": "How much?", **row})


def judged(folder: Path, one: Task, text: str, *, code: str | None = REWARDS) -> Judgement:
    async def main() -> Judgement:
        if code is None:
            return await Rewarder(None).judge(one, said(text))
        rewards = write_tools(folder, code, name="rewards.py")
        async with UserPool(tools_file=None, rewards_file=read_user_file(rewards)) as pool:
            return await Rewarder(pool).judge(one, said(text))

    return run_async(main)


def test_a_reward_is_the_sum_of_the_named_ones(tmp_path: Path) -> None:
    one = task(metadata={"answer": "7"}, rewards=["right", "brief"])

    assert judged(tmp_path, one, "7") == Judgement(1.25, {"right": 1.0, "brief": 0.25})
    assert judged(tmp_path, one, "8") == Judgement(0.25, {"right": 0.0, "brief": 0.25})


def test_a_precondition_of_zero_makes_all_zero(tmp_path: Path) -> None:
    one = task(rewards=["brief", "polite"])

    please, now = judged(tmp_path, one, "please"), judged(tmp_path, one, "now!")
    assert (please.total, please.by_name) == (1.25, {"brief": 0.25, "polite": 1.0})
    assert (now.total, now.by_name) == (0.0, {"brief": 0.25, "polite": 0.0})


@pytest.mark.parametrize(
    ("rewards", "is_success"),
    [
        ({"polite": 1.0, "right": 0.0}, False),
        ({"polite": 1.0, "right": 0.5}, True),
        ({"polite": 0.0, "right": 1.0}, False),
        ({"polite": 1.0}, True),
    ],
)
def test_a_precondition_that_holds_makes_no_wrong_answer_a_success(
    rewards: dict[str, float], is_success: bool
) -> None:
    judgement = Judgement(sum(rewards.values()), rewards, preconditions=("polite",))

    assert judgement.success is is_success


def test_the_expected_answer_counts_beside_others_where_it_is_named(tmp_path: Path) -> None:
    one = task(metadata={"expected_answer": "7"}, rewards=["brief", "expected_answer"])

    assert judged(tmp_path, one, "7") == Judgement(1.25, {"brief": 0.25, "expected_answer": 1.0})


def test_a_reward_of_the_users_may_be_called_like_the_built_in_one(tmp_path: Path) -> None:
    code = "@reward\ndef expected_answer(args, messages):\n    return 0.75\n"

    for metadata in ({}, {"expected_answer": "7"}):
        result = judged(tmp_path, task(metadata=metadata), "7", code=code)
        assert result == Judgement(0.75, {"expected_answer": 0.75})


@pytest.mark.parametrize(
    ("metadata", "text", "reward"),
    [
        ({"expected_answer": ["Paris", "City of Paris"]}, "It is the City of Paris.", 1.0),
        ({"expected_answer": ["Paris", "Rome"]}, "Lyon", 0.0),
        ({"expected_answer": 0.5, "answer_match": "numeric"}, "The answer is 50%.", 1.0),
        ({"expected_answer": 3, "answer_match": "numeric", "answer_tolerance": 0.2}, "3.1", 1.0),
        ({"expected_answer": "Paris", "answer_match": "exact"}, "It is Paris", 0.0),
        ({"expected_answer": "B", "answer_match": "choice"}, "(B) Rome", 1.0),
    ],
)
def test_the_row_says_how_its_answer_is_compared(
    tmp_path: Path, metadata: dict, text: str, reward: float
) -> None:
    assert judged(tmp_path, task(metadata=metadata), text, code=None).total == reward


def test_the_request_says_it_where_the_row_does_not() -> None:
    async def main() -> list[float | None]:
        rewarder = Rewarder(None, match=AnswerMatch.EXACT)
        plain = task(metadata={"expected_answer": "12"})
        own = task(metadata={"expected_answer": "12", "answer_match": "contained"})
        return [(await rewarder.judge(one, said("It is 12"))).total for one in (plain, own)]

    assert run_async(main) == [0.0, 1.0]


@pytest.mark.parametrize(
    "metadata",
    [
        {"expected_answer": "12", "answer_match": "fuzzy"},
        {"expected_answer": "twelve", "answer_match": "numeric"},
        {"expected_answer": []},
        {"expected_answer": {"a": {"b": 1}}},
    ],
)
def test_an_answer_that_cannot_be_compared_is_refused_before_the_run(metadata: dict) -> None:
    one = task(metadata=metadata)

    with pytest.raises(DataError, match=one.task_id):
        Rewarder(None).check([one])


def judge_of(*replies: Any) -> tuple[AnswerJudge, ScriptedJudge]:
    teacher = ScriptedJudge(replies)
    return AnswerJudge(teacher, "Is it polite?"), teacher


def test_a_judge_comes_before_the_match_and_its_cost_is_told() -> None:
    async def main() -> None:
        judge, teacher = judge_of(judgement(0.75, "kind"))
        one = task(metadata={"expected_answer": "12"})
        result = await Rewarder(None, judge=judge).judge(one, said("13"))
        assert (result.total, result.by_name) == (0.75, {"judge": 0.75})
        assert result.judge is not None
        assert (result.judge.calls, result.judge.usage.prompt_tokens) == (1, 10)
        assert (result.reasoning, result.success) == ("kind", True)
        assert len(teacher.requested) == 1

    run_async(main)


def test_a_judge_counts_beside_others_where_it_is_named(tmp_path: Path) -> None:
    async def main() -> None:
        rewards = write_tools(tmp_path, REWARDS, name="rewards.py")
        async with UserPool(tools_file=None, rewards_file=read_user_file(rewards)) as pool:
            judge, teacher = judge_of(judgement(0.5))
            rewarder = Rewarder(pool, judge=judge)
            named = task(rewards=["brief", "judge", "polite"])
            result = await rewarder.judge(named, said("please"))
            assert result.by_name == {"brief": 0.25, "polite": 1.0, "judge": 0.5}
            assert result.total == 1.75
            # Not paid for where nothing can come of it, nor where the row does not want it.
            blocked = await rewarder.judge(named, said("now!"))
            assert (blocked.total, blocked.judge) == (0.0, None)
            other = await rewarder.judge(task(rewards=["brief"]), said("please"))
            assert other.by_name == {"brief": 0.25}
            assert len(teacher.requested) == 1

    run_async(main)


def test_a_judge_that_is_named_and_not_given_is_refused_unless_it_is_optional() -> None:
    one = task(rewards=["judge"], metadata={"expected_answer": "7"})

    with pytest.raises(DataError, match="no judge is given"):
        Rewarder(None).check([one])
    Rewarder(None).check([one], is_judge_optional=True)
    assert not Rewarder(None).has_reward(one)
    judge, _ = judge_of()
    Rewarder(None, judge=judge).check([one])
    assert Rewarder(None, judge=judge).has_reward(one)
