"""Parses the text of an assistant turn into a message: thinking, content and tool calls."""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from stillroom.errors import ModelError
from stillroom.types import Message, ToolCall

_THINKING = re.compile(r"^\s*<think>(.*?)</think>\s*", re.DOTALL)
_HERMES = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)
_MISTRAL = re.compile(r"\[TOOL_CALLS\]\s*(\[.*\])\s*\Z", re.DOTALL)
_MISTRAL_MARKED = re.compile(
    r"\[TOOL_CALLS\]([^\[\]]*)\[ARGS\](.*?)(?=\[TOOL_CALLS\]|\Z)", re.DOTALL
)
_NAME = re.compile(r'"name"\s*:\s*"([^"]*)"')
_OPENERS = re.compile(
    # After a backtick, the text only quotes a call.
    r"(?<!`)(?:"
    # Hermes, Qwen, GLM; Granite, Phi-4, LFM2, Kimi (<|tool_call…); MiniMax (<minimax:tool_call>).
    r"<\|?(?:\w+[:_])?tool_?calls?(?:[>|]|_\w+\|>)"
    r"|<[|\uff5c]tool▁calls?▁begin[|\uff5c]>"  # DeepSeek
    r"|\[TOOL_CALLS\]"  # Mistral
    r"|<\|python_tag\|>|<function=\w"  # Llama 3, Qwen3-Coder
    r"|<\|channel\|>commentary|\bto=functions\.\w"  # gpt-oss
    r"|<\|START_ACTION\|>"  # Command
    r"|<start_function_call>"  # FunctionGemma
    r"|<\|action_start\|>"  # InternLM
    r"|<\|tools_prefix\|>"  # Apertus
    r"|<(?:antml:)?(?:function_calls>|invoke name=)"  # OLMo, MiniMax, Claude
    r"|\bfunctools\[\{"
    r")",
    re.IGNORECASE,
)
"""The texts with which tool calls of the supported model families begin."""
_CALL_KEYS = {"type", "id", "name", "parameters", "arguments"}
_TEXT_CALL_ID = re.compile(r"text\d{5}")

_CALL_ID = re.compile(r"[A-Za-z0-9]{9}")


class WrittenCall(NamedTuple):
    """A tool call as a model wrote it."""

    name: str
    arguments: str
    id: str | None = None
    """The call's id if the format has ids; the model expects the reply to have the same id."""


Parser = Callable[[str], tuple[str, list[WrittenCall]]]
"""Parses a turn's text into its content and its tool calls."""


def parser_for(chat_template: str) -> Parser:
    """Returns the parser of the tool-call format that a chat template writes.

    Raises ModelError if the template's format is not known.
    """
    if "<tool_call>" in chat_template:
        return parse_hermes
    if "[TOOL_CALLS]" in chat_template:
        return parse_mistral_marked if "[ARGS]" in chat_template else parse_mistral
    if '"parameters": ' in chat_template or "'parameters'" in chat_template:
        return parse_llama
    raise ModelError(
        "the model's chat template has no supported tool-call format",
        "use a model with Hermes/Qwen (<tool_call>), Llama 3 or Mistral ([TOOL_CALLS]) tool calls, "
        "set chat_template: chatml for an untrained student (in config.yml: model.chat_template), "
        "serve it behind an OpenAI-compatible endpoint, or run without tools",
    )


def message_from_text(
    text: str, parser: Parser | None, *, first_call: int = 0, is_thinking: bool = False
) -> Message:
    """Parses a turn's text, without its end-of-turn token, into an assistant message.

    The ids of its calls are numbered from `first_call`, so that they are unique in a conversation.
    `is_thinking` says whether the turn's header has already opened the thinking.
    """
    if is_thinking and "</think>" in text:
        text = "<think>" + text
    message: Message = {"role": "assistant", "content": text}
    thinking = _THINKING.match(text)
    if thinking:
        message["reasoning_content"] = thinking.group(1).strip("\n")
        text = text[thinking.end() :]
        message["content"] = text
    if parser is None:
        return message
    content, calls = parser(text)
    if calls:
        message["content"] = content
        message["tool_calls"] = _tool_calls(calls, first_call)
    return message


def has_call_text(text: str) -> bool:
    """Returns whether a turn's content has a tool call that its server did not parse."""
    _, body = _split_thinking(text)
    return _OPENERS.search(body) is not None or _is_json_call(body)


def message_with_calls(message: Message, tools: Iterable[str], *, first_call: int) -> Message:
    """Returns the message with the tool calls that the server left as text in its content.

    A server does so if it has no parser, or one that cannot read the call. If a call cannot be
    parsed here either, its whole text becomes its arguments, so that the error shows the model what
    is wrong. `tools` are the names of the offered tools.
    """
    content = message.get("content")
    if message.get("tool_calls") or not isinstance(content, str):
        return message
    names, (thinking, body) = list(tools), _split_thinking(content)
    name = _NAME.search(body) if body.lstrip().startswith("{") else None
    if not has_call_text(body) and (name is None or name.group(1) not in names):
        return message
    text, calls = _parse_calls(body)
    calls = [
        call
        if call.name
        else call._replace(name=next((n for n in names if n in call.arguments), ""))
        for call in calls
    ]
    changed: Message = {**message, "content": (thinking + text) or None}
    changed["tool_calls"] = _tool_calls(calls, first_call, prefix="text")
    return changed


