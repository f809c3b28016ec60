"""Writes the samples of Langfuse from what its SDK sends to a server.

`PYTHONPATH=scripts python -m trace_samples.make_langfuse`; needs langfuse, openai and
opentelemetry-proto. The SDK sends each observation as a span; its input, output, usage, model and
session are taken as they were sent, and stand here in the fields in which Langfuse's API and its
exports show them.
"""

import csv
import gzip
import json
import os
from collections.abc import Iterator
from typing import Any

from trace_samples import clients
from trace_samples.conversation import REPLIES
from trace_samples.files import KEY, SAMPLES, write_rows
from trace_samples.scripted_endpoint import Json, ScriptedEndpoint, in_order

_START = "2026-03-01T10:00:"


def _caught() -> tuple[list[Json], list[Json]]:
    """Returns the observations and the scores that the SDK sent."""
    with ScriptedEndpoint(in_order(REPLIES)) as endpoint:
        os.environ |= {"LANGFUSE_PUBLIC_KEY": KEY, "LANGFUSE_SECRET_KEY": KEY}
        os.environ["LANGFUSE_HOST"] = endpoint.url
        from langfuse import get_client, propagate_attributes
        from langfuse.openai import OpenAI

        langfuse = get_client()
        with (
            propagate_attributes(session_id="shop-1"),
            langfuse.start_as_current_observation(name="answer", as_type="span"),
        ):
            clients.chat(OpenAI(base_url=f"{endpoint.url}/v1", api_key=KEY))
            langfuse.score_current_trace(name="helpful", value=1.0)
            langfuse.score_current_trace(name="tone", value="kind")
        langfuse.flush()
        langfuse.shutdown()
    bodies = [(path, body) for _, path, body in endpoint.others]
    observations = [o for path, body in bodies if "otel" in path for o in _observations(body)]
    scores = [s for path, body in bodies if path.endswith("/scores") for s in json.loads(body)]
    return observations, scores


def _observations(body: bytes) -> Iterator[Json]:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    request = ExportTraceServiceRequest()
    request.ParseFromString(gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body)
    for resource in request.resource_spans:
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield _observation(span)


def _observation(span: Any) -> Json:
    sent = {item.key: item.value.string_value for item in span.attributes}

    def read(name: str) -> Any:
        text = sent.get(f"langfuse.observation.{name}")
        return json.loads(text) if text and text[0] in "{[" else text or None

    return {
        "id": span.span_id.hex(),
        "traceId": span.trace_id.hex(),
        "parentObservationId": span.parent_span_id.hex() or None,
        "type": sent["langfuse.observation.type"].upper(),
        "name": span.name,
        "input": read("input"),
        "output": read("output"),
        "model": read("model.name"),
        "modelParameters": read("model.parameters"),
        "usageDetails": _usage(read("usage_details") or {}),
        "level": "DEFAULT",
        "sessionId": sent.get("session.id"),
    }


def _usage(sent: Json) -> Json:
    """Returns the counts as Langfuse shows them: those of a cache beside the rest of the input."""
    if not sent:
        return {}
    cached = (sent.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    usage = {
        "input": sent["prompt_tokens"] - cached,
        "output": sent["completion_tokens"],
        "total": sent["total_tokens"],
    }
    return usage | ({"input_cached_tokens": cached} if cached else {})


def _snake(row: Json) -> Json:
    return {
        "".join(f"_{c.lower()}" if c.isupper() else c for c in key): v for key, v in row.items()
    }


def main() -> None:
    """Writes all samples of Langfuse."""
    observations, scores = _caught()
    for number, row in enumerate(observations):
        row |= {"startTime": f"{_START}0{number}.000Z", "endTime": f"{_START}0{number}.500Z"}
    trace_id = observations[0]["traceId"]
    # As the pages' export and the API list observations: without the session of their trace.
    plain = [{key: row[key] for key in row if key != "sessionId"} for row in observations]
    write_rows("langfuse/observations.json", [{"data": plain, "meta": {"page": 1}}])
    trace = {"id": trace_id, "timestamp": f"{_START}00.000Z", "name": "answer", "tags": ["a"]}
    trace |= {"sessionId": "shop-1", "input": None, "output": None, "metadata": {}}
    write_rows("langfuse/traces.jsonl", [trace])
    # As the export to a bucket writes them.
    bucket = [_snake(row) for row in observations]
    for row in bucket:
        row["provided_model_name"] = row.pop("model") or ""
        row |= {name: json.dumps(row[name], ensure_ascii=False) for name in ("input", "output")}
    write_rows("langfuse/bucket_observations.jsonl", bucket)
    shown = [_snake(score) | {"source": "API"} for score in scores]
    for score in shown:
        is_text = isinstance(score["value"], str)
        score["data_type"] = "CATEGORICAL" if is_text else "NUMERIC"
        score["string_value"] = score["value"] if is_text else None
        score["value"] = 0 if is_text else score["value"]
        score["timestamp"] = f"{_START}09.000Z"
    write_rows("langfuse/bucket_scores.jsonl", shown)
    _write_table("langfuse/observations.csv", plain)


def _write_table(name: str, rows: list[Json]) -> None:
    with (SAMPLES / name).open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, fieldnames=list(rows[0]))
        writer.writeheader()
        for row in rows:
            writer.writerow(
                {
                    key: json.dumps(value) if isinstance(value, dict | list) else value
                    for key, value in row.items()
                }
            )


if __name__ == "__main__":
    main()
