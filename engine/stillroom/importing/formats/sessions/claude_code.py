"""Reads Claude Code's session files, in which each message links to its parent."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from stillroom.importing.formats.sessions.message_tree import MessageTree, Turn, fork_chain
from stillroom.importing.json_rows import JsonRow, Row, detect_by_row, read_json_rows
from stillroom.importing.payloads.fields import as_list, as_row, first_text, text_of
from stillroom.importing.records import LoggedConversation, RefusedRow, SourceRow, TraceFormat

_KINDS = frozenset(("user", "assistant", "system", "attachment", "progress"))
_FORK, _NUM_HEAD_ROWS = "fork-context-ref", 50
_NOTES = {
    "summary": "leafUuid",
    "last-prompt": "leafUuid",
    "file-history-snapshot": "messageId",
    "queue-operation": "sessionId",
    "mode": "sessionId",
    _FORK: "parentSessionId",
}
"""The types of lines that are not messages, each with a required field."""


def read_sessions(paths: Sequence[Path]) -> Iterator[SourceRow]:
    """Yields the conversations of session files, with one file in memory at a time.

    A session has its main conversation, abandoned branches, one conversation after each compaction,
    and those of sub-agents. Unreadable lines and branches without a reply are refused. Turns that
    a fork copies from another session, or that a forked sub-agent continues, are context there.
    """
    conversation_ids: dict[str, str] = {}
    sessions = _Sessions(paths)
    for path in sessions.in_order():
        tree = MessageTree("claude_code", conversation_ids)
        for row in read_json_rows(path):
            if isinstance(row, RefusedRow):
                yield row
            elif row.data.get("type") == _FORK:
                session = first_text(row.data, "parentSessionId") or ""
                last = first_text(row.data, "parentLastUuid")
                tree.continue_from(session, sessions.tree_of(session), last)
            else:
                _add_line(tree, row)
        yield from tree.conversations()


@dataclass(frozen=True, slots=True)
class _FileHeader:
    """The origin of a session file, from its first lines."""

    session: str | None = None
    """The id of the session; None for a sub-agent's file."""
    forked_from: str | None = None
    is_copy: bool = False
    """Whether it begins with lines copied from an older session."""


class _Sessions:
    """The session files of an import, and which sessions were forked from which."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._headers = {path: _header_of(path) for path in paths}
        self._files: dict[str, Path] = {}
        self._origins: dict[str, str] = {}
        for path, header in self._headers.items():
            if header.session is not None:
                self._files.setdefault(header.session, path)
                if header.forked_from is not None:
                    self._origins[header.session] = header.forked_from
        self._cached: tuple[str, MessageTree] | None = None

    def in_order(self) -> list[Path]:
        """Returns the files, each fork after the session from which it was forked."""
        return sorted(self._headers, key=self._depth)

    def tree_of(self, session: str) -> MessageTree | None:
        """Returns a session's messages; None if its file is missing. Caches the last session."""
        if self._cached is not None and self._cached[0] == session:
            return self._cached[1]
        if (path := self._files.get(session)) is None:
            return None
        tree = MessageTree("claude_code")
        for row in read_json_rows(path):
            if isinstance(row, JsonRow):
                _add_line(tree, row)
        self._cached = (session, tree)
        return tree

    def _depth(self, path: Path) -> int:
        """Returns how many known forks lead to a file's session."""
        header = self._headers[path]
        chain = [] if header.session is None else fork_chain(header.session, self._origins)
        return len(chain) - 1 if len(chain) > 1 else int(header.is_copy)


def _header_of(path: Path) -> _FileHeader:
    """Returns the origin of a session file, from its first lines."""
    first_timestamp = ""
    for row in islice(read_json_rows(path), _NUM_HEAD_ROWS):
        line: Row = row.data if isinstance(row, JsonRow) else {}
        timestamp = first_text(line, "timestamp")
        first_timestamp = first_timestamp or timestamp or ""
        if line.get("isSidechain") is True:
            return _FileHeader()
        if "uuid" in line and "sessionId" in line:
            forked_from = first_text(as_row(line.get("forkedFrom")), "sessionId")
            is_copy = timestamp is not None and timestamp < first_timestamp
            return _FileHeader(first_text(line, "sessionId"), forked_from, is_copy)
    return _FileHeader()


