"""Collects the rows that readers yield: stores each for joining, or refuses it with a reason."""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, cast

import msgspec

from stillroom.data.checks import message_problems, tool_schema_problems
from stillroom.importing.conversations.call_tree import NONE, CallTree
from stillroom.importing.conversations.message_store import MIN_CACHED_MESSAGES, MessageStore
from stillroom.importing.conversations.row_table import RowTable, StoredRow, encode_row
from stillroom.importing.json_rows import Row, UnreadableRowError
from stillroom.importing.payloads.fields import is_id_name, leaves
from stillroom.importing.records import Feedback, LoggedConversation, RefusedRow, SourceRow
from stillroom.importing.redaction import Redaction
from stillroom.importing.spill import Spill
from stillroom.importing.tally import ImportTally

_NO_SCHEMA = "tools without a schema dropped"
_NOT_ENCODABLE = (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError)


class RowCollector:
    """All rows that were read, ready to be joined into rollouts."""

    def __init__(
        self,
        spill: Spill,
        redaction: Redaction,
        tally: ImportTally,
        *,
        infer_tools: bool = False,
        feedback_by: str | None = None,
        min_cached: int = MIN_CACHED_MESSAGES,
    ) -> None:
        """With `infer_tools`, tool schemas are inferred from calls. `feedback_by` names a field of
        ids that feedback refers to.

        `min_cached` is the minimum number of recent messages that are recognised. It affects memory
        and speed only.
        """
        self._redaction, self._tally, self._infer_tools = redaction, tally, infer_tools
        self._feedback_by = feedback_by
        self.inferred = InferredTools(redaction)
        on_tool_calls = self.inferred.add_message if infer_tools else None
        self.store = MessageStore(spill, on_tool_calls=on_tool_calls, min_cached=min_cached)
        self._tools_by_hash: dict[int, tuple[int, tuple[str, ...]]] = {}
        self.tree = CallTree(self.store)
        self.rows = RowTable(spill)
        self.tools = ToolLists()
        self.feedback: list[tuple[str, Feedback]] = []

    def add(self, row: SourceRow, format_name: str) -> None:
        """Stores one row of a format, or counts it as refused."""
        if isinstance(row, Feedback):
            self._tally.count_read(format_name)
            name = self._redaction.redact_name
            redacted = replace(row, name=name(row.name), column=name(row.column))
            self.feedback.append((format_name, redacted))
        elif isinstance(row, RefusedRow):
            self._tally.refuse(format_name, row)
        elif (refused := self._store(row, format_name)) is None:
            self._tally.count_read(format_name, 1 + len(row.merged_from))
            for location in (row.location, *row.merged_from):
                self._tally.files.mark_as_read(location.path)
        else:
            self._tally.refuse(format_name, refused)
            for location in row.merged_from:
                self._tally.refuse(
                    format_name, RefusedRow(location, refused.reason, f"see {row.location}")
                )

    def _store(self, row: LoggedConversation, format_name: str) -> RefusedRow | None:
        """Stores a row and returns None, or returns the reason for which it is refused."""
        try:
            refused = _check(row)
            if refused is None:
                (self._store_call if row.is_call else self._store_conversation)(row, format_name)
            return refused
        except UnreadableRowError as error:
            return RefusedRow(row.location, error.reason, error.detail)
        except _NOT_ENCODABLE as error:
            return RefusedRow(row.location, "cannot be written as JSON", str(error))

    def _store_call(self, row: LoggedConversation, format_name: str) -> None:
        """Stores a call: its messages in the tree, and its other fields in the table."""
        numbers = self.store.numbers_of(row.messages)
        stored = self._stored_row(row, format_name)
        data = encode_row(stored)  # before the tree is changed, since it may raise
        node = self.tree.add(row.group, numbers, len(self.rows))
        self.rows.add(
            stored,
            data,
            feedback_ids=row.feedback_ids,
            ids=_ids(row),
            chosen_ids=self._chosen_ids(row),
            parent=row.parent,
            node=node,
            length=len(numbers),
        )

    def _store_conversation(self, row: LoggedConversation, format_name: str) -> None:
        """Stores a whole conversation. Raises UnreadableRowError if it is not valid."""
        messages = row.messages
        for index, message in enumerate(messages):
            for number, call in enumerate(message.get("tool_calls", ())):
                call.setdefault("id", f"call_{index}_{number}")
        if (problem := next(message_problems(messages), None)) is not None:
            raise UnreadableRowError("invalid message", f"{problem.field} {problem.message}")
        if self._infer_tools:
            for message in messages:
                if message.get("tool_calls"):
                    self.inferred.add_message(message)
        encoded = [msgspec.json.encode(message) for message in messages]
        stored = self._stored_row(row, format_name, messages=encoded)
        data = encode_row(stored)
        self.rows.add(
            stored,
            data,
            feedback_ids=row.feedback_ids,
            ids=_ids(row),
            chosen_ids=self._chosen_ids(row),
            parent=row.parent,
        )

    def _chosen_ids(self, row: LoggedConversation) -> list[tuple[str, str]]:
        """Returns the ids in fields with the name `feedback_by`, as pairs of field path and id."""
        field = self._feedback_by
        if field is None:
            return []
        fields = row.metadata | {"id": row.id, "session_id": row.group} | {**row.ids}
        return [
            (path, text)
            for path, text in leaves(fields)
            if field in (path, path.rpartition(".")[2])
        ]

    def _stored_row(
        self,
        row: LoggedConversation,
        format_name: str,
        *,
        messages: list[bytes] | None = None,
    ) -> StoredRow:
        """Returns the fields of a row that the table stores."""
        tools, dropped_tools = self._add_tools(row.tools)
        show = self._tally.show_location
        return StoredRow(
            format=format_name,
            source=show(row.location),
            id=row.id,
            group=row.group,
            provider=row.provider,
            model=row.model,
            usage=row.usage,
            cost_usd=row.cost_usd,
            started_at=row.started_at,
            duration_s=row.duration_s,
            finish_reason=row.finish_reason,
            error=row.error,
            scores={name: value for name, value in row.scores.items() if math.isfinite(value)},
            merged_from=tuple(show(location) for location in row.merged_from),
            dropped=tuple(dict.fromkeys(row.dropped + dropped_tools)),
            metadata=msgspec.json.encode(row.metadata),
            tools=tools,
            failure=row.failure,
            messages=messages or [],
            stop_reason=row.stop_reason,
            tool_errors=row.tool_errors,
            answered_by=row.answered_by,
        )

    def _add_tools(self, tools: list[Row] | None) -> tuple[int, tuple[str, ...]]:
        """Stores a list of tools; returns its number, and a note if tools were dropped from it."""
        if tools is None:
            return NONE, ()
        key = hash(msgspec.json.encode(tools))
        if (stored := self._tools_by_hash.get(key)) is None:
            valid = valid_tools(tools)
            dropped = (_NO_SCHEMA,) if len(valid) < len(tools) else ()
            number = self.tools.number_of(self._redaction.redact_tools(valid))
            stored = self._tools_by_hash[key] = number, dropped
        return stored


