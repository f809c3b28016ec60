"""Whole rollout runs against a scripted teacher: counts, aborts, resuming, failures, cancelling."""

import json
import re
import shutil
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import httpx
import pytest

from fakes.chat_endpoint import NoAnswerError, ScriptedTeacher, Served, completion, refused
from fakes.reporters import KeptReporter
from fakes.rollout_rows import read_rows, write_rows
from fakes.rollout_runs import PowerCutError, run_rollouts
from fakes.user_files import write_tools
from fakes.waiting import run_async
from stillroom.errors import DataError, InputError, RunCancelledError, TeacherError
from stillroom.rollout.rescore.request import ScoreRollouts
from stillroom.rollout.rescore.score import score_rollouts
from stillroom.rollout.results import RolloutsResult
from stillroom.settings import Workspace
from stillroom.teachers.endpoint.aiohttp_channel import AiohttpChannel
from stillroom.teachers.endpoint.http_channel import HttpReply
from stillroom.types import Usage

NUM_PROMPTS = 3
PROMPTS = [
    {"prompt": f"prompt {index}", "metadata": {"expected_answer": 12}}
    for index in range(NUM_PROMPTS)
]
OUTPUT = Path("rollouts") / "out.jsonl"
JOURNAL = Path("rollouts") / ".out.jsonl" / "journal.jsonl"


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    root = tmp_path / "workspace"
    write_rows(root / "prompts.jsonl", PROMPTS)
    return Workspace(root)


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> list[HttpReply]:
    """The replies that have reached the run, which may be fewer than those that were served."""

    async def receive(channel: AiohttpChannel, body: bytes, **options: Any) -> HttpReply:
        replies.append(await post(channel, body, **options))
        return replies[-1]

    post, replies = AiohttpChannel.post, list[HttpReply]()
    monkeypatch.setattr(AiohttpChannel, "post", receive)
    return replies


class PowerCut:
    """Cuts the run's power once, when `teacher` has served `num_served` requests."""

    def __init__(self, received: list[HttpReply], num_served: int, tool_turns: int = 1) -> None:
        self.received, self.num_served = received, num_served
        self.num_before = len(received)
        self.is_cut = False
        self.teacher = ScriptedTeacher(tool_turns=tool_turns, before=self.cut)

    async def cut(self, _served: Served) -> None:
        if len(self.teacher.served) < self.num_served:
            return
        if self.is_cut:
            # Several requests may arrive at the cut, and a power cut happens once.
            await anyio.sleep_forever()
        self.is_cut = True
        # Wait until all replies have arrived, so that the cut meets none on its way.
        while len(self.received) - self.num_before < self.num_served:
            await anyio.lowlevel.checkpoint()
        raise PowerCutError


def run_of(workspace: Workspace, teacher: ScriptedTeacher, **changes: Any) -> RolloutsResult:
    return run_rollouts(workspace, teacher.handle, **{"output": str(OUTPUT), "seed": 7, **changes})


def rows_of(workspace: Workspace) -> list[dict[str, Any]]:
    return read_rows(workspace.root / OUTPUT)


def records_of(workspace: Workspace) -> list[dict[str, Any]]:
    journal = workspace.root / JOURNAL
    return read_rows(journal) if journal.exists() else []


def conversations(rows: list[dict[str, Any]]) -> dict[tuple[str, int], Any]:
    """What the rows say, by rollout; fails where a rollout stands twice."""
    reported = {
        (row["task_id"], row["sample"]): (row["messages"], row["reward"], row["usage"])
        for row in rows
    }
    assert len(reported) == len(rows)
    return reported


def adds_up(result: RolloutsResult) -> bool:
    return (
        result.requested == result.succeeded + result.failed + result.omitted
        and result.failed == sum(result.failed_by_class.values())
        and result.already_done <= result.succeeded
    )


def test_every_prompt_gets_its_samples_and_the_counts_add_up(workspace: Workspace) -> None:
    teacher = ScriptedTeacher(tool_turns=1)

    result = run_of(workspace, teacher, samples_per_prompt=2, concurrency=3)

    assert adds_up(result)
    assert (result.requested, result.succeeded, result.already_done) == (6, 6, 0)
    assert (result.failed, result.failed_by_class, result.omitted) == (0, {}, 0)
    assert (result.rewarded, result.mean_reward, result.num_success) == (6, 1.0, 6)
    assert result.calls == len(teacher.served) == 12
    assert result.usage == Usage(prompt_tokens=120, completion_tokens=60)
    assert result.output == str(OUTPUT)
    assert len(set(teacher.served)) == 12
    rows = rows_of(workspace)
    assert len(conversations(rows)) == 6
    assert Counter(row["task_id"] for row in rows) == {row["task_id"]: 2 for row in rows}
    for row in rows:
        assert [m["role"] for m in row["messages"]] == ["user", "assistant", "tool", "assistant"]
        assert row["stop_reason"] == "answered"
        assert row["usage"] == {"prompt_tokens": 20, "completion_tokens": 10}
        assert row["teacher"]["model"] == "m"
        assert row["metadata"] == PROMPTS[0]["metadata"]
    assert not (workspace.root / JOURNAL).exists()


