import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.facts import in_full
from fakes.foreign_rollouts import GYM_ROW, RNOW_ROW, write_rnow
from fakes.mangling import mangled
from fakes.rollout_lines import BAD_LINES, deep, encoded, rollout_lines, row_with, saying
from fakes.rollout_rows import assistant, rollout_row, tool_call, tool_reply, user, write_lines
from stillroom.curate.rows.facts import RolloutFacts, checked_facts
from stillroom.curate.rows.fields import OwnFields
from stillroom.curate.rows.read import read_rollouts
from stillroom.curate.rows.translate import own_row
from stillroom.data.layouts.detect import RULES, RolloutLayout, as_rollout, layout_of
from stillroom.data.layouts.rnow import rnow_from_rollout
from stillroom.data.row_files import MAX_ROW_BYTES, RowReader

TALK = [user("a"), assistant(None, tool_call()), tool_reply("7"), assistant("7")]


def facts_of(folder: Path, **changes: object) -> RolloutFacts:
    path = write_lines(folder / "rollouts.jsonl", [encoded(rollout_row(**changes))])
    [line] = read_rollouts(path)
    assert line.facts is not None
    return line.facts


def test_a_row_says_what_decides(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, messages=TALK, reward=0.5, tool_errors=2, metadata={"a": 1})

    assert (facts.num_turns, facts.tools_used) == (2, {"price"})
    assert (facts.reward, facts.tool_errors, facts.metadata) == (0.5, 2, {"a": 1})
    assert facts.has_final_answer
    assert facts.messages is facts.messages  # decoded once, however many filters ask


@pytest.mark.parametrize(
    ("messages", "has_answer"),
    [(TALK, True), (TALK[:3], False), (TALK[:2], False), (TALK[:1], False), ([], False)]
    + [([user("a"), assistant(nothing)], False) for nothing in ("", " \n", None)],
)
def test_a_final_answer_is_a_last_word_of_the_assistant(
    tmp_path: Path, messages: list, has_answer: bool
) -> None:
    assert facts_of(tmp_path, messages=messages).has_final_answer == has_answer


@pytest.mark.parametrize(
    ("changes", "is_success"),
    [
        ({"success": True, "stop_reason": "max_turns"}, True),
        ({"success": False}, False),
        ({"success": None}, True),
        ({"success": None, "reward": 0.49}, False),
        ({"success": None, "reward": 0.5, "messages": TALK[:2]}, True),
        ({"success": None, "error": {"class": "timeout", "message": "x"}}, False),
        ({"success": None, "reward": None}, True),
        ({"success": None, "reward": None, "stop_reason": "max_tokens"}, False),
        ({"success": None, "reward": None, "messages": TALK[:2]}, False),
        ({"success": None, "reward": None, "messages": [user("a"), assistant(" ")]}, False),
    ],
)
def test_success_is_the_rows_word_or_its_reward_or_a_complete_answer(
    tmp_path: Path, changes: dict, is_success: bool
) -> None:
    assert facts_of(tmp_path, **changes).is_success == is_success


@pytest.mark.parametrize("field", ["metadata", "tool_errors", "id", "task_id", "tools"])
def test_a_field_that_is_null_is_as_good_as_absent(tmp_path: Path, field: str) -> None:
    assert facts_of(tmp_path, **{field: None}).is_success


@pytest.mark.parametrize("field", [b"messages", b"conversation"])
@pytest.mark.parametrize(
    "content",
    [b'"a"', b' "" ', b"[]", b'[{"type":"image"},{"type":"text","text":5}]', b'"\\u00fc"'],
)
def test_a_message_may_say_a_text_or_parts(tmp_path: Path, content: bytes, field: bytes) -> None:
    path = write_lines(tmp_path / "rollouts.jsonl", [saying(content, field)])

    [line] = read_rollouts(path)

    assert line.facts is not None
    assert json.loads(content) == line.messages[0]["content"]
    assert line.facts.has_final_answer