def _ids(row: LoggedConversation) -> list[tuple[str, str]]:
    """Returns the ids in fields named like ids, as pairs of field path and id."""
    pairs = (*leaves(row.metadata), *row.ids.items())
    return [(path, text) for path, text in pairs if is_id_name(path)]


def _check(row: LoggedConversation) -> RefusedRow | None:
    """Returns a RefusedRow for a row without a conversation with a reply; None for any other."""
    if row.error is not None and row.is_call:
        return RefusedRow(row.location, "failed call", row.error)
    if not row.messages:
        return RefusedRow(row.location, "no messages")
    roles = [message.get("role") for message in row.messages]
    if row.is_call and roles[-1] != "assistant":
        return RefusedRow(row.location, "call without a reply")
    if "assistant" not in roles:
        return RefusedRow(row.location, "no assistant message")
    last_reply = len(roles) - 1 - roles[::-1].index("assistant")
    if roles[0] == "assistant" and "user" not in roles[:last_reply]:
        return RefusedRow(row.location, "no message before the reply")
    return None


_MAX_INFERRED = 64
"""With more tools than this, the log mixes several systems, and a rollout gets only the tools that
it calls."""
_KINDS: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
}


class ToolLists:
    """The distinct lists of tool schemas in the sources, by number."""

    def __init__(self) -> None:
        self._by_json: dict[bytes, int] = {}
        self._lists: list[list[dict[str, Any]]] = []

    def number_of(self, tools: list[dict[str, Any]]) -> int:
        """Returns the number of a list of tools; adds the list if it is new."""
        data = msgspec.json.encode(tools)
        number = self._by_json.get(data)
        if number is None:
            number = self._by_json[data] = len(self._lists)
            self._lists.append(tools)
        return number

    def union_of(self, numbers: Iterable[int]) -> list[dict[str, Any]]:
        """Returns the union of several lists; the last schema of a name wins."""
        by_name: dict[str, dict[str, Any]] = {}
        for number in dict.fromkeys(numbers):
            by_name |= {tool["function"]["name"]: tool for tool in self._lists[number]}
        return list(by_name.values())


def valid_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the tools whose schema is valid. Tools that the provider runs have no schema."""
    return [tool for tool in tools if next(tool_schema_problems([tool]), None) is None]


class InferredTools:
    """Schemas of tools, inferred from the arguments of their calls."""

    def __init__(self, redaction: Redaction) -> None:
        self._redaction = redaction
        self._arguments: dict[str, dict[str, set[str]]] = {}

    def add_message(self, message: dict[str, Any]) -> None:
        """Collects the names and types of the arguments in a message's tool calls."""
        for call in message["tool_calls"]:
            function = call["function"]
            arguments = self._arguments.setdefault(
                self._redaction.redact_name(function["name"]), {}
            )
            for name, value in _parse_arguments(function["arguments"]).items():
                kinds = arguments.setdefault(self._redaction.redact_name(name), set())
                if (kind := _KINDS.get(type(value))) is not None:
                    kinds.add(kind)

    def schemas(self, called: Iterable[str]) -> list[dict[str, Any]]:
        """Returns the schemas for a rollout that calls these tools, sorted by name."""
        is_one_system = len(self._arguments) <= _MAX_INFERRED
        names = self._arguments if is_one_system else set(called)
        return [self._schema(name) for name in sorted(names)]

    def _schema(self, name: str) -> dict[str, Any]:
        """Returns the schema of a tool, inferred from the arguments of its calls."""
        properties = {
            argument: {"type": next(iter(kinds)) if len(kinds) == 1 else sorted(kinds)}
            if kinds
            else {}
            for argument, kinds in sorted(self._arguments.get(name, {}).items())
        }
        parameters = {"type": "object", "properties": properties}
        return {"type": "function", "function": {"name": name, "parameters": parameters}}


def _parse_arguments(arguments: str) -> dict[str, Any]:
    """Returns a tool call's arguments as an object; empty if they are not a JSON object."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return {}
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