def test_a_run_leaves_a_manifest_and_reports_as_it_goes(workspace: Workspace) -> None:
    reporter = KeptReporter()

    run_of(workspace, ScriptedTeacher(), reporter=reporter)

    manifest = json.loads((workspace.root / f"{OUTPUT}.manifest.json").read_bytes())
    assert manifest["counts"] == {"requested": 3, "rows": 3, "failed": 0}
    assert manifest["run_id"] == "run"
    paths = [file["path"] for file in manifest["inputs"]]
    assert paths == [str(workspace.root / "prompts.jsonl")]
    (model,) = manifest["models"]
    assert (model["role"], model["name"]) == ("policy", "m")
    assert model["location"].startswith("http")
    assert reporter.progressed == [(0, 3), (1, 3), (2, 3), (3, 3)]
    reported = reporter.measured[-1]
    assert (reported["succeeded"], reported["failed"], reported["calls"], reported["tokens"]) == (
        3,
        0,
        6,
        90,
    )
    assert reported["calls_per_s"] > 0
    assert reported["at_once_allowed"] >= 1
    # Nobody knows what `m` costs, so no figure at any time says that it was nothing.
    assert not any("cost_usd" in values for values in reporter.measured)


def test_the_same_run_again_pays_for_nothing(workspace: Workspace) -> None:
    run_of(workspace, ScriptedTeacher())
    before = (workspace.root / OUTPUT).read_bytes()
    teacher = ScriptedTeacher()

    result = run_of(workspace, teacher)

    assert (teacher.requested, result.calls, result.usage) == (0, 0, Usage())
    assert (result.succeeded, result.already_done, result.mean_reward) == (3, 3, 1.0)
    assert adds_up(result)
    assert (workspace.root / OUTPUT).read_bytes() == before


def test_more_samples_are_added_to_those_that_are_there(workspace: Workspace) -> None:
    first = ScriptedTeacher()
    run_of(workspace, first, n=2)
    second = ScriptedTeacher()

    result = run_of(workspace, second, samples_per_prompt=2)

    assert (result.requested, result.succeeded, result.already_done) == (6, 6, 2)
    assert set(first.served).isdisjoint(second.served)
    assert len(conversations(rows_of(workspace))) == 6


@pytest.mark.parametrize("num_served", range(3 * NUM_PROMPTS))
def test_after_an_abort_at_any_call_no_finished_call_is_made_again(
    workspace: Workspace, tmp_path: Path, num_served: int, received: list[HttpReply]
) -> None:
    whole = ScriptedTeacher(tool_turns=2)
    run_of(Workspace(shutil.copytree(workspace.root, tmp_path / "whole")), whole, concurrency=2)

    first = PowerCut(received, num_served, tool_turns=2).teacher
    with pytest.RaisesGroup(PowerCutError, flatten_subgroups=True):
        run_of(workspace, first, concurrency=2)
    second = ScriptedTeacher(tool_turns=2)
    result = run_of(workspace, second, concurrency=2)

    assert sorted([*first.served, *second.served]) == sorted(whole.served)
    assert result.calls == len(second.served)
    assert (result.succeeded, adds_up(result)) == (NUM_PROMPTS, True)
    reported = conversations(rows_of(workspace))
    assert reported == conversations(read_rows(tmp_path / "whole" / OUTPUT))


@pytest.fixture
def unfinished(workspace: Workspace, tmp_path: Path) -> Path:
    """A workspace whose run did all but the last rollout's last call, so its journal is there."""

    async def refuse_the_last(served: Served) -> httpx.Response | None:
        number = int(served.prompt.removeprefix("prompt "))
        # A row is rewarded and written beside the next rollout's calls, which here come after it.
        with anyio.fail_after(10):
            while len(rows_of(Workspace(root)) if (root / OUTPUT).exists() else ()) < number:
                await anyio.lowlevel.checkpoint()
        return refused(400) if number == NUM_PROMPTS - 1 and served.turn == 1 else None

    root = shutil.copytree(workspace.root, tmp_path / "unfinished")
    result = run_of(Workspace(root), ScriptedTeacher(before=refuse_the_last))
    assert (result.succeeded, result.failed_by_class) == (2, {"bad_request": 1})
    return root


