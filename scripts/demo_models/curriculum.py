"""The conversations that the demo's models are trained on, as tokens.

Echoes teach copying. Clerk conversations follow the right plan in some share of the cases and a
random plan in the others, so that the student starts out with room to learn.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from transformers import PreTrainedTokenizerFast

from demo_models.conversations import (
    TOOL_SCHEMAS,
    gold_messages,
    make_training_task,
    noisy_messages,
)
from stillroom.demo.shop import ITEMS, TASK_PATTERNS, TASK_TYPES, Difficulty, TaskType
from stillroom.types import Message

_EASY_TYPES: list[TaskType] = [
    name for name in TASK_TYPES if TASK_PATTERNS[name].difficulty == "easy"
]
_OTHER_TYPES: list[TaskType] = [
    name for name in TASK_TYPES if TASK_PATTERNS[name].difficulty != "easy"
]


@dataclass(frozen=True, slots=True)
class TrainingExample:
    """One conversation. `is_trained` is True on the assistant's tokens and its ends of turns."""

    ids: list[int]
    is_trained: list[bool]


@dataclass(frozen=True, slots=True)
class ClerkMix:
    """The share of easy tasks, and of clerks that follow the gold plan and not a random one."""

    easy_share: float
    gold_share: Mapping[Difficulty, float]


def _encode_messages(
    tokenizer: PreTrainedTokenizerFast, messages: Sequence[Message], *, with_tools: bool = True
) -> TrainingExample:
    """Returns the conversation as the chat template renders it."""
    conversation: Any = messages
    encoded: Any = tokenizer.apply_chat_template(
        conversation,
        tools=[dict(schema) for schema in TOOL_SCHEMAS] if with_tools else None,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    return TrainingExample(
        encoded["input_ids"], [bool(flag) for flag in encoded["assistant_masks"]]
    )


def echo_examples(
    tokenizer: PreTrainedTokenizerFast, num: int, *, seed: int
) -> list[TrainingExample]:
    """Returns short conversations that repeat items and numbers, which teach copying.

    From tool calls alone a model takes several times as long to learn copying.
    """
    rng = Random(seed)
    examples: list[TrainingExample] = []
    for _ in range(num):
        text = " ".join(_item_or_number(rng) for _ in range(rng.randint(2, 5)))
        messages: list[Message] = [
            {"role": "user", "content": text},
            {"role": "assistant", "content": text},
        ]
        examples.append(_encode_messages(tokenizer, messages, with_tools=False))
    return examples


def clerk_examples(
    tokenizer: PreTrainedTokenizerFast, num: int, *, mix: ClerkMix, seed: int
) -> list[TrainingExample]:
    """Returns conversations about random tasks of the training split."""
    rng = Random(seed)
    examples: list[TrainingExample] = []
    for _ in range(num):
        task_types = _EASY_TYPES if rng.random() < mix.easy_share else _OTHER_TYPES
        task = make_training_task(rng, rng.choice(task_types))
        is_gold = rng.random() < mix.gold_share[task.difficulty]
        messages = gold_messages(task) if is_gold else noisy_messages(task, rng)
        examples.append(_encode_messages(tokenizer, messages))
    return examples


def _item_or_number(rng: Random) -> str:
    return rng.choice(ITEMS) if rng.random() < 0.5 else str(rng.randint(2, 9999))
