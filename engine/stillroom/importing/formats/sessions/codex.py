"""Reads Codex's rollout files: the items of each thread, as sent to the model.

The file of a forked thread either refers to a position in the original thread's file, or begins
with a copy of its lines.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from stillroom.importing.formats.sessions.message_tree import (
    COPIED,
    HISTORY_DROPPED,
    MAX_FORKS,
    NO_REPLY,
    fork_chain,
)
from stillroom.importing.json_rows import (
    JsonRow,
    Row,
    UnreadableRowError,
    head_rows,
    read_json_rows,
)
from stillroom.importing.payloads.calls import responses_messages
from stillroom.importing.payloads.fields import (
    as_list,
    as_row,
    first_text,
    text_of,
    usage_of,
    without_empty,
)
from stillroom.importing.payloads.messages import MessageReader, as_context, json_text
from stillroom.importing.records import (
    Location,
    LoggedConversation,
    RefusedRow,
    SourceRow,
    TraceFormat,
)
from stillroom.types import Usage

_ENVELOPES = frozenset(
    ("session_meta", "response_item", "event_msg", "turn_context", "compacted", "world_state")
)
_IMAGE = "input_image"
_UNSENT = frozenset(("ghost_snapshot", "compaction", "other"))
_NO_PROMPT = "the output of `codex exec --json` lacks the prompts and the tool calls"


_NUM_HEAD_ROWS = 20


class ThreadForks:
    """The forks among the threads of an import.

    A thread's family is the threads that it was forked from, and those forked from it. An item in
    several files of a family belongs to the first of them that is read.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._files: dict[str, Path] = {}
        self._origins: dict[str, str] = {}
        self._threads: dict[Path, str] = {}
        self._in_several_files: set[str] = set()
        for path in paths:
            meta = _first_meta(path)
            if thread := first_text(meta, "id", "session_id"):
                self._threads[path] = thread
                longest = self._files.setdefault(thread, path)
                if longest != path:
                    self._in_several_files.add(thread)
                    self._files[thread] = max(longest, path, key=_size)
                if origin := origin_of(meta):
                    self._origins.setdefault(thread, origin)
        self._related = {*self._origins, *self._origins.values(), *self._in_several_files}
        self._owners: dict[int, str] = {}

    def in_order(self, paths: Iterable[Path]) -> list[Path]:
        """Returns the files, each after the files of the threads that it was forked from.

        Of several files of a thread, the longest is first.
        """
        depths = {
            path: len(fork_chain(name, self._origins)) for path, name in self._threads.items()
        }
        shorter = {path for path in self._threads if self._files[self._threads[path]] != path}
        return sorted(paths, key=lambda path: (depths.get(path, 0), path in shorter))

    def file_of(self, thread: str | None) -> Path | None:
        """Returns the file of a thread; None if the import does not have it."""
        return self._files.get(thread or "")

    def has_several_files(self, thread: str | None) -> bool:
        """Returns whether a thread has several files, e.g. archived and continued."""
        return thread in self._in_several_files

    def family_of(self, thread: str | None) -> str | None:
        """Returns the id of the first thread in a thread's family; None if it has no family."""
        if thread is None or thread not in self._related:
            return None
        return fork_chain(thread, self._origins)[-1]

    def owner_of(self, family: str, item: Row) -> str | None:
        """Returns the id of the conversation that an item belongs to; None if the item is new."""
        return self._owners.get(_key(family, item) or 0)

    def assign(self, family: str, item: Row, conversation: str) -> None:
        """Assigns an item to a conversation."""
        if (key := _key(family, item)) is not None:
            self._owners.setdefault(key, conversation)


def is_identifiable(item: Row) -> bool:
    """Returns whether copies of an item are recognised, by its call id or its role and text."""
    return _key("", item) is not None


def origin_of(meta: Mapping[str, Any]) -> str | None:
    """Returns the id of the thread that a thread was forked from; None if it is no fork."""
    return first_text(as_row(meta.get("history_base")), "thread_id") or first_text(
        meta, "forked_from_id"
    )


def _size(path: Path) -> int:
    return path.stat().st_size


def _first_meta(path: Path) -> Row:
    for row in islice(read_json_rows(path), _NUM_HEAD_ROWS):
        if isinstance(row, JsonRow) and row.data.get("type") == "session_meta":
            return as_row(row.data.get("payload"))
    return {}