def resumed(root: Path, workspace: Workspace, journal: bytes, output: bytes) -> ScriptedTeacher:
    """A run that goes on from these files; all of it must be there at the end, once."""
    shutil.rmtree(workspace.root)
    shutil.copytree(root, workspace.root)
    (workspace.root / JOURNAL).write_bytes(journal)
    (workspace.root / OUTPUT).write_bytes(output)
    teacher = ScriptedTeacher()

    result = run_of(workspace, teacher)

    assert adds_up(result)
    assert (result.requested, result.succeeded, result.calls) == (3, 3, len(teacher.served))
    # Rows come in the order in which their rollouts end, and rewards are given beside the calls.
    answers = sorted(row[0][-1]["content"] for row in conversations(rows_of(workspace)).values())
    assert answers == [f"prompt {index}: the answer is 12." for index in range(NUM_PROMPTS)]
    # What may have been billed stays on record.
    assert [record["type"] for record in records_of(workspace)] in ([], ["unconfirmed"])
    return teacher


def test_a_run_goes_on_from_every_record_of_the_journal(
    unfinished: Path, workspace: Workspace
) -> None:
    journal = (unfinished / JOURNAL).read_bytes().splitlines(keepends=True)
    rows = (unfinished / OUTPUT).read_bytes().splitlines(keepends=True)
    types = [json.loads(record)["type"] for record in journal]
    # Each finished rollout wrote turn, replies, turn and then its row.
    assert [kind for kind in types if kind != "outstanding"] == (
        ["turn", "replies", "turn"] * 2 + ["turn", "replies"]
    )

    for num_records in range(len(journal) + 1):
        num_turns = types[:num_records].count("turn")
        num_steps = num_records - types[:num_records].count("outstanding")
        # A kill may come right before or right after the row is written.
        for num_rows in {num_steps // 3, max(0, (num_steps - 1) // 3)}:
            teacher = resumed(
                unfinished,
                workspace,
                b"".join(journal[:num_records]),
                b"".join(rows[:num_rows]),
            )
            assert len(teacher.served) == 2 * NUM_PROMPTS - num_turns


@pytest.mark.thorough
def test_a_run_goes_on_from_a_journal_and_an_output_torn_anywhere(
    unfinished: Path, workspace: Workspace
) -> None:
    journal = (unfinished / JOURNAL).read_bytes()
    output = (unfinished / OUTPUT).read_bytes()

    for length in range(0, len(journal), 331):
        whole = journal[:length].splitlines(keepends=True)
        num_turns = sum(
            line.endswith(b"\n") and json.loads(line)["type"] == "turn" for line in whole
        )
        teacher = resumed(unfinished, workspace, journal[:length], b"")
        assert len(teacher.served) == 2 * NUM_PROMPTS - num_turns
    for length in range(0, len(output), 401):
        # What the journal has is replayed, so a torn row costs no call.
        assert len(resumed(unfinished, workspace, journal, output[:length]).served) == 1


def test_what_a_partial_run_left_unfinished_survives_a_complete_run_of_other_prompts(
    workspace: Workspace,
) -> None:
    async def cut(served: Served) -> None:
        if served.turn == 1:
            raise PowerCutError

    first = ScriptedTeacher(before=cut)
    with pytest.RaisesGroup(PowerCutError, flatten_subgroups=True):
        run_of(workspace, first, entries="0")
    run_of(workspace, ScriptedTeacher(), entries="1")
    last = ScriptedTeacher()
    run_of(workspace, last)

    assert first.served == [("prompt 0", first.served[0][1], 0)]
    assert set(first.served).isdisjoint(last.served)


def test_a_failed_rollout_is_done_by_the_next_run(workspace: Workspace) -> None:
    async def refuse_one(served: Served) -> httpx.Response | None:
        return refused(422, "too long") if served.prompt == "prompt 1" else None

    result = run_of(workspace, ScriptedTeacher(before=refuse_one), concurrency=2)
    assert adds_up(result)
    assert (result.succeeded, result.failed, result.failed_by_class) == (2, 1, {"bad_request": 1})
    [failure] = read_rows(workspace.runs / "run" / "failures.jsonl")
    assert (failure["class"], failure["sample"], failure["turns"]) == ("bad_request", 0, 0)
    assert failure["message"] == "HTTP 422: too long"
    assert [row["reward"] for row in rows_of(workspace)] == [1.0, 1.0]

    teacher = ScriptedTeacher()
    result = run_of(workspace, teacher)

    assert {prompt for prompt, _, _ in teacher.served} == {"prompt 1"}
    assert (result.succeeded, result.already_done, result.failed) == (3, 2, 0)
    assert len(conversations(rows_of(workspace))) == 3


def test_a_third_of_all_calls_failing_loses_nothing(workspace: Workspace) -> None:
    write_rows(workspace.root / "prompts.jsonl", [{"prompt": f"prompt {i}"} for i in range(20)])
    kinds = [
        lambda: refused(429),
        lambda: refused(503),
        lambda: httpx.Response(500, headers={"retry-after": "0"}),
    ]

    async def fail_often(_served: Served) -> httpx.Response | None:
        return kinds[teacher.requested % 3]() if teacher.requested % 7 in (0, 1) else None

    teacher = ScriptedTeacher(before=fail_often)
    result = run_of(workspace, teacher, concurrency=5)

    assert adds_up(result)
    assert result.succeeded == 20
    assert result.calls == len(teacher.served) == 40
    assert teacher.requested > 50


@pytest.mark.parametrize("status", [401, 404])
def test_a_refused_key_or_model_ends_the_run_and_the_mended_one_starts_over(
    workspace: Workspace, status: int
) -> None:
    async def refuse(_served: Served) -> httpx.Response:
        return refused(status)

    teacher = ScriptedTeacher(before=refuse)
    with pytest.RaisesGroup(TeacherError, flatten_subgroups=True):
        run_of(workspace, teacher, model="mispelt")
    assert teacher.requested == 1

    # Nothing was done under the wrong name, so it binds nobody.
    assert run_of(workspace, ScriptedTeacher(), model="m").succeeded == 3


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({"model": "other"}, "model was 'm', now 'other'"),
        ({"temperature": 0.1}, "temperature was 0.7, now 0.1"),
        ({"system": "Be brief."}, "system was None, now 'Be brief.'"),
        ({"max_turns": 3}, "max_turns was 10, now 3"),
        ({"seed": 8}, "seed was 7, now 8"),
        ({"top_p": 0.5, "seed": None}, "top_p was 1.0, now 0.5; seed was 7, now None"),
        ({"termination_policy": "max_turns"}, "nudge was None"),
    ],
)
def test_changed_settings_are_refused_before_any_call(
    workspace: Workspace, changes: dict, reported: str
) -> None:
    run_of(workspace, ScriptedTeacher(), n=1)
    teacher = ScriptedTeacher()

    with pytest.raises(InputError) as caught:
        run_of(workspace, teacher, **changes)
    assert reported in caught.value.problem
    assert teacher.requested == 0
    assert run_of(workspace, ScriptedTeacher()).succeeded == 3