def is_from_text(call: ToolCall) -> bool:
    """Returns whether a call comes from text that the model's server did not parse."""
    return _TEXT_CALL_ID.fullmatch(call["id"]) is not None


def _split_thinking(text: str) -> tuple[str, str]:
    """Returns the thinking at the start of a turn, with its tags, and the text after it."""
    thinking, end, body = text.rpartition("</think>")
    return thinking + end, body


def _parse_calls(body: str) -> tuple[str, list[WrittenCall]]:
    """Returns the content and the calls of a text; an unreadable call has no name."""
    parser = parse_llama
    if "<tool_call>" in body:
        parser = parse_hermes
    elif "[TOOL_CALLS]" in body:
        parser = parse_mistral_marked if "[ARGS]" in body else parse_mistral
    content, calls = parser(body)
    if calls:
        return content, calls
    opener = _OPENERS.search(body)
    start = opener.start() if opener else 0
    return body[:start].strip(), [WrittenCall("", body[start:])]


def _is_json_call(body: str) -> bool:
    """Returns whether a text is a JSON object with the keys of a tool call only."""
    if not body.lstrip().startswith("{"):
        return False
    try:
        call: Any = json.loads(body)
    except (ValueError, RecursionError):
        return False
    arguments = call.get("parameters", call.get("arguments"))
    return "name" in call and isinstance(arguments, dict) and call.keys() <= _CALL_KEYS


def _tool_calls(
    calls: Sequence[WrittenCall], first: int, *, prefix: str = "call"
) -> list[ToolCall]:
    """Returns calls in the OpenAI format; those without an id are numbered from `first`."""
    return [
        {
            # Mistral's templates require ids of nine letters or digits.
            "id": call.id or f"{prefix}{index:05d}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for index, call in enumerate(calls, start=first)
    ]


def parse_hermes(text: str) -> tuple[str, list[WrittenCall]]:
    """Parses `<tool_call>{"name": …, "arguments": {…}}</tool_call>` blocks."""
    calls = [_json_call(body, "arguments") for body in _HERMES.findall(text)]
    return _HERMES.sub("", text).strip() if calls else text, calls


def parse_mistral(text: str) -> tuple[str, list[WrittenCall]]:
    """Parses `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]` at the end of a turn."""
    match = _MISTRAL.search(text)
    if not match:
        return text, []
    try:
        listed: list[Any] = json.loads(match.group(1))
    except (ValueError, RecursionError):
        return text[: match.start()].strip(), [WrittenCall("", match.group(1))]
    calls = [_json_call(json.dumps(call), "arguments") for call in listed]
    return text[: match.start()].strip(), calls


def parse_mistral_marked(text: str) -> tuple[str, list[WrittenCall]]:
    """Parses consecutive `[TOOL_CALLS]name[ARGS]{…}` calls (newer Mistral models)."""
    first = text.find("[TOOL_CALLS]")
    if first < 0:
        return text, []
    calls = [
        WrittenCall(name.strip(), arguments.strip())
        for name, arguments in _MISTRAL_MARKED.findall(text[first:])
    ]
    return text[:first].strip(), calls or [WrittenCall("", text[first:])]


def parse_llama(text: str) -> tuple[str, list[WrittenCall]]:
    """Parses a turn that is one `{"name": …, "parameters": {…}}` object (Llama 3)."""
    body = text.strip().removeprefix("<|python_tag|>").strip()
    if not (body.startswith("{") and '"name"' in body):
        return text, []
    return "", [_json_call(body, "parameters", "arguments")]


def _json_call(body: str, *keys: str) -> WrittenCall:
    """Parses the name, arguments and id of a call; the first of `keys` it has is its arguments.

    The whole text of an invalid call becomes its arguments, so that the error shows the
    model what is wrong.
    """
    try:
        call: Any = json.loads(body)
        name = str(call["name"])
        arguments = next((call[key] for key in keys if key in call), {})
        is_text = isinstance(arguments, str)
        written = arguments if is_text else json.dumps(arguments, ensure_ascii=False)
        # A JSON escape can be half of a surrogate pair, which cannot be written to a file.
        f"{name}{written}".encode()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        named = _NAME.search(body)
        return WrittenCall(named.group(1) if named else "", body)
    call_id = call.get("id")
    is_usable = isinstance(call_id, str) and _CALL_ID.fullmatch(call_id)
    return WrittenCall(name, written, call_id if is_usable else None)
