"""Cutting a run into shards and putting it together again, without Ray."""

import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fakes.chat_endpoint import ScriptedTeacher
from fakes.reporters import KeptReporter
from fakes.rollout_rows import read_rows, write_rows
from fakes.rollout_runs import GIVEN, run_rollouts
from fakes.waiting import run_async
from stillroom.errors import InputError, MissingExtraError, RunError
from stillroom.files import FileLock
from stillroom.lines import NewLines
from stillroom.rollout.episode.collect import RolloutSpecs
from stillroom.rollout.journal.journal import RolloutStore, journal_path
from stillroom.rollout.journal.records import OutstandingRecord, RolloutKey, TurnRecord
from stillroom.rollout.journal.shards import (
    RemainingBudget,
    RunPart,
    copy_new_rows,
    merge_shards,
    prepare_shards,
    recorded_cost,
    recorded_costs,
    shard_output,
    shard_run_folder,
    shards_locked,
    split_into_shards,
)
from stillroom.rollout.plan import output_settings, plan_generation
from stillroom.rollout.ray.run import generate_on_ray
from stillroom.rollout.ray.shards import ShardJob, ShardWorker
from stillroom.rollout.request import GenerateRollouts
from stillroom.rollout.results import origin_of
from stillroom.settings import Workspace
from stillroom.teachers.budget import Budget, Cost, Outstanding
from stillroom.types import SampledTurn, Usage

NUM_PROMPTS = 7
KEYS = [RolloutKey(f"t{index}", sample) for index in range(NUM_PROMPTS) for sample in range(3)]


def shards_of(keys=KEYS, *, workers=4, concurrency=20, max_concurrency=256, remaining=None):
    return split_into_shards(
        keys,
        workers=workers,
        concurrency=concurrency,
        max_concurrency=max_concurrency,
        remaining=remaining or RemainingBudget(),
    )


@pytest.mark.parametrize("workers", [1, 2, 3, 8, 21, 64])
def test_every_rollout_is_in_exactly_one_shard(workers: int) -> None:
    shards = shards_of(workers=workers)

    dealt = [key for shard in shards for key in shard.keys]
    assert sorted(dealt) == sorted(KEYS)
    assert len(shards) == min(workers, 20, len(KEYS))
    sizes = [len(shard.keys) for shard in shards]
    assert max(sizes) - min(sizes) <= 1
    assert shards == shards_of(workers=workers)


@pytest.mark.parametrize("workers", [1, 2, 3, 8, 19])
def test_slices_add_up_to_the_whole(workers: int) -> None:
    remaining = RemainingBudget(usd=1.0, tokens=10_007)

    shards = shards_of(workers=workers, remaining=remaining)

    assert sum(shard.concurrency for shard in shards) == 20
    assert sum(shard.max_concurrency for shard in shards) == 256
    assert sum(shard.remaining.tokens for shard in shards) == 10_007
    assert sum(shard.remaining.usd for shard in shards) == pytest.approx(1.0)
    for shard in shards:
        assert 1 <= shard.concurrency <= shard.max_concurrency
        assert shard.remaining.tokens == pytest.approx(10_007 * len(shard.keys) / len(KEYS), abs=1)


def test_there_are_no_more_shards_than_conversations_at_once_or_rollouts() -> None:
    assert len(shards_of(workers=9, concurrency=2)) == 2
    assert len(shards_of(KEYS[:3], workers=9)) == 3
    assert shards_of([], workers=9) == []


def test_no_limit_stays_no_limit() -> None:
    assert {shard.remaining for shard in shards_of()} == {RemainingBudget(math.inf, math.inf)}


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    root = tmp_path / "workspace"
    prompts = [
        {"prompt": f"prompt {index}", "metadata": {"expected_answer": 12}}
        for index in range(NUM_PROMPTS)
    ]
    write_rows(root / "prompts.jsonl", prompts)
    return Workspace(root)


def run_of(workspace: Workspace, teacher: ScriptedTeacher, **changes) -> Any:
    return run_rollouts(workspace, teacher.handle, **{"seed": 7, **changes})