def test_changed_prompts_and_tools_are_refused(workspace: Workspace) -> None:
    run_of(workspace, ScriptedTeacher(), n=1)

    write_rows(workspace.root / "prompts.jsonl", [*PROMPTS, {"prompt": "one more"}])
    with pytest.raises(InputError, match="input_sha256 was"):
        run_of(workspace, ScriptedTeacher())
    write_rows(workspace.root / "prompts.jsonl", PROMPTS)
    write_tools(workspace.root, '@tool\ndef f():\n    """Do it."""\n')
    with pytest.raises(InputError, match="tools_sha256 was None"):
        run_of(workspace, ScriptedTeacher(), tools="tools.py")


ABOUT_TWELVE = """
from answers import wanted

@reward
def right(args, messages):
    return float(wanted in messages[-1]["content"])
"""


def test_rollouts_that_were_begun_with_other_rewards_go_on_and_are_then_judged_by_the_new(
    workspace: Workspace,
) -> None:
    write_tools(workspace.root, ABOUT_TWELVE, name="rewards.py")
    (workspace.root / "answers.py").write_text("wanted = 'thirteen'\n", encoding="utf-8")
    assert run_of(workspace, ScriptedTeacher(), n=1, rewards="rewards.py").mean_reward == 0
    (workspace.root / "answers.py").write_text("wanted = '12'\n", encoding="utf-8")

    with pytest.raises(InputError, match="rewards_modules was") as caught:
        run_of(workspace, ScriptedTeacher(), rewards="rewards.py")
    said = re.fullmatch(
        r"resume \S+ with (rewards=(\S+)), then score its rows .* "
        r"score_rollouts\(input=(\S+), output=<another file>\); or choose another output",
        caught.value.fix,
    )
    assert said is not None
    done = run_of(workspace, ScriptedTeacher(), rewards=said[2])
    assert (done.succeeded, done.calls, done.mean_reward) == (3, 4, 0)
    request = ScoreRollouts(input=said[3], output="scored.jsonl", rewards="rewards.py")
    folder = workspace.root / "run"
    folder.mkdir()
    scored = run_async(
        partial(score_rollouts, workspace, request, folder=folder, reporter=KeptReporter())
    )

    assert (scored.read, scored.changed, scored.mean_after) == (3, 3, 1)


