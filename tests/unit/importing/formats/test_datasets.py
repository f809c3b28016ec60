"""Datasets of conversations: OpenAI's files, ShareGPT, Alpaca, tables."""

import json
import sys

import pytest

from fakes.trace_files import (
    SAMPLES,
    conversations,
    read,
    recognised_by,
    refusals,
    shown,
    write_lines,
)
from stillroom.data.checks import message_problems, tool_schema_problems
from stillroom.errors import DataError, InputError, MissingExtraError
from stillroom.importing.records import LoggedConversation
from stillroom.types import Usage

_DATASETS = (
    "openai_fine_tuning", "openai_preferences", "trl_preferences", "sharegpt", "alpaca", "csv",
    "parquet", "pairs",
)  # fmt: skip


def sample(name, file):
    return conversations(read(name, SAMPLES / name / file))


def test_fine_tuning_rows_keep_weights_tools_and_what_a_grader_would_read():
    weighted, called, legacy, picture, refused, prompt = sample("openai_fine_tuning", "chat.jsonl")
    assert [m.get("weight") for m in weighted.messages] == [None, None, 0, None, 1]
    assert shown(called.messages) == [
        "system Use the tool.",
        "user Price of a lamp?",
        'assistant  price{"item": "lamp"}',
        "tool 12",
        "assistant 12 euros.",
    ]
    assert called.tools[0]["function"]["description"] == "Returns a price."
    assert legacy.messages[1]["tool_calls"][0]["id"] == legacy.messages[2]["tool_call_id"]
    assert legacy.tools[0] == {
        "type": "function",
        "function": {
            "name": "price",
            "parameters": {"type": "object", "properties": {"item": {"type": "string"}}},
        },
    }
    assert (picture.messages[0]["content"], picture.losses) == (
        "What is on it?",
        ("images left out",),
    )
    assert refused.messages[-1]["content"] == "I cannot help with that."
    assert prompt.metadata == {"reference_answer": "4"}
    assert [row.losses for row in (weighted, called, legacy)] == [(), (), ()]


def test_legacy_completions_become_a_question_and_an_answer():
    rows = sample("openai_fine_tuning", "legacy.jsonl")
    assert shown(rows[0].messages) == ["user The capital of France is ->", "assistant  Paris"]
    assert [row.place.line for row in rows] == [1, 2]


def test_both_answers_of_a_preference_row_share_its_prompt_and_differ_in_their_score():
    good, bad = sample("openai_preferences", "pairs.jsonl")
    assert good.messages[0] == bad.messages[0]
    assert (good.scores, bad.scores) == ({"preferred": 1.0}, {"preferred": 0.0})
    assert shown([good.messages[-1], bad.messages[-1]]) == [
        "assistant It is 3 degrees, with rain later.",
        "assistant Not very.",
    ]
    assert str(good.place).endswith("pairs.jsonl:1#preferred")


def test_pairs_as_trl_has_them_are_read_with_the_prompt_within_or_beside_the_answers():
    rows = sample("trl_preferences", "pairs.jsonl")
    assert [(shown(row.messages), row.scores["preferred"]) for row in rows] == [
        (["user How cold is it in Oslo?", "assistant 3 degrees."], 1.0),
        (["user How cold is it in Oslo?", "assistant Not very."], 0.0),
        (["user How far is it?", "assistant 40 km."], 1.0),
        (["user How far is it?", "assistant Far."], 0.0),
        (["user Name a colour.", "assistant Blue."], 1.0),
        (["user Name a colour.", "assistant No."], 0.0),
    ]
    assert rows[2].metadata == {"score_chosen": 9.0}


def test_messages_may_be_text_and_a_completion_messages():
    (row,) = sample("pairs", "messages_as_text.jsonl")
    assert (shown(row.messages), row.id, row.tools) == (["user Hi", "assistant Hello."], "u1", None)
    (row,) = sample("openai_fine_tuning", "prompt_completion.jsonl")
    assert shown(row.messages) == ["user Name a colour.", "assistant Blue."]


def test_items_of_an_eval_keep_the_grades_and_a_failed_call_its_error():
    fine, failed = sample("openai_evals", "output_items.jsonl")
    assert fine.scores == {"String check": 1.0, "Judge": 0.0}
    assert fine.usage == Usage(prompt_tokens=20, completion_tokens=1)
    assert (fine.model, fine.finish_reason) == ("gpt-4o-mini-2024-07-18", "stop")
    assert shown(fine.messages) == ["system Answer.", "user 2+2?", "assistant 4"]
    assert fine.metadata["item"] == {"question": "2+2?", "answer": "4"}
    assert (failed.error, len(failed.messages)) == ("Too many requests.", 1)


