from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.filtering import TALK, filtered, kept_of
from fakes.folders import names_in
from fakes.rollout_lines import BAD_LINES, encoded, rollout_lines
from fakes.rollout_rows import (
    assistant,
    read_rows,
    rollout_row,
    tool_call,
    tool_reply,
    user,
    write_lines,
    write_rows,
)
from stillroom.curate.filter.request import SourceFilterCount
from stillroom.data.row_names import row_hash
from stillroom.errors import DataError, InputError
from stillroom.lineage import read_manifest

ROWS = [
    rollout_row(task_id="good"),
    rollout_row(task_id="half", reward=0.5, success=True),
    rollout_row(task_id="bad", reward=0.0, success=False),
    rollout_row(task_id="unjudged", reward=None, success=None),
    rollout_row(task_id="tools", messages=TALK, tool_errors=1),
    rollout_row(task_id="open", messages=TALK[:2], stop_reason="max_turns", success=False),
]
ALL = ["good", "half", "bad", "unjudged", "tools", "open"]


def test_only_rows_that_the_named_models_answered_alone_pass(tmp_path: Path) -> None:
    def row(task_id: str, *models: str, **more: Any) -> dict[str, Any]:
        return {
            **rollout_row(task_id=task_id),
            "answered_by": [{"model": m} for m in models],
            **more,
        }

    teacher = {"provider": "p", "model": "large-2", "settings": {}}
    rows = [
        row("dated", "large-2026-05-01"),
        row("both", "large-2026-05-01", "small"),
        row("small", "small"),
        row("asked", teacher=teacher),
        {**rollout_row(task_id="nobody"), "teacher": None},
    ]
    assert kept_of(tmp_path, rows, answered_by=("large*",)) == ["dated", "asked"]
    result = filtered(tmp_path, answered_by=("small", "large-2026-05-01"), overwrite=True)
    assert result.dropped == {"answered by another model": 1, "answering model unknown": 1}


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, ALL),
        ({"min_reward": 0.5}, ["good", "half", "tools", "open"]),
        ({"min_reward": 0.51}, ["good", "tools", "open"]),
        ({"success": True}, ["good", "half", "unjudged", "tools"]),
        ({"success": False}, ["bad", "open"]),
        ({"min_turns": 2}, ["tools"]),
        ({"min_turns": 0}, ALL),
        ({"max_turns": 1}, ["good", "half", "bad", "unjudged", "open"]),
        ({"min_turns": 1, "max_turns": 1}, ["good", "half", "bad", "unjudged", "open"]),
        ({"min_turns": 2, "max_turns": 2}, ["tools"]),
        ({"require_final_answer": True}, ["good", "half", "bad", "unjudged", "tools"]),
        ({"require_tool_use": "any"}, ["tools", "open"]),
        ({"require_tool_use": "price"}, ["tools", "open"]),
        ({"require_tool_use": "stock"}, []),
        ({"only_tools": ["price", "stock"]}, ALL),
        ({"only_tools": ["stock"]}, ["good", "half", "bad", "unjudged"]),
        ({"max_tool_errors": 0}, ["good", "half", "bad", "unjudged", "open"]),
        ({"max_tool_errors": 1}, ALL),
        ({"success": True, "min_turns": 2, "min_reward": 1}, ["tools"]),
    ],
)
def test_a_filter_keeps_what_it_says(tmp_path: Path, options: dict, kept: list[str]) -> None:
    assert kept_of(tmp_path, ROWS, **options) == kept


def test_a_call_that_a_server_left_in_the_text_is_no_final_answer(tmp_path: Path) -> None:
    texts = {
        "call": '<tool_call>{"name": "price", "arguments": {"item": "12',
        "thought": "<think>price?</think>[TOOL_CALLS]price[ARGS]{}",
        "answer": "12",
    }
    rows = [
        rollout_row(task_id=name, messages=[user("?"), assistant(text)], success=None, reward=None)
        for name, text in texts.items()
    ]

    assert kept_of(tmp_path, rows, require_final_answer=True) == ["answer"]
    assert kept_of(tmp_path, rows, success=True, overwrite=True) == ["answer"]


