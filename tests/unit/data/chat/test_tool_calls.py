import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import chat_templates
from stillroom.data.chat.tool_calls import (
    has_call_text,
    is_from_text,
    message_from_text,
    message_with_calls,
    parse_hermes,
    parse_llama,
    parse_mistral,
    parse_mistral_marked,
    parser_for,
)
from stillroom.errors import ModelError


def parsed(parser, text):
    """Returns the content and each call's name and arguments."""
    content, written = parser(text)
    return content, [(call.name, call.arguments) for call in written]


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        (chat_templates.CHATML, parse_hermes),
        (chat_templates.QWEN3, parse_hermes),
        (chat_templates.MISTRAL, parse_mistral),
        (chat_templates.LLAMA3, parse_llama),
    ],
)
def test_the_parser_follows_the_templates_format(template, parser):
    assert parser_for(template) is parser


def test_a_template_without_a_known_format_is_refused_with_other_ways():
    with pytest.raises(ModelError, match="no supported tool-call format") as caught:
        parser_for(chat_templates.GEMMA)
    assert "OpenAI-compatible endpoint" in caught.value.fix


def test_hermes_calls_are_read_and_the_text_around_them_is_kept():
    text = (
        'Let me look.\n<tool_call>\n{"name": "price", "arguments": {"item": "lämp"}}\n</tool_call>'
        '\n<tool_call>{"name": "stock", "arguments": {}}</tool_call>'
    )

    assert parsed(parse_hermes, text) == (
        "Let me look.",
        [("price", '{"item": "lämp"}'), ("stock", "{}")],
    )


def test_a_broken_call_keeps_its_text_so_that_the_model_is_told():
    text = '<tool_call>{"name": "price", "arguments": {"item": lamp}}</tool_call>'

    assert parsed(parse_hermes, text)[1] == [
        ("price", '{"name": "price", "arguments": {"item": lamp}}')
    ]


@pytest.mark.parametrize(
    ("body", "call"),
    [
        ("", ("", "")),
        ("[]", ("", "[]")),
        ("7", ("", "7")),
        ('"price"', ("", '"price"')),
        ('{"arguments": {}}', ("", '{"arguments": {}}')),
        ('{"name": "price"}', ("price", "{}")),
        ('{"name": "price", "arguments": "{}"}', ("price", "{}")),
        ('{"name": "price", "arguments": null}', ("price", "null")),
        ('{"name": 7, "arguments": {}}', ("7", "{}")),
    ],
)
def test_every_odd_call_becomes_one_call(body, call):
    assert parsed(parse_hermes, f"<tool_call>{body}</tool_call>")[1] == [call]


def test_text_without_calls_is_left_as_it_is():
    for parser in (parse_hermes, parse_mistral, parse_llama):
        assert parser(" The answer is 12.\n") == (" The answer is 12.\n", [])


def test_marked_mistral_calls_are_read_one_after_another():
    text = 'Hm.[TOOL_CALLS]price[ARGS]{"item": "lamp"}[TOOL_CALLS]stock[ARGS]{}'

    assert parsed(parse_mistral_marked, text) == (
        "Hm.",
        [("price", '{"item": "lamp"}'), ("stock", "{}")],
    )
    assert parsed(parse_mistral_marked, "No call.") == ("No call.", [])
    assert parsed(parse_mistral_marked, "[TOOL_CALLS]pri") == ("", [("", "[TOOL_CALLS]pri")])


def test_mistral_calls_are_read_from_the_end_of_the_turn():
    text = (
        'Hm. [TOOL_CALLS] [{"name": "price", "arguments": {"item": "lamp"}, "id": "abcdefghi"}, '
        '{"name": "stock", "arguments": {}}]'
    )

    assert parsed(parse_mistral, text) == ("Hm.", [("price", '{"item": "lamp"}'), ("stock", "{}")])


def test_a_mistral_call_keeps_the_id_under_which_the_model_expects_its_reply():
    text = '[TOOL_CALLS] [{"name": "a", "id": "abcdefghi"}, {"name": "b"}, {"name": "c", "id": 7}]'

    made = message_from_text(text, parse_mistral)["tool_calls"]

    assert [call["id"] for call in made] == ["abcdefghi", "call00001", "call00002"]


