"""Writes the traces of the project template `traces`: a shop's app, as it logged its calls.

`PYTHONPATH=scripts python -m trace_samples.make_shop`. The demo's teacher answers questions about a
shop whose prices stay the same; what it said is written as three parts of an app might log it:
chat completions with people's thumbs, Anthropic's Messages, and OpenTelemetry spans. As in real
logs, some answers are wrong, an older version had other names for its tools, calls failed or were
logged twice, and customers left addresses. A seed makes the same traces again.
"""

import gzip
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

from stillroom.demo.shop import ITEMS, TASK_PATTERNS, TASK_TYPES, evaluate
from stillroom.demo.world import SYSTEM

Row = dict[str, Any]
TEMPLATE = Path(__file__).parents[2] / "engine/stillroom/projects/templates/traces"
NUM_TASKS, OLD_SHARE, SEED, TEMPERATURE = 380, 0.2, 20, 1.15
OLD_NAMES = {"price": "get_price", "stock": "get_stock", "calculator": "calculate"}
MODEL, START = "shop-large-2", datetime(2026, 8, 3, 9, tzinfo=UTC)


def shop() -> dict[str, dict[str, int]]:
    """Returns the shop's price list, which all questions are about."""
    chance = Random(SEED)
    prices = chance.sample(range(3, 400), len(ITEMS))
    return {
        item: {"price": price, "stock": chance.randint(32, 199)}
        for item, price in zip(ITEMS, prices, strict=True)
    }


def questions(goods: dict[str, dict[str, int]]) -> Iterator[Row]:
    """Yields distinct questions of all types about the shop, as prompt rows of the demo."""
    chance, seen = Random(SEED + 1), set[str]()
    number = 0
    while len(seen) < NUM_TASKS:
        pattern = TASK_PATTERNS[TASK_TYPES[number % len(TASK_TYPES)]]
        number += 1
        item, other = chance.sample(ITEMS, 2)
        if pattern is TASK_PATTERNS["difference"] and goods[item]["price"] < goods[other]["price"]:
            item, other = other, item
        n, price, other_price = chance.randint(2, 29), goods[item]["price"], goods[other]["price"]
        numbers = {
            "price": price, "other_price": other_price, "stock": goods[item]["stock"], "n": n,
            "k": chance.randint(2, 29), "x": chance.randint(11, 989), "y": chance.randint(11, 989),
            "coins": n * price + other_price + chance.randint(1, 400),
        }  # fmt: skip
        text = chance.choice(pattern.wordings).format(item=item, other=other, **numbers)
        if text in seen:
            continue
        seen.add(text)
        answer = numbers[pattern.look_ups[-1]] if pattern.expression is None else (
            evaluate(pattern.expression.format(**numbers))
        )  # fmt: skip
        goods_of_both = {name: goods[name] for name in (item, other)}
        yield {
            "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}],
            "metadata": {"kb": goods_of_both, "expected_answer": str(answer)},
        }


