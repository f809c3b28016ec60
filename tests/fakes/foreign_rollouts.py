"""Rollouts as rnow and NeMo Gym write them, and rows near them."""

import json
from pathlib import Path
from typing import Any

from fakes.rollout_rows import assistant, tool_call, tool_reply, user

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
