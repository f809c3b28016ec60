"""Reads Claude Code's session files: messages linked to the ones before them, and sub-agents."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from stillroom.importing.bodies.facts import as_list, as_row, first_text, text_of
from stillroom.importing.formats.sessions.message_tree import MessageTree, Turn
from stillroom.importing.json_rows import JsonRow, Row, has_row, read_json_rows
from stillroom.importing.records import Refusal, SourceRow, TraceFormat

_KINDS = frozenset(("user", "assistant", "system", "attachment", "progress"))
_NOTES = {
    "summary": "leafUuid",
    "last-prompt": "leafUuid",
    "file-history-snapshot": "messageId",
    "queue-operation": "sessionId",
    "mode": "sessionId",
}
"""Lines that are no messages, with a field that each has."""


def read_sessions(paths: Sequence[Path]) -> Iterator[SourceRow]:
    """Yields the conversations of session files, with one file held at a time.

    These are the main one, the branches that were left, what came after each compaction, and those
    of sub-agents. A line that cannot be read is refused, and so is a branch without a reply. What
    a session copied from another one (a fork) is only read there.
    """
    known: dict[str, str] = {}
    for path in paths:
        tree = MessageTree("claude_code", known)
        for row in read_json_rows(path):
            if isinstance(row, Refusal):
                yield row
            else:
                _add_line(tree, row)
        yield from tree.conversations()


def _add_line(tree: MessageTree, row: JsonRow) -> None:
    line = row.data
    uuid = text_of(line.get("uuid"))
    if uuid is None or tree.has(uuid):
        return
    message, kind = as_row(line.get("message")), line.get("type")
    tree.note_session(
        first_text(line, "sessionId"),
        agent=first_text(line, "agentId"),
        is_side=line.get("isSidechain") is True,
        version=first_text(line, "version"),
    )
    turn = Turn(
        place=row.place,
        uuid=uuid,
        parent=text_of(line.get("parentUuid")),
        is_side=line.get("isSidechain") is True,
        at=first_text(line, "timestamp"),
    )
    if kind == "assistant" and line.get("isApiErrorMessage"):
        tree.add_failure(turn, tree.text(message.get("content")))
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
    kept = as_row(as_row(line.get("compactMetadata")).get("preservedMessages"))
    tree.add_compaction(
        turn,
        continued=text_of(line.get("logicalParentUuid")),
        kept=[uuid for uuid in as_list(kept.get("uuids")) if isinstance(uuid, str)],
        kept_after=text_of(kept.get("anchorUuid")),
    )


def _queued_prompt(line: Row) -> object:
    """Returns what a user wrote while the agent was at work; None if the line is another one."""
    attachment = as_row(line.get("attachment"))
    return attachment.get("prompt") if attachment.get("type") == "queued_command" else None


def _is_line(row: Row) -> bool:
    kind = row.get("type")
    if not isinstance(kind, str):
        return False
    if kind in _NOTES:
        return _NOTES[kind] in row
    return kind in _KINDS and "uuid" in row and "parentUuid" in row


CLAUDE_CODE = TraceFormat(
    name="claude_code",
    title="Claude Code sessions",
    is_recognised=has_row(_is_line),
    read=read_sessions,
)
