"""What a scripted endpoint saw of an agent's calls, in our shape of messages, for the tests."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trace_samples.scripted_endpoint import Json, Reply, Seen

SAMPLES = Path(__file__).parents[2] / "tests" / "fixtures" / "traces"
_ROLES = {"developer": "system"}
_REMINDER = "<system-reminder>"


def write_seen(path: Path, calls: Sequence[Json]) -> None:
    """Writes what the endpoint saw beside a sample."""
    text = json.dumps(calls, ensure_ascii=False, indent=1)
    path.write_text(text + "\n", encoding="utf-8")


def anthropic_call(seen: Seen) -> Json:
    """Returns a call of Anthropic's Messages: its messages with the reply, its model and tokens.

    Reminders that an agent adds to its calls are left out, as its own files lack them.
    """
    messages: list[Json] = []
    for message in seen.body["messages"]:
        content = message["content"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if message["role"] == "assistant":
            messages.append(_assistant(blocks))
        elif message["role"] == "user":
            messages += _user(blocks)
    return _call(seen, messages)


def _assistant(blocks: list[Json]) -> Json:
    calls = [
        _tool_call(block["id"], block["name"], block["input"])
        for block in blocks
        if block["type"] == "tool_use"
    ]
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    thoughts = [block["thinking"] for block in blocks if block["type"] == "thinking"]
    return _message("".join(texts), "".join(thoughts), calls)


def _user(blocks: list[Json]) -> list[Json]:
    results = [
        {
            "role": "tool",
            "tool_call_id": block["tool_use_id"],
            "content": _text(block["content"]),
        }
        for block in blocks
        if block["type"] == "tool_result"
    ]
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    own = [text.removesuffix("\n") for text in texts if not text.startswith(_REMINDER)]
    return [*results, *([{"role": "user", "content": "\n".join(own)}] if own else [])]


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)


def chat_call(seen: Seen) -> Json:
    """Returns a call of chat completions: its messages with the reply, its model and tokens."""
    messages: list[Json] = []
    for message in seen.body["messages"]:
        text = _text(message.get("content") or "")
        if message["role"] == "assistant":
            calls = [
                _tool_call(c["id"], c["function"]["name"], json.loads(c["function"]["arguments"]))
                for c in message.get("tool_calls") or ()
            ]
            messages.append(_message(text, message.get("reasoning_content") or "", calls))
        else:
            link = {"tool_call_id": message["tool_call_id"]} if message["role"] == "tool" else {}
            messages.append(
                {"role": _ROLES.get(message["role"], message["role"]), "content": text, **link}
            )
    return _call(seen, messages)


def responses_call(seen: Seen) -> Json:
    """Returns a call of the Responses API: its items and the reply as messages."""
    body = seen.body
    messages: list[Json] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    opened: Json | None = None
    items = body["input"]
    for item in [{"role": "user", "content": items}] if isinstance(items, str) else items:
        kind = item.get("type", "message")
        if kind in ("reasoning", "function_call") or item.get("role") == "assistant":
            if opened is None:
                opened = _message("", "", [])
                messages.append(opened)
            _add_item(opened, item)
            continue
        opened = None
        if kind == "function_call_output":
            output = _text(item["output"])
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": output})
        else:
            role = _ROLES.get(item["role"], item["role"])
            messages.append({"role": role, "content": _text(item["content"])})
    return _call(seen, messages)


def _add_item(message: Json, item: Json) -> None:
    if item.get("type") == "reasoning":
        message["reasoning_content"] = _text(item["summary"])
    elif item.get("type") == "function_call":
        call = _tool_call(item["call_id"], item["name"], json.loads(item["arguments"]))
        message["tool_calls"] = [*message.get("tool_calls", ()), call]
    else:
        message["content"] += _text(item["content"])


def _call(seen: Seen, messages: list[Json]) -> Json:
    return {
        "model": seen.body.get("model"),
        "messages": [*messages, _reply(seen.reply)],
        "prompt_tokens": seen.reply.prompt_tokens,
        "completion_tokens": seen.reply.completion_tokens,
    }


def _reply(reply: Reply) -> Json:
    calls = [_tool_call(call.id, call.name, call.arguments) for call in reply.calls]
    return _message(reply.text, reply.reasoning, calls)


def _message(text: str, reasoning: str, calls: list[Json]) -> Json:
    message: Json = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_call(call_id: str, name: str, arguments: Json) -> Json:
    text = json.dumps(arguments, ensure_ascii=False)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}
