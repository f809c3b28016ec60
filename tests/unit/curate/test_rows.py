import contextlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.foreign_rollouts import GYM_ROW
from fakes.mangling import mangled
from fakes.odd_lines import MESSAGES, ODD_FIELDS, ROWS, SFT_ROW, TWICE, VALUES
from fakes.rollout_lines import (
    BAD_LINES,
    deep,
    encoded,
    mutated,
    rollout_lines,
    row_with,
    saying,
)
from fakes.rollout_rows import assistant, rollout_row, tool_call, tool_reply, user, write_lines
from stillroom.curate.facts import RowFacts
from stillroom.curate.rows import CuratedRow, _RowDecoder, read_curated_rows
from stillroom.data.row_files import MAX_ROW_BYTES, RowReader
from stillroom.lines import Line

TALK = [user("a"), assistant(None, tool_call()), tool_reply("7"), assistant("7")]


def facts_of(folder: Path, **changes: object) -> RowFacts:
    path = write_lines(folder / "rollouts.jsonl", [encoded(rollout_row(**changes))])
    [line] = read_curated_rows(path)
    assert line.facts is not None
    return line.facts


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


@pytest.mark.parametrize("field", [b"messages", b"conversation"])
@pytest.mark.parametrize(
    "content",
    [b'"a"', b' "" ', b"[]", b'[{"type":"image"},{"type":"text","text":5}]', b'"\\u00fc"'],
)
def test_a_message_may_say_a_text_or_parts(tmp_path: Path, content: bytes, field: bytes) -> None:
    path = write_lines(tmp_path / "rollouts.jsonl", [saying(content, field)])

    [line] = read_curated_rows(path)

    assert line.facts is not None
    assert json.loads(content) == line.messages[0]["content"]
    assert line.facts.has_final_answer