def test_every_dropped_row_has_all_its_reasons_in_the_side_file(tmp_path: Path) -> None:
    write_lines(tmp_path / "rollouts.jsonl", [*map(encoded, ROWS), b"{broken"])

    result = filtered(tmp_path, success=True, min_reward=0.75, min_turns=2)

    assert (result.read, result.kept) == (7, 1)
    assert result.dropped == {
        "reward below 0.75": 2,
        "no reward": 1,
        "under 2 turns": 1,
        "no success": 1,
        "not a rollout or SFT row": 1,
    }
    assert result.dropped_file == "kept.jsonl.dropped"
    assert [p.split(": ")[0] for p in result.problems] == [f"{tmp_path}/rollouts.jsonl:7"]
    dropped = {row["id"]: row for row in read_rows(tmp_path / "kept.jsonl.dropped")}
    assert dropped["bad-0"] == {
        "file": str(tmp_path / "rollouts.jsonl"),
        "line": 3,
        "id": "bad-0",
        "reasons": ["reward below 0.75", "no success", "under 2 turns"],
        "like": None,
        "row": f"{row_hash(encoded(ROWS[2]))}#1",
    }
    assert dropped["good-0"]["reasons"] == ["under 2 turns"]
    assert dropped[None]["reasons"] == ["not a rollout or SFT row"]


def test_kept_rows_are_the_very_bytes_that_came_in(tmp_path: Path) -> None:
    messages = rb'[{"role":"assistant","content":"\u00fc"}]'
    odd = rb'{ "messages":%s,  "stop_reason":"answered","x":1.0 }' % messages
    write_lines(tmp_path / "rollouts.jsonl", [b"\xef\xbb\xbf" + odd, b"  " + odd], end=b"\r\n")

    filtered(tmp_path)

    assert (tmp_path / "kept.jsonl").read_bytes() == odd + b"\n" + odd + b"\n"


def test_rows_with_the_same_messages_are_kept_once(tmp_path: Path) -> None:
    same = [user("a"), assistant("b")]
    rows = [
        rollout_row(task_id="1", messages=same, reward=0.0),
        rollout_row(task_id="2", messages=same),
        rollout_row(task_id="3", messages=same, metadata={"x": 1}),
        rollout_row(task_id="4", messages=[user("a"), assistant("c")]),
    ]

    # A row that another filter drops does not make a good one a duplicate.
    assert kept_of(tmp_path, rows, dedupe="exact", min_reward=1) == ["2", "4"]
    # Of twins the best is kept, and one that was judged before one that was not.
    assert kept_of(tmp_path, rows, dedupe="exact") == ["2", "4"]
    unjudged = rollout_row(task_id="0", messages=same, reward=None, success=None)
    assert kept_of(tmp_path, [unjudged, rows[0]], dedupe="exact") == ["1"]
    [dropped] = read_rows(tmp_path / "kept.jsonl.dropped")
    assert dropped["like"] == f"{tmp_path}/rollouts.jsonl:2"


def calling(arguments: str = "{}", call_id: str = "x1") -> list[dict]:
    called = assistant(None, tool_call(arguments=arguments, call_id=call_id))
    return [user("a"), called, tool_reply("7", call_id)]


@pytest.mark.parametrize(
    ("one", "other", "are_equal"),
    [
        (calling('{"item": "lamp"}'), calling('{"item": "desk"}'), False),
        (calling(call_id="x1"), calling(call_id="x2"), True),
        ([{**assistant("b"), "reasoning_content": "x"}], [assistant("b")], False),
    ],
)
def test_duplicates_have_equal_messages_apart_from_the_ids_of_their_calls(
    tmp_path: Path, one: list[dict], other: list[dict], are_equal: bool
) -> None:
    rows = [rollout_row(task_id=name, messages=talk) for name, talk in (("1", one), ("2", other))]

    assert kept_of(tmp_path, rows, dedupe="exact") == (["1"] if are_equal else ["1", "2"])