def test_a_llama_call_is_the_whole_turn():
    call = '{"name": "price", "parameters": {"item": "lamp"}}'

    assert parsed(parse_llama, f" <|python_tag|>{call}\n") == (
        "",
        [("price", '{"item": "lamp"}')],
    )
    assert parse_llama(f"Look: {call}") == (f"Look: {call}", [])


def test_arguments_of_a_llama_call_may_be_named_as_its_fields():
    call = '{"name": "run", "arguments": {"parameters": {"x": 1}, "y": 2}}'

    assert parsed(parse_llama, call) == ("", [("run", '{"parameters": {"x": 1}, "y": 2}')])


def test_thinking_is_set_apart_from_the_answer():
    message = message_from_text("<think>\nhm <tool_call>\n</think>\n\nIt is 12.", parse_hermes)

    assert message == {
        "role": "assistant",
        "content": "It is 12.",
        "reasoning_content": "hm <tool_call>",
    }


def test_calls_are_numbered_through_a_conversation_with_ids_every_template_takes():
    text = '<tool_call>{"name": "a"}</tool_call><tool_call>{"name": "b"}</tool_call>'

    first = message_from_text(text, parse_hermes)["tool_calls"]
    second = message_from_text(text, parse_hermes, first_call=2)["tool_calls"]

    ids = [call["id"] for call in [*first, *second]]
    assert len(set(ids)) == 4
    # Mistral's templates want nine letters or digits.
    assert all(len(one) == 9 and one.isalnum() for one in ids)
    assert first[1] == {
        "id": ids[1], "type": "function", "function": {"name": "b", "arguments": "{}"},
    }  # fmt: skip


pieces = st.lists(
    st.sampled_from(
        ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<think>", "</think>", '{"name": "', '"}',
         '"arguments": ', '"parameters": ', "[", "]", "{", "}", '"', "\\", "\\ud800", "\\u0000",
         "1e999", "-", ":", ",", " ", "\n", "é", "[" * 2000, "null", "9" * 5000]
    ),
    max_size=12,
).map("".join)  # fmt: skip


@settings(max_examples=300)
@given(text=st.one_of(pieces, st.text(max_size=40)))
@pytest.mark.parametrize("parser", [parse_hermes, parse_mistral, parse_llama])
def test_whatever_a_model_writes_becomes_a_message_that_can_be_stored(parser, text):
    text = text.encode(errors="replace").decode()

    message = message_from_text(text, parser)

    assert msgspec.json.decode(msgspec.json.encode(message)) == message


@pytest.mark.parametrize("parser", [parse_hermes, parse_mistral, parse_llama])
@pytest.mark.parametrize(
    "arguments", ['{"item": "\\ud83d"}', '{"\\udfff": 1}', "[" * 100_000, '{"a":' * 100_000]
)
def test_calls_that_json_cannot_carry_are_handed_back_as_they_were_written(parser, arguments):
    key = "parameters" if parser is parse_llama else "arguments"
    body = json.dumps({"name": "price", key: 0}).replace("0", arguments)
    text = {parse_hermes: "<tool_call>{}", parse_mistral: "[TOOL_CALLS][{}]"}.get(parser, "{}")

    message = message_from_text(text.replace("{}", body), parser)

    assert arguments in message["tool_calls"][0]["function"]["arguments"]
    assert msgspec.json.encode(message)