def _key(family: str, item: Row) -> int | None:
    """Returns a hash that all copies of an item share: of its call id, or of its role and text."""
    call, role = item.get("call_id"), item.get("role")
    if isinstance(call, str):
        return hash((family, item.get("type"), call))
    if isinstance(role, str):
        return hash((family, role, MessageReader().text(item.get("content"))))
    return None


@dataclass(slots=True)
class _Segment:
    """The items sent to the model, from the start of a file or a compaction to the next one."""

    location: Location
    number: int
    parent: str | None
    items: list[Row] = field(default_factory=list[Row])
    turns: list[int] = field(default_factory=list[int])
    """The index of the first item of each user turn."""
    num_context: int = 0
    """The number of items that an earlier conversation already has, or that summarise it."""
    usage: Usage | None = None
    started_at: str | None = None
    dropped: tuple[str, ...] = ()


class _Thread:
    """One thread of a rollout file."""

    def __init__(self, location: Location, forks: ThreadForks, *, is_context: bool = False) -> None:
        """With `is_context`, the thread is read only for the items that another one shares."""
        self.location, self.forks, self.is_context = location, forks, is_context
        self.meta: Row = {}
        self.model: str | None = None
        self.segment = _Segment(location, 0, None)
        self.is_copy = False
        """Whether the next items may still be copies from another file of the thread, or from the
        thread that it was forked from."""
        self.num_conversations = 0
        self._family: str | None = None
        self._total: Usage | None = Usage()
        """The last known total usage; None if the earlier usage is unknown."""

    def begin(self, meta: Row) -> None:
        """Starts the thread with the metadata at the beginning of its file."""
        self.meta = meta
        self.is_copy = origin_of(meta) is not None or self.forks.has_several_files(self.id)
        self._family = None if self.is_context else self.forks.family_of(self.id)

    def continue_from(self, other: "_Thread | None") -> None:
        """Starts with all items of another thread; `other` is None if it is not in the import."""
        if other is None:
            self.segment.dropped, self._total = (HISTORY_DROPPED,), None
            return
        previous = other.segment
        self.segment.items, self.segment.turns = previous.items, previous.turns
        self.segment.num_context, self.segment.dropped = len(previous.items), previous.dropped
        self.segment.parent = other._id_of(previous)
        self.model, self._total = other.model, other._total

    def add(self, item: Row) -> None:
        """Adds an item; a copy of another conversation's item is context here."""
        segment = self.segment
        segment.items.append(item)
        if self._family is None or not is_identifiable(item):
            return
        owner = self.forks.owner_of(self._family, item) if self.is_copy else None
        self.is_copy = owner is not None
        if owner is not None:
            segment.num_context = len(segment.items)
            segment.parent = segment.parent if segment.number else owner
        else:
            self.forks.assign(self._family, item, self._id_of(segment) or "")

    @property
    def id(self) -> str | None:
        """The id of the thread."""
        return first_text(self.meta, "id", "session_id")

    def add_usage(self, info: Row) -> None:
        """Adds the usage since the last recorded totals."""
        total = usage_of(as_row(info.get("total_token_usage")))
        if total is None:
            return
        before, self._total = self._total, total
        if self.is_copy:
            return
        if before is None:
            used = usage_of(as_row(info.get("last_token_usage"))) or Usage()
        else:
            used = Usage(
                prompt_tokens=max(0, total.prompt_tokens - before.prompt_tokens),
                completion_tokens=max(0, total.completion_tokens - before.completion_tokens),
            )
        self.segment.usage = (self.segment.usage or Usage()) + used

    def begin_segment(
        self, location: Location, items: list[Row], dropped: tuple[str, ...] = ()
    ) -> None:
        """Starts a conversation that continues the previous one."""
        before = self.segment
        self.segment = _Segment(location, before.number, before.parent, items)
        if len(before.items) > before.num_context:
            self.segment.number, self.segment.parent = before.number + 1, self._id_of(before)
        self.segment.num_context = len(items)
        self.segment.dropped = dropped

    def _id_of(self, segment: _Segment) -> str | None:
        return self.id if segment.number == 0 else f"{self.id}/{segment.number}"

    def conversation(self) -> SourceRow:
        """Returns the current conversation. Raises UnreadableRowError if it has no reply."""
        segment, reader = self.segment, MessageReader()
        if not any(_is_reply(item) for item in segment.items[segment.num_context :]):
            raise UnreadableRowError(NO_REPLY, "it was interrupted, or continued in another file")
        context = responses_messages(segment.items[: segment.num_context], reader)
        messages = responses_messages(segment.items[segment.num_context :], reader)
        base = self.meta.get("base_instructions")
        system = first_text(as_row(base), "text")
        source = as_row(as_row(as_row(self.meta.get("source")).get("subagent")).get("thread_spawn"))
        spawned_by = first_text(source, "parent_thread_id")
        return LoggedConversation(
            location=segment.location,
            messages=[
                *([{"role": "system", "content": system}] if system else []),
                *map(as_context, context),
                *messages,
            ],
            is_call=False,
            group=first_text(self.meta, "session_id", "id"),
            id=self._id_of(segment),
            parent=segment.parent or spawned_by or first_text(self.meta, "forked_from_id"),
            provider=first_text(self.meta, "model_provider"),
            model=self.model,
            usage=segment.usage,
            started_at=segment.started_at or first_text(self.meta, "timestamp"),
            dropped=tuple(dict.fromkeys((*segment.dropped, *reader.dropped))),
            metadata=without_empty(
                agent="codex", agent_version=text_of(self.meta.get("cli_version"))
            ),
        )