def test_sharegpt_turns_become_messages_with_calls_that_their_results_name():
    plain, called, picture = sample("sharegpt", "chats.json")
    assert shown(plain.messages) == [
        "user Name a colour.",
        'assistant Blue, for example: "[blue]".',
    ]
    first, second = called.messages[2]["tool_calls"]
    assert [m.get("tool_call_id") for m in called.messages[3:5]] == [first["id"], second["id"]]
    assert called.messages[0] == {"role": "system", "content": "Use the tools."}
    assert called.tools[0]["function"]["name"] == "price"
    assert picture.losses == ("images left out",)
    assert [(row.id, row.place.line) for row in (plain, called, picture)] == [
        ("chat_0", 1),
        ("chat_1", 2),
        ("chat_2", 3),
    ]


def test_conversations_may_be_messages_of_chat_apis(tmp_path):
    call = {"id": "c", "function": {"name": "price", "arguments": {"item": "lamp"}}}
    turns = [
        {"role": "user", "content": "Price?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "12", "tool_call_id": "c"},
        {"role": "assistant", "content": "12."},
    ]
    path = write_lines(tmp_path / "x.jsonl", {"conversations": turns, "source": "web"})
    assert recognised_by(path) == ["sharegpt"]
    (row,) = conversations(read("sharegpt", path))
    assert shown(row.messages)[1] == 'assistant  price{"item": "lamp"}'
    assert row.metadata == {"source": "web"}


def test_alpaca_rows_put_the_input_after_the_instruction():
    first, second = sample("alpaca", "rows.json")
    assert shown(first.messages) == [
        "user Translate to French.\n\na lamp",
        "assistant une lampe",
    ]
    assert shown(second.messages) == [
        "system Be brief.",
        "user Hi",
        "assistant Hello.",
        "user Name a colour.",
        "assistant Blue.",
    ]
    (dolly,) = sample("alpaca", "dolly.jsonl")
    assert dolly.messages[0]["content"] == "When was it made?\n\nThe lamp was made in 1962."
    assert dolly.metadata == {"category": "closed_qa"}


def test_columns_with_usual_names_need_not_be_named():
    first, second = sample("csv", "questions.csv")
    assert shown(first.messages) == ['user What is "it"?', "assistant A lamp,\nof course."]
    assert (first.place.line, second.place.line) == (3, 4)
    assert second.metadata == {"rating": "true", "source": "web"}
    (chat,) = sample("csv", "chats.tsv")
    assert shown(chat.messages) == ["user Hi", "assistant Hello."]
    assert shown(sample("pairs", "gsm.jsonl")[1].messages)[0] == "user Three chairs at 30 each?"


def test_columns_say_what_holds_a_score_and_what_the_texts():
    columns = {"user": "question", "assistant": "answer", "score": "rating"}
    rows = read("csv", SAMPLES / "csv" / "questions.csv", columns=columns)
    assert [row.scores for row in conversations(rows)] == [{"rating": 0.5}, {"rating": 1.0}]
    columns = {"user": "q", "assistant": "a", "score": "good"}
    rows = read("parquet", SAMPLES / "parquet" / "questions.parquet", columns=columns)
    assert [(row.scores["good"], shown(row.messages)[1]) for row in conversations(rows)] == [
        (0.0, "assistant 2"),
        (1.0, "assistant 4"),
        (1.0, "assistant 6"),
    ]


def test_parquet_rows_keep_their_calls_and_lose_their_pictures_openly():
    called, plain = sample("parquet", "chats.parquet")
    assert shown(called.messages)[1:3] == ['assistant  price{"item": "lamp"}', "tool 12"]
    assert (called.id, called.metadata, called.losses) == (
        "row-1",
        {"num_tokens": 31},
        ("files left out",),
    )
    assert plain.losses == ()


def test_columns_of_a_question_and_an_answer_may_hold_messages(tmp_path):
    from pyarrow import Table, parquet

    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    rows = [
        {"prompt": prompt, "completion": [{"role": "assistant", "content": "Hello."}], "reward": 1},
        {"prompt": prompt, "completion": [], "reward": 0},
    ]
    parquet.write_table(Table.from_pylist(rows), tmp_path / "saved.parquet")
    columns = {"user": "prompt", "assistant": "completion", "score": "reward"}
    read_rows = read("parquet", tmp_path / "saved.parquet", columns=columns)
    assert shown(read_rows[0].messages) == ["system Be brief.", "user Hi", "assistant Hello."]
    assert read_rows[0].scores == {"reward": 1.0}
    assert refusals(read_rows) == [(2, "a column holds no text")]


@pytest.mark.parametrize(
    ("columns", "error", "words"),
    [
        ({"usr": "q"}, InputError, "'usr' is nothing that a column holds"),
        ({"user": "qq", "assistant": "a"}, InputError, "has no column 'qq'"),
        ({"user": "q"}, DataError, "no column holds the conversation"),
    ],
)
def test_a_wrong_choice_of_columns_is_refused_by_name(columns, error, words):
    with pytest.raises(error, match=words):
        read("parquet", SAMPLES / "parquet" / "questions.parquet", columns=columns)


def test_a_table_of_unknown_columns_is_refused_and_others_are_read(tmp_path):
    [refusal] = read("parquet", SAMPLES / "parquet" / "questions.parquet")
    assert refusal.reason == "no column holds the conversation"
    assert refusal.detail.startswith("say which do: columns user=question")
    assert refusal.detail.endswith("it has 'q', 'a', 'good'")
    (tmp_path / "a.csv").write_text("left,right\n1,2\n")
    (tmp_path / "b.csv").write_text("question,answer\n1,2\n")
    read_rows = read("csv", tmp_path / "a.csv", tmp_path / "b.csv")
    assert shown(conversations(read_rows[1:])[0].messages) == ["user 1", "assistant 2"]
    assert refusals(read_rows) == [(1, "no column holds the conversation")]


def test_parquet_without_pyarrow_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"stillroom\[traces\]"):
        read("parquet", SAMPLES / "parquet" / "chats.parquet")