def test_a_content_that_is_none_is_named(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rollouts.jsonl", [saying(b'[{"type":5}]'), saying(b"5")])

    problems = [line.problem for line in read_curated_rows(path)]

    assert problems[0] == "Expected `str`, got `int` - at `$.messages[0].content[0].type`"
    assert problems[1] == "messages[0].content must be a string or a list of parts, not number 5"


@pytest.mark.parametrize("index", range(len(BAD_LINES)))
def test_a_line_that_is_no_rollout_is_told_with_its_place(tmp_path: Path, index: int) -> None:
    good = encoded(rollout_row())
    path = write_lines(tmp_path / "rollouts.jsonl", [good, BAD_LINES[index], good])

    lines = list(read_curated_rows(path))

    assert [line.facts is None for line in lines] == [False, True, False]
    assert lines[1].problem
    assert lines[1].where == f"{path}:2"


def test_nesting_is_read_or_told_at_every_depth(tmp_path: Path) -> None:
    lines = [row_with(b"more", deep(depth)) for depth in (1, 100, *range(900, 1000), 100_000)]
    path = write_lines(tmp_path / "rollouts.jsonl", lines)

    found = list(read_curated_rows(path))

    assert len(found) == len(lines)
    assert found[0].facts is not None
    assert found[-1].facts is None


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

    found = list(read_curated_rows(path))

    assert [line.line.data for line in found] == lines
    assert [line.facts is None for line in found] == [line in BAD_LINES for line in lines]


def test_a_line_that_is_too_long_is_a_problem_and_its_neighbours_are_read(tmp_path: Path) -> None:
    good = encoded(rollout_row())
    path = tmp_path / "rollouts.jsonl"
    with path.open("wb") as stream:
        stream.write(good + b"\n" + good[:-1])
        stream.write(b" " * MAX_ROW_BYTES)
        stream.write(b"}\n" + good)

    lines = list(read_curated_rows(path))

    assert [line.facts is None for line in lines] == [False, True, False]
    assert lines[1].problem == "the line is longer than 64 MB"
    with RowReader() as reader:
        last = lines[2].line
        assert reader.read(path, last.offset, last.num_bytes) == good


class _LongWay(_RowDecoder):
    """Decodes all fields of every line."""

    def _decode_quickly(self, *_: object) -> None: ...


def decoded(decoder: _RowDecoder, data: bytes) -> tuple[Any, ...]:
    """All that a decoder says of a line, whichever way it took."""
    [row] = decoder.decode_block(Path("f"), [Line(1, 0, len(data), data)])
    names = row.raw_fields.__struct_fields__ if row.raw_fields else ()
    # What is absent and what is empty become the same training row.
    parts = [json.loads(bytes(getattr(row.raw_fields, name))) or None for name in names]
    ours = json.loads(row.stillroom_json) if row.facts else None
    return row.facts, row.problem, parts, row.layout, ours


def both_ways(data: bytes) -> None:
    for options in ({}, {"with_raw_fields": True}, {"with_supervised": True}):
        both = {"with_raw_fields": False, "with_supervised": False} | options
        assert decoded(_RowDecoder(**both), data) == decoded(_LongWay(**both), data)


def in_one_pass(data: bytes, *, with_supervised: bool = True) -> CuratedRow | None:
    decoder = _RowDecoder(with_raw_fields=False, with_supervised=with_supervised)
    return decoder._decode_quickly(Path("f"), Line(1, 0, len(data), data))


@pytest.mark.parametrize("row", ROWS, ids=["rollout", "supervised row"])
def test_usual_rows_are_decoded_in_one_pass(row: dict) -> None:
    found = in_one_pass(encoded(row))

    assert found is not None
    facts = found.facts
    assert facts is not None
    assert (facts.id, facts.task_id, facts.reward, facts.num_turns) == ("task-0", "task", 1.0, 2)
    assert facts.has_final_answer
    assert (in_one_pass(encoded(row), with_supervised=False) is None) == (row is SFT_ROW)


LINES = [
    *(row_with(b"more", value) for value in VALUES),
    *(row_with(b"metadata", value) for value in VALUES),
    *map(saying, VALUES),
    *BAD_LINES,
    encoded(GYM_ROW),
    *(encoded(SFT_ROW | more) for more in ODD_FIELDS),
]


@pytest.mark.parametrize("line", LINES, ids=range(len(LINES)))
def test_one_pass_and_all_checks_read_a_line_alike(line: bytes) -> None:
    both_ways(line)


@pytest.mark.parametrize("message", MESSAGES, ids=range(len(MESSAGES)))
def test_of_every_message_both_ways_say_the_same(message: Any) -> None:
    called = assistant(None, tool_call(call_id="x"), tool_call(call_id="\n"))
    for before in ([user("a")], [user("a"), called], [user("a") | {"tool_calls": [tool_call()]}]):
        for name in ("messages", "conversation"):
            rest = {"stop_reason": "a", "id": "a", "task_id": "t", "completed": True}
            both_ways(encoded({name: [*before, message], **rest}))
            both_ways(encoded({name: [*before, message], "reward": 1}))


@pytest.mark.parametrize("line", TWICE, ids=range(len(TWICE)))
def test_of_a_field_that_stands_there_twice_the_last_one_counts(line: bytes) -> None:
    for with_raw_fields in (False, True):
        decoder = _RowDecoder(with_raw_fields=with_raw_fields, with_supervised=not with_raw_fields)
        facts, problem, *rest = decoded(decoder, line)
        once_facts, once_problem, *once_rest = decoded(decoder, encoded(json.loads(line)))
        assert (facts, rest, problem is None) == (once_facts, once_rest, once_problem is None)


@pytest.mark.thorough
@settings(max_examples=300)
@given(row=mangled(ROWS), seed=st.none() | st.integers(0, 2**32))
def test_of_any_line_both_ways_say_the_same(row: dict, seed: int | None) -> None:
    line = encoded(row)
    if seed is not None:
        line = mutated(random.Random(seed), line)
        # A field that stands there twice is another matter.
        with contextlib.suppress(ValueError, RecursionError):
            line = encoded(json.loads(line))

    both_ways(line)
