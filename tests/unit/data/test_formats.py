import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given

from fakes.mangling import mangled
from fakes.rollout_rows import assistant, rollout_row, tool_call, tool_reply, user, write_rows
from stillroom.data.formats import (
    CHECKS,
    RowFormat,
    decode_trajectory,
    detect_format,
    load_dpo_rows,
    load_sft_rows,
    load_tasks,
    read_rows,
    task_from_row,
)
from stillroom.errors import DataError

SFT = {"messages": [user("a"), assistant("b")], "tools": None, "metadata": {"k": 1}}
DPO = {"prompt": [user("a")], "chosen": [assistant("b")], "rejected": [assistant("c")]}
SYSTEM = {"role": "system", "content": "Be brief."}
PROMPTS: list[dict[str, Any]] = [
    {"prompt": "hello"},
    {"messages": [user("a"), assistant("b"), user("c")], "metadata": {"expected_answer": "7"}},
]


@pytest.mark.parametrize(
    ("row", "row_format"),
    [
        (PROMPTS[0], "prompts"),
        (PROMPTS[1], "prompts"),
        ({"responses_create_params": {"input": "hello"}}, "prompts"),
        (SFT, "sft"),
        (DPO, "dpo"),
        (rollout_row(), "rollouts"),
        ({}, None),
        ({"messages": "x"}, None),
        ({"messages": []}, None),
    ],
)
def test_a_rows_format_is_told_from_its_fields(row: dict, row_format: str | None) -> None:
    assert detect_format(row) == row_format
    if row_format is not None:
        assert list(CHECKS[RowFormat(row_format)](row)) == []


@pytest.mark.parametrize(
    ("row_format", "row", "field"),
    [
        ("prompts", {}, ""),
        ("prompts", {"prompt": " "}, "prompt"),
        ("prompts", {"prompt": 5}, "prompt"),
        ("prompts", {"prompt": ["a"]}, "prompt[0]"),
        ("prompts", {"prompt": [user("a"), assistant("b")]}, "prompt"),
        ("prompts", {"prompt": [SYSTEM, user("a")], "system": "Be brief."}, "system"),
        ("prompts", {"prompt": "a", "system": "b", "system_prompt": "c"}, "system_prompt"),
        ("prompts", {"messages": [user("a"), assistant("b")]}, "messages"),
        ("prompts", {"responses_create_params": 5}, "responses_create_params"),
        ("prompts", {"responses_create_params": {}}, "responses_create_params.input"),
        ("prompts", {"responses_create_params": {"input": " "}}, "responses_create_params.input"),
        ("prompts", {"responses_create_params": {"input": []}}, "responses_create_params.input"),
        ("prompts", {"prompt": "x", "docker": "--privileged"}, "docker"),
        ("prompts", {"prompt": "x", "docker": ""}, "docker"),
        ("prompts", {"prompt": "x", "docker": ["a"]}, "docker"),
        ("prompts", {"prompt": "x", "docker_env": {"A": "b"}}, "docker_env"),
        ("prompts", {"prompt": "x", "docker": "a", "docker_env": {"A": 1}}, "docker_env"),
        ("prompts", {"prompt": "x", "docker": "a", "docker_env": {"A=B": "1"}}, "docker_env"),
        ("prompts", {"prompt": "x", "docker": "a", "docker_env": ["A=B"]}, "docker_env"),
        ("prompts", {"prompt": "x", "tools": "price"}, "tools"),
        ("prompts", {"prompt": "x", "tools": [1]}, "tools"),
        ("prompts", {"prompt": "x", "rewards": {"a": 1}}, "rewards"),
        ("prompts", {"prompt": "x", "metadata": []}, "metadata"),
        ("prompts", {"prompt": "x", "variables": True}, "variables"),
        ("sft", {}, "messages"),
        ("sft", {"messages": [user("a")]}, "messages"),
        ("sft", {**SFT, "tools": {}}, "tools"),
        ("sft", {**SFT, "metadata": "x"}, "metadata"),
        ("dpo", {**DPO, "rejected": DPO["chosen"]}, "rejected"),
        ("dpo", {**DPO, "chosen": [user("x")]}, "chosen"),
        ("dpo", {**DPO, "prompt": []}, "prompt"),
        ("dpo", {**DPO, "metadata": "x"}, "metadata"),
        ("rollouts", rollout_row(reward="1"), "reward"),
        ("rollouts", rollout_row(reward=True), "reward"),
        ("rollouts", rollout_row(task_id=7), "task_id"),
        ("rollouts", rollout_row(messages=[]), "messages"),
    ],
)
def test_what_is_wrong_with_a_row_is_told_with_its_field(
    row_format: str, row: dict, field: str
) -> None:
    assert [problem.field for problem in CHECKS[RowFormat(row_format)](row)] == [field]


