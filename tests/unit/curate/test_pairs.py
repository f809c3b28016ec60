import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from fakes.folders import names_in
from fakes.foreign_rollouts import GYM_ROW, RNOW_ROW, write_rnow
from fakes.rollout_lines import BAD_LINES, encoded, rollout_lines
from fakes.rollout_rows import (
    assistant,
    read_rows,
    rollout_row,
    tool_call,
    tool_reply,
    user,
    write_lines,
)
from stillroom.curate.pairs import MakeDpoPairs, PairsResult, make_dpo_pairs
from stillroom.data.formats import load_dpo_rows
from stillroom.data.row_names import RowNames
from stillroom.errors import DataError, InputError
from stillroom.lineage import read_manifest
from stillroom.settings import Workspace


def pairs_of(folder: Path, **options: Any) -> PairsResult:
    if "chosen_from" not in options:
        options = {"input": "rollouts.jsonl", **options}
    return make_dpo_pairs(Workspace(folder), MakeDpoPairs(**{"output": "pairs.jsonl", **options}))


def answers(*rewards: float | None, task_id: str = "t") -> list[dict]:
    """Rollouts of one task, each with an answer of its own."""
    return [
        rollout_row(
            task_id=task_id,
            sample=index,
            messages=[user("What?"), assistant(f"{task_id}{index}")],
            reward=reward,
        )
        for index, reward in enumerate(rewards)
    ]


def texts_of(folder: Path, rows: list[dict], **options: Any) -> list[str]:
    """The pairs as `chosen>rejected`."""
    write_lines(folder / "rollouts.jsonl", map(encoded, rows))
    pairs_of(folder, **options)
    return [
        f"{row['chosen'][0]['content']}>{row['rejected'][0]['content']}"
        for row in read_rows(folder / "pairs.jsonl")
    ]


@pytest.mark.parametrize(
    ("options", "pairs"),
    [
        ({}, ["t1>t2"]),
        ({"strategy": "adjacent"}, ["t1>t0", "t3>t2", "t0>t3"]),
        (
            {"strategy": "all"},
            ["t1>t2", "t1>t3", "t0>t2", "t1>t0", "t3>t2", "t0>t3"],
        ),
        ({"strategy": "all", "max_pairs_per_task": 2}, ["t1>t2", "t1>t3"]),
        ({"strategy": "all", "min_difference": 0.5}, ["t1>t2", "t1>t3", "t0>t2"]),
    ],
)
def test_rollouts_are_paired_as_the_strategy_says(
    tmp_path: Path, options: dict, pairs: list[str]
) -> None:
    rows = answers(0.625, 1.0, 0.0, 0.25)

    found = texts_of(tmp_path, rows, **options)

    assert sorted(found) == sorted(pairs)
    differences = [row["quality_difference"] for row in read_rows(tmp_path / "pairs.jsonl")]
    assert differences == sorted(differences, reverse=True)


def test_rollouts_that_say_no_task_are_of_one_where_their_prompts_are_equal(
    tmp_path: Path,
) -> None:
    nameless = [
        {**row, "task_id": task_id}
        for prompt in ("x", "y")
        for task_id, row in zip(("", None), answers(1, 0, task_id=prompt), strict=True)
    ]
    for row in nameless:
        row["messages"][0] = user(row["id"][0])

    assert texts_of(tmp_path, [*nameless, *answers(1, 0, task_id="a")]) == [
        "x0>x1",
        "y0>y1",
        "a0>a1",
    ]
    x, y, _ = (row["task_id"] for row in read_rows(tmp_path / "pairs.jsonl"))
    assert len(x) == len(y) == 16
    assert x != y


@pytest.mark.parametrize(("high", "low"), [(0.5, 0.4), (1.0, 0.9), (0.3, 0.2), (0.7, 0.6)])
def test_a_difference_of_just_the_least_one_is_enough(
    tmp_path: Path, high: float, low: float
) -> None:
    assert texts_of(tmp_path, answers(high, low), min_difference=0.1) == ["t0>t1"]


