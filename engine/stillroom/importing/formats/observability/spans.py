"""Traces as files of spans: OpenTelemetry, OpenInference, Phoenix, OpenRouter's broadcast.

Spans of one trace may stand far apart, in several files. What a call needs of others is looked for
first: the session of its trace, and the log records that hold its messages.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from stillroom.importing.formats.observability.ai_sdk import AI_SDK
from stillroom.importing.formats.observability.genai import EVENT_NAMES, GENAI, OPENROUTER_SPANS
from stillroom.importing.formats.observability.openinference import OPENINFERENCE
from stillroom.importing.formats.observability.otlp import (
    EVALUATION,
    LogRecord,
    PlacedEvent,
    Span,
    judgement_of,
    judgements_in,
    telemetry_of,
)
from stillroom.importing.json_rows import (
    JsonRow,
    Row,
    UnreadableRowError,
    head_rows,
)
from stillroom.importing.payloads.calls import NO_CALL, NO_REPLY, ApiCall, logged_calls
from stillroom.importing.payloads.fields import (
    first_text,
    iso_time,
    seconds_between,
    without_nothing,
)
from stillroom.importing.records import (
    Feedback,
    Place,
    Refusal,
    SourceRow,
    TraceFormat,
)
from stillroom.importing.spill import DiskDict
from stillroom.importing.table_rows import read_any_rows

_SESSIONS = ("session.id", "langfuse.session.id", "ai.telemetry.metadata.sessionId")
_CONVERSATION = "gen_ai.conversation.id"
_RESPONSE = "gen_ai.response.id"
_AMBIGUOUS = ""
_MARKS = (
    b"session",
    b"conversation",
    b"Logs",
    b"_logs",
)
"""Texts of which one is in each file that holds a session, a conversation or log records."""
_LONGEST_MARK = max(map(len, _MARKS))
_BLOCK = 1 << 20
_CONVENTIONS = (OPENINFERENCE, OPENROUTER_SPANS, AI_SDK, GENAI)
_HEAD_PLACE = Place(Path(), 1)


Telemetry = Span | LogRecord | Feedback | Refusal
TelemetryOf = Callable[[JsonRow], Iterator[Telemetry]]


@dataclass(slots=True)
class _Others:
    """What calls need of other spans and of log records."""

    records: DiskDict[tuple[str, int]]
    """The log records with messages, by the id of their span and their number within it."""
    num_records: dict[str, int] = field(default_factory=dict[str, int])
    sessions: dict[str, str] = field(default_factory=dict[str, str])
    """The session of each trace that has one."""
    conversations: dict[str, str] = field(default_factory=dict[str, str])
    """The conversation of each trace that has one; ambiguous if its spans name several."""

    def group_of(self, span: Span) -> str | None:
        """Returns the session or the conversation of a span, else that of its trace."""
        own = first_text(span.attributes, *_SESSIONS, _CONVERSATION)
        known = (self.sessions.get(span.trace_id), self.conversations.get(span.trace_id))
        return own or next((group for group in known if group), None)

    def look_at(self, span: Span) -> None:
        """Notes the session and the conversation that a span names."""
        if session := first_text(span.attributes, *_SESSIONS):
            self.sessions.setdefault(span.trace_id, session)
        if conversation := first_text(span.attributes, _CONVERSATION):
            known = self.conversations.setdefault(span.trace_id, conversation)
            if known != conversation:
                self.conversations[span.trace_id] = _AMBIGUOUS


def read_spans(paths: Sequence[Path], telemetry_of: TelemetryOf) -> Iterator[SourceRow]:
    """Yields the calls and judgements of files, and a refusal for each span that is no call.

    `telemetry_of` yields what a row holds; it refuses rows that hold nothing.
    """
    with DiskDict[tuple[str, int]]() as records:
        others = _Others(records)
        if any(_names_others(path) for path in paths):
            _take_in(paths, telemetry_of, others)
        used: set[str] = set()
        for item in _telemetry(paths, telemetry_of):
            if isinstance(item, Span):
                yield from _rows_of(item, others, used, paths)
                yield from judgements_in(item)
            elif not isinstance(item, LogRecord):
                yield item
            elif item.event.name == EVALUATION:
                yield judgement_of(item)
            elif not _has_messages(item):
                yield Refusal(item.place, NO_CALL, "a log record without messages")
        for span_id, number in records:
            if span_id not in used:
                event = _record(others, (span_id, number), paths)
                yield Refusal(event.place, "a message without its span", f"span {span_id!r}")


def _names_others(path: Path) -> bool:
    """Returns whether a file may hold what calls need of other spans and of log records."""
    tail = b""
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            data = tail + block
            if any(mark in data for mark in _MARKS):
                return True
            tail = block[-_LONGEST_MARK:]
    return False


def _has_messages(record: LogRecord) -> bool:
    return record.event.name in EVENT_NAMES and bool(record.span_id)


def _telemetry(paths: Sequence[Path], telemetry_of: TelemetryOf) -> Iterator[Telemetry]:
    for row in read_any_rows(*paths):
        if isinstance(row, Refusal):
            yield row
        else:
            yield from telemetry_of(row)


def _take_in(paths: Sequence[Path], telemetry_of: TelemetryOf, others: _Others) -> None:
    """Keeps what calls need of other spans and of log records."""
    for item in _telemetry(paths, telemetry_of):
        if isinstance(item, Span):
            others.look_at(item)
        elif isinstance(item, LogRecord) and _has_messages(item):
            number = others.num_records.get(item.span_id, 0)
            others.num_records[item.span_id] = number + 1
            place = [paths.index(item.place.path), item.place.line, item.place.part]
            others.records.add((item.span_id, number), [item.event.name, item.event.fields, place])


def _otlp_of(row: JsonRow) -> Iterator[Telemetry]:
    found = list(telemetry_of(row.data, row.place))
    yield from found or [Refusal(row.place, "neither spans nor log records")]


def _read(paths: Sequence[Path]) -> Iterator[SourceRow]:
    return read_spans(paths, _otlp_of)


def _record(others: _Others, key: tuple[str, int], paths: Sequence[Path]) -> PlacedEvent:
    name, fields, (number, line, part) = others.records.get(key)
    return PlacedEvent(name=name, fields=fields, place=Place(paths[number], line, part))


def _rows_of(
    span: Span, others: _Others, used: set[str], paths: Sequence[Path]
) -> Iterator[SourceRow]:
    """Yields the call of a span, or its refusal with those of its log records."""
    convention = next(each for each in _CONVENTIONS if each.is_followed(span))
    if not convention.is_model_call(span):
        yield Refusal(span.place, NO_CALL, span.name)
        return
    num_records = 0 if span.id in used else others.num_records.get(span.id, 0)
    records = [_record(others, (span.id, number), paths) for number in range(num_records)]
    used.update([span.id] if records else [])
    places = tuple(record.place for record in records)
    span = replace(span, events=(*span.events, *records))
    try:
        calls = [_with_failure(call, span) for call in convention.read_call(span)]
    except UnreadableRowError as error:
        yield Refusal(span.place, error.reason, error.detail)
        for place in places:
            yield Refusal(place, error.reason, f"see {span.place}")
        return
    judged_as = (span.trace_id, first_text(span.attributes, _RESPONSE))
    facts: Row = {
        "group": others.group_of(span),
        "id": span.id or None,
        "judged_as": tuple(name for name in judged_as if name),
        "started_at": iso_time(span.begin),
        "duration_s": seconds_between(span.begin, span.end),
    }
    metadata = without_nothing(trace_id=span.trace_id)
    yield from logged_calls(
        span.place, calls, facts, metadata=metadata, part=span.id, also_at=places
    )


def _with_failure(call: ApiCall, span: Span) -> ApiCall:
    """Returns a span's call; one without a reply has the failure of its span."""
    if call.messages[-1]["role"] == "assistant":
        return call
    if not span.error:
        raise UnreadableRowError(NO_REPLY, "the span holds no output messages")
    return replace(call, error=span.error)


