from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given

from fakes.foreign_rollouts import GYM_ROW, RNOW_ROW, write_rnow
from fakes.mangling import mangled
from fakes.rollout_rows import (
    assistant,
    rollout_row,
    tool_call,
    tool_reply,
    user,
    write_lines,
    write_rows,
)
from stillroom.data.inspect import ExamplesPage, InspectExamples, inspect_examples
from stillroom.errors import DataError, InputError
from stillroom.settings import Workspace

TALK = [
    user("How much?"),
    assistant(None, tool_call(arguments='{"item": "lamp"}')),
    tool_reply("7"),
    assistant("7 coins"),
]
SFT: dict[str, Any] = {"messages": TALK, "reward": 0.5}
DPO: dict[str, Any] = {
    "prompt": [user("a")],
    "chosen": [assistant("b")],
    "rejected": [assistant("c")],
}


def page_of(folder: Path, name: str = "rows.jsonl", **options: Any) -> ExamplesPage:
    return inspect_examples(Workspace(folder), InspectExamples(path=name, **options)).page


def test_a_row_is_shown_as_a_conversation(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", [SFT, DPO, {"prompt": "hi"}])

    sft, dpo, prompt = page_of(tmp_path, n=3).examples

    assert sft.text.splitlines() == [
        "user: How much?",
        'assistant calls price({"item": "lamp"})',
        "tool: 7",
        "assistant: 7 coins",
    ]
    assert (sft.where, sft.format, sft.reward, sft.problem) == ("rows.jsonl:1", "sft", 0.5, None)
    assert dpo.text.splitlines() == [
        "== prompt",
        "user: a",
        "== chosen",
        "assistant: b",
        "== rejected",
        "assistant: c",
    ]
    assert (prompt.text, prompt.format) == ("user: hi", "prompts")
    assert sft.num_tokens is sft.num_trained_tokens is None


def test_rows_of_other_systems_are_shown_as_conversations(tmp_path: Path) -> None:
    write_rnow(tmp_path / "rollouts", RNOW_ROW)
    request = {"responses_create_params": {"input": "What is a lamp?", "instructions": "Be brief."}}
    write_rows(tmp_path / "rollouts" / "a.jsonl", [GYM_ROW, request])

    gym, prompt, rnow = page_of(tmp_path, "rollouts", n=3).examples

    assert [gym.format, prompt.format, rnow.format] == ["rollouts", "prompts", "rollouts"]
    assert gym.text.splitlines()[1:3] == [
        "user: What is a lamp?",
        'assistant calls price({"item": "lamp"})',
    ]
    assert prompt.text == "system: Be brief.\nuser: What is a lamp?"
    assert rnow.text.splitlines()[-1] == "assistant: 7 × 5 = 35"
    assert [gym.reward, rnow.reward] == [1.0, 0.75]


def test_pages_cover_all_rows_once(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", [{"prompt": str(index)} for index in range(5)])

    start: int | None = 0
    seen: list[str] = []
    while start is not None:
        page = page_of(tmp_path, start=start)
        assert page.total_count == 5
        assert page.has_more == (page.next_start is not None)
        seen += [example.text for example in page.examples]
        start = page.next_start

    assert seen == [f"user: {index}" for index in range(5)]


def test_a_start_beyond_the_rows_is_refused(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", [{"prompt": "a"}])
    write_lines(tmp_path / "empty.jsonl", [])

    with pytest.raises(InputError, match="start 1 is beyond the 1 rows"):
        page_of(tmp_path, start=1)
    with pytest.raises(InputError, match="add rows to the file"):
        page_of(tmp_path, "empty.jsonl")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match=r"no \.jsonl"):
        page_of(tmp_path, "folder")


def test_rows_of_a_folder_are_numbered_through(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write_rows(tmp_path / "rollouts" / f"{name}.jsonl", [rollout_row(task_id=name)] * 2)

    page = page_of(tmp_path, "rollouts", start=1, n=2)

    assert [example.where for example in page.examples] == ["a.jsonl:2", "b.jsonl:1"]
    assert (page.total_count, page.next_start) == (4, 3)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{broken", "is not valid JSON"),
        (b'{"a": 1}', "has no known format"),
        (b'{"messages": [{"role": "user", "content": 5}]}', "messages[0].content must be"),
        (b'{"prompt": "\xff"}', "is not valid JSON"),
    ],
)
def test_a_bad_row_is_shown_raw_with_its_first_problem(
    tmp_path: Path, line: bytes, problem: str
) -> None:
    write_lines(tmp_path / "rows.jsonl", [line, b'{"prompt": "Hello?"}'])

    example, _ = page_of(tmp_path).examples

    assert example.problem is not None
    assert problem in example.problem
    assert example.text == line.decode("utf-8", errors="replace")


def test_a_long_text_is_cut(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("x" * 5000, encoding="utf-8")

    [example] = page_of(tmp_path, "prompts.txt").examples

    assert example.text.endswith("x… (5006 characters)")
    assert len(example.text) < 4100


@given(mangled([SFT, DPO, {"prompt": "a"}, rollout_row()]))
def test_any_row_can_be_looked_at(
    tmp_path_factory: pytest.TempPathFactory, row: dict[str, Any]
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    write_lines(folder / "rows.jsonl", [msgspec.json.encode(row)])

    page = page_of(folder)

    assert page.total_count == 1
    assert msgspec.json.decode(msgspec.json.encode(page), type=ExamplesPage) == page