def test_a_content_that_is_none_is_named(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rollouts.jsonl", [saying(b'[{"type":5}]'), saying(b"5")])

    problems = [line.problem for line in read_rollouts(path)]

    assert problems[0] == "Expected `str`, got `int` - at `$.messages[0].content[0].type`"
    assert problems[1] == "messages[0].content must be a string or a list of parts, not number 5"


@pytest.mark.parametrize("index", range(len(BAD_LINES)))
def test_a_line_that_is_no_rollout_is_told_with_its_place(tmp_path: Path, index: int) -> None:
    good = encoded(rollout_row())
    path = write_lines(tmp_path / "rollouts.jsonl", [good, BAD_LINES[index], good])

    lines = list(read_rollouts(path))

    assert [line.facts is None for line in lines] == [False, True, False]
    assert lines[1].problem
    assert lines[1].where == f"{path}:2"


def test_nesting_is_read_or_told_at_every_depth(tmp_path: Path) -> None:
    lines = [row_with(b"more", deep(depth)) for depth in (1, 100, *range(900, 1000), 100_000)]
    path = write_lines(tmp_path / "rollouts.jsonl", lines)

    found = list(read_rollouts(path))

    assert len(found) == len(lines)
    assert found[0].facts is not None
    assert found[-1].facts is None


@settings(deadline=None)
@given(
    st.lists(rollout_lines() | st.sampled_from(BAD_LINES), max_size=8),
    st.sampled_from([b"\n", b"\r\n", b"\n\n"]),
    st.booleans(),
)
def test_no_line_is_lost_and_none_is_changed(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], newline: bytes, has_bom: bool
) -> None:
    path = tmp_path_factory.mktemp("rows") / "rollouts.jsonl"
    path.write_bytes((b"\xef\xbb\xbf" if has_bom else b"") + newline.join(lines))

    found = list(read_rollouts(path))

    assert [line.line.data for line in found] == lines
    assert [line.facts is None for line in found] == [line in BAD_LINES for line in lines]


def test_rows_of_other_systems_say_what_decides(tmp_path: Path) -> None:
    write_rnow(tmp_path, RNOW_ROW)
    write_lines(tmp_path / "gym.jsonl", [encoded(GYM_ROW)])

    gym, rnow = read_rollouts(tmp_path)

    for line, row in ((gym, GYM_ROW), (rnow, RNOW_ROW)):
        assert line.facts is not None
        assert json.loads(line.line.data) == row
        own = {key: value for key, value in as_rollout(row).items() if key != "origin"}
        assert json.loads(line.own) == own
        assert own_row(line.line.data) == line.own
        assert line.facts.num_turns == 2
        assert line.facts.has_final_answer
        assert line.facts.tools_used == {"price", "stock"}


def test_a_document_on_many_lines_is_one_row(tmp_path: Path) -> None:
    ours = rollout_row(messages=[user('a "b" \\ {'), assistant("1 ,\n2")])
    path = tmp_path / "x" / "row.json"
    path.parent.mkdir()
    path.write_text(json.dumps(ours, indent=2), encoding="utf-8")

    [line] = read_rollouts(tmp_path)

    assert line.where == f"{path}:1"
    assert b"\n" not in line.line.data
    assert json.loads(line.own) == ours


def long_way(row: Any) -> RolloutFacts | None:
    """The facts as they follow from all of a row's problems and from our row of it."""
    layout = layout_of(row)
    if layout is None or any(RULES[layout].problems(row)):
        return None
    own = msgspec.json.decode(msgspec.json.encode(as_rollout(row)), type=OwnFields)
    facts = checked_facts(own)
    for message in facts.messages:
        message.said()
    return facts


@settings(deadline=None, max_examples=300)
@given(mangled([rollout_row(messages=TALK), RNOW_ROW, GYM_ROW, rnow_from_rollout(rollout_row())]))
def test_one_pass_over_a_row_finds_what_all_its_checks_find(
    tmp_path_factory: pytest.TempPathFactory, row: dict
) -> None:
    path = write_lines(tmp_path_factory.mktemp("rows") / "rollouts.jsonl", [encoded(row)])

    [line] = read_rollouts(path)
    [with_parts] = read_rollouts(path, with_parts=True)

    assert in_full(line.facts) == in_full(with_parts.facts)
    assert (line.facts is None) == (line.problem is not None)
    try:
        expected = long_way(row)
    except msgspec.ValidationError:  # e.g. a success that is no boolean
        expected = None
    if expected is not None:
        assert line.facts is not None
        task_id = expected.task_id or line.facts.task_id
        assert in_full(line.facts) == msgspec.structs.replace(expected, task_id=task_id)
    elif layout_of(row) is not RolloutLayout.STILLROOM:
        assert line.facts is None
    if line.facts is not None:
        parts = with_parts.parts
        assert parts is not None
        own = json.loads(line.own)
        assert json.loads(bytes(parts.messages)) == own["messages"] == line.messages
        assert (json.loads(bytes(parts.tools)) or []) == (own.get("tools") or [])


def test_a_line_that_is_too_long_is_a_problem_and_its_neighbours_are_read(tmp_path: Path) -> None:
    good = encoded(rollout_row())
    path = tmp_path / "rollouts.jsonl"
    with path.open("wb") as stream:
        stream.write(good + b"\n" + good[:-1])
        stream.write(b" " * MAX_ROW_BYTES)
        stream.write(b"}\n" + good)

    lines = list(read_rollouts(path))

    assert [line.facts is None for line in lines] == [False, True, False]
    assert lines[1].problem == "the line is longer than 64 MB"
    with RowReader() as reader:
        last = lines[2].line
        assert reader.read(path, last.offset, last.num_bytes) == good