def test_what_cannot_be_paired_is_counted_with_its_reason(tmp_path: Path) -> None:
    rows = [
        *answers(1, 0, None, task_id="a"),
        *answers(0.5, 0.55, task_id="b"),
        *answers(1, task_id="c"),
        rollout_row(task_id="d", messages=[user("x")]),
        {**rollout_row(task_id="e"), "reward": 1.0},
        {**rollout_row(task_id="e"), "reward": 0.0},
    ]
    write_lines(tmp_path / "rollouts.jsonl", [*map(encoded, rows), b"{broken"])

    result = pairs_of(tmp_path)

    assert (result.pairs, result.tasks_with_pairs, result.mean_difference) == (1, 1, 1.0)
    assert result.skipped == {
        "rollout without a reward": 1,
        "task whose rewards differ too little": 1,
        "task with a single rollout": 1,
        "rollout without an assistant message": 1,
        "pair of equal conversations": 1,
        "not a rollout row": 1,
    }
    # Seven of the ten lines can take part; they are of four tasks.
    assert (result.read, result.tasks) == (10, 4)


def shared(*rest: dict) -> list[dict]:
    return [user("How much?"), assistant(None, tool_call(call_id="x")), tool_reply("7", "x"), *rest]


def test_a_pair_is_cut_where_the_two_part(tmp_path: Path) -> None:
    good = [*shared(assistant("7")), user("And two?"), assistant("14")]
    bad_call = tool_call("price", "other-id", '{"n": 2}')
    bad = [*shared(assistant(None, bad_call)), tool_reply("14", "other-id"), assistant("14")]
    # The same call under another id is the same turn.
    bad[1:3] = [assistant(None, tool_call(call_id="y")), tool_reply("7", "y")]
    rows = [
        rollout_row(task_id="t", messages=good, reward=1),
        rollout_row(task_id="t", messages=bad, reward=0),
    ]
    write_lines(tmp_path / "rollouts.jsonl", map(encoded, rows))

    pairs_of(tmp_path)
    [pair] = read_rows(tmp_path / "pairs.jsonl")
    assert pair["prompt"] == good[:3]
    assert (pair["chosen"], pair["rejected"]) == ([good[3]], [bad[3]])

    pairs_of(tmp_path, cut="none")
    [pair] = read_rows(tmp_path / "pairs.jsonl")
    assert pair["prompt"] == good[:3]
    assert (pair["chosen"], pair["rejected"]) == (good[3:], bad[3:])
    assert len(load_dpo_rows(tmp_path / "pairs.jsonl")) == 1


def test_weights_are_kept_and_are_no_difference_between_conversations(tmp_path: Path) -> None:
    good = [*shared(assistant("7") | {"weight": 0}), user("And two?"), assistant("14")]
    bad = [*shared(assistant("7")), user("And two?"), assistant("15")]
    rows = [
        rollout_row(task_id="t", messages=good, reward=1),
        rollout_row(task_id="t", messages=bad, reward=0),
        rollout_row(task_id="u", messages=[*good[:-1], good[-1] | {"weight": 0}], reward=1),
        rollout_row(task_id="u", messages=bad, reward=0),
    ]
    write_lines(tmp_path / "rollouts.jsonl", map(encoded, rows))

    result = pairs_of(tmp_path)

    [pair] = read_rows(tmp_path / "pairs.jsonl")
    assert pair["prompt"] == good[:-1]
    assert (pair["chosen"], pair["rejected"]) == (good[-1:], bad[-1:])
    assert result.skipped == {"pair in which an answer has only turns of weight 0": 1}


@pytest.mark.parametrize(
    "rejected",
    [[*shared()[:2], tool_reply("8", "x"), assistant("8")], shared(assistant("7"))],
    ids=["part at a tool's reply", "one begins the other"],
)
def test_conversations_that_differ_in_no_answer_make_no_pair(
    tmp_path: Path, rejected: list[dict]
) -> None:
    chosen = shared(assistant("7"), user("more?"), assistant("no"))
    rows = [
        rollout_row(task_id="t", messages=chosen, reward=1),
        rollout_row(task_id="t", messages=rejected, reward=0),
        *answers(1, 0, task_id="u"),
    ]

    assert texts_of(tmp_path, rows) == ["u0>u1"]
    assert pairs_of(tmp_path).skipped == {"pair that first differs in a tool's reply": 1}


