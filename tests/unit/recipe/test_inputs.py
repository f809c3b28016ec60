import json
from pathlib import Path

import pytest

from fakes.rollout_rows import assistant, user
from stillroom.errors import DataError
from stillroom.recipe.inputs import read_examples


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_a_table_gives_prompts_with_the_system_message_and_other_columns_as_metadata(
    tmp_path: Path,
) -> None:
    table = written(tmp_path / "in.csv", 'id,text,label\n1,"Where is it, please?",delivery\n')

    [example] = read_examples(table, system="Sort it.", with_answers=True)

    assert example.row == {
        "messages": [
            {"role": "system", "content": "Sort it."},
            {"role": "user", "content": "Where is it, please?"},
        ],
        "metadata": {"id": "1", "expected_answer": "delivery"},
    }
    assert (example.text, example.answer) == ("Where is it, please?", "delivery")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("in.csv", "body,queue\nWhere is my parcel?,delivery\n"),
        ("in.tsv", "queue\tticket words\ndelivery\tWhere is my parcel?\n"),
        ("in.jsonl", '{"ticket": "Where is my parcel?", "queue": "delivery"}\n'),
    ],
)
def test_the_columns_of_texts_and_answers_are_found(tmp_path: Path, name: str, text: str) -> None:
    [example] = read_examples(written(tmp_path / name, text), system=None, with_answers=True)

    assert (example.text, example.answer) == ("Where is my parcel?", "delivery")


def test_an_unclear_column_of_answers_is_asked_for(tmp_path: Path) -> None:
    table = written(tmp_path / "in.csv", "text,queue,team\nWhere is it?,delivery,north\n")

    with pytest.raises(DataError, match="queue, team has the right answers is not clear") as error:
        read_examples(table, system=None, with_answers=True)
    assert "'label'" in error.value.fix


def test_prompts_keep_their_fields_and_equal_texts_count_once(tmp_path: Path) -> None:
    rows = [
        {"prompt": "2 + 2?", "tools": ["sum"], "metadata": {"expected_answer": "4"}},
        {"prompt": "2 + 2?"},
        {"messages": [{"role": "system", "content": "Old."}, {"role": "user", "content": "Hi"}]},
    ]
    path = written(tmp_path / "in.jsonl", "".join(json.dumps(row) + "\n" for row in rows))

    first, second = read_examples(path, system="New.")

    assert first.row["tools"] == ["sum"]
    assert first.answer == "4"
    assert [message["content"] for message in second.row["messages"]] == ["New.", "Hi"]
    assert read_examples(path, system=None)[1].row["messages"][0]["content"] == "Old."


def test_a_text_file_has_a_prompt_per_line(tmp_path: Path) -> None:
    path = written(tmp_path / "in.txt", "One?\nTwo?\n")

    assert [example.text for example in read_examples(path, system=None)] == ["One?", "Two?"]


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("in.csv", "text\n", "no rows that can be read"),
        ("in.csv", "text\n \n", "has no prompts"),
        (
            "in.jsonl",
            f"{json.dumps({'messages': [user('a'), assistant('b')]})}\n",
            "conversations with answers, not prompts",
        ),
    ],
)
def test_a_file_without_prompts_is_refused(
    tmp_path: Path, name: str, text: str, problem: str
) -> None:
    with pytest.raises(DataError, match=problem):
        read_examples(written(tmp_path / name, text), system=None)


def test_every_labelled_prompt_needs_its_answer(tmp_path: Path) -> None:
    path = written(tmp_path / "in.jsonl", '{"prompt": "Where is it?"}\n')

    with pytest.raises(DataError, match="a prompt without an answer: 'Where is it"):
        read_examples(path, system=None, with_answers=True)
