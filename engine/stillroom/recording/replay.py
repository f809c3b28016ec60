"""Answers requests with the replies that were recorded for them, without network access."""

import asyncio
import re

from aiohttp import web

from stillroom import bounds
from stillroom.errors import EngineError
from stillroom.recording.admission import Admission, RefusedError
from stillroom.recording.headers import Headers, RequestHead, is_event_stream
from stillroom.recording.records import call_kind
from stillroom.recording.request_keys import request_keys
from stillroom.recording.scrubbing import redactor_of
from stillroom.recording.serving import Service, cut_off, response_with
from stillroom.recording.tape import ReplayedReply, Tape, request_key
from stillroom.secrecy.key_fields import without_signatures

_EVENT = re.compile(rb".*?(?:\r?\n\r?\n|\Z)", re.DOTALL)
_MAX_BYTES = bounds.REPLAYED.limit


class Replay(Service):
    """Answers requests from a tape."""

    def __init__(self, tape: Tape, admission: Admission) -> None:
        super().__init__(admission)
        self._tape = tape

    async def respond(self, request: web.Request, head: RequestHead) -> web.StreamResponse:
        """Returns the recorded reply to a request, in the recorded blocks."""
        replayed = self._find(head, await _read_body(request))
        reply, data = replayed.reply, replayed.reply.content.data
        headers = Headers(reply.headers)
        is_stream = bool(reply.blocks) or is_event_stream(headers)
        if not is_stream:
            # A truncated reply gets a Content-Length that is too large, so it looks incomplete.
            headers["Content-Length"] = str(len(data) + (not replayed.is_complete))
        entry = replayed.entry
        source = f"{entry.path.name}:{entry.line}; {replayed.number} of {replayed.total}"
        headers["X-Stillroom-Replay"] = source
        response = response_with(request, reply.status, reply.reason, headers)
        await response.prepare(request)
        for block in _blocks(data, reply.blocks) if is_stream else [data]:
            await response.write(block)
            # Each block is a separate write.
            await asyncio.sleep(0)
        if not replayed.is_complete:
            cut_off(request, response)
        return response

    async def aclose(self) -> None:
        """Closes the journals."""
        self._tape.close()

    def _find(self, head: RequestHead, data: bytes) -> ReplayedReply:
        """Returns the recorded reply to a request.

        Raises RefusedError, naming the most similar recorded request, if there is none.
        """
        path = head.target.partition("?")[0]
        kind = call_kind(head.method, head.target)
        if kind is None:
            raise RefusedError(
                404, "not_recorded", f"{head.method} {path} is not a model call",
                "replay answers POST requests to …/chat/completions, …/responses and …/messages",
            )  # fmt: skip
        # The recorded request has no API keys either.
        data = without_signatures(redactor_of(request_keys(head, data)).redact_bytes(data))
        try:
            key = request_key(kind, head.target, data)
            replayed = self._tape.next_reply(key)
            if replayed is not None:
                return replayed
            nearest = self._tape.nearest(key, data)
        except (EngineError, OSError, ValueError) as error:
            raise RefusedError(
                500, "tape", f"a journal cannot be read: {error}",
                "restart the replay with the complete journals",
            ) from error  # fmt: skip
        other = (
            f"; the most similar one is {nearest}" if nearest else f"; no {kind} call was recorded"
        )
        raise RefusedError(
            404, "not_recorded", f"no recorded call matches this request{other}",
            "send the request as it was recorded, or record it: stillroom record --upstream …",
        )  # fmt: skip


async def _read_body(request: web.Request) -> bytes:
    """Returns the body of a request, or its beginning if it is longer than any recorded one."""
    data = b""
    async for block in request.content.iter_any():
        data += block
        if len(data) > _MAX_BYTES:
            break
    return data


def _blocks(data: bytes, sizes: list[int]) -> list[bytes]:
    """Splits a stream into its recorded blocks; without sizes, into its events."""
    if sum(sizes) != len(data):
        return [event for event in _EVENT.findall(data) if event]
    blocks: list[bytes] = []
    offset = 0
    for size in sizes:
        blocks.append(data[offset : offset + size])
        offset += size
    return blocks