def test_the_chosen_and_the_rejected_may_come_from_different_files(tmp_path: Path) -> None:
    teacher, student = answers(1.0, 0.5), answers(0.25, 0.75)
    for row in student:
        row["messages"][1] = assistant(f"s{row['sample']}")
    write_lines(tmp_path / "teacher.jsonl", map(encoded, [*teacher, *answers(1, task_id="only")]))
    student += answers(0, task_id="other")
    write_lines(tmp_path / "student.jsonl", map(encoded, student))
    sources = {"chosen_from": "teacher.jsonl", "rejected_from": "student.jsonl"}

    result = pairs_of(tmp_path, **sources, strategy="all")

    rows = read_rows(tmp_path / "pairs.jsonl")
    assert [(row["chosen"][0]["content"], row["rejected"][0]["content"]) for row in rows] == [
        ("t0", "s0"),
        ("t0", "s1"),
        ("t1", "s0"),
    ]
    assert (result.read, result.tasks, result.tasks_with_pairs, result.pairs) == (6, 2, 1, 3)
    assert result.skipped == {
        "task only in chosen_from": 1,
        "task only in rejected_from": 1,
    }
    manifest = json.loads((tmp_path / "pairs.jsonl.manifest.json").read_bytes())
    assert [Path(f["path"]).name for f in manifest["inputs"]] == ["teacher.jsonl", "student.jsonl"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"input": "a", "chosen_from": "b", "rejected_from": "c"},
        {"chosen_from": "b"},
        {"input": "a", "rejected_from": "c"},
        {"chosen_from": "b", "rejected_from": "c", "strategy": "adjacent"},
        {"input": "a", "min_difference": 0},
        {"input": "a", "max_pairs_per_task": 0},
    ],
)
def test_a_request_that_is_not_clear_is_refused(options: dict) -> None:
    with pytest.raises(ValidationError):
        MakeDpoPairs(output="pairs.jsonl", **options)


def test_tools_and_metadata_of_the_chosen_are_taken_byte_for_byte(tmp_path: Path) -> None:
    tools = rb'"tools":[{"function":{"name":"f","parameters":{"b":1.00, "a":null}}}]'
    rest = rb'"stop_reason":"answered",%s,"metadata":{"x": -0.0}' % tools
    lines = [
        rb'{"task_id":"t","reward":1,"messages":[{"role":"assistant","content":"\u00fc"}],%s}'
        % rest,
        rb'{"task_id":"t","reward":0,"messages":[{"role":"assistant","content":"b"}],%s}' % rest,
    ]
    # One file begins with a mark and has DOS lines; what is copied must not shift.
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(lines))

    pairs_of(tmp_path)

    line = (tmp_path / "pairs.jsonl").read_bytes()
    assert tools in line
    assert rb'"metadata":{"x": -0.0}' in line
    assert json.loads(line)["chosen"][0]["content"] == "ü"


@pytest.mark.parametrize("output", ["rollouts/a.jsonl", "link.jsonl"])
@pytest.mark.parametrize("kind", ["file", "folder", "sides"])
def test_rollouts_are_never_replaced_by_their_pairs(tmp_path: Path, kind: str, output: str) -> None:
    path = write_lines(tmp_path / "rollouts" / "a.jsonl", map(encoded, answers(1, 0)))
    write_lines(tmp_path / "other.jsonl", map(encoded, answers(1, 0)))
    (tmp_path / "link.jsonl").symlink_to(path)
    before = path.read_bytes()
    sources = {
        "file": {"input": "rollouts/a.jsonl"},
        "folder": {"input": "rollouts"},
        "sides": {"chosen_from": "other.jsonl", "rejected_from": "rollouts/a.jsonl"},
    }

    with pytest.raises(InputError, match="is also an input"):
        pairs_of(tmp_path, output=output, **sources[kind])
    assert path.read_bytes() == before