def test_prompts_that_are_to_be_trained_on_are_sent_to_a_teacher_first() -> None:
    [problem] = CHECKS[RowFormat.SFT]({"messages": [user("a")]})

    assert "if the file has prompts, pass it to generate_rollouts" in problem.fix


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a", "system": "Be brief."},
        {"prompt": [user("a")], "system_prompt": "Be brief."},
        {"messages": [user("a")], "system": "Be brief."},
        {"prompt": [SYSTEM, user("a")], "system": ""},
    ],
)
def test_a_prompt_may_be_a_list_and_have_its_system_message_beside_it(row: dict) -> None:
    assert list(CHECKS[RowFormat.PROMPTS](row)) == []

    task = task_from_row(row)

    assert task.messages == [SYSTEM, user("a")]
    if row.get("system") != "":
        assert task.task_id == task_from_row({"messages": [SYSTEM, user("a")]}).task_id


def test_the_answers_of_a_pair_may_go_on_with_a_tools_reply() -> None:
    row = {
        "prompt": [user("a"), assistant(None, tool_call(call_id="a"))],
        "chosen": [assistant(None, tool_call(call_id="b")), tool_reply("1", "a")],
        "rejected": [assistant("x")],
    }

    assert list(CHECKS[RowFormat.DPO](row)) == []


def test_a_tasks_id_follows_from_the_row_alone() -> None:
    row = {"prompt": "hello", "metadata": {"b": 1, "a": 2}, "extra": [1]}
    same = {"extra": [1], "metadata": {"a": 2, "b": 1}, "messages": [user("hello")]}

    assert task_from_row(row).task_id == task_from_row(same).task_id
    for changed in ({"prompt": "hallo"}, {"metadata": {"a": 2}}, {"extra": []}, {"tools": []}):
        assert task_from_row({**row, **changed}).task_id != task_from_row(row).task_id


def test_a_task_has_all_that_its_row_says() -> None:
    row = {
        "messages": [user("a")],
        "metadata": {"expected_answer": "7"},
        "tools": ["price"],
        "rewards": ["style"],
        "variables": {"x": 1},
    }

    task = task_from_row(row)

    assert task.messages == row["messages"]
    assert task.metadata == row["metadata"]
    assert (task.tool_names, task.reward_names) == (["price"], ["style"])
    assert task.variables == {"x": 1}
    plain = task_from_row({"prompt": "a"})
    assert (plain.tool_names, plain.docker, plain.docker_env) == (None, None, {})


def test_a_task_may_ask_for_a_container() -> None:
    row = {"prompt": "a", "docker": "local/browser", "docker_env": {"MODE": "test"}}

    assert list(CHECKS[RowFormat.PROMPTS](row)) == []
    task = task_from_row(row)
    assert (task.docker, task.docker_env) == ("local/browser", {"MODE": "test"})
    images = ["python:3.12-slim", "ghcr.io/a/b@sha256:0a", "localhost:5000/x"]
    assert not [p for i in images for p in CHECKS[RowFormat.PROMPTS]({"prompt": "a", "docker": i})]


