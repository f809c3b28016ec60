"""Refined rollouts turn by turn, with scripted models and tools."""

from pathlib import Path
from typing import Any

import pytest

from fakes.rollout_rows import assistant, rollout_row, tool_call, tool_reply, user, write_rows
from fakes.scripted_policy import MemoryRecorder, ScriptedPolicy, ScriptedTools, turn
from fakes.waiting import run_async
from stillroom.data.formats import Task
from stillroom.rollout.episode.collect import RolloutContext, RolloutSpec, collect_rollouts
from stillroom.rollout.episode.loop import TurnRules
from stillroom.rollout.refine_plan import FailedRollouts
from stillroom.rollout.refining import (
    MAX_TEXT_CHARACTERS,
    RefiningPolicy,
    critic_messages,
    read_turn_number,
)
from stillroom.rollout.request import RefineOptions
from stillroom.rollout.rewards.rewards import Rewarder
from stillroom.tools.source import ToolResult
from stillroom.types import SamplingSettings, TeacherRecord, Trajectory

TASK = Task(
    task_id="0" * 16,
    messages=[{"role": "user", "content": "prompt"}],
    metadata={"expected_answer": 12},
    tool_names=None,
    reward_names=None,
    variables={},
)
CALLS = [tool_call(call_id=f"s{n}", arguments=f'{{"n": {n}}}') for n in range(3)]


def failed_rollout(folder: Path) -> FailedRollouts:
    """A rollout of three calls and an answer, which is wrong."""
    messages = [user("prompt")]
    for n, call in enumerate(CALLS):
        messages += [assistant(None, call), tool_reply(f"reply {n}", f"s{n}")]
    row = rollout_row(
        task_id=TASK.task_id,
        messages=[*messages, assistant("7") | {"reasoning_content": "hm"}],
        turns=4,
        reward=0.0,
        success=False,
    )
    write_rows(folder / "student.jsonl", [row])
    return FailedRollouts([folder / "student.jsonl"])


async def reply_to(_name: str, arguments: dict[str, Any]) -> ToolResult:
    return ToolResult(content=f"reply {arguments['n']}", is_error=False)


def refined(
    folder: Path,
    options: dict[str, Any],
    teacher: ScriptedPolicy,
    student: ScriptedPolicy | None = None,
    recorder: MemoryRecorder | None = None,
) -> tuple[Trajectory, ScriptedTools]:
    failed = failed_rollout(folder)
    policy = RefiningPolicy(
        teacher,
        failed,
        RefineOptions(refine="student.jsonl", **options),
        student=student,
    )
    tools = ScriptedTools(["price"], reply_to)
    context = RolloutContext(
        policy,
        TeacherRecord(provider="hf", model="m", settings=SamplingSettings()),
        tools,
        Rewarder(None),
        TurnRules(8),
        refiner=policy,
    )
    outcomes: list[Any] = []

    async def keep(outcome: Any) -> None:
        outcomes.append(outcome)

    async def main() -> None:
        with failed:
            await collect_rollouts(
                [RolloutSpec(TASK, 0)],
                context,
                concurrency=1,
                on_outcome=keep,
                recorder_for=(lambda _key: recorder) if recorder is not None else None,
            )

    run_async(main)
    [outcome] = outcomes
    assert isinstance(outcome, Trajectory), outcome
    return outcome, tools


def other(n: int) -> Any:
    return turn(assistant(None, tool_call(call_id=f"t{n}", arguments=f'{{"n": {n}}}')))


def test_after_the_teachers_one_turn_the_student_goes_on(tmp_path: Path) -> None:
    # The teacher does as the student in its first turn, in words of its own, and then otherwise.
    by_turn = {"teacher0": [other(0)], "teacher1": [other(5)]}
    teacher = ScriptedPolicy(lambda key: by_turn[key.rpartition(":")[2]])
    student = ScriptedPolicy(lambda _key: [other(6), turn(assistant("12"))])

    rollout, tools = refined(
        tmp_path,
        {"takeover": "first_difference", "turns": "one", "train_turns": "teacher"},
        teacher,
        student,
    )

    assert rollout.refined is not None
    assert rollout.refined.authors == ["student", "teacher", "student", "student"]
    assert (rollout.refined.turn, rollout.turns, rollout.reward) == (1, 4, 1.0)
    assert [arguments["n"] for _, arguments, _ in tools.calls] == [0, 5, 6]
    weights = [m.get("weight") for m in rollout.messages if m["role"] == "assistant"]
    assert weights == [0, None, 0, 0]
    assert (teacher.num_open, student.num_open) == (0, 0)
    assert (teacher.most_open, student.most_open) == (1, 1)
    # One turn of each model that is in the messages, and one of the teacher that is not.
    assert rollout.usage.completion_tokens == 15
    assert rollout.dropped is not None
    assert (rollout.dropped.calls, rollout.dropped.usage.completion_tokens) == (1, 5)


