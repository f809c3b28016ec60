"""Reads what `claude -p --output-format stream-json` and the Claude Agent SDK print."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from stillroom.importing.formats.sessions.message_tree import MessageTree, Turn
from stillroom.importing.json_rows import JsonRow, Row, has_row, read_json_rows
from stillroom.importing.payloads.fields import as_row, first_text, text_of
from stillroom.importing.records import LoggedConversation, Refusal, SourceRow, TraceFormat

_NO_PROMPT = "the output lacks the user's messages"
_HINT = (
    "import the session's file in ~/.claude/projects instead, or print with --input-format "
    "stream-json --replay-user-messages"
)


class _Session:
    """The messages of one session, each thread of which is in its order."""

    def __init__(self) -> None:
        self.tree = MessageTree("claude_code")
        self._last: dict[str | None, str] = {}
        """The id of the last message of each thread: of the session, or of a sub-agent."""

    def add(self, row: JsonRow) -> None:
        """Adds a message; other lines say nothing that the model reads."""
        line = row.data
        uuid, kind = text_of(line.get("uuid")), line.get("type")
        if uuid is None or self.tree.has(uuid) or kind not in ("user", "assistant"):
            return
        thread = text_of(line.get("parent_tool_use_id"))
        self.tree.note_session(
            first_text(line, "session_id"), agent=None, is_side=False, version=None
        )
        turn = Turn(
            place=row.place,
            uuid=uuid,
            parent=self._last.get(thread),
            is_side=thread is not None,
            at=first_text(line, "timestamp"),
        )
        self._last[thread] = uuid
        message = as_row(line.get("message"))
        if kind == "assistant":
            self.tree.add_reply(turn, message)
        else:
            self.tree.add_messages(turn, message)


def read_outputs(paths: Sequence[Path]) -> Iterator[SourceRow]:
    """Yields the conversations of printed sessions, one file held at a time.

    A conversation is refused if the user's messages were not printed, as is usual.
    """
    for path in paths:
        sessions: dict[str | None, _Session] = {}
        for row in read_json_rows(path):
            if isinstance(row, Refusal):
                yield row
            else:
                name = text_of(row.data.get("session_id"))
                sessions.setdefault(name, _Session()).add(row)
        for session in sessions.values():
            for item in session.tree.conversations():
                yield _checked(item)


def _checked(item: SourceRow) -> SourceRow:
    if not isinstance(item, LoggedConversation):
        return item
    if item.messages[0]["role"] == "assistant":
        return Refusal(item.place, _NO_PROMPT, _HINT)
    # Messages are printed before their tokens are counted.
    return replace(item, usage=None, finish_reason=None)


def _is_line(row: Row) -> bool:
    if "session_id" not in row or "parentUuid" in row:
        return False
    is_begin = row.get("type") == "system" and row.get("subtype") == "init"
    return is_begin or ("parent_tool_use_id" in row and "message" in row)


CLAUDE_CODE_OUTPUT = TraceFormat(
    name="claude_code_output",
    title="What `claude -p --output-format stream-json` prints",
    is_recognised=has_row(_is_line),
    read=read_outputs,
)
