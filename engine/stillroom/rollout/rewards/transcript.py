"""Conversations as a judging model reads them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stillroom.types import Message


def transcript(messages: Sequence[Message]) -> str:
    """Returns a conversation as text, a line for each message and each call."""
    lines: list[str] = []
    for message in messages:
        text = shown_text(message)
        if text or not message.get("tool_calls"):
            lines.append(f"[{message['role']}] {text}")
        for call in message.get("tool_calls") or []:
            function = call["function"]
            lines.append(f"[{message['role']} calls {function['name']}] {function['arguments']}")
    return "\n".join(lines)


def shown_text(message: Message) -> str:
    """Returns a message's text; of a part that is no text, such as an image, its type."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(_part_text(part) for part in content)


def _part_text(part: Mapping[str, Any]) -> str:
    text = part.get("text")
    return text if isinstance(text, str) else f"[{part.get('type', 'part')}]"


def in_tags(parts: Iterable[tuple[str, str]], nonce: str, *, most: int) -> list[str]:
    """Returns named texts that others wrote, each in tags that end in the nonce.

    Of a text of more than `most` characters a note replaces the middle.
    """
    return [
        f"<{name}-{nonce}>\n{_shortened(text, most)}\n</{name}-{nonce}>" for name, text in parts
    ]


def _shortened(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    half = most // 2
    left_out = len(text) - 2 * half
    return f"{text[:half]}\n[… {left_out} characters left out …]\n{text[-half:]}"
