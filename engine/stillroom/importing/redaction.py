"""Removes secrets and personal data from imported rollouts, and counts them by kind."""

from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from typing import Any, cast

from stillroom.recording.scrubbing import redactor_of
from stillroom.secrecy.key_fields import holds_keys, keys_in_fields
from stillroom.secrecy.patterns import PERSONAL_DATA, SECRETS, replace_kinds
from stillroom.secrecy.redaction import Redactor

_LOCAL_KEY = "API key of this machine"
_FIELD_KEY = "API key in a field"
_KEY_MARK = "[key]"
_ANSWERS = frozenset(("answer", "expected_answer", "label"))
"""The fields that rewards compare with replies; only fields of requests are removed from these."""
_MAX_CACHED_NAMES = 1 << 14


class Redaction:
    """Replaces secrets and personal data with placeholders such as `[email address 3 removed]`.

    Within a conversation, equal values get the same number, so that a tool call with the address
    that the user gave still makes sense. Numbers restart with each conversation, so that values
    cannot be linked across conversations.
    """

    def __init__(self, key_redactor: Redactor, *, keep_secrets: bool, keep_personal: bool) -> None:
        """`key_redactor` redacts the API keys in this process's environment and files."""
        kinds = [] if keep_secrets else [*SECRETS]
        kinds += [] if keep_personal else PERSONAL_DATA
        self._kinds = tuple(kinds)
        self._keep_secrets = keep_secrets
        self._key_redactor = None if keep_secrets or not key_redactor.secrets else key_redactor
        self._numbers: dict[tuple[str, int], int] = {}
        self._name_numbers: dict[tuple[str, int], int] = {}
        self.redact_name = lru_cache(_MAX_CACHED_NAMES)(self._redact_name)
        """Redacts a name (of a model, tool, parameter, field or score).

        Placeholders in names are the same in the whole import, so that calls still match their
        tools.
        """
        self.num_replaced: Counter[str] = Counter()
        """The number of replacements by kind."""

    def begin_conversation(self) -> None:
        """Restarts the numbering of values for the next conversation."""
        self._numbers.clear()

    def redact_message(self, message: dict[str, Any]) -> dict[str, Any]:
        """Returns a message of the conversation with placeholders for secrets and personal data."""
        clean = dict(message)
        for field in ("content", "reasoning_content"):
            if message.get(field):
                clean[field] = self.redact_text(message[field])
        if "tool_calls" in message:
            clean["tool_calls"] = [self._redact_call(call) for call in message["tool_calls"]]
        for field, redact in (("name", self.redact_name), ("tool_call_id", self.redact_text)):
            if message.get(field):
                clean[field] = redact(message[field])
        return clean

    def _redact_call(self, call: dict[str, Any]) -> dict[str, Any]:
        """Returns a tool call with placeholders for secrets and personal data."""
        function = call["function"]
        redacted = {
            "name": self.redact_name(function["name"]),
            "arguments": self.redact_text(function["arguments"]),
        }
        return call | {"id": self.redact_text(call["id"]), "function": function | redacted}

    def redact_metadata(self, metadata: dict[str, Any]) -> dict[str, Any]:
        """Redacts metadata: API keys by the fields that hold them, then all strings and names."""
        clean = metadata if self._keep_secrets else self._without_keys(metadata)
        return self._redact_value(clean, self.redact_text)

    def _without_keys(self, value: Any, name: str = "", *, is_answer: bool = False) -> Any:
        """Replaces the API keys in the fields of requests, such as `mcp_servers`."""
        is_answer = is_answer or name in _ANSWERS
        if holds_keys(name, value, is_answer=is_answer):
            clean = redactor_of(tuple(dict.fromkeys(keys_in_fields([(name, value)])))).redact_value(
                value
            )
            self._count_marks(_FIELD_KEY, str(value), str(clean))
            return clean
        if isinstance(value, list):
            items = cast("list[Any]", value)
            return [self._without_keys(item, name, is_answer=is_answer) for item in items]
        if isinstance(value, dict):
            fields = cast("dict[str, Any]", value)
            return {
                key: self._without_keys(item, key, is_answer=is_answer)
                for key, item in fields.items()
            }
        return value

    def redact_tools(self, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Redacts tool schemas; their placeholders are the same in the whole import."""
        return self._redact_value(tools, self.redact_name)

    def _redact_value(self, value: Any, redact: Callable[[str], str]) -> Any:
        """Redacts the strings of a JSON value with `redact`, and its field names as names."""
        if isinstance(value, str):
            return redact(value)
        if isinstance(value, list):
            return [self._redact_value(item, redact) for item in cast("list[Any]", value)]
        if isinstance(value, dict):
            fields = cast("dict[str, Any]", value)
            return {
                self.redact_name(key): self._redact_value(item, redact)
                for key, item in fields.items()
            }
        return value

    def redact_text(self, text: str) -> str:
        """Redacts a text of the current conversation."""
        return self._redact(text, self._numbers)

    def _redact_name(self, name: str) -> str:
        return self._redact(name, self._name_numbers)

    def _redact(self, text: str, numbers: dict[tuple[str, int], int]) -> str:
        """Returns a text with placeholders; `numbers` has the numbers of values, and is updated."""

        def mark(kind: str, removed: str) -> str:
            self.num_replaced[kind] += 1
            number = numbers.setdefault((kind, hash(removed)), len(numbers) + 1)
            return f"[{kind} {number} removed]"

        if self._kinds:
            text = replace_kinds(text, self._kinds, mark)
        if self._key_redactor is not None:
            clean = self._key_redactor.redact_text(text)
            self._count_marks(_LOCAL_KEY, text, clean)
            return clean
        return text

    def _count_marks(self, kind: str, text: str, clean: str) -> None:
        if clean != text:
            self.num_replaced[kind] += clean.count(_KEY_MARK) - text.count(_KEY_MARK)
