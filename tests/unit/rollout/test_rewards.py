from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.loops import run_async
from fakes.rollout_rows import assistant, tool_call, tool_reply, user
from fakes.user_files import write_tools
from stillroom.data.formats import Task, task_from_row
from stillroom.errors import CallFailedError, DataError
from stillroom.rollout.rewards import Judgement, Rewarder, last_answer, matches_answer
from stillroom.tools.user_pool import UserPool

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


@pytest.mark.parametrize(
    ("expected", "text"),
    [
        ("12", "12"),
        ("12", "It costs 12."),
        ("12", "It costs 12, plus tax"),
        ("12", "(12)"),
        ("12", "$12!"),
        ("12", "**12**"),
        ("12", "Answer:12"),
        ("12", "12%"),
        (12, "that makes 12 coins"),
        (-3, "it is -3 degrees"),
        ("12.5", "costs 12.5."),
        ("1,200", "costs 1,200."),
        ("Red Lamp", "the red  \n lamp"),
        ("straße", "In der STRASSE."),
        ("a+b", "so a+b is it"),
        ("(x)", "f of (x)"),
    ],
)
def test_an_expected_answer_is_found_as_a_whole_word(expected: Any, text: str) -> None:
    assert matches_answer(said(text), expected) == 1.0


@pytest.mark.parametrize(
    ("expected", "text"),
    [
        ("12", "112"),
        ("12", "120"),
        ("12", "12.5"),
        ("12", "1.12"),
        ("12", "12,000"),
        ("12", "-12"),
        ("12", "3-12"),
        ("12", "12-3"),
        ("12", "x12"),
        ("12", "12th"),
        ("12", ""),
        ("12", "twelve"),
        ("lamp", "lamps"),
        ("lamp", "desk-lamp"),
        ("(x)", "f(x)"),
        ("", "anything"),
        ("  ", "anything"),
    ],
)
def test_a_part_of_a_longer_answer_is_no_match(expected: str, text: str) -> None:
    assert matches_answer(said(text), expected) == 0.0


@settings(deadline=None)
@given(st.text(min_size=1).filter(lambda text: bool(text.split())))
def test_an_answer_in_the_very_words_always_matches(text: str) -> None:
    assert matches_answer(said(text), text) == 1.0
    assert matches_answer(said(f"so: {text} ."), text) == 1.0


def test_the_last_answer_is_the_last_assistant_text() -> None:
    call = assistant("thinking aloud", tool_call())

    assert last_answer([user("a"), assistant("b"), user("c")]) == "b"
    assert last_answer([user("a"), assistant("b"), call]) == ""
    assert last_answer([user("a"), assistant("b"), call, tool_reply("7")]) == ""
    assert last_answer([user("a")]) == ""
    assert last_answer([user("a"), assistant(None)]) == ""
    parts = [{"type": "text", "text": "12"}, {"type": "text", "text": "3"}]
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
        async with UserPool(tools_file=None, rewards_file=rewards) as pool:
            return await Rewarder(pool).judge(one, said(text))

    return run_async(main)


def test_without_rewards_of_the_users_the_expected_answer_decides(tmp_path: Path) -> None:
    one = task(metadata={"expected_answer": 12})

    assert judged(tmp_path, one, "12.", code=None) == Judgement(1.0, {"expected_answer": 1.0})
    assert judged(tmp_path, one, "13.", code=None) == Judgement(0.0, {"expected_answer": 0.0})


@pytest.mark.parametrize("metadata", [{}, {"expected_answer": None}])
def test_a_task_without_an_answer_has_no_reward_rather_than_none_of_it(
    tmp_path: Path, metadata: dict
) -> None:
    one = task(metadata=metadata)

    assert judged(tmp_path, one, "none", code=None) == Judgement(None, {})
    assert not Rewarder(None).can_judge(one)


def test_a_reward_is_the_sum_of_the_named_ones(tmp_path: Path) -> None:
    one = task(metadata={"answer": "7"}, rewards=["right", "brief"])

    assert judged(tmp_path, one, "7") == Judgement(1.25, {"right": 1.0, "brief": 0.25})
    assert judged(tmp_path, one, "8") == Judgement(0.25, {"right": 0.0, "brief": 0.25})


def test_a_precondition_of_zero_makes_all_zero(tmp_path: Path) -> None:
    one = task(rewards=["brief", "polite"])

    assert judged(tmp_path, one, "please") == Judgement(1.25, {"brief": 0.25, "polite": 1.0})
    assert judged(tmp_path, one, "now!") == Judgement(0.0, {"brief": 0.25, "polite": 0.0})


def test_the_expected_answer_counts_beside_others_where_it_is_named(tmp_path: Path) -> None:
    one = task(metadata={"expected_answer": "7"}, rewards=["brief", "expected_answer"])

    assert judged(tmp_path, one, "7") == Judgement(1.25, {"brief": 0.25, "expected_answer": 1.0})


def test_a_reward_of_the_users_may_be_called_like_the_built_in_one(tmp_path: Path) -> None:
    code = "@reward\ndef expected_answer(args, messages):\n    return 0.75\n"

    for metadata in ({}, {"expected_answer": "7"}):
        result = judged(tmp_path, task(metadata=metadata), "7", code=code)
        assert result == Judgement(0.75, {"expected_answer": 0.75})


def test_a_reward_that_fails_is_not_a_reward_of_zero(tmp_path: Path) -> None:
    with pytest.raises(CallFailedError, match="reward fail: KeyError"):
        judged(tmp_path, task(rewards=["brief", "fail"]), "7")


def test_a_name_that_rewards_py_does_not_have_is_refused_before_the_run(tmp_path: Path) -> None:
    async def main() -> None:
        rewards = write_tools(tmp_path, REWARDS, name="rewards.py")
        async with UserPool(tools_file=None, rewards_file=rewards) as pool:
            rewarder = Rewarder(pool)
            known = task(rewards=["right", "expected_answer"], metadata={"expected_answer": "7"})
            rewarder.check([known, task()])
            with pytest.raises(DataError, match=r"'rihgt'.*it has: right, brief, polite, fail"):
                rewarder.check([known, task(rewards=["rihgt"])])

    run_async(main)
