"""Finds conversations, branches and compactions in messages that link to their parents."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stillroom import bounds
from stillroom.importing.json_rows import Row, UnreadableRowError
from stillroom.importing.payloads.fields import (
    as_list,
    as_row,
    finish_reason_of,
    first_text,
    usage_of,
)
from stillroom.importing.payloads.messages import MessageReader, as_context
from stillroom.importing.records import Location, LoggedConversation, RefusedRow, SourceRow
from stillroom.types import Usage

CONTEXT_DROPPED = "the session file lacks the agent's system prompt and reminders"
HISTORY_DROPPED = "earlier messages are not in the file"
NO_REPLY = "no reply from the model"
COPIED = "copied from another session"
SYNTHETIC = "<synthetic>"
"""The model name of replies that the agent itself adds to the conversation."""


@dataclass(slots=True)
class Turn:
    """One message of a session, which may be logged in several lines."""

    location: Location
    uuid: str
    parent: str | None
    is_sidechain: bool
    timestamp: str | None
    origin: str | None = None
    """The id of the line in another session of which it is a copy."""
    previous: "Turn | None" = None
    """The previous turn; None at the beginning."""
    messages: list[Row] = field(default_factory=list[Row])
    blocks: list[Any] = field(default_factory=list[Any])
    """The blocks of a reply, from all of its lines."""
    dropped: tuple[str, ...] = ()
    is_last: bool = True
    """Whether no turn follows it."""
    is_answered: bool = False
    """Whether a reply follows it, directly or later."""
    model: str | None = None
    usage: Usage | None = None
    finish_reason: str | None = None
    error: str | None = None
    """The error of the API request that should have answered it."""
    results: "Turn | None" = None
    """The tool results for this reply."""
    last_summarised: "Turn | None" = None
    """Of a compaction: the last turn that it summarises."""
    kept: list["Turn"] = field(default_factory=list["Turn"])
    """Of a compaction: the turns that the model still sees unchanged."""
    kept_after: str | None = None
    """Of a compaction: the id of the turn after which the model sees the kept turns."""
    conversation: str | None = None
    """The id of the first conversation with this turn."""
    is_context: bool = False
    """Whether it belongs to another session, which this one continues."""

    @property
    def is_reply(self) -> bool:
        """Whether the model wrote it."""
        return bool(self.blocks) and self.model != SYNTHETIC


class MessageTree:
    """The messages of one session file, in file order."""

    def __init__(self, agent: str, conversation_ids: dict[str, str] | None = None) -> None:
        """`conversation_ids` has each reply's conversation; the trees of all files share it."""
        self._agent = agent
        self._conversation_ids = {} if conversation_ids is None else conversation_ids
        self._turns: list[Turn] = []
        self._turn_of_line: dict[str, Turn | None] = {}
        """The turn of each line, by the line's id; for a line without a message, the last turn."""
        self._replies: dict[str, Turn] = {}
        self._callers: dict[str, Turn] = {}
        self._problems: list[RefusedRow] = []
        self._context: Turn | None = None
        self._copied: dict[str, str] = {}
        """The conversations of replies in the continued session."""
        self._lacks_context = False
        self._reader = MessageReader()
        self._session: str | None = None
        self._sub_agent: str | None = None
        self._version: str | None = None
        self._has_main = False

    def has_line(self, uuid: str) -> bool:
        """Returns whether a line with this id was already added."""
        return uuid in self._turn_of_line

    def set_session(
        self, session: str | None, *, agent: str | None, is_sidechain: bool, version: str | None
    ) -> None:
        """Stores the session that a line names, and the sub-agent if the file is a sub-agent's."""
        if not self._turns:
            self._session = session or self._session
            self._sub_agent = agent if is_sidechain else None
        self._version = version or self._version

    def continue_from(self, session: str, other: "MessageTree | None", uuid: str | None) -> None:
        """Starts with the turns of another session up to the line `uuid`.

        `other` is None if that session is not in the import.
        """
        self._context = (
            other._turn_of_line.get(uuid) if other is not None and uuid is not None else None
        )
        self._lacks_context = self._context is None
        if other is None or self._context is None:
            return
        for turn in _path(self._context):
            turn.is_context = True
            turn.conversation = self._conversation_ids.get(turn.uuid, session)
        self._copied = {
            message_id: self._conversation_ids.get(reply.uuid, session)
            for message_id, reply in other._replies.items()
        }

    def text(self, content: Any) -> str:
        """Returns the text of a message's content."""
        return self._reader.text(content)

    def add_note(self, turn: Turn) -> None:
        """Adds a line that is not a message; its children become children of its parent."""
        self._turn_of_line[turn.uuid] = self._previous(turn)

    def add_api_error(self, turn: Turn, text: str) -> None:
        """Stores a request's error on the previous turn; it is not part of the conversation."""
        previous = self._previous(turn)
        if previous is not None:
            previous.error = text or "the request failed"
        self._turn_of_line[turn.uuid] = previous

    def add_reply(self, turn: Turn, message: Row) -> None:
        """Adds a line of a reply; all lines with the same message id form one reply."""
        message_id = first_text(message, "id")
        reply = self._replies.get(message_id) if message_id else None
        if reply is None:
            reply = self._add(turn)
            reply.model = first_text(message, "model")
            if message_id:
                self._replies[message_id] = reply
                reply.conversation = self._copied.get(message_id)
        self._turn_of_line[turn.uuid] = reply
        content = message.get("content")
        blocks = [content] if isinstance(content, str) else as_list(content)
        reply.blocks += blocks
        reply.usage = usage_of(message.get("usage")) or reply.usage
        reply.finish_reason = finish_reason_of(message.get("stop_reason")) or reply.finish_reason
        for block in map(as_row, blocks):
            if call_id := first_text(block, "id"):
                self._callers[call_id] = reply

    def add_messages(self, turn: Turn, message: Row) -> None:
        """Adds a user message or tool results.

        Results for the calls of one reply form one turn, although their lines have different
        parents.
        """
        reader = MessageReader()
        try:
            turn.messages = reader.turn(message)
        except UnreadableRowError as error:
            self._problems.append(RefusedRow(turn.location, error.reason, error.detail))
            self.add_note(turn)
            return
        turn.dropped = tuple(reader.dropped)
        call_ids = [m["tool_call_id"] for m in turn.messages if "tool_call_id" in m]
        caller = self._callers.get(call_ids[0]) if call_ids else None
        results = caller.results if caller is not None else None
        if results is not None and not {m.get("tool_call_id") for m in results.messages} & {
            *call_ids
        }:
            results.messages += turn.messages
            results.dropped += turn.dropped
            self._turn_of_line[turn.uuid] = results
            return
        added = self._add(turn)
        if caller is not None:
            caller.results = added

    def add_compaction(
        self,
        turn: Turn,
        *,
        last_summarised: str | None,
        kept: Sequence[str],
        kept_after: str | None,
    ) -> None:
        """Adds a compaction, after which the model sees a summary in place of earlier turns.

        `kept` has the ids of the turns that the model still sees, after the turn `kept_after`.
        """
        turn.parent = None
        added = self._add(turn)
        added.last_summarised = self._turn_of_line.get(last_summarised) if last_summarised else None
        turns = [self._turn_of_line.get(uuid) for uuid in kept]
        added.kept = list({id(each): each for each in turns if each is not None}.values())
        added.kept_after = kept_after

    def conversations(self) -> Iterator[SourceRow]:
        """Yields all conversations, including branches; a branch without a reply is refused."""
        yield from self._problems
        for turn in self._turns:
            turn.conversation = turn.conversation or self._earlier_conversation(turn)
        # A turn is added after its parent.
        for turn in reversed(self._turns):
            if turn.previous is not None and (turn.is_reply or turn.is_answered):
                turn.previous.is_answered = True
        for turn in self._turns:
            if turn.is_last:
                yield self._conversation(turn)

    def _earlier_conversation(self, turn: Turn) -> str | None:
        """Returns the conversation of another file that already has a turn, or None."""
        earlier = self._conversation_ids.get(turn.uuid)
        if turn.origin is not None:
            earlier = earlier or self._conversation_ids.get(turn.origin)
            if earlier is not None:
                self._conversation_ids[turn.uuid] = self._conversation_ids[turn.origin] = earlier
        return earlier

    def _previous(self, turn: Turn) -> Turn | None:
        if turn.parent is None:
            return None if self._turns else self._context
        return self._turn_of_line.get(turn.parent)

    def _add(self, turn: Turn) -> Turn:
        """Appends a turn after its parent, and returns it."""
        turn.previous = self._previous(turn)
        is_parent_missing = (
            turn.parent not in self._turn_of_line if turn.parent else self._lacks_context
        )
        if turn.previous is not None:
            turn.previous.is_last = False
        elif is_parent_missing:
            turn.dropped = (*turn.dropped, HISTORY_DROPPED)
        self._lacks_context = False
        self._turns.append(turn)
        self._turn_of_line[turn.uuid] = turn
        return turn

    def _conversation(self, last: Turn) -> SourceRow:
        """Returns the conversation that ends with a turn, or refuses it if it has no new reply."""
        path = _path(last)
        new_turns = [turn for turn in path if turn.conversation is None]
        last_reply = next((turn for turn in reversed(new_turns) if turn.is_reply), None)
        if last_reply is None and path[-1].conversation is not None:
            detail = f"its replies are in {path[-1].conversation}"
            return RefusedRow(last.location, COPIED, detail)
        if last_reply is None or last_reply.is_answered:
            return RefusedRow(
                last.location, NO_REPLY, "it was interrupted, or continued in another session"
            )
        conversation_id = self._id_of(last, path)
        parent = self._parent_of(path)
        context = {id(turn) for turn in path if turn.conversation is not None}
        for turn in new_turns:
            turn.conversation = conversation_id
            if turn.is_reply:
                self._conversation_ids[turn.uuid] = conversation_id
                if turn.origin is not None:
                    self._conversation_ids[turn.origin] = conversation_id
        dropped: dict[str, None] = {CONTEXT_DROPPED: None}
        try:
            messages = list(_join_user_messages(_messages(path, context, dropped)))
        except UnreadableRowError as error:
            return RefusedRow(last.location, error.reason, error.detail)
        replies = [turn for turn in path if turn.is_reply and turn.model]
        models = list(dict.fromkeys(turn.model for turn in replies if turn.model))
        usages = [turn.usage for turn in new_turns if turn.usage is not None]
        metadata = {"agent": self._agent, "agent_version": self._version}
        metadata |= {"models": models} if len(models) > 1 else {}
        session_turns = [turn for turn in path if not turn.is_context]
        return LoggedConversation(
            location=session_turns[0].location,
            messages=messages,
            is_call=False,
            group=self._session,
            id=conversation_id,
            parent=parent,
            provider="anthropic" if models and models[-1].startswith("claude") else None,
            model=models[-1] if models else None,
            usage=sum(usages, Usage()) if usages else None,
            started_at=next((turn.timestamp for turn in session_turns if turn.timestamp), None),
            finish_reason=next((turn.finish_reason for turn in reversed(replies)), None),
            error=last.error,
            dropped=tuple(dropped),
            metadata={key: value for key, value in metadata.items() if value},
        )

    def _id_of(self, last: Turn, path: Sequence[Turn]) -> str:
        """Returns the session's id for the first conversation, or a suffixed id for later ones."""
        session = self._session or self._turns[0].uuid
        if self._sub_agent is not None:
            session = f"{session}/agent-{self._sub_agent}"
        is_sidechain = self._sub_agent is None and path[0].is_sidechain
        if is_sidechain or self._has_main:
            return f"{session}/{last.uuid}"
        self._has_main = True
        return session

    def _parent_of(self, path: Sequence[Turn]) -> str | None:
        """Returns the id of the conversation that a path branches from or continues, if any."""
        shared = next((t.conversation for t in reversed(path) if t.conversation), None)
        if shared is not None:
            return shared
        if path[0].last_summarised is not None:
            return path[0].last_summarised.conversation
        return self._session if path[0].is_sidechain else None