JSON_CALL = '{"name": "price", "arguments": {"item": "lamp"}}'
LEFT_IN_TEXT = {
    "hermes": f"<tool_call>\n{JSON_CALL}\n</tool_call>",
    "hermes, never closed": f"Let me look.\n<tool_call>{JSON_CALL}",
    "hermes, broken": '<tool_call>{"name": "price", "arguments": {"item": "la</tool_call>',
    "qwen3 coder": "<tool_call>\n<function=price>\n<parameter=item>\nlamp\n</parameter></function>",
    "qwen3 coder, bare": "<function=price><parameter=item>lamp</parameter></function>",
    "glm": "<tool_call>price\n<arg_key>item</arg_key><arg_value>lamp</arg_value></tool_call>",
    "mistral": f"[TOOL_CALLS] [{JSON_CALL}]",
    "mistral, broken": '[TOOL_CALLS] price {"item": "lamp"}',
    "mistral, newer": '[TOOL_CALLS]price[ARGS]{"item": "lamp"}',
    "llama 3": '{"name": "price", "parameters": {"item": "lamp"}}',
    "llama 3, broken": '{"name": "price", "parameters": {"item": "la',
    "llama 3.1": '<|python_tag|>{"name": "price", "parameters": {"item": "lamp"}}',
    "llama 3.1, custom": '<function=price>{"item": "lamp"}</function>',
    "deepseek": "<\uff5ctool▁calls▁begin\uff5c>function<\uff5ctool▁sep\uff5c>price\n{}",
    "kimi": '<|tool_calls_section_begin|><|tool_call_begin|>functions.price:0 {"item": "lamp"}',
    "gpt-oss": '<|channel|>commentary to=functions.price<|message|>{"item": "lamp"}',
    "granite": f"<|tool_call|>[{JSON_CALL}]",
    "lfm2": '<|tool_call_start|>[price(item="lamp")]<|tool_call_end|>',
    "minimax": '<minimax:tool_call><invoke name="price"></invoke></minimax:tool_call>',
    "seed": "<seed:tool_call><function=price></function></seed:tool_call>",
    "nemotron": f"<TOOLCALL>[{JSON_CALL}]</TOOLCALL>",
    "hunyuan": f"<tool_calls><tool_call>{JSON_CALL}</tool_call></tool_calls>",
    "command": '<|START_ACTION|>[{"tool_name": "price"}]<|END_ACTION|>',
    "functiongemma": "<start_function_call>call:price{item:lamp}<end_function_call>",
    "internlm": f"<|action_start|><|plugin|>{JSON_CALL}<|action_end|>",
    "apertus": '<|tools_prefix|>[{"price": {"item": "lamp"}}]<|tools_suffix|>',
    "olmo": '<function_calls>price(item="lamp")</function_calls>',
    "phi": f"functools[{JSON_CALL}]",
    "after thinking": f"<think>The price?</think>\n<tool_call>{JSON_CALL}</tool_call>",
}
READABLE = {
    "hermes",
    "hermes, never closed",
    "mistral",
    "mistral, newer",
    "llama 3",
    "llama 3.1",
} | {
    "hunyuan",
    "after thinking",
}


@pytest.mark.parametrize("family", LEFT_IN_TEXT)
def test_a_call_that_a_server_left_in_the_text_is_a_call_and_no_answer(family):
    text = LEFT_IN_TEXT[family]

    message = message_with_calls(
        {"role": "assistant", "content": text}, ["stock", "price"], first_call=4
    )

    [call] = message["tool_calls"]
    assert (call["id"], call["function"]["name"]) == ("text00004", "price")
    assert is_from_text(call)
    try:
        arguments = msgspec.json.decode(call["function"]["arguments"])
    except msgspec.DecodeError:
        arguments = None
    assert (arguments == {"item": "lamp"}) is (family in READABLE)
    # Without the names of the tools, a broken object may be an answer.
    assert has_call_text(text) is (family != "llama 3, broken")


@pytest.mark.parametrize(
    "text",
    [
        "12",
        "",
        '{"name": "lamp", "price": 12}',
        '{"name": "lamp", "parameters": "none"}',
        '[{"name": "lamp"}]',
        "Qwen writes calls in `<tool_call>` tags.",
        "<think>Should I write <tool_call>?</think>No: 12.",
        "The tool call failed; tools are listed below.",
    ],
)
def test_an_answer_is_left_as_it_is(text):
    message = {"role": "assistant", "content": text}

    assert not has_call_text(text)
    assert message_with_calls(message, ["price"], first_call=0) is message
