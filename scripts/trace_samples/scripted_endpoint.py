"""A model endpoint on the loopback that answers by a script and remembers every call.

It speaks OpenAI's chat completions and Responses and Anthropic's Messages, streamed or whole. The
scripts beside it point a tool at it, let the tool write its own log, and keep what was really sent
and answered, with which the tests compare the imported log.
"""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

Json = dict[str, Any]
CREATED = 1_760_000_000
_NUM_PIECES = 3


@dataclass(frozen=True)
class Call:
    """A tool call of a reply."""

    id: str
    name: str
    arguments: Json


@dataclass(frozen=True)
class Reply:
    """What the model says, in no API's own shape."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    prompt_tokens: int = 20
    """All tokens of the prompt, those read from a cache among them."""
    cached_tokens: int = 0
    completion_tokens: int = 7
    is_cut: bool = False
    """Whether the limit of tokens ended it."""


@dataclass
class Seen:
    """One call that the endpoint answered."""

    path: str
    body: Json
    reply: Reply
    id: str = ""


Script = Callable[[str, Json], Reply]
"""Returns the reply to a request, from its path and its body."""


def in_order(replies: Sequence[Reply]) -> Script:
    """Returns a script that gives one reply after another, whatever is requested."""
    left = iter(replies)
    return lambda _path, _body: next(left)


@dataclass
class ScriptedEndpoint:
    """Serves for as long as the block runs. `seen` holds each answered call, in its order."""

    script: Script
    model: str = "scripted-1"
    seen: list[Seen] = field(default_factory=list[Seen])
    others: list[tuple[str, str, bytes]] = field(default_factory=list[tuple[str, str, bytes]])
    """Other requests, such as what an SDK sends to its server: method, path and body."""

    def __enter__(self) -> Self:
        owner = type("Handler", (_Handler,), {"owner": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), owner)
        self._server.daemon_threads = True
        self._lock = threading.Lock()
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        """The address without a path; OpenAI's clients want `/v1` after it."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def answer(self, path: str, body: Json) -> Seen:
        """Returns the call with its reply, and remembers it."""
        with self._lock:
            seen = Seen(path, body, self.script(path, body), id=f"{len(self.seen) + 1:04d}")
            self.seen.append(seen)
        return seen

    def seen_as_json(self) -> list[Json]:
        """Returns the calls as plain values, to be kept beside a sample."""
        return [asdict(seen) for seen in self.seen]


def chat_completion(seen: Seen, model: str) -> Json:
    """Returns the reply in the shape of chat completions."""
    reply = seen.reply
    message: Json = {"role": "assistant", "content": reply.text or None}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for call in reply.calls
        ]
    return {
        "id": f"chatcmpl-{seen.id}",
        "object": "chat.completion",
        "created": CREATED,
        "model": model,
        "choices": [
            {
                "index": 0,
                "message": message,
                "logprobs": None,
                "finish_reason": _finish(reply, "stop", "tool_calls", "length"),
            }
        ],
        "usage": {
            "prompt_tokens": reply.prompt_tokens,
            "completion_tokens": reply.completion_tokens,
            "total_tokens": reply.prompt_tokens + reply.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": reply.cached_tokens},
        },
    }


def chat_chunks(whole: Json) -> Iterator[Json]:
    """Yields a chat completion as the chunks of a stream."""
    message = whole["choices"][0]["message"]
    same = {key: whole[key] for key in ("id", "created", "model")}
    deltas: list[Json] = [{"role": "assistant", "content": ""}]
    deltas += [{"reasoning_content": piece} for piece in _pieces(message.get("reasoning_content"))]
    deltas += [{"content": piece} for piece in _pieces(message["content"])]
    for index, call in enumerate(message.get("tool_calls", ())):
        function = call["function"]
        head = {"name": function["name"], "arguments": ""}
        deltas.append({"tool_calls": [call | {"index": index, "function": head}]})
        deltas += [
            {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}
            for piece in _pieces(function["arguments"])
        ]
    for delta in deltas:
        choice = {"index": 0, "delta": delta, "finish_reason": None}
        yield {**same, "object": "chat.completion.chunk", "choices": [choice]}
    ended = {"index": 0, "delta": {}, "finish_reason": whole["choices"][0]["finish_reason"]}
    yield {**same, "object": "chat.completion.chunk", "choices": [ended]}
    yield {**same, "object": "chat.completion.chunk", "choices": [], "usage": whole["usage"]}