def _convention_of(head: bytes) -> str | None:
    """Returns the conventions that the first spans of an OTLP file follow; None if it is none.

    A file whose first spans are no calls is taken for one of OpenTelemetry's, whose reader reads
    spans of all conventions.
    """
    is_otlp = any(
        isinstance(row.get(name), list)
        for row in head_rows(head)
        for name in ("resourceSpans", "resource_spans", "resourceLogs", "resource_logs")
    )
    if not is_otlp:
        return None
    items = (item for row in head_rows(head) for item in telemetry_of(row, _HEAD_PLACE))
    spans = [item for item in items if isinstance(item, Span)]
    if any(OPENROUTER_SPANS.is_followed(span) for span in spans):
        return "openrouter"
    return (
        "openinference" if any(OPENINFERENCE.is_followed(span) for span in spans) else "otel_genai"
    )


OTEL_GENAI = TraceFormat(
    name="otel_genai",
    title="OpenTelemetry GenAI spans and log records (OTLP JSON)",
    is_recognised=lambda _path, head: _convention_of(head) == "otel_genai",
    read=_read,
)
OPENINFERENCE_SPANS = TraceFormat(
    name="openinference",
    title="OpenInference spans (OTLP JSON)",
    is_recognised=lambda _path, head: _convention_of(head) == "openinference",
    read=_read,
)
OPENROUTER = TraceFormat(
    name="openrouter",
    title="OpenRouter's broadcast to a bucket or collector (OTLP JSON)",
    is_recognised=lambda _path, head: _convention_of(head) == "openrouter",
    read=_read,
)
