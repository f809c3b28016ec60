"""Writes the sample of Gemini's generateContent with Google's own client.

`PYTHONPATH=scripts python -m trace_samples.make_gemini`; needs google-genai. The client talks to an
endpoint that answers as the conversation of the samples goes. Three rows have what the client was
given and returned, three the chunks that it streamed, and three the bodies as they were sent.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from google import genai
from google.genai import types

from trace_samples.conversation import (
    CALLS,
    DESCRIPTIONS,
    FIRST,
    IMAGE,
    MODEL,
    PARAMETERS,
    REPLIES,
    RESULTS,
    SECOND,
    SYSTEM,
)
from trace_samples.files import KEY, write_rows
from trace_samples.scripted_endpoint import Json, Reply


def _parts(reply: Reply) -> list[Json]:
    thoughts = [{"text": reply.reasoning, "thought": True}] if reply.reasoning else []
    calls = [{"functionCall": {"name": c.name, "args": c.arguments}} for c in reply.calls]
    return [*thoughts, {"text": reply.text}, *calls]


def _body(reply: Reply, number: int, parts: list[Json]) -> Json:
    num_thoughts = 5 if reply.reasoning else 0
    candidate = {
        "content": {"role": "model", "parts": parts},
        "index": 0,
        "finishReason": "MAX_TOKENS" if reply.is_cut else "STOP",
    }
    usage = {
        "promptTokenCount": reply.prompt_tokens,
        "candidatesTokenCount": reply.completion_tokens - num_thoughts,
        "thoughtsTokenCount": num_thoughts,
        "cachedContentTokenCount": reply.cached_tokens,
        "totalTokenCount": reply.prompt_tokens + reply.completion_tokens,
    }
    return {
        "candidates": [candidate],
        "usageMetadata": usage,
        "modelVersion": MODEL,
        "responseId": f"reply-{number}",
    }


class _Endpoint(BaseHTTPRequestHandler):
    seen: list[Json]

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        number = len(self.seen)
        reply = REPLIES[number]
        self.seen.append({"path": self.path, "body": request})
        is_streamed = "streamGenerateContent" in self.path
        pieces = [[part] for part in _parts(reply)] if is_streamed else [_parts(reply)]
        bodies = [json.dumps(_body(reply, number, parts)) for parts in pieces]
        text = "".join(f"data: {body}\n\n" for body in bodies) if is_streamed else bodies[0]
        self.send_response(200)
        kind = "text/event-stream" if is_streamed else "application/json"
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:  # the requests are in the sample
        pass


@contextmanager
def _endpoint() -> Iterator[tuple[genai.Client, list[Json]]]:
    seen: list[Json] = []
    handler = type("Endpoint", (_Endpoint,), {"seen": seen})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, daemon=True).start()
    options = types.HttpOptions(base_url=f"http://127.0.0.1:{server.server_port}")
    try:
        yield genai.Client(api_key=KEY, http_options=options), seen
    finally:
        server.shutdown()
        server.server_close()


def _dumped(response: types.GenerateContentResponse) -> Json:
    return response.model_dump(mode="json", exclude_none=True, exclude={"sdk_http_response"})


def _contents() -> Iterator[types.Content]:
    """Yields what the app adds before each call."""
    part = types.Part
    yield types.Content(role="user", parts=[part(text=FIRST)])
    outputs = [{"output": text} if text == "3" else json.loads(text) for text in RESULTS]
    results = [part.from_function_response(name=call.name, response=output)
               for call, output in zip(CALLS, outputs, strict=True)]  # fmt: skip
    yield types.Content(role="user", parts=results)
    image = types.Blob(mime_type="image/png", data=IMAGE)
    yield types.Content(role="user", parts=[part(text=SECOND), part(inline_data=image)])


def _calls(client: genai.Client, *, is_streamed: bool) -> Iterator[tuple[Json, Any]]:
    """Yields the arguments of each call, and the response or its chunks."""
    tools = [types.FunctionDeclaration(name=name, description=DESCRIPTIONS[name],
                                       parameters=types.Schema.model_validate(schema))
             for name, schema in PARAMETERS.items()]  # fmt: skip
    config = types.GenerateContentConfig(
        system_instruction=SYSTEM, tools=[types.Tool(function_declarations=tools)]
    )
    history: list[types.Content] = []
    for added in _contents():
        history.append(added)
        request = {"model": MODEL, "contents": list(history), "config": config}
        logged = {
            "model": MODEL,
            "contents": [each.model_dump(mode="json", exclude_none=True) for each in history],
            "config": config.model_dump(mode="json", exclude_none=True),
        }
        if is_streamed:
            chunks = list(client.models.generate_content_stream(**request))
            parts = [part for chunk in chunks for part in chunk.candidates[0].content.parts]
            response = list(map(_dumped, chunks))
        else:
            whole = client.models.generate_content(**request)
            parts = whole.candidates[0].content.parts
            response = _dumped(whole)
        history.append(types.Content(role="model", parts=parts))
        yield logged, response


def _row(request: Json, response: Any, session: str, number: int) -> Json:
    return {
        "request": request,
        "response": response,
        "session_id": session,
        "timestamp": f"2026-03-01T10:00:0{number}Z",
        "duration_ms": 1500,
    }


def main() -> None:
    """Writes the nine rows."""
    rows: list[Json] = []
    for session in ("whole", "streamed"):
        with _endpoint() as (client, seen):
            calls = list(_calls(client, is_streamed=session == "streamed"))
        rows += [_row(*call, session, number) for number, call in enumerate(calls)]
        if session == "whole":
            for number, (sent, reply) in enumerate(zip(seen, REPLIES, strict=True)):
                answered = _body(reply, number, _parts(reply))
                rows.append(_row(sent, answered, "bodies", number))
    write_rows("gemini/calls.jsonl", rows)


if __name__ == "__main__":
    main()