def _is_reply(item: Row) -> bool:
    return item.get("role") == "assistant" or item.get("type") == "function_call"


def read_threads(paths: Sequence[Path]) -> Iterator[SourceRow]:
    """Yields the conversations of rollout files, with one in memory at a time.

    A compaction starts a new conversation, and so does a rollback to an earlier turn. Items that a
    fork shares with its origin are context in the fork.
    """
    forks = ThreadForks(paths)
    for path in forks.in_order(paths):
        thread = _Thread(Location(path, 1), forks)
        for row in read_json_rows(path):
            if isinstance(row, RefusedRow):
                yield row
            else:
                yield from _add_row(thread, row)
        yield from _end_segment(thread)
        if thread.num_conversations == 0 and thread.segment.items:
            yield RefusedRow(thread.location, COPIED, f"its replies are in {thread.segment.parent}")


def _end_segment(thread: _Thread) -> Iterator[SourceRow]:
    """Yields the current conversation, unless it has no new items."""
    if len(thread.segment.items) > thread.segment.num_context and not thread.is_context:
        thread.num_conversations += 1
        try:
            yield thread.conversation()
        except UnreadableRowError as error:
            yield RefusedRow(thread.segment.location, error.reason, error.detail)


def _begin(thread: _Thread, meta: Row, chain: frozenset[str]) -> None:
    """Starts a thread, with the items of the thread that it continues, if any.

    `chain` are the threads that continue this one, directly or not, to detect cycles.
    """
    thread.begin(meta)
    base = as_row(meta.get("history_base"))
    if not base:
        return
    origin, end = first_text(base, "thread_id"), base.get("end_ordinal_exclusive")
    path, chain = thread.forks.file_of(origin), chain | {thread.id or ""}
    if path is None or origin in chain or not isinstance(end, int) or len(chain) > MAX_FORKS:
        thread.continue_from(None)
        return
    other = _Thread(Location(path, 1), thread.forks, is_context=True)
    for number, row in enumerate(read_json_rows(path)):
        if isinstance(row, JsonRow):
            ordinal = row.data.get("ordinal", number)
            if isinstance(ordinal, int) and ordinal >= end:
                break
            for _ in _add_row(other, row, chain):
                pass
    thread.continue_from(other)


def _add_row(
    thread: _Thread, row: JsonRow, chain: frozenset[str] = frozenset()
) -> Iterator[SourceRow]:
    """Adds a row to a thread; yields the conversation that it ends, if it ends one."""
    payload, segment = as_row(row.data.get("payload")), thread.segment
    match row.data.get("type"):
        # In the file of a fork, the copied metadata of its origin follows its own.
        case "session_meta" if not thread.meta:
            _begin(thread, payload, chain)
        case "turn_context":
            thread.model = first_text(payload, "model") or thread.model
        case "response_item":
            _add_item(thread, payload)
        case "compacted":
            _drop_summary(segment.items, text_of(payload.get("message")) or "")
            yield from _end_segment(thread)
            replaced = payload.get("replacement_history")
            summary = {"type": "message", "role": "user", "content": payload.get("message") or ""}
            items = [item for item in map(_convert_item, as_list(replaced)) if item is not None]
            dropped = () if isinstance(replaced, list) else (HISTORY_DROPPED,)
            thread.begin_segment(row.location, items or [summary], dropped)
        case "event_msg":
            yield from _add_event(thread, row.location, payload)
        case None if not thread.meta and "timestamp" in row.data:
            thread.begin(row.data)
        case str(kind) if kind not in _ENVELOPES and "payload" not in row.data and thread.meta:
            _add_item(thread, row.data)
        case _:
            pass
    if segment is thread.segment and segment.started_at is None:
        segment.started_at = first_text(row.data, "timestamp")


