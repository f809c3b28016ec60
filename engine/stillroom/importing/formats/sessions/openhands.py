"""Reads events of OpenHands: of its SDK, of older versions and of its benchmarks."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stillroom.importing.formats.sessions.message_tree import NO_REPLY
from stillroom.importing.json_rows import (
    JsonRow,
    Row,
    UnreadableRowError,
    head_rows,
    read_document,
    read_json_rows,
    source_folder,
)
from stillroom.importing.payloads.fields import (
    as_list,
    as_row,
    first_text,
    usage_of,
    without_empty,
)
from stillroom.importing.payloads.messages import (
    IMAGES_DROPPED,
    MessageReader,
    as_context,
    tool_call,
)
from stillroom.importing.records import (
    Location,
    LoggedConversation,
    RefusedRow,
    SourceRow,
    TraceFormat,
)
from stillroom.types import Usage

NOTES_DROPPED = "the event files lack the notes that the agent adds to tool results"
_NO_CALLS = "actions without the model's tool calls"
_OLD_ANSWERS = {"message": ("content",), "finish": ("final_thought", "thought")}


def is_event(row: Row) -> bool:
    """Returns whether a row is an event of the SDK."""
    kind = row.get("kind")
    return (
        isinstance(kind, str)
        and kind.endswith(("Event", "Observation", "Condensation"))
        and {
            "id",
            "timestamp",
            "source",
        }
        <= row.keys()
    )


def is_old_event(row: Row) -> bool:
    """Returns whether a row is an event of a version before the SDK."""
    has_kind = ("action" in row and "args" in row) or ("observation" in row and "content" in row)
    return has_kind and {"id", "timestamp", "source"} <= row.keys()


@dataclass(slots=True)
class _EventMessages:
    """The messages of one event, or of several events that form one reply."""

    event_ids: list[Any]
    messages: list[Row]
    response: str | None = None
    """The id of the response with this reply."""
    is_context: bool = False
    """Whether an earlier conversation already has this message, so that it is context."""

    @property
    def is_reply(self) -> bool:
        """Whether the model wrote it."""
        return any(message["role"] == "assistant" for message in self.messages)


@dataclass(slots=True)
class EventLog:
    """The events of one conversation, in order."""

    location: Location
    id: str | None
    folder: Path | None = None
    state: Row = field(default_factory=dict[str, Any])
    """The SDK's state next to the events: the model, and the usage of each response."""
    _messages: list[_EventMessages] = field(default_factory=list[_EventMessages])
    _reader: MessageReader = field(default_factory=MessageReader)
    _usages: dict[str, Usage] = field(default_factory=dict[str, Usage])
    _model: str | None = None
    _error: str | None = None
    _problem: UnreadableRowError | None = None
    _result: Row = field(default_factory=dict[str, Any])
    _number: int = 0
    _started_at: str | None = None

    def set_result(self, row: Row) -> None:
        """Stores a benchmark's result for the conversation."""
        self._result = row
        self._model = first_text(as_row(as_row(row.get("metadata")).get("llm_config")), "model")

    def add(self, event: Row) -> Iterator[SourceRow]:
        """Adds an event; if it is a condensation, yields the conversation before it."""
        self._started_at = self._started_at or first_text(event, "timestamp")
        try:
            if event.get("kind") == "Condensation":
                yield from self._condense(event.get("id"), event)
            elif event.get("action") == "condensation":
                yield from self._condense(event.get("id"), as_row(event.get("args")))
            elif "kind" in event:
                self._add_event(event)
            else:
                self._add_old_event(event)
        except UnreadableRowError as error:
            self._problem = self._problem or error

    def end(self) -> Iterator[SourceRow]:
        """Yields the current conversation, or a RefusedRow if it has no reply."""
        new_entries = [entry for entry in self._messages if not entry.is_context]
        if not new_entries:
            return
        replies = [entry for entry in new_entries if entry.is_reply]
        if self._problem is not None or not replies:
            problem = self._problem or UnreadableRowError(NO_REPLY, "it was interrupted")
            yield RefusedRow(self.location, problem.reason, problem.detail)
        else:
            yield self._conversation([entry.response for entry in replies])
        self._number += 1

    def _conversation(self, responses: list[str | None]) -> LoggedConversation:
        """Returns the current conversation; `responses` are the ids of its replies."""
        metrics = as_row(
            as_row(as_row(self.state.get("stats")).get("usage_to_metrics")).get("agent")
        )
        for counts in map(as_row, as_list(metrics.get("token_usages"))):
            if (name := first_text(counts, "response_id")) and (usage := usage_of(counts)):
                self._usages[name] = usage
        usages = [self._usages[name] for name in responses if name in self._usages]
        llm = as_row(as_row(self.state.get("agent")).get("llm"))
        results = as_row(self._result.get("test_result"))
        resolved = as_row(results.get("report")).get("resolved", self._result.get("resolved"))
        return LoggedConversation(
            location=self.location,
            messages=[message for entry in self._messages for message in entry.messages],
            is_call=False,
            group=self.id,
            id=self._id_of(self._number),
            parent=self._id_of(self._number - 1) if self._number else None,
            model=self._model or first_text(llm, "model"),
            usage=sum(usages, Usage()) if usages else None,
            started_at=self._started_at,
            error=self._error,
            scores={"resolved": float(resolved)} if isinstance(resolved, bool) else {},
            dropped=tuple(self._reader.dropped),
            metadata=without_empty(
                agent="openhands", instance_id=first_text(self._result, "instance_id")
            ),
        )

    def _id_of(self, number: int) -> str | None:
        return f"{self.id}/{number}" if self.id is not None and number else self.id

    def _condense(self, event_id: Any, condensation: Row) -> Iterator[SourceRow]:
        """Yields the conversation, and continues with the messages that the model still sees."""
        entries = self._messages
        # Messages after the last reply belong to the next conversation.
        reply_indices = (index for index, entry in enumerate(entries) if entry.is_reply)
        last = max(reply_indices, default=len(entries) - 1)
        self._messages = entries[: last + 1]
        yield from self.end()
        forgotten = {*map(str, as_list(condensation.get("forgotten_event_ids")))}
        first, last = (condensation.get(f"forgotten_events_{end}_id") for end in ("start", "end"))
        forgotten_range = (
            range(first, last + 1) if isinstance(first, int) and isinstance(last, int) else ()
        )
        kept = [
            _EventMessages(
                entry.event_ids, [as_context(m) for m in entry.messages], is_context=True
            )
            for entry in entries
            if not any(
                str(event) in forgotten or event in forgotten_range for event in entry.event_ids
            )
        ]
        summary, offset = first_text(condensation, "summary"), condensation.get("summary_offset")
        if summary is not None:
            index = offset if isinstance(offset, int) and 0 <= offset <= len(kept) else len(kept)
            kept.insert(
                index,
                _EventMessages(
                    [f"{event_id}-summary"], [{"role": "user", "content": summary}], None, True
                ),
            )
        self._messages = kept

    def _add_event(self, event: Row) -> None:
        """Adds an event of the SDK."""
        match event.get("kind"):
            case "SystemPromptEvent":
                texts = [
                    self._text([event.get(key)]) for key in ("system_prompt", "dynamic_context")
                ]
                self._add_message(event, "system", "\n\n".join(text for text in texts if text))
            case "MessageEvent":
                message = as_row(event.get("llm_message"))
                content = [
                    *as_list(message.get("content")),
                    *as_list(event.get("extended_content")),
                ]
                response = first_text(event, "llm_response_id")
                turns = self._reader.turn({**message, "content": content})
                self._messages.append(_EventMessages([event.get("id")], turns, response))
            case "ActionEvent":
                self._add_action(event)
            case "ObservationEvent":
                observation = as_row(event.get("observation"))
                if observation.get("metadata"):
                    self._reader.drop(NOTES_DROPPED)
                content = [
                    *as_list(observation.get("content")),
                    *as_list(event.get("extended_content")),
                ]
                self._add_message(event, "tool", self._text(content))
            case "UserRejectObservation":
                self._add_message(
                    event, "tool", first_text(event, "rejection_reason") or "rejected"
                )
            case "AgentErrorEvent":
                self._add_message(event, "tool", first_text(event, "error") or "failed")
            case "ConversationErrorEvent":
                self._error = first_text(event, "detail", "code")
            case _:
                pass  # e.g. changes of state, which the model does not see

    def _text(self, parts: list[Any]) -> str:
        return self._reader.text([part for part in parts if part is not None])

    def _add_message(self, event: Row, role: str, text: str) -> None:
        message: Row = {"role": role, "content": text}
        if role == "tool" and (call_id := first_text(event, "tool_call_id")):
            message["tool_call_id"] = call_id
        self._messages.append(_EventMessages([event.get("id")], [message]))

    def _add_action(self, event: Row) -> None:
        """Adds a tool call. All calls of a response form one message."""
        logged = as_row(event.get("tool_call"))
        call = tool_call({"id": logged.get("id"), "function": logged})
        response = first_text(event, "llm_response_id")
        entries = reversed(self._messages)
        reply = next((entry for entry in entries if entry.response == response), None)
        if response is not None and reply is not None and "tool_calls" in reply.messages[0]:
            reply.messages[0]["tool_calls"].append(call)
            reply.event_ids.append(event.get("id"))
            return
        message: Row = {
            "role": "assistant",
            "content": [*as_list(event.get("thinking_blocks")), *as_list(event.get("thought"))],
        }
        if reasoning := first_text(event, "reasoning_content"):
            message["reasoning_content"] = reasoning
        (turn,) = self._reader.turn(message)
        turn["tool_calls"] = [call]
        self._messages.append(_EventMessages([event.get("id")], [turn], response))

    def _add_old_event(self, event: Row) -> None:
        """Adds an event of a version before the SDK."""
        args, call = as_row(event.get("args")), as_row(event.get("tool_call_metadata"))
        kind = event.get("action")
        if "observation" in event:
            if call_id := first_text(call, "tool_call_id"):
                result = {"id": event.get("id"), "tool_call_id": call_id}
                self._add_message(result, "tool", first_text(event, "content") or "")
        elif kind == "system":
            self._add_message(event, "system", first_text(args, "content") or "")
        elif kind == "message" and event.get("source") == "user":
            if args.get("image_urls"):
                self._reader.drop(IMAGES_DROPPED)
            self._add_message(event, "user", first_text(args, "content") or "")
        elif call:
            self._add_old_reply(event, as_row(call.get("model_response")))
        elif event.get("source") == "agent" and isinstance(kind, str):
            self._add_old_answer(event, kind, args)

    def _add_old_reply(self, event: Row, response: Row) -> None:
        """Adds the reply in a model response, which several actions may repeat."""
        response_id = first_text(response, "id")
        earlier = next((entry for entry in self._messages if entry.response == response_id), None)
        if response_id is not None and earlier is not None:
            earlier.event_ids.append(event.get("id"))
            return
        choice = as_row(next(iter(as_list(response.get("choices"))), None))
        turns = self._reader.turn(as_row(choice.get("message")))
        self._messages.append(_EventMessages([event.get("id")], turns, response_id))
        self._model = first_text(response, "model") or self._model
        if response_id and (usage := usage_of(response.get("usage"))):
            self._usages[response_id] = usage

    def _add_old_answer(self, event: Row, kind: str, args: Row) -> None:
        """Adds a reply without a call. Raises UnreadableRowError for an action with a call."""
        if kind not in _OLD_ANSWERS:
            if "command" in args or "code" in args or "path" in args:
                raise UnreadableRowError(_NO_CALLS, f"action {kind!r} has no tool_call_metadata")
            return  # e.g. a change of state
        if text := first_text(args, *_OLD_ANSWERS[kind]):
            self._add_message(event, "assistant", text)