def test_fields_that_are_null_count_as_absent(tmp_path: Path) -> None:
    row = rollout_row(task_id="a", id=None, metadata=None, tool_errors=None, tools=None)

    assert kept_of(tmp_path, [row], max_tool_errors=0, max_per_category=1, dedupe="exact") == ["a"]


def categories(*names: Any) -> list[dict]:
    return [
        rollout_row(task_id=f"{index}", metadata={"kind": name} if name != "-" else {})
        for index, name in enumerate(names)
    ]


def test_at_most_so_many_of_each_category_are_kept(tmp_path: Path) -> None:
    rows = categories("a", "a", "b", "a", "-", "a", "-", None)
    rows[0]["success"] = False
    write_lines(tmp_path / "rollouts.jsonl", [*map(encoded, rows), b"{broken"])

    result = filtered(tmp_path, max_per_category=2, category_field="kind", success=True)

    assert result.categories_before == {"a": 4, "b": 1, "(none)": 3, "(unreadable)": 1}
    assert result.categories_after == {"a": 2, "b": 1, "(none)": 2}
    assert result.dropped == {
        "no success": 1,
        "over 2 rows of its category": 2,
        "not a rollout or SFT row": 1,
    }


def test_the_choice_within_a_category_follows_from_the_seed_alone(tmp_path: Path) -> None:
    rows = categories(*"a" * 20)
    first = kept_of(tmp_path, rows, max_per_category=5, category_field="kind", seed=1)

    assert kept_of(tmp_path, rows, max_per_category=5, category_field="kind", seed=1) == first
    others = [
        kept_of(tmp_path, rows, max_per_category=5, category_field="kind", seed=seed)
        for seed in range(2, 8)
    ]
    assert any(other != first for other in others)
    assert first == sorted(first, key=int)


def test_every_row_of_a_category_has_the_same_chance(tmp_path: Path) -> None:
    rows = categories(*(f"k{index // 6}" for index in range(20 * 6)))
    seen: Counter[int] = Counter()
    for seed in range(15):
        kept = kept_of(tmp_path, rows, max_per_category=2, category_field="kind", seed=seed)
        seen.update(int(row) % 6 for row in kept)

    # Each place is drawn 300 times; 100 each are expected, and five standard deviations are 41.
    assert sum(seen.values()) == 600
    assert all(59 <= count <= 141 for count in seen.values())


