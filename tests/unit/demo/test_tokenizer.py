import json
from random import Random

import pytest
from transformers import AutoTokenizer

from demo_models.conversations import TOOL_SCHEMAS, gold_messages, noisy_messages
from stillroom.demo import DEMO_MODELS
from stillroom.demo.shop import TASK_TYPES
from stillroom.demo.world import make_task

MODELS = DEMO_MODELS["demo/student"].parent
TURN_END = "<|im_end|>"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO_MODELS["demo/student"])


@pytest.fixture(scope="module")
def conversations():
    rng = Random(11)
    tasks = [make_task(rng, name) for name in TASK_TYPES for _ in range(4)]
    return [gold_messages(task) for task in tasks] + [noisy_messages(task, rng) for task in tasks]


def two_calls_in_one_turn():
    calls = [
        {"id": f"call_{n}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for n, (name, arguments) in enumerate(
            [("price", '{"item": "lamp"}'), ("calculator", '{"expression": "2*(3-1)"}')]
        )
    ]
    return [
        {"role": "system", "content": "You are a shop clerk. Use the tools."},
        {"role": "user", "content": "How much is a lamp, and 2*(3-1)?"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_0", "name": "price", "content": "7"},
        {"role": "tool", "tool_call_id": "call_1", "name": "calculator", "content": "4"},
        {"role": "assistant", "content": "The answer is 7."},
        {"role": "user", "content": "Thanks, and a chair?"},
        {"role": "assistant", "content": "The answer is 9."},
    ]


def render(tokenizer, messages, **options):
    return tokenizer.apply_chat_template(messages, tools=TOOL_SCHEMAS, tokenize=False, **options)


def test_a_conversation_renders_as_chatml_with_hermes_tool_calls(tokenizer):
    assert render(tokenizer, two_calls_in_one_turn()[:5], add_generation_prompt=True) == (
        "<|im_start|>system\nYou are a shop clerk. Use the tools.\n"
        "<tools>\nprice(item)\nstock(item)\ncalculator(expression)\n</tools><|im_end|>\n"
        "<|im_start|>user\nHow much is a lamp, and 2*(3-1)?<|im_end|>\n"
        "<|im_start|>assistant\nLet me see.\n"
        '<tool_call>\n{"name": "price", "arguments": {"item": "lamp"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2*(3-1)"}}\n</tool_call>'
        "<|im_end|>\n"
        "<|im_start|>tool\n<tool_response>\n7\n</tool_response><|im_end|>\n"
        "<|im_start|>tool\n<tool_response>\n4\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_arguments_render_the_same_as_text_and_as_an_object(tokenizer):
    messages = two_calls_in_one_turn()
    with_objects = json.loads(json.dumps(messages))
    for call in with_objects[2]["tool_calls"]:
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])

    assert render(tokenizer, with_objects) == render(tokenizer, messages)


def test_the_mask_covers_the_assistant_text_and_its_turn_ends(tokenizer, conversations):
    for messages in [*conversations, two_calls_in_one_turn()]:
        encoded = tokenizer.apply_chat_template(
            messages, tools=TOOL_SCHEMAS, return_dict=True, return_assistant_tokens_mask=True
        )
        masked = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
        trained_on = tokenizer.decode([token for token, is_trained in masked if is_trained])
        turns = render(tokenizer, messages).split("<|im_start|>assistant\n")[1:]

        assert trained_on == "".join(turn.split(TURN_END)[0] + TURN_END for turn in turns)


def test_student_and_teacher_share_one_tokenizer():
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        student, teacher = (MODELS / model / name for model in ("student", "teacher"))

        assert student.read_bytes() == teacher.read_bytes()