def _add_line(tree: MessageTree, row: JsonRow) -> None:
    """Adds a line of a session file to the tree, unless it was added before."""
    line = row.data
    uuid = text_of(line.get("uuid"))
    if uuid is None or tree.has_line(uuid):
        return
    message, kind = as_row(line.get("message")), line.get("type")
    tree.set_session(
        first_text(line, "sessionId"),
        agent=first_text(line, "agentId"),
        is_sidechain=line.get("isSidechain") is True,
        version=first_text(line, "version"),
    )
    turn = Turn(
        location=row.location,
        uuid=uuid,
        parent=text_of(line.get("parentUuid")),
        is_sidechain=line.get("isSidechain") is True,
        timestamp=first_text(line, "timestamp"),
        origin=first_text(as_row(line.get("forkedFrom")), "messageUuid"),
    )
    if kind == "assistant" and line.get("isApiErrorMessage"):
        tree.add_api_error(turn, tree.text(message.get("content")))
    elif kind == "assistant":
        tree.add_reply(turn, message)
    elif kind == "user":
        tree.add_messages(turn, message)
    elif kind == "attachment" and (prompt := _queued_prompt(line)) is not None:
        tree.add_messages(turn, {"role": "user", "content": prompt})
    elif kind == "system" and line.get("subtype") == "compact_boundary":
        _add_compaction(tree, turn, line)
    else:
        tree.add_note(turn)


def _add_compaction(tree: MessageTree, turn: Turn, line: Row) -> None:
    """Adds a compaction, from the line that marks its boundary."""
    kept = as_row(as_row(line.get("compactMetadata")).get("preservedMessages"))
    tree.add_compaction(
        turn,
        last_summarised=text_of(line.get("logicalParentUuid")),
        kept=[uuid for uuid in as_list(kept.get("uuids")) if isinstance(uuid, str)],
        kept_after=text_of(kept.get("anchorUuid")),
    )


def _queued_prompt(line: Row) -> object:
    """Returns a prompt that the user queued while the agent was working; None for other lines."""
    attachment = as_row(line.get("attachment"))
    return attachment.get("prompt") if attachment.get("type") == "queued_command" else None


def _is_line(row: Row) -> bool:
    """Returns whether a row is a line of a session file."""
    kind = row.get("type")
    if not isinstance(kind, str):
        return False
    if kind in _NOTES:
        return _NOTES[kind] in row
    return kind in _KINDS and "uuid" in row and "parentUuid" in row


CLAUDE_CODE = TraceFormat(
    name="claude_code",
    title="Claude Code sessions",
    is_recognised=detect_by_row(_is_line),
    read=read_sessions,
)


_NO_PROMPT = "the output lacks the user's messages"
_HINT = (
    "import the session's file in ~/.claude/projects instead, or run `claude` with "
    "--input-format stream-json --replay-user-messages"
)


class _PrintedSession:
    """The messages of one printed session, whose threads are interleaved."""

    def __init__(self) -> None:
        self.tree = MessageTree("claude_code")
        self._last: dict[str | None, str] = {}
        """The id of the last message of each thread: the session's (None) or a sub-agent's."""

    def add(self, row: JsonRow) -> None:
        """Adds a message; ignores other lines, which the model does not see."""
        line = row.data
        uuid, kind = text_of(line.get("uuid")), line.get("type")
        if uuid is None or self.tree.has_line(uuid) or kind not in ("user", "assistant"):
            return
        thread = text_of(line.get("parent_tool_use_id"))
        self.tree.set_session(
            first_text(line, "session_id"), agent=None, is_sidechain=False, version=None
        )
        turn = Turn(
            location=row.location,
            uuid=uuid,
            parent=self._last.get(thread),
            is_sidechain=thread is not None,
            timestamp=first_text(line, "timestamp"),
        )
        self._last[thread] = uuid
        message = as_row(line.get("message"))
        if kind == "assistant":
            self.tree.add_reply(turn, message)
        else:
            self.tree.add_messages(turn, message)


def read_outputs(paths: Sequence[Path]) -> Iterator[SourceRow]:
    """Yields the conversations of printed sessions, with one file in memory at a time.

    A conversation is refused if the user's messages were not printed, which is the default.
    """
    for path in paths:
        sessions: dict[str | None, _PrintedSession] = {}
        for row in read_json_rows(path):
            if isinstance(row, RefusedRow):
                yield row
            else:
                name = text_of(row.data.get("session_id"))
                sessions.setdefault(name, _PrintedSession()).add(row)
        for session in sessions.values():
            for item in session.tree.conversations():
                yield _refuse_without_prompt(item)


def _refuse_without_prompt(item: SourceRow) -> SourceRow:
    """Returns a conversation, or a RefusedRow if it begins with a reply."""
    if not isinstance(item, LoggedConversation):
        return item
    if item.messages[0]["role"] == "assistant":
        return RefusedRow(item.location, _NO_PROMPT, _HINT)
    # Messages are printed before their usage is final.
    return replace(item, usage=None, finish_reason=None)


def _is_printed_line(row: Row) -> bool:
    if "session_id" not in row or "parentUuid" in row:
        return False
    is_begin = row.get("type") == "system" and row.get("subtype") == "init"
    return is_begin or ("parent_tool_use_id" in row and "message" in row)


CLAUDE_CODE_OUTPUT = TraceFormat(
    name="claude_code_output",
    title="Output of `claude -p --output-format stream-json`",
    is_recognised=detect_by_row(_is_printed_line),
    read=read_outputs,
)
