"""What an MCP server says of its tools and their results, in the words of the rollout loop."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from stillroom.tools.base import ToolResult
from stillroom.types import ToolSchema

if TYPE_CHECKING:
    from mcp import types

MAX_RESULT_CHARACTERS = 1_000_000


def schema_of(tool: "types.Tool") -> ToolSchema:
    """Returns a tool as the model sees it; the input schema is as the server sent it."""
    function = {
        "name": tool.name,
        "description": tool.description or "",
        "parameters": tool.input_schema,
    }
    return {"type": "function", "function": function}


def result_of(result: "types.CallToolResult") -> ToolResult:
    """Returns a tool's result as the text a model reads; what is no text is named with its size."""
    text = "\n".join(map(_shown, result.content))
    if not text and result.structured_content is not None:
        text = json.dumps(result.structured_content, ensure_ascii=False)
    return ToolResult(content=_cut(text), is_error=bool(result.is_error))


def _shown(block: "types.ContentBlock") -> str:
    match block.type:
        case "text":
            return block.text
        case "image" | "audio":
            return f"[{block.type} {block.mime_type}, {_num_bytes(block.data)} bytes]"
        case "resource_link":
            return _bracketed(["resource", str(block.uri), block.mime_type], block.size)
        case "resource":
            return _shown_resource(block.resource)


def _shown_resource(
    resource: "types.TextResourceContents | types.BlobResourceContents",
) -> str:
    text: str | None = getattr(resource, "text", None)
    words = ["resource", str(resource.uri), resource.mime_type]
    if text is not None:
        return f"{_bracketed(words, len(text.encode('utf-8')))}\n{text}"
    return _bracketed(words, _num_bytes(getattr(resource, "blob", "")))


def _bracketed(words: Sequence[str | None], num_bytes: int | None) -> str:
    size = "" if num_bytes is None else f", {num_bytes} bytes"
    return f"[{' '.join(word for word in words if word)}{size}]"


def _num_bytes(base64_text: str) -> int:
    return len(base64_text.rstrip("=")) * 3 // 4


def _cut(text: str) -> str:
    if len(text) <= MAX_RESULT_CHARACTERS:
        return text
    return f"{text[:MAX_RESULT_CHARACTERS]}… (cut; {len(text)} characters in all)"
