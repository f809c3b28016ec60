"""Takes in the rows that readers yield: each is refused with a reason, or kept for joining."""

import math

import msgspec

from stillroom.data.checks import message_problems
from stillroom.importing.bodies.exchanges import offered_tools
from stillroom.importing.chat_messages import ChatReader
from stillroom.importing.joining.call_tree import NONE, CallTree
from stillroom.importing.joining.message_store import MessageStore
from stillroom.importing.joining.recent import REMEMBERED
from stillroom.importing.joining.row_table import LoggedFacts, RowTable
from stillroom.importing.joining.spill import Spill
from stillroom.importing.joining.tool_lists import InferredTools, ToolLists, sound_tools
from stillroom.importing.json_rows import Row, UnreadableRowError
from stillroom.importing.records import (
    Feedback,
    LoggedConversation,
    Place,
    RawCall,
    RawRow,
    Refusal,
)
from stillroom.importing.redaction import Redaction
from stillroom.importing.tally import ImportTally

_NO_METADATA = b"{}"
_NO_SCHEMA = "tools without a schema dropped"
_UNWRITABLE = (TypeError, UnicodeError, RecursionError, msgspec.MsgspecError)


class Intake:
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
        look_at = self.inferred.look_at if infers else None
        self.store = MessageStore(spill, look_at=look_at, remembered=remembered)
        self._known_tools: dict[bytes, tuple[int, tuple[str, ...]]] = {}
        self.tree = CallTree(self.store, remembered=remembered)
        self.rows = RowTable(spill)
        self.tools = ToolLists()
        self.feedback: list[tuple[str, Feedback]] = []

    def take(self, row: RawRow, format_name: str) -> None:
        """Takes in one row of a format."""
        if isinstance(row, RawCall):
            self.take_raw(row, format_name)
            return
        if isinstance(row, Refusal):
            self._tally.refuse(format_name, row)
            return
        if isinstance(row, Feedback):
            self._tally.read(format_name)
            self.feedback.append((format_name, row))
            return
        try:
            refusal = self._reason_to_refuse(row)
            if refusal is None:
                (self._take_call if row.is_call else self._take_whole)(row, format_name)
                self._tally.read(format_name, 1 + len(row.also_at))
                return
        except UnreadableRowError as error:
            refusal = Refusal(row.place, error.reason, error.detail)
        except _UNWRITABLE as error:
            refusal = Refusal(row.place, "not a JSON object", str(error))
        self._tally.refuse(format_name, refusal)
        for place in row.also_at:
            self._tally.refuse(format_name, Refusal(place, refusal.reason, f"see {row.place}"))

    def _reason_to_refuse(self, row: LoggedConversation) -> Refusal | None:
        if row.error is not None and row.is_call:
            return Refusal(row.place, "failed call", row.error)
        if not row.messages:
            return Refusal(row.place, "no messages")
        last = row.messages[-1]
        if row.is_call and last.get("role") != "assistant":
            return Refusal(row.place, "call without a reply")
        if not any(message.get("role") == "assistant" for message in row.messages):
            return Refusal(row.place, "no assistant message")
        return None

    def take_raw(self, row: RawCall, format_name: str) -> None:
        """Takes in a call whose messages are not decoded."""
        try:
            numbers = self.store.numbers_of(list(map(bytes, row.messages)))
            tools, losses = self._offered(row.tools)
            facts = LoggedFacts(
                format_name, self._tally.shown(row.path, row.line), row.id, row.group, None,
                row.model, row.usage, None, row.started_at, row.duration_s, row.finish_reason,
                None, {}, (), losses, _NO_METADATA, tools,
            )  # fmt: skip
            node = self.tree.add(row.group, numbers, len(self.rows))
        except UnreadableRowError as error:
            refusal = Refusal(Place(row.path, row.line), error.reason, error.detail)
            for again in [refusal] if row.reread is None else row.reread():
                self.take(again, format_name)
            return
        self.rows.add(facts, node=node, length=len(numbers))
        self._tally.read(format_name)

    def _offered(self, raw: msgspec.Raw) -> tuple[int, tuple[str, ...]]:
        """Returns the number of a request's tools, and what is lost of them."""
        data = bytes(raw)
        if data == b"null":
            return NONE, ()
        known = self._known_tools.get(data)
        if known is None:
            try:
                tools = offered_tools({"tools": msgspec.json.decode(data)})
            except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
                raise UnreadableRowError("the tools are not valid JSON", str(error)) from error
            known = self._known_tools[data] = self._number_of_tools(tools)
        return known

    def _number_of_tools(self, tools: list[Row] | None) -> tuple[int, tuple[str, ...]]:
        if tools is None:
            return NONE, ()
        sound = sound_tools(tools)
        lost = (_NO_SCHEMA,) if len(sound) < len(tools) else ()
        return self.tools.number_of(self._redaction.value(sound)), lost

    def _take_call(self, row: LoggedConversation, format_name: str) -> None:
        numbers = self.store.numbers_of(list(map(msgspec.json.encode, row.messages)))
        facts = self._facts(row, format_name)
        node = self.tree.add(row.group, numbers, len(self.rows))
        self.rows.add(
            facts,
            judged_as=row.judged_as,
            parent=row.parent,
            node=node,
            length=len(numbers),
        )

    def _take_whole(self, row: LoggedConversation, format_name: str) -> None:
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
        pieces = [msgspec.json.encode(message) for message in messages]
        facts = self._facts(row, format_name, lost=tuple(reader.losses), pieces=pieces)
        self.rows.add(facts, judged_as=row.judged_as, parent=row.parent)

    def _facts(
        self,
        row: LoggedConversation,
        format_name: str,
        *,
        lost: tuple[str, ...] = (),
        pieces: list[bytes] | None = None,
    ) -> LoggedFacts:
        tools, unsound = self._number_of_tools(row.tools)
        losses = row.losses + lost + unsound
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
            losses=tuple(dict.fromkeys(losses)),
            metadata=msgspec.json.encode(row.metadata),
            tools=tools,
            pieces=pieces or [],
        )
