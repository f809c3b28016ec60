"""Conversations are shown in parts, cut where they are long."""

from typing import Any

from stillroom.report.conversation import MAX_TEXT, Part, conversation, num_prompt_messages


def parts(*given: dict[str, Any]) -> list[Part]:
    return list(conversation(given).head)


def call(arguments: Any) -> dict[str, Any]:
    function = {"name": "price", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}


def test_every_kind_of_message_becomes_a_part() -> None:
    shown = parts(
        {"role": "system", "content": "You add."},
        {"role": "user", "content": [{"type": "text", "text": "See"}, {"type": "image_url"}]},
        {"role": "assistant", "content": "Let me look.", "tool_calls": call("{}")["tool_calls"]},
        {"role": "tool", "name": "price", "content": "error: no such item"},
        {"role": "assistant", "reasoning_content": "Hm.", "content": "4", "tool_calls": None},
    )
    assert [(part.kind, part.text) for part in shown] == [
        ("system", "You add."),
        ("user", "See\n[image_url]"),
        ("text", "Let me look."),
        ("call", ""),
        ("reply", "error: no such item"),
        ("thinking", "Hm."),
        ("answer", "4"),
    ]
    assert [part.is_error for part in shown].count(True) == 1


def test_arguments_are_shown_by_name_and_broken_ones_as_written() -> None:
    assert parts(call('{"item": "tray", "n": 2}'))[0].text == 'item="tray", n=2'
    assert parts(call('{"item": '))[0].text == '{"item": '
    assert parts(call("[1]"))[0].text == "[1]"


def test_an_empty_answer_is_said_to_be_empty() -> None:
    assert parts({"role": "assistant", "content": " "})[0].text == "(empty)"


def test_long_texts_and_long_conversations_are_cut_and_what_is_gone_is_counted() -> None:
    turn = {"role": "assistant", "content": "x" * (MAX_TEXT + 7)}
    shown = conversation([turn] * 40)
    assert len(shown.head[0].text) == MAX_TEXT
    assert shown.head[0].num_hidden == 7
    assert len(shown.head) + shown.num_left_out + len(shown.tail) == 40
    assert shown.num_left_out > 20


def test_the_turns_of_the_model_are_told_from_those_it_was_given() -> None:
    given = (
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "an example"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "the model's own"},
    )
    assert num_prompt_messages(given, 1) == 3
    assert num_prompt_messages(given, 2) == 1
    assert num_prompt_messages(given, 0) == num_prompt_messages(given, 9) == 4
