"""Answers requests with the replies that were recorded for them, without a network."""

import asyncio
import re

from aiohttp import web

from stillroom import bounds
from stillroom.errors import EngineError
from stillroom.recording.admission import Admission, RefusedError
from stillroom.recording.headers import Headers, RequestHead, is_event_stream
from stillroom.recording.records import kind_of
from stillroom.recording.request_keys import request_keys
from stillroom.recording.scrubbing import redactor_of
from stillroom.recording.serving import Service, cut_off, response_with
from stillroom.recording.tape import Replayed, Tape, request_key

_EVENT = re.compile(rb".*?(?:\r?\n\r?\n|\Z)", re.DOTALL)
_MOST_BYTES = bounds.REPLAYED.most


class Replay(Service):
    """Answers the requests of all clients from a tape."""

    def __init__(self, tape: Tape, admission: Admission) -> None:
        super().__init__(admission)
        self._tape = tape

    async def answer(self, request: web.Request, head: RequestHead) -> web.StreamResponse:
        """Returns the recorded reply to a request, in the recorded blocks."""
        replayed = self._find(head, await _content(request))
        reply, data = replayed.reply, replayed.reply.content.data
        headers = Headers(reply.headers)
        is_stream = bool(reply.blocks) or is_event_stream(headers)
        if not is_stream:
            # A truncated reply announces more bytes than it has.
            headers["Content-Length"] = str(len(data) + (not replayed.is_whole))
        entry = replayed.entry
        place = f"{entry.path.name}:{entry.line}; {replayed.number} of {replayed.total}"
        headers["X-Stillroom-Replay"] = place
        response = response_with(request, reply.status, reply.reason, headers)
        await response.prepare(request)
        for block in _blocks(data, reply.blocks) if is_stream else [data]:
            await response.write(block)
            # Each block is sent by itself.
            await asyncio.sleep(0)
        if not replayed.is_whole:
            cut_off(request, response)
        return response

    async def aclose(self) -> None:
        """Closes the journals."""
        self._tape.close()

    def _find(self, head: RequestHead, data: bytes) -> Replayed:
        """Returns the recorded reply to a request.

        Raises RefusedError, which names the nearest recorded request.
        """
        path = head.target.partition("?")[0]
        kind = kind_of(head.method, head.target)
        if kind is None:
            raise RefusedError(
                404, "not_recorded", f"{head.method} {path} is not a call that is recorded",
                "replay answers POSTs to …/chat/completions, …/responses and …/messages",
            )  # fmt: skip
        # The recorded request has no keys either.
        data = redactor_of(request_keys(head, data)).data(data)
        try:
            key = request_key(kind, head.target, data)
            found = self._tape.answer(key)
            if found is not None:
                return found
            nearest = self._tape.nearest(key, data)
        except (EngineError, OSError, ValueError) as error:
            raise RefusedError(
                500, "tape", f"the recorded calls cannot be read: {error}",
                "start the replay again with their journals",
            ) from error  # fmt: skip
        other = f"; the nearest is {nearest}" if nearest else f", and no other call of {kind}"
        raise RefusedError(
            404, "not_recorded", f"no recorded call has this request{other}",
            "make the request as it was recorded, or record it: stillroom record --upstream …",
        )  # fmt: skip


async def _content(request: web.Request) -> bytes:
    """Returns the body of a request, or the beginning of one too long to have been recorded."""
    data = b""
    async for block in request.content.iter_any():
        data += block
        if len(data) > _MOST_BYTES:
            break
    return data


def _blocks(data: bytes, sizes: list[int]) -> list[bytes]:
    """Returns a stream in its recorded blocks; without them, one event per block."""
    if sum(sizes) != len(data):
        return [event for event in _EVENT.findall(data) if event]
    blocks: list[bytes] = []
    place = 0
    for size in sizes:
        blocks.append(data[place : place + size])
        place += size
    return blocks
