"""What the demo's models learn from, as tokens: echoes, and clerks who are right now and then."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from transformers import PreTrainedTokenizerFast

from stillroom.demo.grammar import ITEMS, KINDS, TASK_TYPES, Difficulty, TaskType
from stillroom.demo.shop import TOOL_SCHEMAS
from stillroom.demo.world import gold_messages, make_training_task, noisy_messages
from stillroom.types import Message

EASY_TYPES: list[TaskType] = [name for name in TASK_TYPES if KINDS[name].difficulty == "easy"]
OTHER_TYPES: list[TaskType] = [name for name in TASK_TYPES if KINDS[name].difficulty != "easy"]


@dataclass(frozen=True, slots=True)
class Example:
    """One conversation. `is_trained` is True on the assistant's tokens, its turn ends included."""

    ids: list[int]
    is_trained: list[bool]


@dataclass(frozen=True, slots=True)
class ClerkMix:
    """Which tasks a clerk is asked, and how often it follows the gold plan, else a random one."""

    easy_share: float
    gold_share: Mapping[Difficulty, float]


def encode_messages(
    tokenizer: PreTrainedTokenizerFast, messages: Sequence[Message], *, with_tools: bool = True
) -> Example:
    """Returns the conversation as the chat template renders it."""
    conversation: Any = messages
    encoded: Any = tokenizer.apply_chat_template(
        conversation,
        tools=[dict(schema) for schema in TOOL_SCHEMAS] if with_tools else None,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    return Example(encoded["input_ids"], [bool(flag) for flag in encoded["assistant_masks"]])


def echo_examples(tokenizer: PreTrainedTokenizerFast, num: int, *, seed: int) -> list[Example]:
    """Returns short conversations that repeat items and numbers, from which copying is learnt.

    Learnt from tool calls alone, copying takes several times as long.
    """
    rng = Random(seed)
    examples: list[Example] = []
    for _ in range(num):
        text = " ".join(_item_or_number(rng) for _ in range(rng.randint(2, 5)))
        messages: list[Message] = [
            {"role": "user", "content": text},
            {"role": "assistant", "content": text},
        ]
        examples.append(encode_messages(tokenizer, messages, with_tools=False))
    return examples


def clerk_examples(
    tokenizer: PreTrainedTokenizerFast, num: int, *, mix: ClerkMix, seed: int
) -> list[Example]:
    """Returns conversations about random tasks of the training split."""
    rng = Random(seed)
    examples: list[Example] = []
    for _ in range(num):
        task_types = EASY_TYPES if rng.random() < mix.easy_share else OTHER_TYPES
        task = make_training_task(rng, rng.choice(task_types))
        is_gold = rng.random() < mix.gold_share[task.difficulty]
        messages = gold_messages(task) if is_gold else noisy_messages(task, rng)
        examples.append(encode_messages(tokenizer, messages))
    return examples


def _item_or_number(rng: Random) -> str:
    return rng.choice(ITEMS) if rng.random() < 0.5 else str(rng.randint(2, 9999))
