"""Takes secrets and personal data out of what is imported, and counts them by kind."""

from collections import Counter
from typing import Any, cast

from stillroom.secrecy.patterns import PERSONAL_DATA, SECRETS, without_kinds
from stillroom.secrecy.redaction import Redactor

_OWN_KEY = "key of this machine"
_OWN_MARK = "[key]"


class Redaction:
    """Replaces secrets and personal data by marks such as `[email address 3 removed]`.

    The same value has the same number throughout a conversation, so that a tool that is called with
    an address which the user gave still shows that; from one conversation to another, nothing is
    told of whose it is.
    """

    def __init__(self, own: Redactor, *, keep_secrets: bool, keep_personal: bool) -> None:
        """`own` replaces the keys that this process can read itself."""
        removed = [] if keep_secrets else [*SECRETS]
        removed += [] if keep_personal else PERSONAL_DATA
        self._kinds = tuple(removed)
        self._own = None if keep_secrets or not own.secrets else own
        self._numbers: dict[tuple[str, int], int] = {}
        self.found: Counter[str] = Counter()
        """How often something of a kind was replaced."""

    def begin_conversation(self) -> None:
        """Begins to count the values of the next conversation."""
        self._numbers.clear()

    def message(self, message: dict[str, Any]) -> dict[str, Any]:
        """Returns a message in our shape with marks in place of what is removed."""
        clean = dict(message)
        for field in ("content", "reasoning_content"):
            if message.get(field):
                clean[field] = self.text(message[field])
        if calls := message.get("tool_calls"):
            clean["tool_calls"] = [self._call(call) for call in calls]
        return clean

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        arguments = self.text(function["arguments"])
        if arguments == function["arguments"]:
            return call
        return {**call, "function": {**function, "arguments": arguments}}

    def value(self, value: Any) -> Any:
        """Returns a JSON value whose strings have marks in place of what is removed."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.value(item) for item in cast("list[Any]", value)]
        if isinstance(value, dict):
            return {key: self.value(item) for key, item in cast("dict[str, Any]", value).items()}
        return value

    def text(self, text: str) -> str:
        """Returns a text with marks in place of what is removed."""
        if self._kinds:
            text = without_kinds(text, self._kinds, self._mark)
        if self._own is not None:
            clean = self._own.text(text)
            if clean != text:
                self.found[_OWN_KEY] += clean.count(_OWN_MARK) - text.count(_OWN_MARK)
            return clean
        return text

    def _mark(self, kind: str, removed: str) -> str:
        self.found[kind] += 1
        known = self._numbers
        number = known.setdefault((kind, hash(removed)), len(known) + 1)
        return f"[{kind} {number} removed]"
