"""Tasks that two evaluations answered differently, with both conversations side by side."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

import msgspec

from stillroom.evaluate.files import Evaluation, TaskScore
from stillroom.evaluate.scores import NO_GROUP
from stillroom.lines import read_lines
from stillroom.report.conversation import ShownConversation, conversation, num_prompt_messages
from stillroom.report.folders import FolderReader
from stillroom.report.lineup import EvaluationEntry, Lineup, num_shared_tasks
from stillroom.report.wording import count, number, plural
from stillroom.rollout.rewards.answers import as_text
from stillroom.types import Message

Change = Literal["fixed", "broken", "unsolved"]

_MAX_PICKS: dict[Change, int] = {"fixed": 4, "broken": 1, "unsolved": 1}
_LONGEST_ANSWER = 200
_TASK_TYPE_FIELD = "task_type"


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """One model's answer to a task."""

    is_right: bool
    reward: str | None
    remarks: Sequence[str]
    conversation: ShownConversation


@dataclass(frozen=True, slots=True)
class TaskExample:
    """One task with the answers of both models."""

    title: str
    groups: Sequence[str]
    prompt: ShownConversation
    expected: str | None
    before: ModelAnswer
    after: ModelAnswer


@dataclass(frozen=True, slots=True)
class BeforeAfter:
    """The examples to show, or the reason why there are none."""

    before: str
    after: str
    after_word: Literal["After", "Teacher"]
    counts: str
    is_sampled: bool
    """Whether tasks were answered several times; a task is right if half of its answers are."""
    examples: Sequence[TaskExample]
    reason: str | None


@dataclass(frozen=True, slots=True)
class TaskChange:
    """A task with its change between two evaluations."""

    task_id: str
    change: Change
    groups: Mapping[str, str]