def _drop_summary(items: list[Row], message: str) -> None:
    """Removes the model's final summary, because its request is not in the file."""
    last = items[-1] if items else {}
    text = MessageReader().text(last.get("content"))
    if last.get("role") == "assistant" and text and message.endswith(text):
        items.pop()


def _add_item(thread: _Thread, item: Row) -> None:
    sent = _convert_item(item)
    if sent is not None:
        thread.add(sent)


def _convert_item(value: object) -> Row | None:
    """Converts an item to the Responses API's format; None if it is never sent to the model."""
    item = {key: _without_images(part) for key, part in as_row(value).items()}
    match item.get("type"):
        case "local_shell_call":
            arguments = json_text(item.get("action"))
            return {
                "type": "function_call",
                "name": "local_shell",
                "arguments": arguments,
                "call_id": item.get("call_id") or item.get("id"),
            }
        case "custom_tool_call":
            arguments = json_text({"input": item.get("input")})
            return item | {"type": "function_call", "arguments": arguments}
        case "function_call_output" | "custom_tool_call_output":
            output = item.get("output")
            content = as_row(output).get("content", output)
            return item | {"type": "function_call_output", "output": content}
        case kind if isinstance(kind, str) and kind not in _UNSENT:
            return item
        case _:
            return None


def _without_images(content: Any) -> Any:
    """Returns a content without the data of images, so that these do not stay in memory."""
    if not isinstance(content, list):
        return content
    parts = as_list(content)
    return [{"type": _IMAGE} if as_row(part).get("type") == _IMAGE else part for part in parts]


def _add_event(thread: _Thread, location: Location, event: Row) -> Iterator[SourceRow]:
    """Adds an event to a thread; yields the conversation that a rollback ends."""
    kind, segment = event.get("type"), thread.segment
    is_user = as_row(event.get("item")).get("type") == "UserMessage"
    if kind == "user_message" or (kind == "item_completed" and is_user):
        users = [n for n, item in enumerate(segment.items) if item.get("role") == "user"]
        if users and users[-1] not in segment.turns:
            segment.turns.append(users[-1])
    elif kind == "token_count":
        thread.add_usage(as_row(event.get("info")))
    elif kind == "thread_rolled_back":
        num_turns = event.get("num_turns")
        count = num_turns if isinstance(num_turns, int) and num_turns > 0 else 1
        num_kept = segment.turns[-count] if len(segment.turns) >= count else 0
        yield from _end_segment(thread)
        turns = segment.turns[:-count]
        thread.begin_segment(location, segment.items[:num_kept])
        thread.segment.turns = turns


def _is_recognised(path: Path, head: bytes) -> bool:
    rows = head_rows(head)
    is_enveloped = any(
        row.get("type") in _ENVELOPES and isinstance(row.get("payload"), dict) for row in rows
    )
    return is_enveloped or (path.name.startswith("rollout-") and _has_old_header(rows))


def _has_old_header(rows: Sequence[Row]) -> bool:
    first = rows[0] if rows else {}
    return {"id", "timestamp"} <= first.keys() and bool({"instructions", "git"} & first.keys())


def _is_exec_output(path: Path, head: bytes) -> bool:
    return any(
        row.get("type") == "thread.started" and "thread_id" in row for row in head_rows(head)
    )


def _refuse_exec_output(paths: Sequence[Path]) -> Iterator[SourceRow]:
    detail = "import the thread's rollout-*.jsonl in ~/.codex/sessions instead"
    return (RefusedRow(Location(path, 1), _NO_PROMPT, detail) for path in paths)


CODEX = TraceFormat(
    name="codex",
    title="Codex rollout files",
    is_recognised=_is_recognised,
    read=read_threads,
)
CODEX_EXEC = TraceFormat(
    name="codex_exec",
    title="Output of `codex exec --json` (refused: it lacks the prompts)",
    is_recognised=_is_exec_output,
    read=_refuse_exec_output,
)
