"""Writes the samples of OpenTelemetry and OpenInference spans with the instrumentations themselves.

`PYTHONPATH=scripts python -m trace_samples.make_spans KIND...`, one process for each kind, as they
patch the clients. Needs openai, anthropic, opentelemetry-exporter-otlp-json-file and the package
that the kind names: opentelemetry-instrumentation-openai 0.62 and 0.40, -openai-v2 2.3b0 (with
openai 2 and wrapt 1), -anthropic 0.62, openinference-instrumentation-openai and -anthropic.
"""

import importlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trace_samples import clients
from trace_samples.conversation import REPLIES
from trace_samples.files import KEY, SAMPLES
from trace_samples.scripted_endpoint import Json, ScriptedEndpoint, in_order

_HIDDEN = ("telemetry.sdk", "service.instance", "server.", "host.", "process.", "os.")
_EVENTS = {"OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT": "true"}


@dataclass(frozen=True)
class Kind:
    """How a sample is made."""

    file: str
    module: str
    """The module of the instrumentation, and after a colon its class."""
    client: str
    is_streamed: bool = False
    variables: tuple[tuple[str, str], ...] = ()
    has_logs: bool = False
    num_calls: int = len(REPLIES)
    """How many of the calls are made, so that the sample stays small."""


KINDS = {
    "openai-v2-events": Kind(
        "otel_genai/events/spans.jsonl",
        "opentelemetry.instrumentation.openai_v2:OpenAIInstrumentor",
        "openai",
        variables=tuple(_EVENTS.items()),
        has_logs=True,
    ),
    "traceloop-openai": Kind(
        "otel_genai/traceloop_openai.jsonl",
        "opentelemetry.instrumentation.openai:OpenAIInstrumentor",
        "openai",
        is_streamed=True,
    ),
    "traceloop-openai-0.40": Kind(
        "otel_genai/traceloop_openai_old.jsonl",
        "opentelemetry.instrumentation.openai:OpenAIInstrumentor",
        "openai",
    ),
    "traceloop-anthropic": Kind(
        "otel_genai/traceloop_anthropic.jsonl",
        "opentelemetry.instrumentation.anthropic:AnthropicInstrumentor",
        "anthropic",
    ),
    "openinference-openai": Kind(
        "openinference/openai.jsonl",
        "openinference.instrumentation.openai:OpenAIInstrumentor",
        "openai",
        is_streamed=True,
    ),
    "openinference-responses": Kind(
        "openinference/responses.jsonl",
        "openinference.instrumentation.openai:OpenAIInstrumentor",
        "responses",
        num_calls=2,
    ),
    "openinference-anthropic": Kind(
        "openinference/anthropic.jsonl",
        "openinference.instrumentation.anthropic:AnthropicInstrumentor",
        "anthropic",
        num_calls=2,
    ),
}


def make(kind: Kind) -> None:
    """Writes one sample."""
    os.environ.update(kind.variables)
    path = SAMPLES / kind.file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    tracer, finish = _providers(path, path.with_name("logs.jsonl") if kind.has_logs else None)
    module, _, name = kind.module.partition(":")
    instrumentor = getattr(importlib.import_module(module), name)()
    instrumentor.instrument(**tracer)
    with ScriptedEndpoint(in_order(REPLIES)) as endpoint:
        with tracer["tracer_provider"].get_tracer("shop").start_as_current_span("answer"):
            _converse(kind, endpoint)
        finish()
    assert len(endpoint.seen) == kind.num_calls  # noqa: S101 - the sample would lack a call
    tidy(path, endpoint.url)
    if kind.has_logs:
        tidy(path.with_name("logs.jsonl"), endpoint.url)


def _converse(kind: Kind, endpoint: ScriptedEndpoint) -> None:
    if kind.client == "anthropic":
        import anthropic

        client = anthropic.Anthropic(base_url=endpoint.url, api_key=KEY)
        clients.messages(client, num_calls=kind.num_calls)
        return
    import openai

    client = openai.OpenAI(base_url=f"{endpoint.url}/v1", api_key=KEY)
    if kind.client == "responses":
        clients.responses(client, is_chained=False, num_calls=kind.num_calls)
    else:
        clients.chat(client, is_streamed=kind.is_streamed)


def _providers(path: Path, logs: Path | None) -> tuple[dict[str, Any], Callable[[], None]]:
    from opentelemetry.exporter.otlp.json.file import _log_exporter, trace_exporter
    from opentelemetry.sdk._logs import LoggerProvider
    from opentelemetry.sdk._logs.export import SimpleLogRecordProcessor
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(trace_exporter.FileSpanExporter(path)))
    given: dict[str, Any] = {"tracer_provider": provider}
    if logs is None:
        return given, provider.shutdown
    logs.unlink(missing_ok=True)
    loggers = LoggerProvider()
    loggers.add_log_record_processor(SimpleLogRecordProcessor(_log_exporter.FileLogExporter(logs)))

    def finish() -> None:
        provider.shutdown()
        loggers.shutdown()

    return given | {"logger_provider": loggers}, finish


def tidy(path: Path, address: str) -> None:
    """Takes what tells of this machine out of a sample."""
    lines: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        _drop_hidden(row)
        lines.append(json.dumps(row, ensure_ascii=False, separators=(",", ":")))
    text = "\n".join(lines).replace(address, "https://api.example.com")
    port = address.rsplit(":", 1)[1]
    if port in text or "127.0.0.1" in text:
        sys.exit(f"{path} names the endpoint's address")
    path.write_text(text + "\n", encoding="utf-8")


def _drop_hidden(value: Any) -> None:
    if isinstance(value, list):
        for item in value:
            _drop_hidden(item)
        return
    if not isinstance(value, dict):
        return
    fields: Json = value
    if isinstance(fields.get("attributes"), list):
        fields["attributes"] = [
            item for item in fields["attributes"] if not item["key"].startswith(_HIDDEN)
        ]
    for item in fields.values():
        _drop_hidden(item)


if __name__ == "__main__":
    for kind_name in sys.argv[1:]:
        make(KINDS[kind_name])