class Sharded:
    """An output that is dealt out to shards, as the driver does it."""

    def __init__(self, workspace: Workspace, workers: int) -> None:
        self.workspace, request = workspace, GenerateRollouts(**GIVEN, seed=7)
        self.output = workspace.root / "out.jsonl"
        plan = plan_generation(workspace, request)
        origin = run_async(origin_of, plan.rollouts)
        self.settings = output_settings(plan.rollouts, origin.weights)
        with plan.open_tasks() as tasks:
            self.keys = list(RolloutSpecs(tasks, 1).keys)
        store = RolloutStore(self.output, self.settings)
        todo = [key for key in self.keys if key not in store.finished]
        self.shards = shards_of(todo, workers=workers)
        prepare_shards(self.output, self.settings, self.shards, store.recorded_steps)
        store.close(is_complete=False)

    def do(self, number: int, teacher: ScriptedTeacher):
        part = RunPart(frozenset(self.shards[number].keys), Budget())
        output = str(shard_output(self.output, number))
        return run_of(self.workspace, teacher, part=part, output=output)

    def begin(self, number: int) -> RolloutKey:
        """Puts a turn of the shard's first rollout on record, as a worker that is killed then."""
        path = shard_output(self.output, number)
        store = RolloutStore(path, self.settings)
        key = self.shards[number].keys[0]
        turn = SampledTurn(
            message={"role": "assistant", "content": "12"},
            finish_reason="stop",
            usage=Usage(prompt_tokens=3, completion_tokens=2),
            cost_usd=0.25,
        )
        store.append(TurnRecord(task_id=key.task_id, sample=key.sample, index=0, turn=turn))
        store.close(is_complete=False)
        return key


def tasks_in(workspace: Workspace) -> list[str]:
    rows = read_rows(workspace.root / "out.jsonl")
    assert len({row["task_id"] for row in rows}) == len(rows)
    return sorted(row["task_id"] for row in rows)


def names_beside(workspace: Workspace) -> list[str]:
    return sorted(path.name for path in (workspace.root / ".out.jsonl").iterdir())


def test_a_share_has_its_own_budget_in_place_of_the_requests(workspace: Workspace) -> None:
    teacher = ScriptedTeacher(tool_turns=0)
    sharded = Sharded(workspace, 1)
    part = RunPart(frozenset(sharded.shards[0].keys), Budget(tokens=0))
    output = str(shard_output(sharded.output, 0))

    result = run_of(workspace, teacher, part=part, output=output, max_total_tokens=100_000)

    assert (result.stopped_by, result.calls) == ("max_total_tokens", 0)


@pytest.mark.parametrize("again", [1, 2, 5])
def test_shards_of_a_killed_driver_are_adopted_by_any_rerun(
    workspace: Workspace, again: int
) -> None:
    teacher = ScriptedTeacher(tool_turns=0)
    killed = Sharded(workspace, 3)
    killed.do(0, teacher)
    killed.do(2, teacher)
    killed.begin(1)
    num_done = len(teacher.served)

    merge_shards(killed.output, killed.settings)
    assert len(tasks_in(workspace)) == num_done
    rest = Sharded(workspace, again)
    for shard in rest.shards:
        rest.do(shard.number, teacher)
    merge_shards(rest.output, rest.settings, requested=rest.keys)

    assert len(tasks_in(workspace)) == NUM_PROMPTS
    # The turn that was on record is not made again, whichever shard its rollout went to.
    assert len(teacher.served) == len(set(teacher.served)) == NUM_PROMPTS - 1
    assert names_beside(workspace) == ["settings.json"]


def test_a_rerun_in_one_process_brings_in_what_shards_left(workspace: Workspace) -> None:
    teacher = ScriptedTeacher(tool_turns=0)
    killed = Sharded(workspace, 3)
    killed.do(0, teacher)
    begun = killed.begin(1)

    result = run_of(workspace, teacher)

    assert (result.succeeded, result.already_done) == (NUM_PROMPTS, 3)
    assert len(tasks_in(workspace)) == NUM_PROMPTS
    # The turn on record is the whole answer of its rollout.
    assert len(teacher.served) == NUM_PROMPTS - 1
    row = next(row for row in read_rows(killed.output) if row["task_id"] == begun.task_id)
    assert row["usage"] == {"prompt_tokens": 3, "completion_tokens": 2}


