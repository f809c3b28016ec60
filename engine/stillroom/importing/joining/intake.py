"""Takes in the rows that readers yield: each is refused with a reason, or kept for joining."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from stillroom.data.checks import message_problems
from stillroom.importing.bodies.exchanges import offered_tools
from stillroom.importing.chat_messages import ChatReader
from stillroom.importing.joining.call_tree import NONE, CallTree
from stillroom.importing.joining.message_process import MessageProcess
from stillroom.importing.joining.message_store import MessageStore
from stillroom.importing.joining.recent import REMEMBERED
from stillroom.importing.joining.row_table import LoggedFacts, RowTable
from stillroom.importing.joining.seen_batch import seen_batch
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

_NO_SCHEMA = "tools without a schema dropped"
_BATCH = 1 << 20
"""The bytes of messages that another process is given at once."""
_LEAST = 4096
"""The bytes as which a row counts whose messages are not joined."""
_UNWRITABLE = (TypeError, UnicodeError, RecursionError, msgspec.MsgspecError)


class _Waiting(NamedTuple):
    """A row that is to be taken in, and the numbers of its messages if they have some already."""

    row: RawRow
    format_name: str
    numbers: Sequence[int] | None = None


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
        self._known_schemas: dict[int, tuple[int, tuple[str, ...]]] = {}
        self.tree = CallTree(self.store, remembered=remembered)
        self.rows = RowTable(spill)
        self.tools = ToolLists()
        self.feedback: list[tuple[str, Feedback]] = []
        self._process: MessageProcess | None = None
        self._batch = _BATCH
        self._waiting, self._given = list[_Waiting](), list[_Waiting]()
        self._num_waiting, self._span = 0, range(0)
        """The bytes of the waiting rows; the messages of the rows that the process was given."""

    def share_with(self, process: MessageProcess, *, batch: int = _BATCH) -> None:
        """Has another process read the messages of the rows that come, until `finish`.

        `batch` is how many bytes of messages it is given at once.
        """
        self._process, self._batch = process, batch

    def take(self, row: RawRow, format_name: str) -> None:
        """Takes in one row of a format; with another process, some rows later."""
        raws = self._raws_of(row)
        numbers = None if raws is None else self.store.numbers_of(raws)
        waiting = _Waiting(row, format_name, numbers)
        if self._process is None or (raws is None and not self._waiting and not self._given):
            self._take(waiting)
            return
        self._waiting.append(waiting)
        self._num_waiting += _LEAST if raws is None else sum(map(len, raws))
        if self._num_waiting >= self._batch:
            self._turn(self._process)

    def finish(self) -> None:
        """Takes in what still waits."""
        if self._process is not None:
            self._turn(self._process)
            self._turn(self._process)
            self._process = None

    def _turn(self, process: MessageProcess) -> None:
        """Gives the process the next messages, and takes in the rows whose messages it has read."""
        rows, self._given = self._given, self._waiting
        self._waiting, self._num_waiting = [], 0
        if span := self._span:
            seen = process.receive(span.start)
            if seen is None:
                seen = seen_batch(map(self.store.raw, span))
            self.store.learn(span.start, seen)
        first, raws = self.store.take_unseen()
        self._span = range(first, first + len(raws))
        if raws:
            process.give(self.store.places[first:], self.store.sizes[first:])
        for each in rows:
            self._take(each)

    def _raws_of(self, row: RawRow) -> list[bytes] | None:
        """Returns the messages of a call as JSON; None for a row without messages to join."""
        if isinstance(row, RawCall):
            return list(map(bytes, row.messages))
        if not isinstance(row, LoggedConversation) or not row.is_call:
            return None
        if self._reason_to_refuse(row) is not None:
            return None
        try:
            return list(map(msgspec.json.encode, row.messages))
        except _UNWRITABLE:
            return None

    def _take(self, waiting: _Waiting) -> None:
        row, format_name, numbers = waiting
        if isinstance(row, RawCall):
            self._take_raw(row, format_name, numbers or ())
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
                if row.is_call:
                    self._take_call(row, format_name, numbers)
                else:
                    self._take_whole(row, format_name)
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

    def _take_raw(self, row: RawCall, format_name: str, numbers: Sequence[int]) -> None:
        """Takes in a call whose messages are not decoded."""
        try:
            self._check(numbers)
            tools, losses = self._offered(row.tools)
            facts = LoggedFacts(
                format_name, self._tally.shown(row.path, row.line), row.id, row.group, row.provider,
                row.model, row.usage, row.cost_usd, row.started_at, row.duration_s,
                row.finish_reason, None, {}, (), losses, row.metadata, tools,
            )  # fmt: skip
            node = self.tree.add(row.group, numbers, len(self.rows))
        except UnreadableRowError as error:
            refusal = Refusal(Place(row.path, row.line), error.reason, error.detail)
            for again in [refusal] if row.reread is None else row.reread():
                self._take(_Waiting(again, format_name))
            return
        self.rows.add(facts, judged_as=row.judged_as, node=node, length=len(numbers))
        self._tally.read(format_name)

    def _check(self, numbers: Sequence[int]) -> None:
        self.store.see()
        self.store.check(numbers)

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
        key = hash(msgspec.json.encode(tools))
        if (known := self._known_schemas.get(key)) is None:
            sound = sound_tools(tools)
            lost = (_NO_SCHEMA,) if len(sound) < len(tools) else ()
            number = self.tools.number_of(self._redaction.value(sound))
            known = self._known_schemas[key] = number, lost
        return known

    def _take_call(
        self, row: LoggedConversation, format_name: str, numbers: Sequence[int] | None
    ) -> None:
        if numbers is None:
            numbers = self.store.numbers_of(list(map(msgspec.json.encode, row.messages)))
        self._check(numbers)
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
