"""Datasets of conversations: OpenAI's files, ShareGPT, Alpaca, tables."""

import csv
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
from stillroom.errors import DataError, InputError, MissingExtraError
from stillroom.importing.records import LoggedConversation


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


def test_named_columns_are_those_of_the_tables_that_have_them(tmp_path):
    (tmp_path / "calls.csv").write_text("Frage ;Antwort\nWhere?;Here.\n", encoding="utf-8")
    (tmp_path / "thumbs.csv").write_text("id,thumb\nc1,up\nc2,down\n", encoding="utf-8")
    files = [tmp_path / "calls.csv", tmp_path / "thumbs.csv"]

    call, *thumbs = read("csv", *files, columns={"user": "Frage", "assistant": "Antwort"})

    [row] = conversations([call])
    assert shown(row.messages) == ["user Where?", "assistant Here."]
    assert [(one.target_id, one.value) for one in thumbs] == [("c1", 1.0), ("c2", 0.0)]
    with pytest.raises(InputError, match="no column 'Question'"):
        read("csv", *files, columns={"user": "Question", "assistant": "Answer"})


def test_an_answer_may_be_in_several_columns(tmp_path):
    (tmp_path / "x.csv").write_text('q,city,year\nWhere?,Paris,1889\nWhen?,,"18\n90"\nNo?,,\n')
    rows = read("csv", tmp_path / "x.csv", columns={"user": "q", "assistant": "city+year"})
    assert [row.messages[-1]["content"] for row in rows[:2]] == [
        '{"city":"Paris","year":"1889"}',
        '{"city":"","year":"18\\n90"}',
    ]
    assert [row.metadata for row in rows[:2]] == [{}, {}]
    assert refusals(rows[2:]) == [(5, "the question or answer is empty or not text")]
    with pytest.raises(InputError, match="no column 'town'"):
        read("csv", tmp_path / "x.csv", columns={"user": "q", "assistant": "city+town"})


def test_a_row_may_lack_a_named_column_and_a_column_that_no_row_has_is_refused(tmp_path):
    path = write_lines(
        tmp_path / "x.jsonl",
        {"q": "One?", "a": "1", "good": 1},
        {"q": "Two?"},
        {"q": "Three?", "a": "3"},
    )
    columns = {"user": "q", "assistant": "a", "score": "good"}
    first, refused, last = read("pairs", path, columns=columns)
    assert refusals([refused]) == [(2, "no field has the conversation")]
    assert [row.scores for row in (first, last)] == [{"good": 1.0}, {}]
    with pytest.raises(InputError, match="no row has the column 'god'"):
        read("pairs", path, columns=columns | {"score": "god"})


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
    assert refusals(read_rows) == [(2, "the question or answer is empty or not text")]


def write_table(path, rows):
    with path.open("w", newline="") as stream:
        table = csv.DictWriter(stream, list(rows[0]))
        table.writeheader()
        table.writerows(rows)


def table_row(messages, response, system="Sort."):
    return {"system": system, "messages": json.dumps(messages), "response": response, "rating": "2"}


ASKED = [{"role": "user", "content": [{"type": "text", "text": "Where?"}]}]


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ('{"queue": "returns"}', 'assistant {"queue": "returns"}'),
        ('[{"type": "text", "text": "[1]"}]', "assistant [1]"),
        (
            '[{"type": "bug", "text": "It stops."}]',
            'assistant [{"type": "bug", "text": "It stops."}]',
        ),
        ('[{"type": "tool_use", "id": "t", "name": "f", "input": {}}]', "assistant  f{}"),
        ('[{"role": "assistant", "content": "Here."}]', "assistant Here."),
        ('[{"role": "chef", "content": "Ada"}]', 'assistant [{"role": "chef", "content": "Ada"}]'),
    ],
)
@pytest.mark.parametrize("columns", [{}, {"user": "messages", "assistant": "response"}])
def test_the_answer_to_messages_may_be_in_another_column(response, answer, columns, tmp_path):
    rows = [table_row(ASKED, response), table_row(ASKED, "")]
    write_table(tmp_path / "calls.csv", rows)
    call, refused = read("csv", tmp_path / "calls.csv", columns=columns)
    assert shown(call.messages) == ["system Sort.", "user Where?", answer]
    assert call.scores == {"rating": 2.0}
    assert refusals([refused]) == [(3, "the question or answer is empty or not text")]