def test_a_broken_parquet_file_is_named(tmp_path):
    path = tmp_path / "x.parquet"
    path.write_bytes(b"PAR1 is all there is")
    with pytest.raises(DataError, match=r"x\.parquet is no readable parquet file"):
        read("parquet", path)


@pytest.mark.parametrize("name", _DATASETS)
def test_every_conversation_of_a_dataset_is_valid_in_our_shape(name):
    files = [file for file in (SAMPLES / name).iterdir() if file.name != "questions.parquet"]
    rows = conversations(read(name, *files))
    problems = [
        (row.place, problem)
        for row in rows
        for problem in (*message_problems(row.messages), *tool_schema_problems(row.tools))
    ]
    assert rows
    assert problems == []
    json.dumps([(row.messages, row.metadata) for row in rows], allow_nan=False)


def test_broken_rows_are_refused_by_line_and_the_others_are_read(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(
        b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
        b"not JSON\n"
        b'{"messages": []}\n'
        b'{"messages": [{"content": "who?"}]}\n'
        b'{"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}\n'
        b'{"messages": [{"role": "user", "content": "\xff"}]}\n'
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}\n'
        b'{"messages": [{"role": "user", "content": NaN}]}\n'
        b"[1]\n"
        b'{"messages": ' + b"[" * 100_000 + b"\n"
        b'{"tools": "{", "messages": [{"role": "user", "content": "a"}]}\n'
        b'{"messages": [{"role": "user", "content": "a"}], "messages": [{"role": "user"}]}\n'
    )
    rows = read("openai_fine_tuning", path)
    assert [row.place.line for row in rows] == list(range(1, 13))
    assert [row.place.line for row in rows if isinstance(row, LoggedConversation)] == [1, 12]
    assert refusals(rows)[1:4] == [
        (3, "holds no messages"),
        (4, "a message has no role"),
        (5, "a tool call has no name"),
    ]
    assert refusals(rows)[-1] == (11, "the tools are not valid JSON")


def test_broken_rows_of_csv_are_refused_by_line_and_the_others_are_read(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_bytes(
        b'\xef\xbb\xbfprompt;response\nq1;a1\nonly one\nq2;\xff\nq3;\n\nq4;a4\nq5;"unclosed\n'
    )
    rows = read("csv", path)
    assert [row.place.line for row in rows if isinstance(row, LoggedConversation)] == [2, 7, 8]
    assert refusals(rows) == [
        (3, "another number of fields than the header"),
        (4, "not UTF-8 text"),
        (5, "a column holds no text"),
    ]


def test_elements_of_an_array_are_read_one_by_one_though_some_are_broken(tmp_path):
    path = tmp_path / "rows.json"
    row = '{"instruction": "a ]} \\" [", "output": "b"}'
    path.write_text(f'[\n{row},\n 5,\n "x, y",\n {{"instruction": 1}}, {row}, {row[:20]}')
    rows = read("alpaca", path)
    assert [row.place.line for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row.place.line for row in rows if isinstance(row, LoggedConversation)] == [1, 5]