def response(seen: Seen, model: str) -> Json:
    """Returns the reply in the shape of the Responses API."""
    reply = seen.reply
    output: list[Json] = []
    if reply.reasoning:
        summary = [{"type": "summary_text", "text": reply.reasoning}]
        output.append({"type": "reasoning", "id": f"rs_{seen.id}", "summary": summary})
    if reply.text:
        part = {"type": "output_text", "text": reply.text, "annotations": []}
        output.append(
            {
                "type": "message",
                "id": f"msg_{seen.id}",
                "role": "assistant",
                "status": "completed",
                "content": [part],
            }
        )
    output += [
        {
            "type": "function_call",
            "id": f"fc_{seen.id}_{call.id}",
            "call_id": call.id,
            "name": call.name,
            "arguments": json.dumps(call.arguments),
            "status": "completed",
        }
        for call in reply.calls
    ]
    echoed = {
        key: seen.body.get(key) for key in ("instructions", "previous_response_id", "metadata")
    }
    return {
        "id": f"resp_{seen.id}",
        "object": "response",
        "created_at": CREATED,
        "status": "incomplete" if reply.is_cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if reply.is_cut else None,
        "model": model,
        "output": output,
        "parallel_tool_calls": True,
        "temperature": 1.0,
        "tool_choice": "auto",
        "tools": seen.body.get("tools") or [],
        "usage": {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": reply.cached_tokens},
            "output_tokens": reply.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.prompt_tokens + reply.completion_tokens,
        },
        **echoed,
    }


def response_events(whole: Json) -> Iterator[Json]:
    """Yields a response as the events of a stream."""
    begun = whole | {"status": "in_progress", "output": [], "usage": None}
    events: list[Json] = [{"type": "response.created", "response": begun}]
    for index, item in enumerate(whole["output"]):
        same = {"output_index": index, "item_id": item["id"]}
        empty = {"message": {"content": []}, "reasoning": {"summary": []}}
        events.append(
            {
                "type": "response.output_item.added",
                "output_index": index,
                "item": item | empty.get(item["type"], {"arguments": ""}),
            }
        )
        events += [{**same, **event} for event in _item_events(item)]
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
    kind = "response.completed" if whole["status"] == "completed" else "response.incomplete"
    events.append({"type": kind, "response": whole})
    for number, event in enumerate(events):
        yield event | {"sequence_number": number}


def _item_events(item: Json) -> Iterator[Json]:
    match item["type"]:
        case "message":
            part = item["content"][0]
            where = {"content_index": 0}
            empty = part | {"text": ""}
            yield {"type": "response.content_part.added", "part": empty, **where}
            for piece in _pieces(part["text"]):
                yield {"type": "response.output_text.delta", "delta": piece, **where}
            yield {"type": "response.output_text.done", "text": part["text"], **where}
            yield {"type": "response.content_part.done", "part": part, **where}
        case "reasoning":
            part = item["summary"][0]
            where = {"summary_index": 0}
            yield {"type": "response.reasoning_summary_part.added", "part": part, **where}
            for piece in _pieces(part["text"]):
                yield {"type": "response.reasoning_summary_text.delta", "delta": piece, **where}
            yield {"type": "response.reasoning_summary_part.done", "part": part, **where}
        case _:
            for piece in _pieces(item["arguments"]):
                yield {"type": "response.function_call_arguments.delta", "delta": piece}
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield {"type": "response.function_call_arguments.done", **done}


