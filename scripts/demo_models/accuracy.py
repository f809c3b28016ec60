"""Measures how many held-out tasks a model solves, by playing them greedily in batches."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, get_args

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from demo_models.conversations import TOOL_SCHEMAS, is_correct, run_tool
from stillroom.data.chat.tool_calls import Parser, parser_for
from stillroom.demo.shop import Difficulty
from stillroom.demo.world import ShopTask, task_row
from stillroom.types import Message, ToolCall

MAX_TURNS = 5
_MAX_TURN_TOKENS = 48
_BATCH_SIZE = 150


@dataclass(frozen=True, slots=True)
class Accuracy:
    """How a model did on some tasks; every figure but the count is a share from 0 to 1."""

    num_tasks: int
    overall: float
    """The share of tasks with the right answer."""
    by_difficulty: dict[str, float]
    answered: float
    """The share of tasks that ended by stating an answer, right or wrong."""
    called_well: float
    """The share of tasks without a call that is malformed or that a tool refused."""


@dataclass(slots=True)
class _Play:
    """One conversation as it grows."""

    task: ShopTask
    messages: list[Message]
    final_text: str | None = None
    """The turn that ended the conversation; None while it goes on."""
    has_bad_call: bool = False


def measure_accuracy(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, tasks: Sequence[ShopTask]
) -> Accuracy:
    """Returns the model's accuracy on the tasks with greedy decoding."""
    parser = parser_for(str(tokenizer.chat_template))
    plays = [_Play(task, list(task_row(task)["messages"])) for task in tasks]
    for _ in range(MAX_TURNS):
        ongoing = [play for play in plays if play.final_text is None]
        for start in range(0, len(ongoing), _BATCH_SIZE):
            batch = ongoing[start : start + _BATCH_SIZE]
            for play, text in zip(batch, _next_turns(model, tokenizer, batch), strict=True):
                _take_turn(play, text, parser)
    is_solved = [is_correct(play.final_text or "", play.task.expected_answer) for play in plays]
    return Accuracy(
        num_tasks=len(plays),
        overall=fmean(is_solved),
        by_difficulty={
            level: fmean(
                solved
                for play, solved in zip(plays, is_solved, strict=True)
                if play.task.difficulty == level
            )
            for level in get_args(Difficulty)
        },
        answered=fmean("The answer is " in (play.final_text or "") for play in plays),
        called_well=fmean(not play.has_bad_call for play in plays),
    )


def _next_turns(
    model: Any, tokenizer: PreTrainedTokenizerFast, plays: Sequence[_Play]
) -> list[str]:
    conversations: Any = [play.messages for play in plays]
    inputs: Any = tokenizer.apply_chat_template(
        conversations,
        tools=[dict(schema) for schema in TOOL_SCHEMAS],
        add_generation_prompt=True,
        padding=True,
        return_dict=True,
        return_tensors="pt",
    )
    with torch.inference_mode():
        outputs: Any = model.generate(**inputs, do_sample=False, max_new_tokens=_MAX_TURN_TOKENS)
    turns = tokenizer.batch_decode(outputs[:, inputs["input_ids"].shape[1] :])
    return [turn.split(str(tokenizer.eos_token))[0] for turn in turns]


def _take_turn(play: _Play, text: str, parser: Parser) -> None:
    """Adds the turn and the replies to its calls, or ends the conversation."""
    try:
        calls = [_parsed_call(call.name, call.arguments) for call in parser(text)[1]]
    except (ValueError, KeyError, TypeError):
        play.has_bad_call = True
        calls = []
    if not calls:
        play.final_text = text
        return
    play.messages.append({"role": "assistant", "content": "", "tool_calls": calls})
    for call in calls:
        function = call["function"]
        reply = run_tool(play.task, function["name"], json.loads(function["arguments"]))
        play.has_bad_call |= reply.startswith("error")
        play.messages.append({"role": "tool", "tool_call_id": call["id"], "content": reply})


def _parsed_call(name: str, arguments: str) -> ToolCall:
    written = json.dumps(dict(json.loads(arguments)))
    return {
        "id": "call",
        "type": "function",
        "function": {"name": name, "arguments": written},
    }
