"""Rollouts as rnow and NeMo Gym write them, and rows near them."""

import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from fakes.mangling import JSON
from fakes.rollout_rows import assistant, rollout_row, tool_call, tool_reply, user

PRICE, STOCK = tool_call("price", "call_1", '{"item": "lamp"}'), tool_call("stock", "call_2", "{}")
PARAMETERS = {"type": "object", "properties": {"item": {"type": ["string", "null"]}}}

RNOW_ROW: dict[str, Any] = {
    "id": "sample_1",
    "completed": True,
    "success": True,
    "total_reward": 0.75,
    "rewards": {"accuracy": 0.5, "brevity": 0.25},
    "errors": [],
    "turns": 2,
    "truncated": False,
    "totalTokens": 412,
    "promptTokens": 301,
    "metadata": {"answer": "12", "prompt_index": 3, "task_type": "price"},
    "latency": 1.5,
    "conversation": [
        {"role": "system", "content": "You mind a shop."},
        user("What are a lamp and its stock?"),
        {**assistant("", PRICE, STOCK), "reasoning_content": "I look it up."},
        tool_reply("7", "call_1"),
        tool_reply("5", "call_2"),
        assistant("7 × 5 = 35"),
    ],
}
"""`rollouts/rollout_1/sample_1.json`"""

GYM_ROW: dict[str, Any] = {
    "responses_create_params": {
        "input": [
            {"role": "system", "content": "You mind a shop.", "type": "message"},
            {"role": "user", "content": [{"type": "input_text", "text": "What is a lamp?"}]},
        ],
        "tools": [
            {"type": "function", "name": "price", "parameters": PARAMETERS, "strict": True},
            {"type": "function", "name": "stock", "description": "d", "parameters": PARAMETERS},
        ],
        "temperature": 1.0,
        "metadata": None,
        "parallel_tool_calls": True,
    },
    "response": {
        "id": "resp_1",
        "created_at": 0.0,
        "error": None,
        "incomplete_details": None,
        "model": "m",
        "object": "response",
        "output": [
            {
                "id": "rs_1",
                "type": "reasoning",
                "summary": [{"text": "I look it up.", "type": "summary_text"}],
                "encrypted_content": None,
            },
            {
                "type": "function_call",
                "id": "fc_1",
                "call_id": "call_1",
                "name": "price",
                "arguments": '{"item": "lamp"}',
                "status": "completed",
            },
            {
                "type": "function_call",
                "call_id": "call_2",
                "name": "stock",
                "arguments": "{}",
            },
            {"type": "function_call_output", "call_id": "call_1", "output": "7", "id": None},
            {"type": "function_call_output", "call_id": "call_2", "output": "5"},
            {
                "id": "msg_1",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [
                    {"annotations": [], "text": "It costs 7.", "type": "output_text"},
                ],
                "generation_token_ids": [1, 2],
            },
        ],
        "usage": {"input_tokens": 30, "output_tokens": 12, "total_tokens": 42},
    },
    "reward": 1.0,
    "_ng_task_index": 4,
    "_ng_rollout_index": 0,
    "agent_ref": {"type": "responses_api_agents", "name": "shop_agent"},
    "verifier_metadata": {"expected": 7},
}

TUTORIAL_ROW: dict[str, Any] = {
    "responses_create_params": {"input": "What is a lamp?"},
    "output": GYM_ROW["response"]["output"],
    "reward": 0.25,
    "success": False,
    "task_id": "lamp",
    "metadata": {"task_type": "price"},
}
"""As NeMo Gym's tutorial on offline training has it."""

FOREIGN_ROWS = [
    RNOW_ROW,
    {**RNOW_ROW, "completed": "error", "success": False, "error": "boom", "total_reward": 0},
    {**RNOW_ROW, "rewards": {"accuracy": "timeout"}, "errors": ["accuracy: late"]},
    {**RNOW_ROW, "completed": False},
    {**RNOW_ROW, "total_reward": None, "truncated": True},
    GYM_ROW,
    {**GYM_ROW, "success": True, "task_id": "t", "rewards": {"a": 1, "b": None}},
    {**GYM_ROW, "response": {**GYM_ROW["response"], "error": {"code": "x", "message": "boom"}}},
    {**GYM_ROW, "response": {**GYM_ROW["response"], "incomplete_details": {"reason": "length"}}},
    TUTORIAL_ROW,
]


def write_rnow(folder: Path, *rows: dict[str, Any]) -> None:
    """Writes rows as rnow does: one file each, in a folder of the run."""
    for number, row in enumerate(rows, start=1):
        path = folder / "rollout_1" / f"sample_{number}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(row, indent=2), encoding="utf-8")


TEXTS = st.sampled_from(["", "12", "ü\u2028", "a\nb"])


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """A conversation with what a message may hold, usual or not."""
    messages: list[dict[str, Any]] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(TEXTS)})
    for number in range(draw(st.integers(1, 3))):
        requested: Any = draw(TEXTS)
        if draw(st.booleans()):
            requested = [{"type": "text", "text": requested}]
            if draw(st.booleans()):
                requested.append({"type": "image_url", "image_url": {"url": "x"}})
        messages.append({"role": "user", "content": requested})
        calls = [tool_call("f", f"c{number}{i}") for i in range(draw(st.integers(0, 2)))]
        turn = assistant(draw(TEXTS | st.none()), *calls)
        if draw(st.booleans()):
            turn["reasoning_content"] = draw(TEXTS)
        if draw(st.booleans()):
            turn["extra"] = draw(JSON)
        messages.append(turn)
        messages += [tool_reply(draw(TEXTS), call["id"]) for call in calls]
        if calls and draw(st.booleans()):
            messages.append(assistant(draw(TEXTS)))
    return messages


@st.composite
def own_rollouts(draw: st.DrawFn) -> dict[str, Any]:
    """A rollout row of ours with odd but possible values and unknown keys."""
    row = rollout_row(
        messages=draw(conversations()),
        turns=draw(st.sampled_from([0, 1, 2, 99, None])),
        reward=draw(st.sampled_from([None, 0, 0.25, 1.0, -2])),
        rewards=draw(st.sampled_from([{}, {"a": 1.0}])),
        success=draw(st.sampled_from([None, True, False])),
        error=draw(st.sampled_from([None, {"class": "timeout", "message": "x"}, "odd", {}])),
        truncated=draw(st.booleans()),
        metadata=draw(st.sampled_from([{}, {"expected_answer": 12}, None])),
        tools=draw(
            st.sampled_from(
                [[], None, [{"type": "function", "function": {"name": "f", "parameters": {}}}]]
            )
        ),
    )
    for name in draw(st.sets(st.sampled_from(["usage", "teacher", "sample", "rewards"]))):
        row[name] = draw(JSON)
    for name in draw(st.sets(st.sampled_from(["extra", "stillroom", "origin", "response"]))):
        row[name] = draw(JSON)
    for name in draw(st.sets(st.sampled_from(["usage", "teacher", "tools", "metadata", "turns"]))):
        row.pop(name)
    return row


def write_stored_rnow(path: Path, *rows: dict[str, Any]) -> Path:
    """Writes rows as `rnow test --store` does: lines of text, then one document."""
    data = {"status": "completed", "results": rows, "billing": {"prompt_tokens": 0}}
    head = (
        f"Rollout ID: {path.stem}\nStatus: completed\nS3 Path: rollouts/{path.stem}/result.json\n"
    )
    summary = f"\nSuccessful: {len(rows)}/{len(rows)}\nMean Reward: 0.750\n"
    text = head + summary + "\n--- Full Results ---\n" + json.dumps(data, indent=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path
