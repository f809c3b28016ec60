"""Converts items of the Responses API into chat messages."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from stillroom.data.checks import Problem, describe

_Item = dict[str, Any]
ChatMessage = dict[str, Any]

_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_ROLES = ("system", "developer", "user", "assistant", "tool")


def item_problems(items: Any, field: str) -> Iterator[Problem]:
    """Yields every problem of a list of Responses items."""
    if not isinstance(items, list):
        yield Problem(field, f"must be a list of items, not {describe(items)}", "write a list")
        return
    for index, item in enumerate(cast("list[Any]", items)):
        where = f"{field}[{index}]"
        if not isinstance(item, dict):
            yield Problem(where, f"must be an object, not {describe(item)}", "write an item")
            continue
        problem = _item_problem(cast("_Item", item), where)
        if problem is not None:
            yield problem


def _item_problem(item: _Item, where: str) -> Problem | None:
    kind = item.get("type") or "message"
    fields = _FIELDS.get(kind) if isinstance(kind, str) else None
    if fields is None:
        return Problem(
            f"{where}.type",
            f"is {kind!r}, which cannot be converted to a chat message",
            "leave the row out: only messages, reasoning and function calls can be converted",
        )
    if kind == "message" and item.get("role") not in _ROLES:
        return _type_problem(f"{where}.role", item.get("role"), f"one of {', '.join(_ROLES)}")
    for name, (is_valid, expected) in fields.items():
        if not is_valid(item.get(name)):
            return _type_problem(f"{where}.{name}", item.get(name), expected)
    return None


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, dict) for v in cast("list[Any]", value))


def _type_problem(field: str, value: Any, expected: str) -> Problem:
    """Returns the problem of a field with an unexpected value."""
    return Problem(field, f"must be {expected}, not {describe(value)}", f"write {expected}")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_content(value: Any) -> bool:
    return value is None or isinstance(value, str) or _are_objects(value)


def _is_optional_object_list(value: Any) -> bool:
    return value is None or _are_objects(value)


_Check = tuple[Callable[[Any], bool], str]
_FIELDS: dict[str, dict[str, _Check]] = {
    "message": {
        "content": (_is_content, "a string or a list of parts"),
        "tool_calls": (_is_optional_object_list, "a list of calls"),
    },
    "function_call": dict.fromkeys(("name", "arguments", "call_id"), (_is_text, "a string")),
    "function_call_output": {
        "call_id": (_is_text, "a string"),
        "output": (_is_content, "a string or a list of parts"),
    },
    "reasoning": dict.fromkeys(
        ("summary", "content"), (_is_optional_object_list, "a list of parts")
    ),
}


def messages_from_items(items: Sequence[_Item]) -> list[ChatMessage]:
    """Converts items without problems to chat messages.

    Consecutive reasoning, text and calls become one assistant message.
    """
    builder = _MessageBuilder()
    for item in items:
        match item.get("type") or "message":
            case "reasoning":
                builder.add_reasoning(_reasoning_text(item))
            case "function_call":
                function = {"name": item["name"], "arguments": item["arguments"]}
                call = {"id": item["call_id"], "type": "function", "function": function}
                builder.add_call(call)
            case "function_call_output":
                content = _chat_content(item.get("output")) or ""
                reply = {"role": "tool", "tool_call_id": item["call_id"], "content": content}
                builder.add_message(reply)
            case _ if item["role"] == "assistant":
                builder.add_assistant_message(item)
            case _:
                role = "system" if item["role"] == "developer" else item["role"]
                extra = {key: item[key] for key in ("tool_call_id", "name") if key in item}
                content = _chat_content(item.get("content")) or ""
                builder.add_message({"role": role, "content": content} | extra)
    builder.close()
    return builder.messages


class _MessageBuilder:
    """Builds chat messages from items; `_open` is the incomplete assistant message."""

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []
        self._open: ChatMessage | None = None

    def add_reasoning(self, text: str) -> None:
        if self._open and (self._open["content"] or "tool_calls" in self._open):
            self.close()
        turn = self._open_turn()
        if text:
            before = turn.get("reasoning_content")
            turn["reasoning_content"] = f"{before}\n{text}" if before else text

    def add_assistant_message(self, item: _Item) -> None:
        content, calls = _chat_content(item.get("content")) or "", item.get("tool_calls") or []
        if not content and not calls and self._follows_assistant():
            return  # Some environments end a rollout with an empty message.
        if self._open and self._open["content"]:
            self.close()
        turn = self._open_turn()
        turn["content"] = content
        # An input may have whole chat messages instead of items.
        if "reasoning_content" in item:
            turn["reasoning_content"] = item["reasoning_content"]
        if calls:
            turn["tool_calls"] = [*turn.get("tool_calls", []), *calls]

    def add_call(self, call: dict[str, Any]) -> None:
        self._open_turn().setdefault("tool_calls", []).append(call)

    def add_message(self, message: ChatMessage) -> None:
        self.close()
        self.messages.append(message)

    def close(self) -> None:
        if self._open is not None:
            self.messages.append(self._open)
            self._open = None

    def _open_turn(self) -> ChatMessage:
        """Returns the incomplete assistant message; begins one if there is none."""
        if self._open is None:
            self._open = {"role": "assistant", "content": ""}
        return self._open

    def _follows_assistant(self) -> bool:
        return self._open is not None or (
            bool(self.messages) and self.messages[-1]["role"] == "assistant"
        )


def _reasoning_text(item: _Item) -> str:
    parts = [*(item.get("content") or []), *(item.get("summary") or [])]
    return "\n".join(part["text"] for part in parts if isinstance(part.get("text"), str))


def _chat_content(content: Any) -> Any:
    """Returns content as one string if all parts are text, else as Chat Completions parts."""
    if content is None or isinstance(content, str):
        return content
    parts = cast("list[_Item]", content)
    if all(part.get("type") in _TEXT_PARTS for part in parts):
        return "".join(_part_text(part) for part in parts)
    return [_chat_part(part) for part in parts]


def _part_text(part: _Item) -> str:
    text = part.get("refusal") if part["type"] == "refusal" else part.get("text")
    return text if isinstance(text, str) else ""


def _chat_part(part: _Item) -> _Item:
    """Returns a content part in the form of Chat Completions."""
    kind = part.get("type")
    if kind in _TEXT_PARTS:
        return {"type": "text", "text": _part_text(part)}
    if kind == "input_image" and isinstance(part.get("image_url"), str):
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    return {"type": "unknown"} | part


def flat_tool_problems(tools: Any, field: str) -> Iterator[Problem]:
    """Yields every problem of a list of tools in the flat form of the Responses API."""
    if tools is None:
        return
    if not _are_objects(tools):
        yield _type_problem(field, tools, "a list of tools")
        return
    for index, tool in enumerate(cast("list[_Item]", tools)):
        nested = tool.get("function")
        function = cast("_Item", nested) if isinstance(nested, dict) else tool
        if tool.get("type") != "function" or not isinstance(function.get("name"), str):
            yield Problem(
                f"{field}[{index}]",
                f"must be a function with a name, not {describe(tool)}",
                'write {"type": "function", "name": …, "parameters": {…}}; built-in tools of an '
                "endpoint are not supported",
            )


def schemas_from_flat(tools: Sequence[_Item] | None) -> list[_Item]:
    """Returns tool schemas in the chat form, which nests the fields of a tool under `function`."""
    return [_nested_schema(tool) for tool in tools or []]


def _nested_schema(tool: _Item) -> _Item:
    """Returns the schema of a tool in the chat form."""
    if isinstance(tool.get("function"), dict):
        return tool
    function = {key: value for key, value in tool.items() if key != "type"}
    return {"type": "function", "function": function}