def test_without_a_pair_the_old_file_stays_and_the_error_says_why(tmp_path: Path) -> None:
    write_lines(tmp_path / "pairs.jsonl", [b"old"])
    write_lines(tmp_path / "rollouts.jsonl", map(encoded, answers(1, 1, None)))

    with pytest.raises(DataError) as caught:
        pairs_of(tmp_path, overwrite=True)
    assert "rollout without a reward: 1" in caught.value.problem
    assert "task whose rewards differ too little: 1" in caught.value.problem
    assert "samples_per_prompt" in caught.value.fix
    assert (tmp_path / "pairs.jsonl").read_bytes() == b"old\n"
    assert names_in(tmp_path) == ["pairs.jsonl", "rollouts.jsonl"]


@settings(max_examples=50)
@given(
    st.lists(rollout_lines() | st.sampled_from(BAD_LINES), max_size=10),
    st.sampled_from(["best_worst", "all", "adjacent"]),
    st.sampled_from(["first_turn", "none"]),
    st.none() | st.integers(1, 2),
)
def test_pairs_are_two_different_answers_to_one_task_in_the_right_order(
    tmp_path_factory: pytest.TempPathFactory,
    lines: list[bytes],
    strategy: str,
    cut: str,
    most: int | None,
) -> None:
    folder = tmp_path_factory.mktemp("pairs")
    write_lines(folder / "rollouts.jsonl", lines)
    good = [json.loads(line) for line in lines if line not in BAD_LINES]
    by_task = {
        task_id: [row for row in good if row["task_id"] == task_id and row["reward"] is not None]
        for task_id in {row["task_id"] for row in good}
    }

    try:
        result = pairs_of(folder, strategy=strategy, cut=cut, max_pairs_per_task=most)
    except DataError:
        assert not (folder / "pairs.jsonl").exists()
        return

    assert result.read == len(lines)
    assert result.tasks == sum(bool(rows) for rows in by_task.values())
    assert result.skipped.get("not a rollout row", 0) == len(lines) - len(good)
    pairs = read_rows(folder / "pairs.jsonl")
    assert len(load_dpo_rows(folder / "pairs.jsonl")) == len(pairs) == result.pairs
    per_task = [
        len(list(group)) for _, group in itertools.groupby(pairs, lambda pair: pair["task_id"])
    ]
    assert len(per_task) == result.tasks_with_pairs
    assert all(most is None or count <= most for count in per_task)
    for pair in pairs:
        rows = by_task[pair["task_id"]]
        chosen = [row for row in rows if _continues(row, pair, "chosen")]
        rejected = [row for row in rows if _continues(row, pair, "rejected")]
        assert any(
            one["reward"] - other["reward"] == pair["quality_difference"] > 0.0999
            for one in chosen
            for other in rejected
        )


def _continues(row: dict, pair: dict, side: str) -> bool:
    messages = [*pair["prompt"], *pair[side]]
    return _plain(row["messages"][: len(messages)]) == _plain(messages)


def _plain(messages: list[dict]) -> list[dict]:
    """Messages without the ids of their calls."""
    plain = [
        {k: v for k, v in m.items() if k not in ("tool_call_id", "tool_calls")} for m in messages
    ]
    for message, reported in zip(messages, plain, strict=True):
        reported["calls"] = [call["function"] for call in message.get("tool_calls", [])]
    return plain