def test_prompts_are_read_from_lines_of_text_and_from_rows(tmp_path: Path) -> None:
    text = tmp_path / "prompts.txt"
    text.write_bytes("\ufeffWas kostet das?\r\n\r\n{not json}\n".encode())
    rows = write_rows(tmp_path / "prompts.jsonl", [*PROMPTS, PROMPTS[0]])

    assert [task.messages for task in load_tasks(text)] == [
        [user("Was kostet das?")],
        [user("{not json}")],
    ]
    tasks = load_tasks(rows)
    assert [task.messages for task in tasks] == [
        [user("hello")],
        PROMPTS[1]["messages"],
        [user("hello")],
    ]
    assert tasks[0].task_id == tasks[2].task_id != tasks[1].task_id


def test_a_text_file_in_another_encoding_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes("fine\nschön\n".encode("latin-1"))

    with pytest.raises(DataError, match=r"prompts\.txt:2: .*UTF-8"):
        load_tasks(path)


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    for name in ("prompts.txt", "prompts.jsonl"):
        path = tmp_path / name
        path.write_bytes(b"\n  \r\n")
        with pytest.raises(DataError, match="has no prompts"):
            load_tasks(path)


def test_a_folder_is_no_data_file(tmp_path: Path) -> None:
    for load in (load_tasks, load_sft_rows, load_dpo_rows):
        with pytest.raises(DataError, match="folder"):
            load(tmp_path)


def test_reading_stops_at_the_first_bad_row_and_says_where(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "train.jsonl", [SFT, {"messages": 5, "metadata": 5}, {}])

    rows = read_rows(path, RowFormat.SFT)
    assert next(rows) == SFT
    with pytest.raises(DataError) as caught:
        next(rows)
    assert caught.value.problem.startswith(f"{path}:2: messages must be a non-empty list")
    assert caught.value.problem.endswith("(and 1 more on this line)")
    assert f"stillroom validate-dataset {path}" in caught.value.fix


def test_training_rows_are_loaded_as_they_stand(tmp_path: Path) -> None:
    schema = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    sft = write_rows(tmp_path / "sft.jsonl", [SFT, {**SFT, "tools": [schema]}])
    dpo = write_rows(tmp_path / "dpo.jsonl", [{**DPO, "tools": [schema], "extra": 1}])

    assert [(row.messages, row.tools, row.metadata) for row in load_sft_rows(sft)] == [
        (SFT["messages"], [], {"k": 1}),
        (SFT["messages"], [schema], {"k": 1}),
    ]
    [pair] = load_dpo_rows(dpo)
    assert [pair.prompt, pair.chosen, pair.rejected] == [
        DPO[k] for k in ("prompt", "chosen", "rejected")
    ]
    assert pair.tools == [schema]


def test_a_rollout_is_read_as_it_was_written() -> None:
    row = rollout_row(error=None, metadata={"a": [1, None]}, success=None, reward=None)

    trajectory = decode_trajectory(json.dumps(row).encode())

    written = msgspec.json.decode(msgspec.json.encode(trajectory))
    # Fields that came later are there too, with what they mean by default.
    assert (written.pop("variables"), written.pop("answered_by")) == ({}, [])
    assert [written.pop(name) for name in ("judge", "dropped", "refined")] == [None] * 3
    settings = written["teacher"]["settings"]
    later = settings.keys() - row["teacher"]["settings"].keys()
    assert [name for name in later if settings.pop(name) is not None] == []
    assert written == row


@given(mangled([SFT, DPO, *PROMPTS]))
def test_a_row_is_either_loaded_or_refused(
    tmp_path_factory: pytest.TempPathFactory, row: dict[str, Any]
) -> None:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_bytes(msgspec.json.encode(row) + b"\n")

    for load in (load_tasks, load_sft_rows, load_dpo_rows):
        try:
            loaded = load(path)
        except DataError as error:
            reported = error.problem
        else:
            assert len(loaded) == 1
            continue
        assert f"{path}:1" in reported
