import json
import re
from random import Random

import pytest

from demo_models.conversations import (
    gold_messages,
    is_correct,
    make_training_task,
    noisy_messages,
    run_tool,
)
from stillroom.demo.shop import TASK_TYPES
from stillroom.demo.world import is_heldout, make_task


def test_a_training_task_is_never_held_out():
    rng = Random(0)

    assert not any(
        is_heldout(make_training_task(rng, name).prompt) for name in TASK_TYPES for _ in range(100)
    )


def test_gold_messages_answer_with_linked_tool_replies():
    task = make_task(Random(3), "inventory")
    messages = gold_messages(task)
    calls = [call for message in messages for call in message.get("tool_calls", [])]
    replies = [message for message in messages if message["role"] == "tool"]

    assert [call["id"] for call in calls] == [reply["tool_call_id"] for reply in replies]
    assert [call["function"]["name"] for call in calls] == [reply["name"] for reply in replies]
    (item, _) = task.knowledge_base
    assert calls[0]["function"] == {"name": "price", "arguments": f'{{"item": "{item}"}}'}
    assert messages[-1]["content"] == f"The answer is {task.expected_answer}."


def test_noisy_messages_keep_the_format_but_are_mostly_wrong():
    rng = Random(4)
    num_right = 0
    for _ in range(300):
        task = make_task(rng, "basket")
        *_, last = messages = noisy_messages(task, rng)
        num_right += is_correct(last["content"], task.expected_answer)

        assert re.fullmatch(r"The answer is \d+\.", last["content"])
        for message in messages:
            for call in message.get("tool_calls", []):
                assert json.loads(call["function"]["arguments"])

    assert num_right < 30


@pytest.mark.parametrize(
    ("name", "arguments", "reply"),
    [
        ("price", {"item": "unicorn"}, "error: unknown item"),
        ("price", {"item": ["lamp"]}, "error: bad arguments"),
        ("stock", {}, "error: bad arguments"),
        ("calculator", {"expression": "2", "base": 10}, "error: bad arguments"),
        ("calculator", {"expression": "two"}, "error: bad expression"),
        ("buy", {"item": "lamp"}, "error: unknown tool"),
    ],
)
def test_a_wrong_call_is_answered_with_what_was_wrong(name, arguments, reply):
    assert run_tool(make_task(Random(0), "bulk"), name, arguments) == reply


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("The answer is 12.", True),
        ("A lamp costs 12. The answer is 12.", True),
        ("The answer is 120.", False),
        ("The answer is 12", False),
        ("The answer is 12. The answer is 13.", False),
        ("12", False),
    ],
)
def test_only_one_exact_answer_is_correct(text, verdict):
    assert is_correct(text, "12") is verdict
