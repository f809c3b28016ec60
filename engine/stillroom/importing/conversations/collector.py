"""Collects the rows that readers yield: each is refused with a reason, or kept for joining."""

import math

import msgspec

from stillroom.data.checks import message_problems
from stillroom.importing.conversations.call_tree import NONE, CallTree
from stillroom.importing.conversations.message_store import REMEMBERED, MessageStore
from stillroom.importing.conversations.row_table import LoggedFacts, RowTable
from stillroom.importing.conversations.tool_lists import InferredTools, ToolLists, sound_tools
from stillroom.importing.json_rows import Row, UnreadableRowError
from stillroom.importing.payloads.messages import ChatReader
from stillroom.importing.records import Feedback, LoggedConversation, Refusal, SourceRow
from stillroom.importing.redaction import Redaction
from stillroom.importing.spill import Spill
from stillroom.importing.tally import ImportTally

_NO_SCHEMA = "tools without a schema dropped"
_UNWRITABLE = (TypeError, UnicodeError, RecursionError, msgspec.MsgspecError)


class RowCollector:
    """Everything that was read, ready to be joined to rollouts."""

    def __init__(
        self,
        spill: Spill,
        redaction: Redaction,
        tally: ImportTally,
        *,
        infers: bool = False,
        remembered: int = REMEMBERED,
    ) -> None:
        """`infers` is whether schemas of tools are to be inferred from calls.

        `remembered` bounds the memory: how many messages and calls are known by their bytes. It
        changes the speed alone.
        """
        self._redaction, self._tally, self._infers = redaction, tally, infers
        self.inferred = InferredTools()
        on_tool_calls = self.inferred.look_at if infers else None
        self.store = MessageStore(spill, on_tool_calls=on_tool_calls, remembered=remembered)
        self._known_tools: dict[int, tuple[int, tuple[str, ...]]] = {}
        self.tree = CallTree(self.store, remembered=remembered)
        self.rows = RowTable(spill)
        self.tools = ToolLists()
        self.feedback: list[tuple[str, Feedback]] = []

    def take(self, row: SourceRow, format_name: str) -> None:
        """Takes in one row of a format."""
        if isinstance(row, Feedback):
            self._tally.read(format_name)
            self.feedback.append((format_name, row))
        elif isinstance(row, Refusal):
            self._tally.refuse(format_name, row)
        elif (refusal := self._add(row, format_name)) is None:
            self._tally.read(format_name, 1 + len(row.also_at))
        else:
            self._tally.refuse(format_name, refusal)
            for place in row.also_at:
                self._tally.refuse(format_name, Refusal(place, refusal.reason, f"see {row.place}"))

    def _add(self, row: LoggedConversation, format_name: str) -> Refusal | None:
        """Adds a row, or returns why it is refused."""
        try:
            refusal = _reason_to_refuse(row)
            if refusal is None:
                (self._add_call if row.is_call else self._add_whole)(row, format_name)
            return refusal
        except UnreadableRowError as error:
            return Refusal(row.place, error.reason, error.detail)
        except _UNWRITABLE as error:
            return Refusal(row.place, "not a JSON object", str(error))

    def _add_call(self, row: LoggedConversation, format_name: str) -> None:
        numbers = self.store.numbers_of(row.messages)
        facts = self._facts(row, format_name)
        node = self.tree.add(row.group, numbers, len(self.rows))
        self.rows.add(
            facts, judged_as=row.judged_as, parent=row.parent, node=node, length=len(numbers)
        )

    def _add_whole(self, row: LoggedConversation, format_name: str) -> None:
        reader = ChatReader()
        messages = reader.messages(row.messages)
        for index, message in enumerate(messages):
            for number, call in enumerate(message.get("tool_calls", ())):
                call.setdefault("id", f"call_{index}_{number}")
        if (problem := next(message_problems(messages), None)) is not None:
            raise UnreadableRowError("unsound message", f"{problem.field} {problem.message}")
        if self._infers:
            for message in messages:
                if message.get("tool_calls"):
                    self.inferred.look_at(message)
        encoded = [msgspec.json.encode(message) for message in messages]
        facts = self._facts(row, format_name, lost=tuple(reader.losses), messages=encoded)
        self.rows.add(facts, judged_as=row.judged_as, parent=row.parent)

    def _facts(
        self,
        row: LoggedConversation,
        format_name: str,
        *,
        lost: tuple[str, ...] = (),
        messages: list[bytes] | None = None,
    ) -> LoggedFacts:
        tools, unsound = self._number_of_tools(row.tools)
        shown = self._tally.shown_place
        return LoggedFacts(
            format=format_name,
            source=shown(row.place),
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
            also_at=tuple(shown(place) for place in row.also_at),
            losses=tuple(dict.fromkeys(row.losses + lost + unsound)),
            metadata=msgspec.json.encode(row.metadata),
            tools=tools,
            messages=messages or [],
        )

    def _number_of_tools(self, tools: list[Row] | None) -> tuple[int, tuple[str, ...]]:
        """Returns the number of a request's tools, and what is lost of them."""
        if tools is None:
            return NONE, ()
        key = hash(msgspec.json.encode(tools))
        if (known := self._known_tools.get(key)) is None:
            sound = sound_tools(tools)
            lost = (_NO_SCHEMA,) if len(sound) < len(tools) else ()
            number = self.tools.number_of(self._redaction.value(sound))
            known = self._known_tools[key] = number, lost
        return known


def _reason_to_refuse(row: LoggedConversation) -> Refusal | None:
    if row.error is not None and row.is_call:
        return Refusal(row.place, "failed call", row.error)
    if not row.messages:
        return Refusal(row.place, "no messages")
    roles = [message.get("role") for message in row.messages]
    if row.is_call and roles[-1] != "assistant":
        return Refusal(row.place, "call without a reply")
    if "assistant" not in roles:
        return Refusal(row.place, "no assistant message")
    last_reply = len(roles) - 1 - roles[::-1].index("assistant")
    if roles[0] == "assistant" and "user" not in roles[:last_reply]:
        return Refusal(row.place, "no message before the reply")
    return None