def conversations() -> list[Row]:
    """Returns the demo teacher's rollouts of all questions."""
    with tempfile.TemporaryDirectory() as folder:
        run = [sys.executable, "-m", "stillroom_mcp"]
        subprocess.run([*run, "create-project", folder, "--workspace", folder], check=True)
        lines = "".join(json.dumps(row) + "\n" for row in questions(shop()))
        (Path(folder) / "asked.jsonl").write_text(lines, encoding="utf-8")
        subprocess.run(
            [*run, "generate-rollouts", "asked.jsonl", "--output", "answered.jsonl",
             "--provider", "demo", "--model", "teacher", "--tools", "tools.py",
             "--rewards", "rewards.py", "--temperature", str(TEMPERATURE), "--max-turns", "5",
             "--max-tokens", "48", "--concurrency", "64", "--seed", "1", "--workspace", folder],
            check=True,
        )  # fmt: skip
        rows = (Path(folder) / "answered.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(row) for row in rows]
    return sorted(found, key=lambda row: row["task_id"])


def calls_of(row: Row) -> Iterator[tuple[list[Row], Row]]:
    """Yields what each call of a conversation was given, and its reply."""
    messages = row["messages"]
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            yield messages[:index], message


def older(row: Row) -> Row:
    """Returns a conversation as an older version of the app had it: its tools had other names."""
    text = json.dumps(row)
    for name, old in OLD_NAMES.items():
        text = text.replace(f'"name": "{name}"', f'"name": "{old}"')
    return json.loads(text)


def chat_row(given: list[Row], reply: Row, tools: list[Row], number: str, at: datetime) -> Row:
    """Returns a call as an app logs it that keeps its arguments and what the client returned."""
    choice = {"index": 0, "message": reply, "finish_reason": _finish(reply)}
    return {
        "timestamp": _moment(at),
        "session_id": number,
        "request": {"model": MODEL, "messages": given, "tools": tools, "temperature": 1.0},
        "response": {
            "id": f"chatcmpl-{number}-{len(given)}", "object": "chat.completion", "model": MODEL,
            "choices": [choice], "usage": _usage(given, reply),
        },
        "duration_ms": 700 + 40 * len(given),
    }  # fmt: skip


def anthropic_row(given: list[Row], reply: Row, tools: list[Row], number: str, at: datetime) -> Row:
    """Returns a call of Anthropic's Messages API, request and response."""
    usage = _usage(given, reply)
    return {
        "timestamp": _moment(at),
        "session_id": number,
        "request": {
            "model": MODEL, "max_tokens": 1024, "system": given[0]["content"],
            "messages": [_blocks(message) for message in given[1:]],
            "tools": [_flat(tool["function"]) for tool in tools],
        },
        "response": {
            "id": f"msg_{number}_{len(given)}", "type": "message", "role": "assistant",
            "model": MODEL, "content": _blocks(reply)["content"],
            "stop_reason": "tool_use" if reply.get("tool_calls") else "end_turn",
            "usage": {
                "input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]
            },
        },
    }  # fmt: skip


def span_row(given: list[Row], reply: Row, tools: list[Row], number: str, at: datetime) -> Row:
    """Returns a call as a line of OTLP JSON with one span of the GenAI conventions."""
    usage, answer = _usage(given, reply), _parts(reply) | {"finish_reason": _finish(reply)}
    functions = [tool["function"] for tool in tools]
    texts = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": MODEL,
        "gen_ai.response.model": MODEL,
        "gen_ai.conversation.id": number,
        "gen_ai.system_instructions": json.dumps([_part(given[0])]),
        "gen_ai.input.messages": json.dumps([_parts(message) for message in given[1:]]),
        "gen_ai.output.messages": json.dumps([answer]),
        "gen_ai.tool.definitions": json.dumps([{"type": "function"} | f for f in functions]),
    }  # fmt: skip
    attributes = [_attribute(key, {"stringValue": text}) for key, text in texts.items()]
    for key, count in (("input", "prompt_tokens"), ("output", "completion_tokens")):
        attributes.append(_attribute(f"gen_ai.usage.{key}_tokens", {"intValue": str(usage[count])}))
    begin = int(at.timestamp() * 1e9)
    digits = f"{int(number):08x}"
    span = {
        "traceId": digits * 4,
        "spanId": f"{len(given):08x}{digits}",
        "name": f"chat {MODEL}",
        "kind": 3,
        "startTimeUnixNano": str(begin),
        "endTimeUnixNano": str(begin + 800_000_000),
        "attributes": attributes,
        "status": {},
    }
    scope = {"scope": {"name": "shop.assistant", "version": "2"}, "spans": [span]}
    service = _attribute("service.name", {"stringValue": "shop"})
    return {"resourceSpans": [{"resource": {"attributes": [service]}, "scopeSpans": [scope]}]}


def _flat(function: Row) -> Row:
    names = {"name": "name", "description": "description", "input_schema": "parameters"}
    return {name: function[ours] for name, ours in names.items()}


def _attribute(key: str, value: Row) -> Row:
    return {"key": key, "value": value}


def _part(message: Row) -> Row:
    return {"type": "text", "content": message["content"]}


