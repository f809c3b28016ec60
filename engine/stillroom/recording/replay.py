"""Answers requests with what was recorded for them, without a network."""

import asyncio
import re

from aiohttp import web

from stillroom.errors import EngineError
from stillroom.recording.admission import Admission, RefusedError
from stillroom.recording.headers import Headers, RequestHead, keys_in
from stillroom.recording.records import kind_of
from stillroom.recording.scrubbing import redactor_of
from stillroom.recording.serving import Service, cut_off, response_with
from stillroom.recording.tape import Replayed, Tape, request_key

_EVENT = re.compile(rb".*?(?:\r?\n\r?\n|\Z)", re.DOTALL)
_MOST_BYTES = 64 << 20


class Replay(Service):
    """Answers the requests of all clients from a tape."""

    def __init__(self, tape: Tape, admission: Admission) -> None:
        super().__init__(admission)
        self._tape = tape

    async def answer(self, request: web.Request, head: RequestHead) -> web.StreamResponse:
        """Returns the recorded reply to a request, in the blocks in which it came."""
        replayed = self._find(head, await _content(request))
        reply, data = replayed.reply, replayed.reply.content.data
        headers = Headers(reply.headers)
        is_stream = bool(reply.blocks) or _is_event_stream(headers)
        if not is_stream:
            # A reply that was broken off says that there is more than what comes.
            headers["Content-Length"] = str(len(data) + (not replayed.is_whole))
        entry = replayed.entry
        place = f"{entry.path.name}:{entry.line}; {replayed.number} of {replayed.total}"
        headers["X-Stillroom-Replay"] = place
        response = response_with(request, reply.status, reply.reason, headers)
        await response.prepare(request)
        for block in _blocks(data, reply.blocks) if is_stream else [data]:
            await response.write(block)
            # The clients get each block by itself.
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
                404, "not_recorded", f"{head.method} {path} is none of the calls that are recorded",
                "replay answers POSTs to …/chat/completions, …/responses and …/messages",
            )  # fmt: skip
        # Keys were taken out of what was recorded.
        data = redactor_of(tuple(dict.fromkeys(keys_in(head)))).data(data)
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
    """Returns the content of a request, or the beginning of one that was never recorded whole."""
    data = b""
    async for block in request.content.iter_any():
        data += block
        if len(data) > _MOST_BYTES:
            break
    return data


def _is_event_stream(headers: Headers) -> bool:
    return headers.get("content-type", "").lower().startswith("text/event-stream")


def _blocks(data: bytes, sizes: list[int]) -> list[bytes]:
    """Returns a stream in the blocks in which it came; each event by itself if nothing says."""
    if sum(sizes) != len(data):
        return [event for event in _EVENT.findall(data) if event]
    blocks: list[bytes] = []
    place = 0
    for size in sizes:
        blocks.append(data[place : place + size])
        place += size
    return blocks
