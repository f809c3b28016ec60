"""Rows as filters see them: rollouts of every layout, and supervised rows."""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from stillroom.curate.rows.facts import RolloutFacts
from stillroom.curate.rows.read import RolloutLine, read_rollouts
from stillroom.files import content_hash

_WHOLE: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, Any])


class Row(msgspec.Struct, dict=True):
    """One row: the facts that most filters need, and its messages where one asks for them."""

    line: RolloutLine
    facts: RolloutFacts | None
    num_tokens: int | None = None
    """As the student sees it, once it is counted."""

    @cached_property
    def whole(self) -> dict[str, Any]:
        """All that it says, in our layout."""
        return _WHOLE.decode(self.line.own)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation."""
        return self.whole["messages"]

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The schemas of the tools that the model saw."""
        return self.whole.get("tools") or []

    @property
    def id(self) -> str | None:
        """Its own, if it has one."""
        return self.facts.id if self.facts else None

    @cached_property
    def review_id(self) -> str | None:
        """By which a review knows it: its id, else a hash of its words where they can be read."""
        if self.id or self.facts is None:
            return self.id
        try:
            return content_hash(self.messages)
        except (msgspec.DecodeError, RecursionError):
            return None

    @cached_property
    def task(self) -> str:
        """What its rollouts have in common: the task's id, else a hash of the prompt."""
        if self.facts is not None and self.facts.task_id:
            return self.facts.task_id
        roles = [message.get("role") for message in self.messages]
        end = roles.index("assistant") if "assistant" in roles else len(roles)
        return content_hash(self.messages[:end])

    def category(self, field: str) -> str:
        """Returns the value of a metadata field."""
        if self.facts is None:
            return "(unreadable)"
        value = (self.facts.metadata or {}).get(field)
        return "(none)" if value is None else str(value)


def read_filter_rows(source: Path) -> Iterator[Row]:
    """Yields the rows of a file or folder; `facts` is None for what is no row of ours."""
    for line in read_rollouts(source, with_supervised=True):
        yield Row(line, line.facts)
