"""A scripted OpenAI-compatible teacher, served on the loopback in the test's event loop."""

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import pytest
from aiohttp import web

from stillroom.teachers.endpoint.http_channel import HttpReply
from stillroom.teachers.providers import Endpoint

ANYWHERE = Endpoint("http://teacher.test/v1", None)
Handler = Callable[[httpx.Request], Awaitable[httpx.Response]]


class NoAnswerError(Exception):
    """Raised by a handler to close the connection instead of answering."""


class ScriptedChannel:
    """The seam under a teacher's client: requests go to a handler, without a socket."""

    def __init__(self, handler: Handler, endpoint: Endpoint = ANYWHERE, key: str | None = None):
        self._handler, self._url = handler, endpoint.chat_url
        self._headers = endpoint.key_headers(key)

    async def post(self, body: bytes, *, timeout_s: float, path: str = "") -> HttpReply:
        request = httpx.Request("POST", self._url + path, headers=self._headers, content=body)
        with anyio.fail_after(timeout_s):
            response = await self._handler(request)
        return HttpReply(response.status_code, dict(response.headers), response.content)

    async def aclose(self) -> None:
        """Does nothing."""


@asynccontextmanager
async def serve(handler: Handler) -> AsyncGenerator[None]:
    """Sends all HTTP requests of the block to `handler`, whatever host they are meant for.

    The server is the proxy that the environment names, so tests can keep hosts such as
    teacher.test. Another exception of the handler's cancels the block and is raised by it.
    """

    async def answer(request: web.BaseRequest) -> web.Response:
        if request.method == "GET":
            # It lists no models.
            return web.Response(status=404)
        try:
            response = await handler(
                httpx.Request(
                    request.method,
                    request.raw_path,
                    headers=list(request.headers.items()),
                    content=await request.read(),
                )
            )
        except NoAnswerError:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        except Exception as error:
            failures.append(error)
            scope.cancel()
            return web.Response(status=500)
        headers = {name: response.headers[name] for name in _SENT if name in response.headers}
        return web.Response(status=response.status_code, body=response.content, headers=headers)

    failures, scope = list[Exception](), anyio.CancelScope()
    runner = web.ServerRunner(web.Server(answer, handler_cancellation=True), shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    with pytest.MonkeyPatch.context() as environment:
        for name in ("http_proxy", "https_proxy"):
            environment.setenv(name, f"http://127.0.0.1:{runner.addresses[0][1]}")
        environment.setenv("no_proxy", "127.0.0.1,localhost")
        try:
            with scope:
                yield
        finally:
            with anyio.CancelScope(shield=True):
                await runner.cleanup()
            if failures:
                raise ExceptionGroup("the endpoint failed", failures)


_SENT = ("content-type", "content-encoding", "location", "retry-after")


def completion(
    content: str | None = "12",
    *,
    tool_calls: list[dict[str, Any]] | None = None,
    finish_reason: str = "stop",
    usage: Any = None,
    reported: Mapping[str, Any] | None = None,
    **message: Any,
) -> httpx.Response:
    """A well-formed answer; `told` is what stands beside the choices."""
    reply: dict[str, Any] = {"role": "assistant", "content": content, **message}
    if tool_calls is not None:
        reply["tool_calls"] = tool_calls
    choice = {"index": 0, "message": reply, "finish_reason": finish_reason}
    counted = {"prompt_tokens": 10, "completion_tokens": 5} if usage is None else usage
    answer = {"id": "x", "choices": [choice], "usage": counted, **(reported or {})}
    return httpx.Response(200, json=answer)


def refused(status: int, text: str = "refused") -> httpx.Response:
    """A refusal after which the client tries again at once, if it tries again."""
    return httpx.Response(status, text=text, headers={"retry-after": "0"})


class Served:
    """Whose turn a request asked for: the prompt, its seed (one a sample) and the turn."""

    def __init__(self, body: dict[str, Any]) -> None:
        messages = body["messages"]
        self.prompt: str = next(m["content"] for m in messages if m["role"] == "user")
        self.seed: int | None = body.get("seed")
        self.turn = sum(message["role"] == "assistant" for message in messages)
        self.key = (self.prompt, self.seed, self.turn)


class ScriptedTeacher:
    """Calls a tool `tool_turns` times and then answers; `served` has every answered request.

    `before` sees each request first and may answer in the script's place, raise or wait. `told` is
    what its answers say beside the turn.
    """

    def __init__(
        self,
        *,
        tool_turns: int = 1,
        before: Callable[[Served], Awaitable[httpx.Response | None]] | None = None,
        reported: Callable[[Served], Mapping[str, Any]] = lambda _served: {},
    ) -> None:
        self.tool_turns, self.before, self.reported = tool_turns, before, reported
        self.served: list[tuple[str, int | None, int]] = []
        self.requested = 0

    async def handle(self, request: httpx.Request) -> httpx.Response:
        self.requested += 1
        served = Served(json.loads(request.content))
        if self.before is not None:
            response = await self.before(served)
            if response is not None:
                return response
        self.served.append(served.key)
        if served.turn < self.tool_turns:
            arguments = json.dumps({"item": served.prompt, "turn": served.turn})
            function = {"name": "price", "arguments": arguments}
            call = {"id": f"call_{served.turn}", "type": "function", "function": function}
            reported = self.reported(served)
            return completion(
                None, tool_calls=[call], finish_reason="tool_calls", reported=reported
            )
        return completion(f"{served.prompt}: the answer is 12.", reported=self.reported(served))