def test_a_teacher_that_acts_as_the_student_does_leaves_the_rollout_as_it_was(
    tmp_path: Path,
) -> None:
    turns = [other(0), other(1), other(2), turn(assistant(" 7 "))]
    teacher = ScriptedPolicy(lambda key: [turns[int(key[-1])]])

    rollout, _ = refined(tmp_path, {"takeover": "first_difference"}, teacher)

    assert rollout.refined is not None
    assert (rollout.refined.turn, rollout.refined.authors) == (None, ["student"] * 4)
    assert rollout.refined.unused is not None
    assert rollout.refined.unused.calls == 4
    assert (rollout.success, rollout.usage.completion_tokens) == (False, 0)
    assert not any("weight" in message for message in rollout.messages)


@pytest.mark.parametrize("num_recorded", range(1, 5))
def test_a_refined_rollout_goes_on_from_its_record_at_any_turn(
    tmp_path: Path, num_recorded: int
) -> None:
    options = {"takeover": "first_difference", "turns": "one"}

    def models() -> tuple[ScriptedPolicy, ScriptedPolicy]:
        by_turn = {"teacher0": [other(0)], "teacher1": [other(5)]}
        return (
            ScriptedPolicy(lambda key: by_turn[key.rpartition(":")[2]]),
            ScriptedPolicy(lambda _key: [other(6), turn(assistant("12"))]),
        )

    whole_recorder = MemoryRecorder()
    whole, _ = refined(tmp_path, options, *models(), whole_recorder)
    recorder = MemoryRecorder()
    recorder.turns = {n: whole_recorder.turns[n] for n in range(num_recorded)}
    recorder.replies = {n: whole_recorder.replies[n] for n in range(min(num_recorded, 3))}

    teacher, student = models()
    again, tools = refined(tmp_path, options, teacher, student, recorder)

    assert again.messages == whole.messages
    assert (again.refined, again.usage, again.dropped) == (
        whole.refined,
        whole.usage,
        whole.dropped,
    )
    assert len(tools.calls) == 3 - min(num_recorded, 3)
    assert len(teacher.opened) == max(2 - num_recorded, 0)


@pytest.mark.parametrize(
    ("reply", "number"),
    [
        ("2", 2),
        ("<think>1 or 2?</think>\n\n3\n", 3),
        ("4", None),
        ("2.0", None),
        ('{"turn": true}', None),
        ('{"turn": 1} or 2', None),
        ("turn 2", None),
        ("2, since it looks at the lamp", None),
        ('{"turn": 2}', 2),
        (' <think>{"turn": 1}</think>\n{"turn": 0}', 0),
        ('```json\n{"turn": 3}\n```', 3),
        ('{"turn": 4}', None),
        ('{"turn": -1}', None),
        ('{"turn": 1.0}', None),
        ('{"turn": "1"}', None),
        ('{"turn": 1, "why": "x"}', None),
        ('The first. {"turn": 1}', None),
        ("[1]", None),
        ("", None),
    ],
)
def test_a_critics_reply_is_read_strictly(reply: str, number: int | None) -> None:
    read = read_turn_number(reply, num_turns=3)

    assert (read if isinstance(read, int) else None) == number


def test_a_critic_sees_every_turn_of_a_rollout_with_a_long_reply() -> None:
    long = tool_reply("x" * 2 * MAX_TEXT_CHARACTERS, "s0")
    turns = [[assistant(None, CALLS[0]), long], [assistant("the last answer")]]

    question = critic_messages(TASK, turns)[1]["content"]

    assert len(question) < 1.1 * MAX_TEXT_CHARACTERS
    assert "characters left out" in question
    assert "the last answer" in question