def test_a_balanced_set_has_no_duplicates_and_no_gaps_left_by_them(tmp_path: Path) -> None:
    rows = [
        rollout_row(task_id=str(index), messages=[user("a"), assistant(str(index // 4))])
        for index in range(12)
    ]

    kept = kept_of(tmp_path, rows, dedupe="exact", max_per_category=3)

    assert kept == ["0", "4", "8"]


@pytest.mark.parametrize(
    ("source", "output"),
    [
        ("rollouts/a.jsonl", "rollouts/a.jsonl"),
        ("rollouts", "rollouts/a.jsonl"),
        ("rollouts/a.jsonl", "link.jsonl"),
        ("out.jsonl.dropped", "out.jsonl"),
    ],
)
def test_the_input_is_never_written_over(tmp_path: Path, source: str, output: str) -> None:
    path = write_lines(tmp_path / "rollouts" / "a.jsonl", [encoded(rollout_row())])
    side = write_lines(tmp_path / "out.jsonl.dropped", [encoded(rollout_row())])
    (tmp_path / "link.jsonl").symlink_to(path)

    with pytest.raises(InputError, match="is also an input"):
        filtered(tmp_path, source, output=output)
    assert path.read_bytes() == side.read_bytes() == encoded(rollout_row()) + b"\n"


def test_an_error_in_the_middle_leaves_both_old_files(tmp_path: Path) -> None:
    for name in ("kept.jsonl", "kept.jsonl.dropped"):
        write_lines(tmp_path / name, [b"old"])
    folder = tmp_path / "folder"
    write_lines(folder / "a.jsonl", [encoded(rollout_row()), b"{broken"] * 2000)
    (folder / "b.jsonl").symlink_to("/proc/self/mem")

    with pytest.raises(InputError, match="cannot be read"):
        filtered(tmp_path, "folder", overwrite=True)
    assert (tmp_path / "kept.jsonl").read_bytes() == b"old\n"
    assert (tmp_path / "kept.jsonl.dropped").read_bytes() == b"old\n"
    assert names_in(tmp_path) == ["folder", "kept.jsonl", "kept.jsonl.dropped"]


def test_an_empty_file_passes_empty_and_an_empty_folder_is_refused(tmp_path: Path) -> None:
    write_lines(tmp_path / "rollouts.jsonl", [])
    (tmp_path / "folder").mkdir()

    assert (filtered(tmp_path).read, filtered(tmp_path).kept) == (0, 0)
    with pytest.raises(DataError, match=r"no \.jsonl"):
        filtered(tmp_path, "folder")


OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "min_reward": st.sampled_from([0.0, 0.5, 1.0]),
        "success": st.booleans(),
        "min_turns": st.integers(0, 2),
        "max_turns": st.integers(1, 2),
        "require_final_answer": st.booleans(),
        "require_tool_use": st.sampled_from(["any", "price"]),
        "only_tools": st.sampled_from([["price"], ["stock"]]),
        "max_tool_errors": st.integers(0, 2),
        "dedupe": st.sampled_from(["exact", "near"]),
        "max_per_category": st.integers(1, 2),
        "seed": st.integers(0, 3),
        "min_success_rate": st.sampled_from([0.5, 1.0]),
        "contains": st.sampled_from(["1", "ü"]),
        "not_contains": st.sampled_from(["13", "7"]),
        "match": st.sampled_from(["answer", "conversation"]),
        "language": st.just("en"),
        "drop_secrets": st.booleans(),
        "drop_pii": st.booleans(),
        "decontaminate": st.just(["held.txt"]),
        "verdicts": st.just("reviewed.jsonl"),
    },
)
SFT_LINES = st.sampled_from(
    [
        b'{"messages":[{"role":"user","content":"What?"},{"role":"assistant","content":"12"}]}',
        b'{"messages":[{"role":"assistant","content":"a@b.io"}],"reward":0.5,"id":"t1-0"}',
    ]
)


@settings(max_examples=50)
@given(st.lists(rollout_lines() | SFT_LINES | st.sampled_from(BAD_LINES), max_size=8), OPTIONS)
def test_the_counts_add_up_and_no_row_is_changed_or_moved(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], options: dict[str, Any]
) -> None:
    folder = tmp_path_factory.mktemp("filter")
    write_lines(folder / "rollouts.jsonl", lines)
    write_lines(folder / "held.txt", [b"What?"])
    name = f"{row_hash(lines[0] if lines else b'')}#1"
    write_rows(folder / "reviewed.jsonl", [{"id": name, "verdict": "drop"}])

    result = filtered(folder, **options)

    kept = (folder / "kept.jsonl").read_bytes().split(b"\n")[:-1]
    dropped = read_rows(folder / "kept.jsonl.dropped")
    assert result.read == len(lines) == result.kept + sum(result.dropped.values())
    assert result.kept == len(kept)
    assert [row["reasons"][0] for row in dropped] == [
        reason for row in dropped for reason in row["reasons"][:1]
    ]
    assert Counter(row["reasons"][0] for row in dropped) == result.dropped
    # The kept lines are the lines that the side file does not name, in their order.
    gone = {row["line"] for row in dropped}
    assert kept == [line for number, line in enumerate(lines, 1) if number not in gone]
    assert sum(result.categories_before.values()) == result.read
    assert sum(result.categories_after.values()) == result.kept
    if "max_per_category" in options:
        assert all(n <= options["max_per_category"] for n in result.categories_after.values())


def test_rows_are_counted_by_the_file_or_log_that_they_come_from(tmp_path: Path) -> None:
    def said(number: int, log: str) -> dict:
        return rollout_row(
            task_id=f"{log}{number}",
            reward=number / 10,
            origin={"source": f"logs/{log}.jsonl:{number}#choice 1"} if log else None,
        )

    rows = [said(number, log) for log in "abb" for number in range(4)]
    write_lines(tmp_path / "in" / "one.jsonl", map(encoded, rows))
    write_lines(tmp_path / "in" / "two.jsonl", [encoded(said(9, "")), b"{broken"])

    result = filtered(tmp_path, "in", min_reward=0.2)

    assert result.sources == {
        "in/two.jsonl": SourceFilterCount(kept=1, dropped=1),
        "logs/a.jsonl": SourceFilterCount(kept=2, dropped=2),
        "logs/b.jsonl": SourceFilterCount(kept=4, dropped=4),
    }
    assert filtered(tmp_path, "in/two.jsonl", overwrite=True).sources == {}


def test_sources_after_the_largest_are_summed_up(tmp_path: Path) -> None:
    for number in range(25):
        rows = [rollout_row(task_id=f"{number}-{n}") for n in range(2 if number < 20 else 1)]
        write_lines(tmp_path / "in" / f"{number}.jsonl", map(encoded, rows))

    sources = filtered(tmp_path, "in").sources

    assert len(sources) == 21
    assert sources["in/7.jsonl"] == SourceFilterCount(kept=2, dropped=0)
    assert sources["(others)"] == SourceFilterCount(kept=5, dropped=0)


def test_refused_rows_of_a_log_count_for_its_file(tmp_path: Path) -> None:
    call = {
        "request": {"messages": [user("Hi")]},
        "response": {"choices": [{"message": assistant("Hello")}]},
    }
    write_lines(tmp_path / "logs" / "a.jsonl", [encoded(call), b"{broken"])
    write_lines(tmp_path / "logs" / "b.jsonl", [encoded(call | {"session": "s"})])

    assert filtered(tmp_path, "logs").sources == {
        "logs/a.jsonl": SourceFilterCount(kept=1, dropped=1),
        "logs/b.jsonl": SourceFilterCount(kept=1, dropped=0),
    }


def test_several_inputs_are_read_in_their_order_and_compared_and_counted_together(
    tmp_path: Path,
) -> None:
    for name, task_ids in (("one.jsonl", "ab"), ("three.jsonl", "bc")):
        rows = [
            rollout_row(task_id=task_id, messages=[user(task_id), assistant(task_id)])
            for task_id in task_ids
        ]
        write_rows(tmp_path / name, rows)
    call = {
        "request": {"messages": [user("Hi")]},
        "response": {"choices": [{"message": assistant("Hello")}]},
    }
    write_lines(tmp_path / "two.jsonl", [encoded(call)])

    result = filtered(tmp_path, ("three.jsonl", "two.jsonl", "one.jsonl"), dedupe="exact")

    answers = [row["messages"][-1]["content"] for row in read_rows(tmp_path / "kept.jsonl")]
    assert answers == ["b", "c", "Hello", "a"]
    [dropped] = read_rows(tmp_path / "kept.jsonl.dropped")
    assert (Path(dropped["file"]).name, dropped["line"]) == ("one.jsonl", 2)
    assert result.sources == {
        "one.jsonl": SourceFilterCount(kept=1, dropped=1),
        "three.jsonl": SourceFilterCount(kept=2, dropped=0),
        "two.jsonl": SourceFilterCount(kept=1, dropped=0),
    }
    manifest = read_manifest(tmp_path / "kept.jsonl")
    assert manifest is not None
    names = [Path(record.path).name for record in manifest.inputs]
    assert names == ["three.jsonl", "two.jsonl", "one.jsonl"]
    with pytest.raises(InputError, match=r"two\.jsonl"):
        filtered(tmp_path, ("one.jsonl", "two.jsonl"), output="two.jsonl", overwrite=True)


def test_a_category_field_that_no_row_has_is_named_with_the_fields_that_rows_have(
    tmp_path: Path,
) -> None:
    row = rollout_row(metadata={"kind": "price", "level": 1})
    write_lines(tmp_path / "rollouts.jsonl", [encoded(row)])

    assert filtered(tmp_path).problems == []
    assert filtered(tmp_path, category_field="topic", overwrite=True).problems == [
        "no row has the metadata field topic; the fields that rows have: kind, level"
    ]