_STATE = "base_state.json"


def read_conversations(paths: Sequence[Path]) -> Iterator[SourceRow]:
    """Yields the conversations of event files, with one in memory at a time.

    The files of an `events` folder form one conversation, and so does any other file of events; a
    row with a `history` is one conversation. A condensation starts a new one.
    """
    log: EventLog | None = None
    for path in sorted(paths, key=_sort_key):
        if path.name == _STATE:
            continue
        folder = source_folder(path)
        folder = folder if folder.name == "events" else None
        if log is not None and (folder is None or log.folder != folder):
            yield from log.end()
            log = None
        for row in read_json_rows(path):
            if isinstance(row, RefusedRow):
                yield row
            elif isinstance(row.data.get("history"), list):
                yield from _history(row)
            else:
                log = log or _new_log(row, folder)
                yield from log.add(row.data)
    if log is not None:
        yield from log.end()


def _new_log(row: JsonRow, folder: Path | None) -> EventLog:
    if folder is None:
        return EventLog(row.location, id=None)
    state = read_document(folder.parent / _STATE)
    return EventLog(row.location, id=folder.parent.name, folder=folder, state=state)


def _history(row: JsonRow) -> Iterator[SourceRow]:
    """Yields the conversations of a benchmark's result."""
    log = EventLog(row.location, id=str(row.data.get("instance_id") or "") or None)
    log.set_result(row.data)
    for item in as_list(row.data["history"]):
        # Old results have pairs of an action and its observation.
        for event in as_list(item) or [item]:
            yield from log.add(as_row(event))
    yield from log.end()


def _sort_key(path: Path) -> tuple[str, list[tuple[int, str]]]:
    parts = re.split(r"(\d+)", path.name)
    return str(source_folder(path)), [(int(p), "") if p.isdecimal() else (-1, p) for p in parts]


def _is_recognised(path: Path, head: bytes) -> bool:
    rows = head_rows(head)
    if path.name == _STATE:
        return any("execution_status" in row or "agent_state" in row for row in rows)
    return any(_has_events(row) for row in rows)


def _has_events(row: Row) -> bool:
    """Returns whether a row is an event, or has a `history` of events."""
    history = as_list(row.get("history"))
    events = as_list(history[0]) or history if history else [row]
    first = as_row(events[0])
    return is_event(first) or is_old_event(first)


OPENHANDS = TraceFormat(
    name="openhands",
    title="OpenHands conversations and benchmark results",
    is_recognised=_is_recognised,
    read=read_conversations,
)