def test_rollouts_of_other_systems_are_paired_by_their_tasks(tmp_path: Path) -> None:
    worse_talk = [*RNOW_ROW["conversation"][:2], assistant("36")]
    worse = {**RNOW_ROW, "conversation": worse_talk, "total_reward": 0.25}
    failed = {**RNOW_ROW, "completed": "error", "success": False, "total_reward": 0}
    write_rnow(tmp_path / "rollouts", RNOW_ROW, worse, failed)
    said = {"type": "message", "role": "assistant", "content": "It costs 9."}
    wrong = {**GYM_ROW, "reward": 0.0, "response": {**GYM_ROW["response"], "output": [said]}}
    write_lines(tmp_path / "rollouts" / "gym.jsonl", map(encoded, [GYM_ROW, wrong]))

    result = pairs_of(tmp_path, input="rollouts")

    assert (result.read, result.tasks, result.pairs) == (5, 2, 2)
    assert result.skipped == {"rollout without a reward": 1}
    manifest = read_manifest(tmp_path / "pairs.jsonl")
    assert manifest is not None
    [teacher] = manifest.models
    assert (teacher.role, teacher.name, teacher.location) == ("policy", "m", "nemo_gym")
    assert [(one.model, one.rows) for one in teacher.answered_by] == [("m", 1)]
    gym, rnow = load_dpo_rows(tmp_path / "pairs.jsonl")
    assert gym.rejected == [{"role": "assistant", "content": "It costs 9."}]
    assert gym.chosen[0]["reasoning_content"] == "I look it up."
    assert rnow.prompt == RNOW_ROW["conversation"][:2]
    assert (rnow.chosen, rnow.rejected) == ([RNOW_ROW["conversation"][2]], [worse_talk[2]])


def test_two_hundred_rollouts_of_a_task_are_paired_from_the_largest_difference_down(
    tmp_path: Path,
) -> None:
    rows = answers(*[index / 256 for index in range(200)])
    write_lines(tmp_path / "rollouts.jsonl", map(encoded, rows))

    result = pairs_of(tmp_path, strategy="all", max_pairs_per_task=500, min_difference=0.5)

    assert (result.pairs, result.tasks_with_pairs) == (500, 1)
    differences = [row["quality_difference"] for row in read_rows(tmp_path / "pairs.jsonl")]
    every = [(one - other) / 256 for one in range(200) for other in range(one)]
    assert differences == sorted(every, reverse=True)[:500]


def test_a_pair_of_rollouts_that_are_in_the_file_several_times_says_which_of_them_it_is_made_of(
    tmp_path: Path,
) -> None:
    good, bad, middling = map(encoded, answers(1, 0, 0.5))
    lines = [good, bad, good, middling, good]
    write_lines(tmp_path / "rollouts.jsonl", lines)

    pairs_of(tmp_path, strategy="all")

    names = RowNames()
    named = [names.name(tmp_path, line.strip()) for line in lines]
    pairs = read_rows(tmp_path / "pairs.jsonl")
    assert [(pair["chosen_id"], pair["rejected_id"]) for pair in pairs] == [
        *((named[index], named[1]) for index in (0, 2, 4)),
        *((named[index], named[3]) for index in (0, 2, 4)),
        (named[3], named[1]),
    ]


def test_pairs_of_an_instructed_teacher_and_its_student_begin_alike(tmp_path: Path) -> None:
    rules = {"role": "system", "content": "Add seven to each price."}
    asked = user("What?")
    rows = [
        rollout_row(task_id="t", messages=[rules, asked, assistant("19")], reward=1.0),
        rollout_row(task_id="t", sample=1, messages=[asked, assistant("12")], reward=0.0),
    ]
    write_lines(tmp_path / "rollouts.jsonl", map(encoded, rows))

    pairs_of(tmp_path, system="")

    [pair] = read_rows(tmp_path / "pairs.jsonl")
    assert pair["prompt"] == [asked]
    assert (pair["chosen"], pair["rejected"]) == ([assistant("19")], [assistant("12")])
    pairs_of(tmp_path, system="Be short.", overwrite=True)
    [pair] = read_rows(tmp_path / "pairs.jsonl")
    assert pair["prompt"] == [{"role": "system", "content": "Be short."}, asked]


def test_pairs_that_call_tools_without_their_schemas_are_counted_in_a_note(tmp_path: Path) -> None:
    calling = [user("What?"), assistant(None, tool_call()), tool_reply("12"), assistant("12")]
    rows = answers(1.0, 0.0)
    rows += [
        rollout_row(task_id="u", sample=0, messages=calling, reward=1.0),
        rollout_row(task_id="u", sample=1, messages=[user("What?"), assistant("7")], reward=0.0),
    ]
    write_lines(tmp_path / "rollouts.jsonl", map(encoded, rows))

    [note] = pairs_of(tmp_path).notes

    assert note.startswith("1 of 2 rows call tools but have no `tools`: ")