def _parts(message: Row) -> Row:
    if message["role"] == "tool":
        part = {"type": "tool_call_response", "id": message["tool_call_id"]}
        return {"role": "tool", "parts": [part | {"response": message["content"]}]}
    parts = [_part(message)] if message.get("content") else []
    for call in message.get("tool_calls") or ():
        arguments = json.loads(call["function"]["arguments"])
        name = call["function"]["name"]
        parts.append({"type": "tool_call", "id": call["id"], "name": name, "arguments": arguments})
    return {"role": message["role"], "parts": parts}


def _blocks(message: Row) -> Row:
    if message["role"] == "tool":
        block = {"type": "tool_result", "tool_use_id": message["tool_call_id"]}
        return {"role": "user", "content": [block | {"content": message["content"]}]}
    if message["role"] == "user":
        return {"role": "user", "content": message["content"]}
    blocks: list[Row] = [{"type": "text", "text": message["content"]}] if message["content"] else []
    for call in message.get("tool_calls") or ():
        arguments = json.loads(call["function"]["arguments"])
        name = call["function"]["name"]
        blocks.append({"type": "tool_use", "id": call["id"], "name": name, "input": arguments})
    return {"role": "assistant", "content": blocks}


def _finish(reply: Row) -> str:
    return "tool_calls" if reply.get("tool_calls") else "stop"


def _usage(given: list[Row], reply: Row) -> Row:
    taken, written = len(json.dumps(given)) // 4, len(json.dumps(reply)) // 4
    return {"prompt_tokens": taken, "completion_tokens": written, "total_tokens": taken + written}


def _moment(at: datetime) -> str:
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def logged() -> dict[str, list[Row]]:
    """Returns the rows of each log by its file's name, in the order of time."""
    chance = Random(SEED + 2)
    answered = conversations()
    chance.shuffle(answered)
    files: dict[str, list[Row]] = {"chat.jsonl": [], "messages.jsonl": [], "spans.jsonl": []}
    writers = {"chat.jsonl": chat_row, "messages.jsonl": anthropic_row, "spans.jsonl": span_row}
    at = START
    for number, row in enumerate(answered):
        is_old = number < OLD_SHARE * len(answered)
        said = older(row) if is_old else row
        file = ("chat.jsonl", "chat.jsonl", "messages.jsonl", "spans.jsonl")[number % 4]
        file = file if _has_whole_arguments(said) else "chat.jsonl"
        at += timedelta(minutes=chance.randint(5, 120))
        if number % 47 == 5:
            _leave_address(said, number)
        rows = files[file]
        for place, (given, reply) in enumerate(calls_of(said)):
            begin = at + timedelta(seconds=2 * place)
            rows.append(writers[file](given, reply, said["tools"], str(1000 + number), begin))
        if file == "chat.jsonl":
            if chance.random() < 0.7:
                rows[-1]["scores"] = {"thumb": int(row["reward"] == 1)}
            if number % 19 == 0:
                rows.append(rows[-1])
            if number % 31 == 2:
                rows.append(_failed(rows[-1]))
    return files


def _has_whole_arguments(row: Row) -> bool:
    """Returns whether every call's arguments are JSON; only chat completions log others."""
    try:
        for message in row["messages"]:
            for call in message.get("tool_calls") or ():
                json.loads(call["function"]["arguments"])
    except ValueError:
        return False
    return True


def _leave_address(row: Row, number: int) -> None:
    question = next(message for message in row["messages"] if message["role"] == "user")
    question["content"] += f" Send it to customer{number}@post.internal."


def _failed(row: Row) -> Row:
    error = {"error": {"type": "rate_limit_error", "message": "too many requests"}}
    return {key: row[key] for key in ("timestamp", "request")} | {
        "session_id": f"{row['session_id']}-again", "response": error
    }  # fmt: skip


def main() -> None:
    """Writes the three logs, compressed, and the price list of the template's tools.py."""
    for name, rows in logged().items():
        text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
        folder = TEMPLATE / "traces"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.gz").write_bytes(gzip.compress(text.encode(), 9, mtime=0))
        sys.stdout.write(f"{name}: {len(rows)} rows, {len(text)} bytes\n")
    goods = ", ".join(f'"{i}": ({g["price"]}, {g["stock"]})' for i, g in shop().items())
    sys.stdout.write(f"SHOP = {{{goods}}}\n")


if __name__ == "__main__":
    main()