def test_bringing_the_same_shards_in_twice_brings_no_row_in_twice(workspace: Workspace) -> None:
    teacher = ScriptedTeacher(tool_turns=0)
    killed = Sharded(workspace, 2)
    killed.do(0, teacher)
    key = killed.begin(1)
    shards = killed.output.with_name(".out.jsonl") / "shards"
    shutil.copytree(shards, workspace.root / "kept")

    merge_shards(killed.output, killed.settings)
    first = killed.output.read_bytes()
    store = RolloutStore(killed.output, killed.settings)
    assert store.spent().tokens == 15 * len(killed.shards[0].keys) + 5
    store.close(is_complete=False)
    (workspace.root / "kept").rename(shards)
    merge_shards(killed.output, killed.settings)

    assert killed.output.read_bytes() == first
    store = RolloutStore(killed.output, killed.settings)
    assert store.spent().tokens >= 15 * len(killed.shards[0].keys) + 5
    assert set(store.recorded_steps) == {key}
    assert len(store.recorded_steps[key].turns) == 1
    store.close(is_complete=False)


def test_rows_are_taken_in_as_they_come_and_a_torn_one_only_when_it_is_whole(
    workspace: Workspace,
) -> None:
    sharded = Sharded(workspace, 1)
    sharded.do(0, ScriptedTeacher(tool_turns=0))
    whole = shard_output(sharded.output, 0).read_bytes()
    growing = workspace.root / "growing.jsonl"
    store = RolloutStore(sharded.output, sharded.settings)
    tail = NewLines(growing)
    ends = [index + 1 for index, byte in enumerate(whole) if byte == ord("\n")]

    taken: list[int] = []
    for end in (0, 10, ends[0], ends[2] + 5, len(whole)):
        growing.write_bytes(whole[:end])
        taken.append(copy_new_rows(tail, store))
    store.close(is_complete=False)

    assert taken == [0, 0, 1, 2, NUM_PROMPTS - 3]
    assert sharded.output.read_bytes() == whole


def test_what_a_dead_worker_had_on_record_is_counted(workspace: Workspace) -> None:
    sharded = Sharded(workspace, 2)
    path = shard_output(sharded.output, 0)
    before = recorded_costs(path, sharded.settings)
    sharded.begin(0)

    since = recorded_costs(path, sharded.settings).since(before)

    assert (since.calls, since.usage.prompt_tokens, since.cost_usd) == (1, 3, 0.25)


def test_what_a_killed_worker_had_out_counts_once(workspace: Workspace) -> None:
    sharded, most = Sharded(workspace, 2), Outstanding(3, Cost(tokens=300, usd=1.5))
    path = shard_output(sharded.output, 0)
    before = recorded_costs(path, sharded.settings)
    reported = OutstandingRecord(calls=3, tokens=300, usd=1.5, begins=True)
    with journal_path(path).open("ab") as journal:
        journal.write(msgspec.json.encode(reported) + b"\n")

    since = recorded_costs(path, sharded.settings).since(before)
    assert (since.spent, since.lost.calls) == (most.worst, 3)
    before = recorded_costs(path, sharded.settings)
    sharded.do(0, ScriptedTeacher(tool_turns=0))
    assert recorded_costs(path, sharded.settings).since(before).lost == Outstanding()

    merge_shards(sharded.output, sharded.settings)
    store = RolloutStore(sharded.output, sharded.settings)
    assert (store.lost_by_last_run, store.lost) == (most, most)
    assert store.spent().tokens == 300 + 15 * len(sharded.shards[0].keys)
    store.close(is_complete=False)


