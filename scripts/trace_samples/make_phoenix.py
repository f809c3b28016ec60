"""Writes the samples of Phoenix with a Phoenix server on the loopback.

`PYTHONPATH=scripts python -m trace_samples.make_phoenix`; needs arize-phoenix, its client, pandas,
openai, openinference-instrumentation-openai and opentelemetry-exporter-otlp-proto-http.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import openai
from openinference.instrumentation import using_session
from openinference.instrumentation.openai import OpenAIInstrumentor
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from trace_samples import clients
from trace_samples.conversation import REPLIES
from trace_samples.files import KEY, SAMPLES, write_rows
from trace_samples.scripted_endpoint import Json, ScriptedEndpoint, in_order

_PORT = 16006
_URL = f"http://127.0.0.1:{_PORT}"


def _request(path: str, body: Json | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(_URL + path, data, headers)  # noqa: S310 - the loopback
    with urllib.request.urlopen(request, timeout=20) as reply:  # noqa: S310 - the loopback
        return json.loads(reply.read() or b"null")


def _wait_for_server() -> None:
    for _ in range(240):
        try:
            _request("/v1/projects")
        except (urllib.error.URLError, ConnectionError, json.JSONDecodeError):
            time.sleep(0.5)
        else:
            return
    sys.exit("Phoenix did not start")


def _send_calls() -> None:
    provider = TracerProvider()
    exporter = OTLPSpanExporter(f"{_URL}/v1/traces")
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    OpenAIInstrumentor().instrument(tracer_provider=provider)
    with ScriptedEndpoint(in_order(REPLIES)) as endpoint, using_session("shop-1"):
        clients.chat(openai.OpenAI(base_url=f"{endpoint.url}/v1", api_key=KEY))
    provider.shutdown()


def _spans() -> list[Json]:
    for _ in range(60):
        page = _request("/v1/projects/default/spans?limit=100")
        if len(page["data"]) == len(REPLIES):
            return page["data"]
        time.sleep(0.5)
    sys.exit("Phoenix has not all spans")


def _write_table(path: Path) -> None:
    """Writes the table of the client as its users do, one JSON row a line."""
    from phoenix.client import Client

    table = Client(base_url=_URL).spans.get_spans_dataframe(project_identifier="default")
    table.reset_index(drop=True).to_json(path, orient="records", lines=True, force_ascii=False)


def main() -> None:
    """Writes all samples of Phoenix."""
    with tempfile.TemporaryDirectory() as folder:
        variables = {
            "PHOENIX_WORKING_DIR": folder,
            "PHOENIX_PORT": str(_PORT),
            "PHOENIX_HOST": "127.0.0.1",
            "PHOENIX_GRPC_PORT": "16007",
            "PHOENIX_TELEMETRY_ENABLED": "false",
        }
        command = [sys.executable, "-m", "phoenix.server.main", "serve"]
        server = subprocess.Popen(command, env=os.environ | variables)
        try:
            _wait_for_server()
            _send_calls()
            spans = _spans()
            write_rows("phoenix/spans.json", [{"data": spans, "next_cursor": None}])
            span_id = spans[0]["context"]["span_id"]
            judged = {"span_id": span_id, "annotator_kind": "HUMAN"}
            annotations = [
                judged | {"name": "helpful", "result": {"label": "good", "score": 1}},
                judged | {"name": "tone", "result": {"label": "kind"}},
            ]
            _request("/v1/span_annotations?sync=true", {"data": annotations})
            listed = _request(f"/v1/projects/default/span_annotations?span_ids={span_id}")
            write_rows("phoenix/annotations.json", [listed])
            _write_table(SAMPLES / "phoenix" / "table.jsonl")
        finally:
            server.terminate()
            server.wait(30)


if __name__ == "__main__":
    main()
