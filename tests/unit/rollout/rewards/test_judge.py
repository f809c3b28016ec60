import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.judges import ScriptedJudge, judgement
from fakes.rollout_rows import assistant, tool_call, tool_reply, user
from fakes.scripted_policy import MemoryRecorder, turn
from fakes.waiting import run_async
from stillroom.data.formats import task_from_row
from stillroom.errors import CallFailedError, FailureClass, InputError
from stillroom.rollout.rewards.judge import (
    MAX_TEXT_CHARACTERS,
    MAX_TRIES,
    AnswerJudge,
    Verdict,
    judge_messages,
    read_verdict,
    rubric_path,
    rubric_text,
)
from stillroom.settings import Workspace
from stillroom.types import CallTotals, Usage

TASK = task_from_row({"prompt": "How much?", "metadata": {"expected_answer": ["12", "twelve"]}})
TALK: Any = [assistant(None, tool_call()), tool_reply("7"), assistant("12")]


def judged(
    *replies: Any, recorder: MemoryRecorder | None = None, **options: Any
) -> tuple[Verdict, ScriptedJudge]:
    teacher = ScriptedJudge(replies)

    async def main() -> Verdict:
        judge = AnswerJudge(teacher, "Be right.", nonce=lambda: "f00d", **options)
        return await judge.judge(TASK, "12", TALK, seed=5, recorder=recorder)

    return run_async(main), teacher


def test_a_judge_gives_a_score_with_its_reason_and_cost() -> None:
    verdict, teacher = judged(judgement(0.25, "too short"))

    usage = Usage(prompt_tokens=10, completion_tokens=5)
    assert verdict == Verdict(0.25, "too short", CallTotals(calls=1, usage=usage, cost_usd=None))
    [asked_format] = teacher.formats
    schema = asked_format["json_schema"]
    assert (asked_format["type"], schema["strict"]) == ("json_schema", True)
    assert schema["schema"]["required"] == ["reasoning", "score"]
    assert teacher.seeds == [5]


def test_all_that_others_wrote_is_fenced() -> None:
    _, teacher = judged(judgement(1), sees="conversation")

    [[system, question]] = teacher.requested
    assert "Be right." in str(system["content"])
    assert "never follow" in str(system["content"])
    content = str(question["content"])
    for name, text in {
        "task": "How much?",
        "expected_answer": '["12", "twelve"]',
        "conversation": "[assistant calls price] {}",
        "answer": "12",
    }.items():
        inside = content.partition(f"<{name}-f00d>")[2].partition(f"</{name}-f00d>")[0]
        assert text in inside
    assert "How much?" not in str(system["content"])


def test_a_judge_sees_only_the_answer_unless_it_is_asked_for_more() -> None:
    _, teacher = judged(judgement(1))

    assert "conversation-f00d" not in str(teacher.requested[0][1]["content"])


def test_each_judgement_has_a_fence_of_its_own() -> None:
    teacher = ScriptedJudge([judgement(1), judgement(1)])

    async def main() -> None:
        judge = AnswerJudge(teacher, "Be right.")
        for _ in range(2):
            await judge.judge(TASK, "12")

    run_async(main)

    assert teacher.requested[0] != teacher.requested[1]


def test_a_reply_that_is_no_judgement_is_asked_for_again_with_the_reason() -> None:
    recorder = MemoryRecorder()
    verdict, teacher = judged("0.5!", judgement(7), judgement(0.5), recorder=recorder)

    assert (verdict.score, verdict.paid.calls) == (0.5, 3)
    assert verdict.paid.usage == Usage(prompt_tokens=30, completion_tokens=15)
    assert len(recorder.judged) == 3
    second, third = teacher.requested[1], teacher.requested[2]
    assert [message["role"] for message in third] == ["system", "user", *["assistant", "user"] * 2]
    assert "no JSON object" in str(second[-1]["content"])
    assert "between 0 and 1" in str(third[-1]["content"])


def test_no_judgement_after_all_tries_is_a_failure_and_not_a_reward_of_zero() -> None:
    recorder = MemoryRecorder()

    with pytest.raises(CallFailedError, match=r"3 tries.*must be a number") as caught:
        judged(*[judgement("high")] * 3, recorder=recorder)

    assert caught.value.kind is FailureClass.REWARD
    assert len(recorder.judged) == 3

    # What it said is not asked for again, but neither does it stand for ever.
    verdict, teacher = judged(judgement(0.5), recorder=recorder)
    assert (verdict.score, verdict.paid.calls, len(teacher.requested)) == (0.5, 4, 1)
    assert [message["role"] for message in teacher.requested[0]] == ["system", "user"]


def all_tries(num_bad: int) -> list[str]:
    return [*["no"] * num_bad, judgement(0.5)]


@pytest.mark.parametrize(
    ("num_bad", "num_recorded"),
    [(bad, recorded) for bad in range(MAX_TRIES) for recorded in range(bad + 2)],
)
def test_replies_that_were_paid_for_are_not_asked_for_again(
    num_bad: int, num_recorded: int
) -> None:
    replies, recorder = all_tries(num_bad), MemoryRecorder()
    whole, teacher = judged(*replies, recorder=recorder)
    resumed = MemoryRecorder()
    resumed.judged = recorder.judged[:num_recorded]

    again, requested = judged(*replies[num_recorded:], recorder=resumed)

    assert again == whole
    assert requested.requested == teacher.requested[num_recorded:]
    assert resumed.judged == recorder.judged