def test_a_tables_system_message_id_and_model_are_read_next_to_named_columns(tmp_path):
    row = {"q": "Where?", "a": "Here.", "system": "Be brief.", "model": "m-1", "id": "r1"}
    write_table(tmp_path / "calls.csv", [row])
    columns = {"user": "q", "assistant": "a"}
    (call,) = conversations(read("csv", tmp_path / "calls.csv", columns=columns))
    assert shown(call.messages) == ["system Be brief.", "user Where?", "assistant Here."]
    assert (call.id, call.model, call.metadata) == ("r1", "m-1", {})
    columns |= {"system": "model"}
    (call,) = conversations(read("csv", tmp_path / "calls.csv", columns=columns))
    assert shown(call.messages)[0] == "system m-1"
    assert call.model is None


def test_a_column_next_to_answered_messages_stays_metadata(tmp_path):
    answered = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "Here."}]
    write_table(tmp_path / "calls.csv", [{"chat": json.dumps(answered), "answer": "There."}])
    (call,) = conversations(read("csv", tmp_path / "calls.csv", columns={"messages": "chat"}))
    assert shown(call.messages) == ["user Where?", "assistant Here."]
    assert call.metadata == {"answer": "There."}


def test_an_answer_after_messages_is_not_read_twice_and_a_reply_without_blocks_is_refused(tmp_path):
    answered = [{"role": "system", "content": "S"}, *ASKED, {"role": "assistant", "content": "[]"}]
    text = [{"role": "user", "content": "List all."}]
    rows = [table_row(answered, "Here."), table_row(text, "[]"), table_row(ASKED, "[]")]
    write_table(tmp_path / "calls.csv", rows)
    first, second, refused = read("csv", tmp_path / "calls.csv")
    assert shown(first.messages) == ["system S", "user Where?", "assistant []"]
    assert shown(second.messages) == ["system Sort.", "user List all.", "assistant []"]
    assert refusals([refused]) == [(4, "the question or answer is empty or not text")]


@pytest.mark.parametrize(
    ("columns", "error", "words"),
    [
        ({"usr": "q"}, InputError, "'usr' is not a known role of a column"),
        ({"user": "qq", "assistant": "a"}, InputError, "has no column 'qq'"),
        ({"user": "q"}, DataError, "no known column for the conversation"),
    ],
)
def test_a_wrong_choice_of_columns_is_refused_by_name(columns, error, words):
    with pytest.raises(error, match=words):
        read("parquet", SAMPLES / "parquet" / "questions.parquet", columns=columns)


def test_a_table_of_unknown_columns_is_refused_and_others_are_read(tmp_path):
    [refusal] = read("parquet", SAMPLES / "parquet" / "questions.parquet")
    assert refusal.reason == "no column has the conversation"
    assert refusal.detail.startswith("name them: columns user=question")
    assert refusal.detail.endswith("the table has 'q', 'a', 'good'")
    (tmp_path / "a.csv").write_text("left,right\n1,2\n")
    (tmp_path / "b.csv").write_text("question,answer\n1,2\n")
    read_rows = read("csv", tmp_path / "a.csv", tmp_path / "b.csv")
    assert shown(conversations(read_rows[1:])[0].messages) == ["user 1", "assistant 2"]
    assert refusals(read_rows) == [(1, "no column has the conversation")]


def test_parquet_without_pyarrow_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"stillroom\[traces\]"):
        read("parquet", SAMPLES / "parquet" / "chats.parquet")


@pytest.mark.parametrize("damage", ["all", "page", "footer"])
def test_a_broken_parquet_file_is_named(tmp_path, damage):
    path = tmp_path / "x.parquet"
    data = bytearray((SAMPLES / "parquet" / "chats.parquet").read_bytes())
    if damage == "all":
        data[:] = b"PAR1 is all there is"
    else:
        at = 4 if damage == "page" else len(data) - 108
        data[at : at + 20] = b"\xff" * 20
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"x\.parquet is not a valid Parquet file"):
        read("parquet", path)


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
    assert [row.location.line for row in rows] == list(range(1, 13))
    assert [row.location.line for row in rows if isinstance(row, LoggedConversation)] == [1, 12]
    assert refusals(rows)[1:4] == [
        (3, "no messages"),
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
    assert [row.location.line for row in rows if isinstance(row, LoggedConversation)] == [2, 7, 8]
    assert refusals(rows) == [
        (3, "the fields do not match the header"),
        (4, "not UTF-8 text"),
        (5, "the question or answer is empty or not text"),
    ]


def test_elements_of_an_array_are_read_one_by_one_though_some_are_broken(tmp_path):
    path = tmp_path / "rows.json"
    row = '{"instruction": "a ]} \\" [", "output": "b"}'
    path.write_text(f'[\n{row},\n 5,\n "x, y",\n {{"instruction": 1}}, {row}, {row[:20]}')
    rows = read("alpaca", path)
    assert [row.location.line for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row.location.line for row in rows if isinstance(row, LoggedConversation)] == [1, 5]
