"""Takes in the rows that readers yield: each is refused with a reason, or kept for joining."""

import math

import msgspec

from stillroom.data.checks import message_problems
from stillroom.importing.joining.call_tree import NONE, ORPHAN, CallTree
from stillroom.importing.joining.message_store import MessageStore
from stillroom.importing.joining.messages import clean_message
from stillroom.importing.joining.row_table import LoggedFacts, RowTable
from stillroom.importing.joining.spill import Spill
from stillroom.importing.joining.tool_lists import InferredTools, ToolLists, sound_tools
from stillroom.importing.json_rows import UnreadableRowError
from stillroom.importing.records import Feedback, LoggedConversation, Refusal, SourceRow
from stillroom.importing.redaction import Redaction
from stillroom.importing.tally import ImportTally

_NO_SCHEMA = "tools without a schema dropped"
_UNWRITABLE = (TypeError, UnicodeError, RecursionError, msgspec.MsgspecError)


class Intake:
    """Everything that was read, ready to be joined to rollouts."""

    def __init__(self, spill: Spill, redaction: Redaction, tally: ImportTally) -> None:
        self._redaction, self._tally = redaction, tally
        self.inferred = InferredTools()
        self.store = MessageStore(spill, redact=redaction.message, look_at=self.inferred.look_at)
        self.tree = CallTree(self.store)
        self.rows = RowTable(spill)
        self.tools = ToolLists()
        self.feedback: list[tuple[str, Feedback]] = []

    def take(self, row: SourceRow, format_name: str) -> None:
        """Takes in one row of a format."""
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

    def _take_call(self, row: LoggedConversation, format_name: str) -> None:
        numbers = [self.store.number_of(msgspec.json.encode(message)) for message in row.messages]
        facts = self._facts(row, format_name)
        node = self.tree.add(row.group, numbers, len(self.rows))
        self.rows.add(
            facts,
            judged_as=row.judged_as,
            parent=row.parent,
            node=node,
            reply=numbers[-1],
            length=len(numbers),
        )

    def _take_whole(self, row: LoggedConversation, format_name: str) -> None:
        clean = [clean_message(message) for message in row.messages]
        messages = [each.message for each in clean]
        if (problem := next(message_problems(messages), None)) is not None:
            raise UnreadableRowError(ORPHAN, f"{problem.field} {problem.message}")
        for message in messages:
            if message.get("tool_calls"):
                self.inferred.look_at(message)
        pieces = [msgspec.json.encode(self._redaction.message(message)) for message in messages]
        lost = tuple(loss for each in clean for loss in each.losses)
        facts = self._facts(row, format_name, lost=lost, pieces=pieces)
        self.rows.add(facts, judged_as=row.judged_as, parent=row.parent)

    def _facts(
        self,
        row: LoggedConversation,
        format_name: str,
        *,
        lost: tuple[str, ...] = (),
        pieces: list[bytes] | None = None,
    ) -> LoggedFacts:
        tools, losses = NONE, row.losses + lost
        if row.tools is not None:
            sound = sound_tools(row.tools)
            tools = self.tools.number_of(sound)
            losses += (_NO_SCHEMA,) if len(sound) < len(row.tools) else ()
        shown = self._tally.shown
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
            metadata=msgspec.json.encode(self._redaction.value(row.metadata)),
            tools=tools,
            pieces=pieces or [],
        )