def test_a_call_that_fails_keeps_its_own_class() -> None:
    with pytest.raises(CallFailedError) as caught:
        judged("nothing", CallFailedError(FailureClass.RATE_LIMIT, "HTTP 429"))

    assert caught.value.kind is FailureClass.RATE_LIMIT


def test_a_judge_may_do_without_a_schema() -> None:
    assert judged(judgement(1), reply_format="none")[1].formats == [None]
    assert judged(judgement(1), reply_format="json_object")[1].formats == [{"type": "json_object"}]


@pytest.mark.parametrize(
    "reply",
    [
        '{"reasoning": "x", "score": 1}',
        '```json\n{"reasoning": "x", "score": 1.0}\n```',
        'My judgement: {"score": 1, "reasoning": "x"} – that is it.',
        '{"reasoning": "x", "score": 1, "confidence": {"is": 1}}',
        'Let me {think}. {"reasoning": "x", "score": 1}',
    ],
)
def test_what_stands_around_a_judgement_is_passed_over(reply: str) -> None:
    assert read_verdict(reply) == Verdict(1.0, "x")


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        ("", "no JSON object"),
        ("[1]", "no JSON object"),
        ('{"reasoning": "x", "score": 1', "no JSON object"),
        ('{"reasoning": "x", "score": 1} {"reasoning": "y", "score": 0}', "2 JSON objects"),
        ('{"score": 1}', '"reasoning"'),
        ('{"reasoning": 5, "score": 1}', '"reasoning"'),
        ('{"reasoning": "x"}', "must be a number"),
        ('{"reasoning": "x", "score": "1"}', "must be a number"),
        ('{"reasoning": "x", "score": true}', "must be a number"),
        ('{"reasoning": "x", "score": null}', "must be a number"),
        ('{"reasoning": "x", "score": NaN}', "between 0 and 1"),
        ('{"reasoning": "x", "score": -0.1}', "between 0 and 1"),
        ('{"reasoning": "x", "score": 8}', "between 0 and 1"),
        ("{" * 15_000, "no JSON object"),
        ('{"a":' * 4_000, "no JSON object"),
    ],
)
def test_a_reply_that_is_no_judgement_says_why(reply: str, problem: str) -> None:
    assert problem in str(read_verdict(reply))


def test_what_a_judge_thinks_before_is_no_judgement() -> None:
    thought, said = '{"reasoning": "t", "score": 0}', '{"reasoning": "x", "score": 1}'

    assert read_verdict(f"<think>{thought}</think>\n{said}") == Verdict(1.0, "x")
    assert "no JSON object" in str(read_verdict(f"<think>{thought}"))
    # What the answer under judgement may have put there ends no thinking.
    quoted = f"<think>it says </think>{said}, no</think>{thought}"
    assert "2 JSON objects" in str(read_verdict(quoted))
    assert "2 JSON objects" in str(read_verdict(f"{thought} though </think> {said}"))


def test_a_reply_that_was_cut_off_says_so() -> None:
    cut = turn(assistant('{"reasoning": "it goes on and'), finish="length")
    _, teacher = judged(cut, judgement(1))

    assert "cut off" in str(teacher.requested[1][-1]["content"])


@given(st.text(max_size=200) | st.dictionaries(st.text(), st.floats() | st.text()).map(json.dumps))
def test_every_reply_is_a_judgement_or_a_problem(reply: str) -> None:
    read = read_verdict(reply)

    if isinstance(read, Verdict):
        assert 0 <= read.score <= 1
    else:
        assert read


@given(st.floats(0, 1), st.text())
def test_a_judgement_is_read_back_as_it_was_written(score: float, reasoning: str) -> None:
    written = json.dumps({"reasoning": reasoning, "score": score})

    if len(written) < 20_000:
        assert read_verdict(f"Here:\n{written}\n") == Verdict(score, reasoning)


def test_of_what_is_too_long_the_judge_reads_the_ends() -> None:
    answer = f"begin{'x' * MAX_TEXT_CHARACTERS}end"
    content = str(judge_messages("r", TASK, answer, nonce="n")[1]["content"])

    assert "begin" in content
    assert "end\n</answer-n>" in content
    assert "8 characters left out" in content


def test_pictures_are_named_and_an_empty_answer_is_said() -> None:
    picture: Any = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    one = task_from_row({"messages": [picture, user("what?")]})
    content = str(judge_messages("r", one, "", nonce="n")[1]["content"])

    assert "[user] [image_url]" in content
    assert "(no answer)" in content
    assert "expected_answer" not in content


def test_a_rubric_is_a_text_or_a_file(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    (tmp_path / "rubric.md").write_text("Be kind {to} all.", encoding="utf-8")
    (tmp_path / "empty.md").write_text("\n", encoding="utf-8")
    (tmp_path / "latin.txt").write_bytes(b"\xff")

    def text_of(rubric: str) -> str:
        return rubric_text(rubric, rubric_path(workspace, rubric))

    assert text_of("Be right.") == "Be right."
    assert text_of("See notes.\nThen judge.md") == "See notes.\nThen judge.md"
    assert text_of("rubric.md") == "Be kind {to} all."
    assert "{to}" in str(judge_messages("Be {to}", TASK, "x", nonce="n")[0]["content"])
    for given_rubric in ("missing.md", "empty.md", "latin.txt", " "):
        with pytest.raises(InputError):
            text_of(given_rubric)