def _path(last: Turn) -> list[Turn]:
    """Returns the turns from the first one to `last`."""
    path, turn = list[Turn](), last
    while turn is not None:
        path.append(turn)
        turn = turn.previous
    return path[::-1]


def _messages(path: Sequence[Turn], context: set[int], dropped: dict[str, None]) -> Iterator[Row]:
    """Yields the messages of a path. The turns with an `id()` in `context` are not trained on."""
    compaction = path[0]
    for turn in path:
        messages = _turn_messages(turn, dropped)
        yield from map(as_context, messages) if id(turn) in context else messages
        if compaction.kept_after is not None and turn.uuid == compaction.kept_after:
            for kept in compaction.kept:
                # The model did not write these after the summary, so they are context here.
                yield from (as_context(m) for m in _turn_messages(kept, dropped))


def _turn_messages(turn: Turn, dropped: dict[str, None]) -> list[Row]:
    """Returns the messages of a turn, and adds what was left out of them to `dropped`."""
    messages = turn.messages
    if turn.blocks:
        reader = MessageReader()
        messages = reader.turn({"role": "assistant", "content": turn.blocks})
        dropped |= reader.dropped
        if turn.model == SYNTHETIC:
            messages = [as_context(message) for message in messages]
    dropped |= dict.fromkeys(turn.dropped)
    return messages


def _join_user_messages(messages: Iterator[Row]) -> Iterator[Row]:
    """Joins successive user messages, since the model is sent them as one."""
    pending: Row | None = None
    for message in messages:
        if pending is not None and message["role"] == "user":
            pending = pending | {"content": f"{pending['content']}\n{message['content']}"}
            continue
        if pending is not None:
            yield pending
        pending = message if message["role"] == "user" else None
        if pending is None:
            yield message
    if pending is not None:
        yield pending


MAX_FORKS = bounds.FORKS.limit
"""The maximum length of a chain of forks."""


def fork_chain(session: str, origins: Mapping[str, str]) -> list[str]:
    """Returns the sessions from which a session was forked, from itself back to the first."""
    chain = [session]
    while (origin := origins.get(chain[-1])) and origin not in chain and len(chain) < MAX_FORKS:
        chain.append(origin)
    return chain