def test_rewards_that_came_later_and_another_judge_are_told_apart_in_what_to_do(
    workspace: Workspace,
) -> None:
    run_of(workspace, ScriptedTeacher(), n=1)
    write_tools(
        workspace.root, "@reward\ndef f(args, messages):\n    return 1\n", name="rewards.py"
    )

    with pytest.raises(InputError) as caught:
        run_of(workspace, ScriptedTeacher(), rewards="rewards.py")
    assert "out.jsonl with rewards=none, then score" in caught.value.fix
    with pytest.raises(InputError) as caught:
        run_of(workspace, ScriptedTeacher(), answer_match="exact")
    assert "out.jsonl with the original judge and rewards, then score" in caught.value.fix
    with pytest.raises(InputError) as caught:
        run_of(workspace, ScriptedTeacher(), answer_match="exact", seed=1)
    assert "score_rollouts" not in caught.value.fix


@pytest.mark.parametrize("num_served", [0, 1, 4])
def test_a_cancelled_run_keeps_what_it_has_and_can_go_on(
    workspace: Workspace, num_served: int
) -> None:
    async def stop(_served: Served) -> None:
        if len(first.served) == num_served:
            await anyio.sleep_forever()

    def has_come_to_a_stop() -> bool:
        """Whether the next call hangs and all rollouts before it have ended."""
        num_done = reporter.progressed[-1][0] if reporter.progressed else -1
        return first.requested > num_served and num_done == num_served // 2

    first = ScriptedTeacher(before=stop)
    reporter = KeptReporter(stop_when=has_come_to_a_stop)
    with pytest.raises(RunCancelledError) as stopped:
        run_of(workspace, first, reporter=reporter, max_concurrency=1)
    partial = stopped.value.result
    assert isinstance(partial, RolloutsResult)
    assert (partial.succeeded, adds_up(partial)) == (num_served // 2, True)
    assert partial.omitted == NUM_PROMPTS - num_served // 2
    assert len(rows_of(workspace)) == num_served // 2
    second = ScriptedTeacher()
    result = run_of(workspace, second)

    assert set(first.served).isdisjoint(second.served)
    assert len(first.served) + len(second.served) == 6
    assert (result.succeeded, adds_up(result)) == (3, True)
    assert len(conversations(rows_of(workspace))) == 3


def test_tools_and_rewards_of_the_users_take_part(workspace: Workspace) -> None:
    write_tools(
        workspace.root,
        '''
        @tool
        def price(item: str, turn: int) -> int:
            """Price of an item."""
            print("looking up", item)
            if item == "prompt 1":
                raise ValueError("no such item")
            return 12 + turn
        ''',
    )
    write_tools(
        workspace.root,
        """
        @reward
        def found(args, messages):
            if messages[0]["content"] == "prompt 2":
                raise RuntimeError("cannot judge")
            return float(messages[2]["content"] == str(args.metadata["expected_answer"]))
        """,
        name="rewards.py",
    )

    result = run_of(workspace, ScriptedTeacher(), tools="tools.py", rewards="rewards.py")

    assert adds_up(result)
    assert (result.succeeded, result.failed_by_class) == (2, {"reward": 1})
    good, bad = rows_of(workspace)
    assert (good["reward"], good["success"], good["tool_errors"]) == (1.0, True, 0)
    assert good["messages"][2]["content"] == "12"
    assert good["tools"][0]["function"]["name"] == "price"
    assert (bad["reward"], bad["success"], bad["tool_errors"]) == (0.0, False, 1)
    assert bad["messages"][2]["content"] == "error: no such item"


def test_calls_that_the_endpoint_leaves_in_the_text_are_calls_and_never_answers(
    workspace: Workspace,
) -> None:
    texts = {
        "prompt 0": '<tool_call>{"name": "price", "arguments": {"item": "lamp"}}</tool_call>',
        "prompt 1": '<tool_call>{"name": "price", "arguments": {"item": "12</tool_call>',
        "prompt 2": "<function=price>12</function>",
    }

    async def as_text(served: Served) -> httpx.Response | None:
        is_first = served.turn == 0 or served.prompt == "prompt 2"
        return completion(texts[served.prompt]) if is_first else None

    write_tools(
        workspace.root, '@tool\ndef price(item: str) -> str:\n    """Price."""\n    return "12"\n'
    )
    reporter = KeptReporter()
    result = run_of(
        workspace, ScriptedTeacher(before=as_text), reporter=reporter, tools="tools.py", max_turns=3
    )

    by_prompt = {row["messages"][0]["content"]: row for row in rows_of(workspace)}
    good, mended, bad = (by_prompt[prompt] for prompt in texts)
    assert (good["messages"][2]["content"], good["reward"]) == ("12", 1.0)
    assert "not valid JSON" in mended["messages"][2]["content"]
    assert (mended["stop_reason"], mended["tool_errors"], mended["reward"]) == ("answered", 1, 1.0)
    assert (bad["stop_reason"], bad["success"]) == ("max_turns", False)
    assert (result.succeeded, result.num_success) == (3, 2)
    [note] = [note for note in reporter.notes if "left tool calls in the text" in note]
    assert "--tool-call-parser" in note


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (
            {"prompt": "a", "tools": ["prize"]},
            "names the unknown tool 'prize'; the tools are: price",
        ),
        ({"prompt": "a", "rewards": ["nice"]}, "names the reward 'nice'"),
        ({"prompt": ""}, "prompt is empty"),
    ],
)
def test_prompts_that_cannot_be_answered_are_refused_before_any_call(
    workspace: Workspace, row: dict, text: str
) -> None:
    write_rows(workspace.root / "prompts.jsonl", [*PROMPTS, row])
    tool = '@tool\ndef price():\n    """Price."""\n'
    reward = "@reward\ndef right(args, messages):\n    return 1.0\n"
    write_tools(workspace.root, tool)
    write_tools(workspace.root, reward, name="rewards.py")
    teacher = ScriptedTeacher()

    with pytest.raises(DataError, match=text):
        run_of(workspace, teacher, tools="tools.py", rewards="rewards.py")
    assert teacher.requested == 0


