import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.rollout_rows import assistant, rollout_row, tool_call
from fakes.scripted_policy import turn
from stillroom.data.formats import decode_trajectory
from stillroom.errors import DataError, InputError
from stillroom.rollout.journal.journal import RolloutStore, journal_path
from stillroom.rollout.journal.records import (
    RECORD,
    CallRecord,
    JournalContent,
    JudgeRecord,
    RecordedSteps,
    RepliesRecord,
    RestartRecord,
    RolloutKey,
    TurnRecord,
)
from stillroom.teachers.budget import Cost, Outstanding
from stillroom.tools.source import ToolResult
from stillroom.types import CallTotals, Trajectory

SETTINGS: dict[str, Any] = {"model": "m", "temperature": 0.7, "seed": None}
CALL, DONE = turn(assistant(None, tool_call())), turn(assistant("7"))
REPLIES = [ToolResult(content="7", is_error=False)]


def trajectory(task_id: str = "task", sample: int = 0, **changes: Any) -> Trajectory:
    row = rollout_row(task_id=task_id, sample=sample, **changes)
    return decode_trajectory(msgspec.json.encode(row))


def steps_of(store: RolloutStore, task_id: str, sample: int = 0) -> list[Any]:
    """The steps of a rollout that are on record, in their order."""
    recorder, steps = store.recorder(RolloutKey(task_id, sample)), []
    for index in range(4):
        steps += [recorder.recorded_turn(index), recorder.recorded_replies(index)]
    return [step for step in steps if step is not None]


def begun(output: Path) -> None:
    """One finished rollout, and two whose steps are on record in turn."""
    store = RolloutStore(output, SETTINGS)
    for task_id in ("done", "a", "b"):
        store.recorder(RolloutKey(task_id, 0)).record_turn(0, CALL)
    store.recorder(RolloutKey("a", 0)).record_replies(0, REPLIES)
    store.recorder(RolloutKey("a", 0)).record_turn(1, DONE)
    store.finish(trajectory("done"))
    store.close(is_complete=False)