def anthropic_message(seen: Seen, model: str) -> Json:
    """Returns the reply in the shape of Anthropic's Messages."""
    reply = seen.reply
    content: list[Json] = []
    if reply.reasoning:
        content.append({"type": "thinking", "thinking": reply.reasoning, "signature": "c2ln"})
    if reply.text:
        content.append({"type": "text", "text": reply.text})
    content += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments}
        for call in reply.calls
    ]
    return {
        "id": f"msg_{seen.id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": _finish(reply, "end_turn", "tool_use", "max_tokens"),
        "stop_sequence": None,
        "usage": {
            "input_tokens": reply.prompt_tokens - reply.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": reply.cached_tokens,
            "output_tokens": reply.completion_tokens,
        },
    }


def message_events(whole: Json) -> Iterator[Json]:
    """Yields a message of Anthropic's as the events of a stream."""
    begun = whole["usage"] | {"output_tokens": 1}
    empty = {"content": [], "stop_reason": None, "usage": begun}
    yield {"type": "message_start", "message": whole | empty}
    for index, block in enumerate(whole["content"]):
        match block["type"]:
            case "thinking":
                first = block | {"thinking": "", "signature": ""}
                deltas = [
                    {"type": "thinking_delta", "thinking": p} for p in _pieces(block["thinking"])
                ]
                deltas.append({"type": "signature_delta", "signature": block["signature"]})
            case "text":
                first = block | {"text": ""}
                deltas = [{"type": "text_delta", "text": p} for p in _pieces(block["text"])]
            case _:
                first = block | {"input": {}}
                text = json.dumps(block["input"])
                deltas = [{"type": "input_json_delta", "partial_json": p} for p in _pieces(text)]
        yield {"type": "content_block_start", "index": index, "content_block": first}
        for delta in deltas:
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    ending = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    used = {"output_tokens": whole["usage"]["output_tokens"]}
    yield {"type": "message_delta", "delta": ending, "usage": used}
    yield {"type": "message_stop"}


def _finish(reply: Reply, ended: str, calls: str, cut: str) -> str:
    return cut if reply.is_cut else calls if reply.calls else ended


def _pieces(text: str | None) -> list[str]:
    """Returns a text in a few pieces, as a stream brings it."""
    size = -(-len(text or "") // _NUM_PIECES) or 1
    return [(text or "")[start : start + size] for start in range(0, len(text or ""), size)]


_APIS = {
    "chat/completions": (chat_completion, chat_chunks),
    "responses": (response, response_events),
    "messages": (anthropic_message, message_events),
}


class _Handler(BaseHTTPRequestHandler):
    owner: ScriptedEndpoint
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self._body()
        path = self.path.partition("?")[0]
        api = next((api for end, api in _APIS.items() if path.endswith("/" + end)), None)
        if api is None:
            self.owner.others.append(("POST", self.path, body))
            self._send(b"{}", "application/json")
            return
        request = json.loads(body)
        whole_reply, stream = api
        whole = whole_reply(self.owner.answer(path, request), request.get("model", ""))
        if not request.get("stream"):
            self._send(json.dumps(whole).encode(), "application/json")
            return
        lines = [
            (f"event: {event['type']}\n" if "type" in event else "")
            + f"data: {json.dumps(event)}\n\n"
            for event in stream(whole)
        ]
        if stream is chat_chunks:
            lines.append("data: [DONE]\n\n")
        self._send("".join(lines).encode(), "text/event-stream")

    def do_GET(self) -> None:
        self.owner.others.append(("GET", self.path, b""))
        self._send(b'{"object": "list", "data": []}', "application/json")

    do_PATCH = do_PUT = do_POST

    def _body(self) -> bytes:
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            body = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body
        return self.rfile.read(int(self.headers.get("content-length") or 0))

    def _send(self, data: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Says nothing."""