def test_a_system_message_takes_the_place_of_the_rows_own(workspace: Workspace) -> None:
    rows = [
        {"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "a"}]},
        {"prompt": "b"},
    ]
    write_rows(workspace.root / "prompts.jsonl", rows)

    run_of(workspace, ScriptedTeacher(tool_turns=0), system="Be brief.")

    for row, prompt in zip(rows_of(workspace), "ab", strict=True):
        assert row["messages"][:2] == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": prompt},
        ]


def test_a_prompt_that_stands_twice_is_answered_twice(workspace: Workspace) -> None:
    write_rows(workspace.root / "prompts.jsonl", [PROMPTS[0], PROMPTS[0]])

    result = run_of(workspace, ScriptedTeacher(), samples_per_prompt=2)

    assert (result.requested, result.succeeded) == (4, 4)
    assert sorted(row["sample"] for row in rows_of(workspace)) == [0, 1, 2, 3]


def test_a_truncated_answer_and_a_missing_reward_are_counted(workspace: Workspace) -> None:
    write_rows(workspace.root / "prompts.jsonl", [{"prompt": "a"}, PROMPTS[0]])

    async def cut(served: Served) -> httpx.Response | None:
        return completion("12 an", finish_reason="length") if served.prompt == "a" else None

    result = run_of(workspace, ScriptedTeacher(tool_turns=0, before=cut))

    assert (result.truncated, result.rewarded, result.mean_reward) == (1, 1, 1.0)
    assert (result.num_success, result.succeeded) == (1, 2)
    first, _ = rows_of(workspace)
    assert (first["stop_reason"], first["truncated"]) == ("max_tokens", True)
    assert (first["reward"], first["success"]) == (None, None)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"output": "../out.jsonl"}, "outside the workspace"),
        ({"output": "prompts.jsonl"}, "was not written by generate_rollouts"),
        ({"output": "folder"}, "folder"),
        ({"input": "folder"}, "folder"),
        ({"input": "none.jsonl"}, "does not exist"),
        ({"entries": "3"}, "out of range: the file has prompts 0-2"),
    ],
)
def test_a_run_that_cannot_be_done_is_refused_and_leaves_the_files_alone(
    workspace: Workspace, changes: dict, text: str
) -> None:
    (workspace.root / "folder").mkdir()
    before = (workspace.root / "prompts.jsonl").read_bytes()
    teacher = ScriptedTeacher()

    with pytest.raises((InputError, DataError), match=text):
        run_of(workspace, teacher, **changes)
    assert teacher.requested == 0
    assert (workspace.root / "prompts.jsonl").read_bytes() == before
    assert not (workspace.root / OUTPUT).exists()


def write_prompts(workspace: Workspace, count: int) -> None:
    write_rows(workspace.root / "prompts.jsonl", [{"prompt": f"prompt {i}"} for i in range(count)])


def write_price(workspace: Workspace) -> None:
    """Half a dollar for what a call writes; up to two dollars with `max_tokens` 20."""
    (workspace.root / "prices.yml").write_text("m: {input: 0, output: 100000}\n", encoding="utf-8")


def billed_usd(*teachers: ScriptedTeacher) -> float:
    return 0.5 * sum(len(teacher.served) for teacher in teachers)