def test_what_the_shards_of_a_killed_driver_cost_is_known_before_they_are_merged(
    workspace: Workspace,
) -> None:
    first = Sharded(workspace, 2)
    first.begin(0)
    merge_shards(first.output, first.settings)
    killed, teacher = Sharded(workspace, 3), ScriptedTeacher(tool_turns=0)
    # The turn that is on record was copied to a shard, and costs nothing again.
    assert recorded_cost(killed.output, with_lost=True) == Cost(tokens=5, usd=0.25)

    killed.do(1, teacher)
    killed.begin(2)
    reported = OutstandingRecord(calls=3, tokens=300, usd=1.5, begins=True)
    with journal_path(shard_output(killed.output, 2)).open("ab") as journal:
        journal.write(msgspec.json.encode(reported) + b"\n")
    store = RolloutStore(killed.output, killed.settings)
    copy_new_rows(NewLines(shard_output(killed.output, 1)), store)
    store.close(is_complete=False)

    spent = Cost(tokens=5 + 15 * len(killed.shards[1].keys) + 5, usd=0.5)
    assert recorded_cost(killed.output, with_lost=False) == spent
    assert recorded_cost(killed.output, with_lost=True) == spent + Cost(tokens=300, usd=1.5)
    merge_shards(killed.output, killed.settings)
    assert recorded_cost(killed.output, with_lost=True) == spent + Cost(tokens=300, usd=1.5)


def test_a_dry_run_knows_what_the_shards_of_a_killed_driver_have(workspace: Workspace) -> None:
    teacher = ScriptedTeacher(tool_turns=0)
    killed = Sharded(workspace, 3)
    killed.do(0, teacher)
    killed.begin(1)
    num_done = len(killed.shards[0].keys)
    before = {path: path.stat().st_mtime_ns for path in workspace.root.rglob("*")}

    reported = run_of(workspace, teacher, dry_run=True)

    assert {path: path.stat().st_mtime_ns for path in workspace.root.rglob("*")} == before
    assert (reported.already_done, reported.todo) == (num_done, NUM_PROMPTS - num_done)
    # One of them has its turn on record.
    assert reported.calls.high == NUM_PROMPTS - num_done - 1
    asked_before = len(teacher.served)
    run_of(workspace, teacher)
    assert len(teacher.served) - asked_before == reported.calls.high


def test_one_process_at_a_time_has_the_shards(workspace: Workspace) -> None:
    output = workspace.root / "out.jsonl"
    with (
        shards_locked(output),
        pytest.raises(InputError, match="another process"),
        shards_locked(output),
    ):
        pass
    lock = FileLock(output.with_name(".out.jsonl") / "shards.lock")
    assert lock.try_acquire()
    lock.release()


def job_of(workspace: Workspace, **changes) -> ShardJob:
    sharded = Sharded(workspace, 1)
    folder = str(shard_run_folder(sharded.output, 0))
    job = ShardJob(str(workspace.root), {}, folder, (), math.inf, math.inf, math.inf, "x")
    return replace(job, **changes)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"folder": "/nowhere/shards/000.run"}, "does not exist on the Ray node"),
        ({"version": "0.0.0-other"}, "0.0.0-other"),
    ],
)
def test_a_worker_without_the_drivers_files_or_of_another_version_says_so(
    workspace: Workspace, changes, problem: str
) -> None:
    end = ShardWorker().run(job_of(workspace, **changes))

    assert isinstance(end.error, RunError)
    assert problem in end.error.problem


def test_without_ray_the_error_names_the_command(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)

    async def main() -> None:
        await generate_on_ray(
            workspace,
            GenerateRollouts(**GIVEN, ray_address="local"),
            folder=workspace.runs / "run",
            reporter=KeptReporter(),
        )

    with pytest.raises(MissingExtraError, match=r"stillroom\[ray\]"):
        run_async(main)


def test_calls_that_broke_off_on_a_worker_count_against_the_budget_of_a_rerun(
    workspace: Workspace,
) -> None:
    killed = Sharded(workspace, 2)
    store = RolloutStore(shard_output(killed.output, 1), killed.settings)
    store.record_unconfirmed(Cost(tokens=100, usd=0.5))
    store.close(is_complete=False)

    merge_shards(killed.output, killed.settings)

    store = RolloutStore(killed.output, killed.settings)
    assert store.spent() == Cost(tokens=100, usd=0.5)
    store.close(is_complete=False)
