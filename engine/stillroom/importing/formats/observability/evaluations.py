"""Judgements in events and log records of OpenTelemetry's conventions for generative AI."""

from collections.abc import Iterator

from stillroom.importing.bodies.facts import decimal_number, first_text
from stillroom.importing.formats.observability.otlp import LogRecord, Span, SpanEvent
from stillroom.importing.records import Feedback, Place, Refusal

EVALUATION = "gen_ai.evaluation.result"
_NAME, _SCORE = "gen_ai.evaluation.name", "gen_ai.evaluation.score.value"
_LABEL = "gen_ai.evaluation.score.label"


def judgements_in(span: Span) -> Iterator[Feedback | Refusal]:
    """Yields the judgements that stand as events in a span, about this span."""
    for number, event in enumerate(span.events):
        if event.name == EVALUATION:
            part = f"{span.id} event {number}"
            yield _judgement(event, Place(span.place.path, span.place.line, part), span.id)


def judgement_of(record: LogRecord) -> Feedback | Refusal:
    """Returns the judgement of a log record, about the span or the response that it names."""
    named = first_text(record.event.fields, "gen_ai.response.id")
    return _judgement(record.event, record.place, record.span_id or named or record.trace_id)


def _judgement(event: SpanEvent, place: Place, about: str) -> Feedback | Refusal:
    name, score = first_text(event.fields, _NAME), decimal_number(event.fields.get(_SCORE))
    if name is None or not about:
        return Refusal(place, "a judgement of nothing", "it names no call, or not what it judges")
    if score is None:
        label = event.fields.get(_LABEL)
        return Refusal(place, "a judgement without a number", f"{name}: {label}")
    return Feedback(place, about, name, score)