@pytest.mark.parametrize(("concurrency", "most"), [(1, 1), (1, None), (8, None)])
def test_a_budget_is_never_exceeded_and_a_higher_one_goes_on_from_there(
    workspace: Workspace, concurrency: int, most: int | None
) -> None:
    write_prompts(workspace, 10)
    write_price(workspace)
    many: dict[str, Any] = {
        "max_tokens": 20,
        "concurrency": concurrency,
        "max_concurrency": most,
    }
    first, same, second = ScriptedTeacher(), ScriptedTeacher(), ScriptedTeacher()

    result = run_of(workspace, first, budget_usd=5.0, **many)

    assert result.stopped_by == "budget_usd"
    assert (result.requested, result.failed, adds_up(result)) == (10, 0, True)
    assert result.omitted > 0
    assert result.calls == len(first.served)
    # As much as fits is done: one more call could have cost two dollars.
    assert 3.0 < billed_usd(first) <= 5.0
    assert result.cost_usd == billed_usd(first)

    assert run_of(workspace, same, budget_usd=5.0, **many).stopped_by == "budget_usd"
    assert same.requested == 0

    result = run_of(workspace, second, budget_usd=50.0, **many)
    assert (result.succeeded, result.omitted, result.stopped_by) == (10, 0, None)
    assert adds_up(result)
    assert set(first.served).isdisjoint(second.served)
    assert billed_usd(first, second) == 10.0
    assert sum(row["cost_usd"] for row in rows_of(workspace)) == 10.0


def test_a_limit_of_tokens_is_kept_in_the_same_way(workspace: Workspace) -> None:
    write_prompts(workspace, 60)
    first, second = ScriptedTeacher(), ScriptedTeacher()
    many: dict[str, Any] = {"max_tokens": 20, "concurrency": 8}

    result = run_of(workspace, first, max_total_tokens=1200, **many)

    assert result.stopped_by == "max_total_tokens"
    assert (result.requested, result.failed, adds_up(result)) == (60, 0, True)
    assert 0 < result.succeeded < 60
    assert 15 * len(first.served) <= 1200

    result = run_of(workspace, second, max_total_tokens=100_000, **many)
    assert (result.succeeded, result.stopped_by, adds_up(result)) == (60, None, True)
    assert set(first.served).isdisjoint(second.served)
    assert len(first.served) + len(second.served) == 120


@pytest.mark.parametrize(
    "usage",
    [
        # Texts of the provider's own, or pictures; thinking that max_tokens does not bound.
        {"prompt_tokens": 1000, "completion_tokens": 10},
        {"prompt_tokens": 10, "completion_tokens": 1000},
        {"prompt_tokens": 10, "completion_tokens": 10, "total_tokens": 1000},
        {"prompt_tokens": 800, "completion_tokens": 200},
    ],
)
def test_an_endpoint_that_takes_more_than_the_worst_case_is_known_by_its_first_answer(
    workspace: Workspace, usage: dict[str, int]
) -> None:
    async def greedy(_served: Served) -> httpx.Response:
        return completion("12", usage=usage)

    write_prompts(workspace, 10)
    one: dict[str, Any] = {"max_tokens": 20, "max_concurrency": 1}
    result = run_of(workspace, ScriptedTeacher(before=greedy), max_total_tokens=5250, **one)

    assert result.stopped_by == "max_total_tokens"
    assert 3000 < result.usage.prompt_tokens + result.usage.completion_tokens <= 5250


def test_a_price_that_is_higher_than_the_table_says_is_known_by_the_first_answer(
    workspace: Workspace,
) -> None:
    async def dear(_served: Served) -> httpx.Response:
        return completion("12", usage={"prompt_tokens": 5, "completion_tokens": 20, "cost": 3.0})

    write_prompts(workspace, 10)
    write_price(workspace)
    one: dict[str, Any] = {"max_tokens": 20, "max_concurrency": 1}
    result = run_of(workspace, ScriptedTeacher(before=dear), budget_usd=8.5, **one)

    # Two dollars at most, as far as the table knows.
    assert (result.stopped_by, result.cost_usd) == ("budget_usd", 6.0)


def test_a_run_whose_rollouts_all_fail_is_given_up(workspace: Workspace) -> None:
    write_prompts(workspace, 25)

    async def overloaded(_served: Served) -> httpx.Response:
        return refused(500, "overloaded")

    with pytest.RaisesGroup(
        pytest.RaisesExc(TeacherError, match="first 20 rollouts all failed, .*overloaded"),
        flatten_subgroups=True,
    ):
        run_of(workspace, ScriptedTeacher(before=overloaded), max_concurrency=1)
    assert len(read_rows(workspace.runs / "run" / "failures.jsonl")) == 20

    assert run_of(workspace, ScriptedTeacher()).succeeded == 25