class _RolloutResult(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a rollout that decide whether it is shown."""

    task_id: str
    success: bool | None = None


class _Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a rollout that the report shows."""

    messages: list[Message]
    metadata: dict[str, Any] = {}
    reward: float | None = None
    success: bool | None = None
    stop_reason: str = "answered"
    turns: int = 0
    truncated: bool = False
    tool_errors: int = 0


def read_before_after(reader: FolderReader, lineup: Lineup) -> BeforeAfter:
    """Returns examples of tasks whose result changed from the first to the last evaluation."""
    before, after = lineup.before, lineup.after
    if before is None or after is None:
        return _without_examples(lineup)
    when = "with the teacher" if after.is_teacher else "after"
    changes = task_changes(before.evaluation, after.evaluation)
    picks = pick_tasks(changes)
    was_right = {pick.task_id: pick.change == "broken" for pick in picks}
    is_right = {pick.task_id: pick.change == "fixed" for pick in picks}
    old = _read_rollouts(reader, before, was_right)
    new = _read_rollouts(reader, after, is_right)
    examples = [
        _example(pick, old[pick.task_id], new[pick.task_id], when)
        for pick in picks
        if pick.task_id in old and pick.task_id in new
    ]
    return BeforeAfter(
        before=before.label,
        after=after.label,
        after_word="Teacher" if after.is_teacher else "After",
        counts=_counts(changes, num_shared_tasks(before.evaluation, after.evaluation), when),
        is_sampled=any(0 < task.success < 1 for task in after.evaluation.tasks),
        examples=examples,
        reason=None if examples else _empty_reason(picks),
    )


def task_changes(before: Evaluation, after: Evaluation) -> list[TaskChange]:
    """Returns the shared tasks that at least one evaluation got wrong, with their change."""
    old = {task.task_id: task for task in before.tasks}
    changes: list[TaskChange] = []
    for task in after.tasks:
        if task.task_id not in old:
            continue
        change = _change(old[task.task_id], task)
        if change is not None:
            changes.append(TaskChange(task.task_id, change, task.groups))
    return changes


def pick_tasks(changes: Sequence[TaskChange]) -> list[TaskChange]:
    """Returns up to 4 fixed, 1 broken and 1 unsolved task.

    They are taken in turn from each task type, the type with the most changes first.
    """
    picks: list[TaskChange] = []
    for change, limit in _MAX_PICKS.items():
        by_type: dict[str, list[TaskChange]] = {}
        for pick in changes:
            if pick.change == change:
                by_type.setdefault(_task_type(pick), []).append(pick)
        largest_first = sorted(by_type.values(), key=len, reverse=True)
        interleaved = [pick for row in zip_longest(*largest_first) for pick in row if pick]
        picks += interleaved[:limit]
    return picks


def _change(old: TaskScore, new: TaskScore) -> Change | None:
    """Returns how a task's result changed; None if both evaluations solved the task."""
    was_right, is_right = old.success >= 0.5, new.success >= 0.5
    if was_right:
        return None if is_right else "broken"
    return "fixed" if is_right else "unsolved"


def _task_type(pick: TaskChange) -> str:
    return pick.groups.get(_TASK_TYPE_FIELD) or next(iter(pick.groups.values()), "")


def _read_rollouts(
    reader: FolderReader, entry: EvaluationEntry, wanted_success: Mapping[str, bool]
) -> dict[str, _Rollout]:
    """Returns a rollout of each task in `wanted_success`, preferably one with that success."""
    # Only the file name is used, since the folder may have been moved.
    path = entry.run.folder / Path(entry.evaluation.result.rollouts).name
    best_lines: dict[str, tuple[bool, bytes]] = {}
    try:
        for row, data in _rows(path):
            is_wanted = (row.success is True) is wanted_success.get(row.task_id)
            is_better = is_wanted and not best_lines.get(row.task_id, (False,))[0]
            if row.task_id in wanted_success and (row.task_id not in best_lines or is_better):
                best_lines[row.task_id] = (is_wanted, data)
    except OSError as error:
        reader.note(path, str(error))
    rollouts: dict[str, _Rollout] = {}
    for task_id, (_, data) in best_lines.items():
        with suppress(ValueError, RecursionError):
            rollouts[task_id] = msgspec.json.decode(data, type=_Rollout)
    return rollouts


def _rows(path: Path) -> Iterator[tuple[_RolloutResult, bytes]]:
    decoder = msgspec.json.Decoder(_RolloutResult)
    for line in read_lines(path):
        # Incomplete lines are skipped.
        with suppress(ValueError, RecursionError):
            yield decoder.decode(line.data), line.data


def _example(pick: TaskChange, old: _Rollout, new: _Rollout, when: str) -> TaskExample:
    titles: dict[Change, str] = {
        "fixed": f"Wrong before, right {when}",
        "broken": f"Right before, wrong {when}",
        "unsolved": "Wrong in both",
    }
    prompt = new.messages[: num_prompt_messages(new.messages, new.turns)]
    expected = new.metadata.get("expected_answer")
    return TaskExample(
        title=titles[pick.change],
        groups=[group for group in pick.groups.values() if group != NO_GROUP],
        prompt=conversation(prompt),
        expected=None if expected is None else as_text(expected)[:_LONGEST_ANSWER],
        before=_answer(old),
        after=_answer(new),
    )


def _answer(rollout: _Rollout) -> ModelAnswer:
    remarks: list[str] = []
    if rollout.tool_errors:
        remarks.append(plural(rollout.tool_errors, "tool error"))
    if rollout.stop_reason != "answered":
        remarks.append(f"stopped by {rollout.stop_reason}")
    if rollout.truncated:
        remarks.append("cut off")
    return ModelAnswer(
        is_right=rollout.success is True,
        reward=None if rollout.reward is None else number(rollout.reward),
        remarks=remarks,
        conversation=conversation(
            rollout.messages[num_prompt_messages(rollout.messages, rollout.turns) :]
        ),
    )


def _counts(changes: Sequence[TaskChange], num_shared: int, when: str) -> str:
    tally = Counter(pick.change for pick in changes)
    return (
        f"Of {plural(num_shared, 'task')} that both answered, {count(tally['fixed'])} were wrong "
        f"before and right {when}, {count(tally['broken'])} right before and wrong {when}, and "
        f"{count(tally['unsolved'])} wrong in both."
    )


def _empty_reason(picks: Sequence[TaskChange]) -> str:
    if picks:
        return "The conversations are no longer in the run folders."
    return "Both models solved all shared tasks, so there is nothing to show."


def _without_examples(lineup: Lineup) -> BeforeAfter:
    """Returns the reason why no evaluations can be compared."""
    reason = "Conversations are compared once two evaluations have answered the same tasks; "
    match len(lineup.entries):
        case 0:
            reason += "no evaluation has finished yet."
        case 1:
            reason += "so far there is only one evaluation."
        case _:
            reason += "no other evaluation shares two tasks with the first."
    return BeforeAfter("", "", "After", "", False, (), reason)