def test_a_step_is_on_disk_for_other_processes_as_soon_as_it_is_recorded(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    heard: list[CallRecord] = []
    store = RolloutStore(output, SETTINGS, on_call=heard.append)
    recorder = store.recorder(RolloutKey("a", 3))
    journal = tmp_path / ".out.jsonl" / "journal.jsonl"

    recorder.record_turn(0, CALL)
    assert journal.read_bytes().count(b"\n") == 1
    recorder.record_replies(0, REPLIES)
    assert journal.read_bytes().count(b"\n") == 2
    assert [record.turn for record in heard] == [CALL]
    store.close(is_complete=False)


@pytest.mark.parametrize("name", ["out.jsonl", ".out.jsonl/journal.jsonl"])
@pytest.mark.parametrize("broken", [b"{", b'{"task_id": 7}', b"[]", b"\0\0\0", b'"\xff"'])
def test_a_broken_line_inside_is_told_with_its_place_and_nothing_is_changed(
    tmp_path: Path, name: str, broken: bytes
) -> None:
    output = tmp_path / "out.jsonl"
    begun(output)
    path = tmp_path / name
    content = broken + b"\n" + path.read_bytes()
    path.write_bytes(content)

    for _ in range(2):
        with pytest.raises(DataError, match=r"\.jsonl:1"):
            RolloutStore(output, SETTINGS)
    assert path.read_bytes() == content


def test_only_steps_that_follow_one_another_are_replayed(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    begun(output)
    journal = tmp_path / ".out.jsonl" / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)

    # Without the replies to turn 0, turn 1 belongs to a conversation that is not known.
    journal.write_bytes(b"".join(line for line in lines if b'"replies"' not in line))
    store = RolloutStore(output, SETTINGS)
    assert steps_of(store, "a") == [CALL]
    store.close(is_complete=False)


def test_a_file_of_the_users_is_left_alone(tmp_path: Path) -> None:
    output = tmp_path / "prompts.jsonl"
    output.write_bytes(b'{"prompt": "no newline at the end"}')

    for _ in range(2):
        with pytest.raises(InputError, match="was not written by generate_rollouts"):
            RolloutStore(output, SETTINGS)
    assert output.read_bytes() == b'{"prompt": "no newline at the end"}'


def test_an_output_has_one_writer_at_a_time(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    first = RolloutStore(output, SETTINGS)

    with pytest.raises(InputError, match="being written by generate_rollouts"):
        RolloutStore(output, SETTINGS)
    first.finish(trajectory())
    first.close(is_complete=True)
    second = RolloutStore(output, SETTINGS)
    assert list(second.finished) == [("task", 0)]
    second.close(is_complete=True)


def test_steps_before_a_restart_are_not_replayed_again(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    begun(output)

    store = RolloutStore(output, SETTINGS)
    recorder = store.recorder(RolloutKey("a", 0))
    assert recorder.recorded_turn(0) == CALL
    recorder.start_over()
    assert (
        recorder.recorded_turn(0)
        is recorder.recorded_replies(0)
        is recorder.recorded_turn(1)
        is None
    )
    assert store.num_restarted == 1
    recorder.record_turn(0, CALL)
    store.close(is_complete=False)

    store = RolloutStore(output, SETTINGS)
    assert store.num_restarted == 0
    assert steps_of(store, "a") == [CALL]
    assert steps_of(store, "b") == [CALL]
    store.close(is_complete=False)


def test_what_is_spent_is_what_rows_and_unfinished_steps_have_cost(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    store = RolloutStore(output, SETTINGS)
    assert store.spent() == Cost()
    priced = turn(assistant(None, tool_call()), cost_usd=0.25)
    for task_id in ("a", "b", "done"):
        store.recorder(RolloutKey(task_id, 0)).record_turn(0, priced)
    store.recorder(RolloutKey("a", 0)).record_replies(0, REPLIES)
    # The price of this call was not known.
    store.recorder(RolloutKey("a", 0)).record_turn(1, DONE)
    usage = {"prompt_tokens": 100, "completion_tokens": 50}
    store.finish(trajectory("done", usage=usage, cost_usd=0.5))
    store.finish(trajectory("free", usage=usage, cost_usd=None))
    assert store.spent() == Cost(tokens=300, usd=0.5)
    store.close(is_complete=False)

    store = RolloutStore(output, SETTINGS)
    assert store.spent() == Cost(tokens=300 + 3 * 15, usd=1.0)
    store.close(is_complete=False)


def test_what_may_have_been_billed_stays_on_record_when_all_is_done(tmp_path: Path) -> None:
    output = tmp_path / "o.jsonl"
    for _ in range(2):
        store = RolloutStore(output, SETTINGS)
        store.recorder(RolloutKey("task", 0)).record_turn(0, DONE)
        store.record_unconfirmed(Cost(tokens=7, usd=0.125))
        store.finish(trajectory(usage={"prompt_tokens": 10, "completion_tokens": 5}))
        store.close(is_complete=True)
    store = RolloutStore(output, SETTINGS)
    assert store.spent().tokens == 15 + 2 * 7
    assert store.recorded_steps == {}
    store.close(is_complete=True)


def killed(output: Path, most: Outstanding, *, num_turns: int = 0) -> None:
    """Leaves what a process leaves that ends without closing the store."""
    store = RolloutStore(output, SETTINGS)
    store.record_outstanding(most)
    for index in range(num_turns):
        store.recorder(RolloutKey("a", index)).record_turn(0, DONE)
    journal = journal_path(output)
    at_the_kill = journal.read_bytes()
    store.close(is_complete=False)
    journal.write_bytes(at_the_kill)


def test_what_a_killed_run_had_out_is_spent_once(tmp_path: Path) -> None:
    output, most = tmp_path / "o.jsonl", Outstanding(3, Cost(tokens=300, usd=1.5))
    killed(output, most, num_turns=2)

    for _ in range(2):
        store = RolloutStore(output, SETTINGS)
        assert (store.lost_by_last_run, store.lost) == (most, most)
        assert store.spent() == Cost(tokens=300 + 2 * 15, usd=1.5)
        # A run that sends nothing leaves it as it is.
        store.close(is_complete=False)
    killed(output, Outstanding(1, Cost(tokens=7, usd=0.25)))
    store = RolloutStore(output, SETTINGS)
    assert (store.lost_by_last_run.calls, store.lost.calls) == (1, 4)
    assert store.spent() == Cost(tokens=337, usd=1.75)
    store.record_outstanding(most)
    store.record_outstanding(Outstanding(5, Cost(tokens=500, usd=2.5)))
    store.close(is_complete=False)

    # Its own calls have all come back by the time a run ends.
    store = RolloutStore(output, SETTINGS)
    assert (store.lost_by_last_run, store.lost.calls) == (Outstanding(), 4)
    assert store.spent() == Cost(tokens=337, usd=1.75)
    store.recorded_steps.clear()
    store.close(is_complete=True)
    store = RolloutStore(output, SETTINGS)
    assert store.spent() == Cost(tokens=307, usd=1.75)
    store.close(is_complete=False)


def test_a_run_that_came_to_nothing_leaves_nothing_on_record(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path / "o.jsonl", SETTINGS)
    store.record_outstanding(Outstanding(3, Cost(tokens=300)))
    store.close(is_complete=False)

    store = RolloutStore(tmp_path / "o.jsonl", {**SETTINGS, "model": "other"})
    store.close(is_complete=True)


STEPS = st.sampled_from(["turn", "replies", "judge", "restart"])


@given(st.lists(STEPS, max_size=12))
def test_the_records_of_recorded_steps_are_the_same_steps_again(kinds: list[str]) -> None:
    key, steps, paid = RolloutKey("a", 2), RecordedSteps(), 0
    for kind in kinds:
        where: Any = {"task_id": "a", "sample": 2}
        if kind == "turn":
            paid += steps.next_turn is not None
            steps.add(TurnRecord(**where, index=len(steps.turns), turn=CALL))
        elif kind == "replies":
            steps.add(RepliesRecord(**where, index=len(steps.turns) - 1, replies=REPLIES))
        elif kind == "judge":
            paid += 1
            steps.add(JudgeRecord(**where, index=len(steps.judge), turn=DONE))
        else:
            steps.add(RestartRecord(**where))

    content = JournalContent()
    for record in steps.records(key):
        content.add(RECORD.decode(msgspec.json.encode(record)), ())

    assert content.recorded_steps.get(key, RecordedSteps()) == steps
    assert steps.paid.calls == paid
    # What a shard is begun with counts there as it does in the whole.
    assert content.paid.get(key, CallTotals()).calls == paid


def test_the_calls_before_a_restart_are_those_of_the_row(tmp_path: Path) -> None:
    output, priced = tmp_path / "o.jsonl", turn(assistant("7"), cost_usd=0.25)
    dropped = CallTotals.of(priced) + CallTotals.of(priced)
    for _ in range(2):
        store = RolloutStore(output, SETTINGS)
        recorder = store.recorder(RolloutKey("a", 0))
        recorder.record_turn(0, priced)
        recorder.record_judge_turn(0, priced)
        recorder.start_over()
        assert recorder.dropped() == dropped
        assert recorder.judge_turns() == []
        store.close(is_complete=False)
        dropped += dropped
    store = RolloutStore(output, SETTINGS)
    assert store.paid().calls == store.recorder(RolloutKey("a", 0)).dropped().calls == 4
    store.finish(trajectory("a", dropped=msgspec.to_builtins(recorder.dropped()), cost_usd=1.25))
    store.close(is_complete=True)
    store = RolloutStore(output, SETTINGS)
    assert (store.spent(), store.paid().calls) == (Cost(tokens=65, usd=1.25), 5)
    store.close(is_complete=True)


@contextmanager
def full_disk() -> Iterator[None]:
    """A limit on the size of files stands for a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_no_lock_behind(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    store = RolloutStore(output, SETTINGS)
    store.recorder(RolloutKey("task", 0)).record_turn(0, CALL)
    with full_disk():
        with pytest.raises(OSError, match="too large"):
            store.finish(trajectory(messages=[assistant("x" * 2000)]))
        with pytest.raises(OSError, match="too large"):
            store.close(is_complete=True)

    # As if there were room again: what was paid for is known.
    store = RolloutStore(output, SETTINGS)
    assert store.finished == {}
    assert steps_of(store, "task") == [CALL]
    store.close(is_complete=False)