def test_a_tools_reply_that_is_too_long_is_cut_and_says_so(workspace: Workspace) -> None:
    write_tools(
        workspace.root,
        '''
        @tool
        def price(item: str, turn: int) -> str:
            """Price of an item."""
            return "x" * (100 if item == "prompt 1" else 10)
        ''',
    )

    run_of(workspace, ScriptedTeacher(), tools="tools.py", max_tool_response=10, n=2)

    replies = {row["messages"][0]["content"]: row["messages"][2] for row in rows_of(workspace)}
    assert replies["prompt 0"]["content"] == "x" * 10
    assert replies["prompt 1"]["content"] == ("x" * 10 + "\n[cut: 10 of 100 characters are shown]")


def test_a_budget_in_dollars_without_a_price_is_refused_before_any_call(
    workspace: Workspace,
) -> None:
    teacher = ScriptedTeacher()

    with pytest.raises(InputError, match=r"budget_usd needs the price of 'm'") as caught:
        run_of(workspace, teacher, budget_usd=5.0)
    assert "prices.yml" in caught.value.fix
    assert teacher.requested == 0

    write_price(workspace)
    assert run_of(workspace, teacher, budget_usd=50.0, max_tokens=20).succeeded == NUM_PROMPTS


@pytest.mark.thorough
def test_calls_that_may_have_been_billed_count_in_the_next_run(workspace: Workspace) -> None:
    write_price(workspace)

    async def slow(_served: Served) -> httpx.Response:
        raise NoAnswerError

    call_request = 0
    for _ in range(3):
        teacher = ScriptedTeacher(before=slow)
        run_of(workspace, teacher, budget_usd=5.0, max_tokens=20, max_concurrency=1)
        call_request += teacher.requested
    assert 1 <= call_request <= 2


def test_a_resumed_run_is_not_given_up_for_prompts_that_always_fail(workspace: Workspace) -> None:
    write_prompts(workspace, 45)

    def only(prompt: str) -> ScriptedTeacher:
        async def refuse(served: Served) -> httpx.Response | None:
            return None if served.prompt == prompt else refused(400)

        return ScriptedTeacher(before=refuse)

    assert run_of(workspace, only("prompt 0"), max_concurrency=1).succeeded == 1
    assert run_of(workspace, only("prompt 44"), max_concurrency=1).succeeded == 2


@pytest.mark.parametrize("limit", [{"max_total_tokens": 100}, {"max_minutes": 1e-6}])
def test_a_model_in_this_process_keeps_to_the_limits_too(
    workspace: Workspace, limit: dict[str, float]
) -> None:
    demo = {"provider": "demo", "model": "teacher", "base_url": None, "max_tokens": 8}

    result = run_of(workspace, ScriptedTeacher(), **demo, **limit)

    [name] = limit
    assert (result.stopped_by, adds_up(result)) == (name, True)
    # The minutes begin with the first turn.
    assert result.succeeded <= (name == "max_minutes")
    assert run_of(workspace, ScriptedTeacher(), **demo).succeeded == NUM_PROMPTS


@pytest.mark.thorough
def test_a_rollout_that_takes_too_long_has_failed_and_goes_on_from_there(
    workspace: Workspace,
) -> None:
    async def hang(served: Served) -> None:
        if served.prompt == "prompt 1" and served.turn == 1:
            await anyio.sleep_forever()

    first = ScriptedTeacher(before=hang)
    result = run_of(workspace, first, concurrency=3, rollout_timeout=2)

    assert adds_up(result)
    assert (result.succeeded, result.failed_by_class) == (2, {"rollout_timeout": 1})
    # Its last call broke off on its way, and the price of this model is not known.
    assert (result.calls, result.unconfirmed_usd) == (5, 0)
    [failure] = read_rows(workspace.runs / "run" / "failures.jsonl")
    assert (failure["class"], failure["turns"]) == ("rollout_timeout", 1)
    assert "after 2 s" in failure["message"]

    second = ScriptedTeacher()
    result = run_of(workspace, second, concurrency=3)
    assert (result.succeeded, result.failed, result.calls) == (3, 0, 1)
    assert second.served == [("prompt 1", second.served[0][1], 1)]


def test_a_reward_that_takes_too_long_has_failed_by_its_class(workspace: Workspace) -> None:
    write_tools(
        workspace.root,
        """
        import time

        @reward
        def slow(args, messages):
            time.sleep(60 * (messages[0]["content"] == "prompt 1"))
            return 1.0
        """,
        name="rewards.py",
    )

    result = run_of(workspace, ScriptedTeacher(), rewards="rewards.py", reward_timeout=2)

    assert adds_up(result)
    assert (result.succeeded, result.failed_by_class) == (2, {"reward_timeout": 1})
    again = run_of(workspace, ScriptedTeacher(), rewards="rewards.py", reward_timeout=2)
    # The turns were paid for once; only the reward is asked for again.
    assert (again.calls, again.failed_by_class) == (0, {"reward_timeout": 1})
