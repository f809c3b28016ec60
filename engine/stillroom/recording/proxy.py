"""The recording proxy: it forwards requests to their upstreams and journals the model calls."""

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from aiohttp import web

from stillroom import bounds
from stillroom.recording.admission import Admission, RefusedError
from stillroom.recording.capture import CallCapture, CapturedBody
from stillroom.recording.encodings import known_encodings
from stillroom.recording.headers import RequestHead, end_to_end, upstream_headers
from stillroom.recording.journal import CallJournal, Outcome
from stillroom.recording.records import CallEnd, kind_of
from stillroom.recording.serving import Service, abort, cut_off, response_with
from stillroom.recording.spending import CallBudget, Reservation
from stillroom.recording.upstream_client import (
    RequestBody,
    UpstreamClient,
    UpstreamError,
    UpstreamReply,
)
from stillroom.recording.upstreams import Upstream, route

MOST_KEPT = bounds.RECORDED.most
"""The default for the most bytes that are recorded of a request, and of a reply."""
_MOST_REPEATED = 1 << 20
_COST_NOTHING = ("/count_tokens", "/tokenize", "/detokenize")
"""The ends of paths to which a POST calls no model."""
_WAIT_FOR_END_S = 0.025
"""Seconds for which the last event of a stream waits for the end of the reply behind it."""


class RecordingProxy(Service):
    """Answers each request with the reply of its upstream.

    `secrets` are removed from all records; the keys of a request are removed from its own record.
    With a `budget`, what cannot be priced is not forwarded.
    """

    def __init__(
        self,
        journal: CallJournal,
        upstreams: Sequence[Upstream],
        admission: Admission,
        *,
        secrets: Sequence[str] = (),
        most_kept: int = MOST_KEPT,
        budget: CallBudget | None = None,
    ) -> None:
        super().__init__(admission)
        self.journal = journal
        has_tls = any(upstream.scheme == "https" for upstream in upstreams)
        self._client = UpstreamClient(has_tls=has_tls)
        self._secrets = tuple(secrets)
        self._upstreams, self._most_kept, self._budget = upstreams, most_kept, budget
        self._is_failing = False
        """Whether the last call could not be written."""
        self._num_complaints = Counter[str]()

    async def answer(self, request: web.Request, head: RequestHead) -> web.StreamResponse:
        """Forwards a request and returns the reply; a model call is recorded."""
        found = route(head.target, self._upstreams)
        if found is None:
            names = ", ".join(f"/{upstream.name}" for upstream in self._upstreams)
            raise RefusedError(
                404, "no_upstream", "the path names none of the upstreams",
                f"begin it with one of {names}, as in the base_url that was printed",
            )  # fmt: skip
        upstream, path = found
        head = replace(head, target=path)
        kind = kind_of(head.method, path)
        if kind is None:
            self._check_costs_nothing(head)
            return await self._forward(request, upstream, head)
        self._check_journal()
        capture = CallCapture(
            kind, upstream, head, limit=self._most_kept, secrets=self._secrets
        )  # fmt: skip
        call = _RecordedExchange(capture, self.journal, self._note)
        body = None
        if request.body_exists:
            body = RequestBody(request.content, capture.request, capture.prepare)
        if self._budget is not None:
            call.reserved = await _reserved(self._budget, body, capture)
        try:
            return await self._forward_and_record(request, upstream, head, body, call)
        except (asyncio.CancelledError, ConnectionError):
            call.end("proxy_stopped" if self.is_cancelling else "client_left")
            raise

    async def aclose(self) -> None:
        """Closes the connections to the upstreams."""
        await self._client.aclose()

    def _check_journal(self) -> None:
        """Raises RefusedError if calls cannot be recorded, before the call is paid for."""
        if self._is_failing and not self.journal.can_write():
            raise RefusedError(
                503, "journal", f"calls cannot be recorded in {self.journal.folder}",
                "make room on the disk, or give another folder with --output; the next call "
                "is recorded again as soon as it can be",
            )  # fmt: skip
        self._is_failing = False

    async def _forward(
        self, request: web.Request, upstream: Upstream, head: RequestHead
    ) -> web.StreamResponse:
        """Forwards a request that is not recorded, and its reply."""
        body = None
        if request.body_exists:
            body = RequestBody(request.content, CapturedBody(_MOST_REPEATED))
        try:
            reply = await self._client.send(upstream, head, upstream_headers(head), body)
        except UpstreamError as error:
            raise RefusedError.no_reply(self._no_reply(upstream, error)) from error
        try:
            response = _response(request, reply)
            await response.prepare(request)
            await _forward_rest(request, response, reply)
            return response
        finally:
            reply.close()

    def _check_costs_nothing(self, head: RequestHead) -> None:
        """Raises RefusedError for a request that may cost what the budget does not see."""
        path = head.target.partition("?")[0].rstrip("/")
        if self._budget is None or head.method != "POST" or path.endswith(_COST_NOTHING):
            return
        raise RefusedError(
            402, "no_price", f"there is a budget, and what POST {path} costs is not known",
            "call it at its own address, or start `stillroom record` without --budget-usd",
        )  # fmt: skip

    async def _forward_and_record(
        self,
        request: web.Request,
        upstream: Upstream,
        head: RequestHead,
        body: RequestBody | None,
        call: "_RecordedExchange",
    ) -> web.StreamResponse:
        """Forwards a model call and its reply, which ends only when the call is on the disk."""
        headers = upstream_headers(head)
        if accepted := headers.getall("accept-encoding", ()):
            headers["Accept-Encoding"] = known_encodings(", ".join(accepted))
        try:
            reply = await self._client.send(upstream, head, headers, body)
        except UpstreamError as error:
            problem = self._no_reply(upstream, error)
            if not error.was_sent:
                call.give_back()
            if not await call.recorded("upstream_left", problem):
                abort(request)
            raise RefusedError.no_reply(problem) from error
        try:
            return await _forward_recorded_reply(request, upstream, reply, call)
        finally:
            reply.close()

    def _no_reply(self, upstream: Upstream, error: UpstreamError) -> str:
        problem = f"{upstream.origin}: {error}"
        self._complain(f"no reply from {problem}")
        return problem

    def _note(self, outcome: Outcome) -> None:
        """Records whether a call could be written; the journal's thread calls it."""
        if outcome is not None:
            self._is_failing = True
            self._complain(f"a call was not recorded, and its reply was broken off: {outcome}")

    def _complain(self, problem: str) -> None:
        """Writes a line to standard error; of a repeated problem only the 1st, 2nd, 4th, 8th, …"""
        self._num_complaints[problem] += 1
        times = self._num_complaints[problem]
        if times & (times - 1) == 0:
            again = f" ({times} times)" if times > 1 else ""
            sys.stderr.write(f"stillroom record: {problem}{again}\n")
            sys.stderr.flush()


class _RecordedExchange:
    """A call that is written to the journal exactly once."""

    def __init__(
        self, capture: CallCapture, journal: CallJournal, note: Callable[[Outcome], None]
    ) -> None:
        self.capture = capture
        self.reserved: Reservation | None = None
        """The part of the budget that is held for the call."""
        self._journal, self._note = journal, note
        self._is_ended = False

    def give_back(self) -> None:
        """Frees the part of the budget of a call that did not reach its endpoint."""
        if self.reserved is not None:
            self.reserved.give_back()
            self.reserved = None

    async def recorded(self, end: CallEnd, problem: str | None = None) -> bool:
        """Returns once the call is on the disk; False if it could not be written."""
        loop = asyncio.get_running_loop()
        written = loop.create_future()

        def settle(outcome: Outcome) -> None:
            if not written.done():
                written.set_result(outcome is None)

        def done(outcome: Outcome) -> None:
            # The loop may have stopped while the journal still writes.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, outcome)

        self.end(end, problem, done)
        return await written

    def end(
        self,
        end: CallEnd,
        problem: str | None = None,
        done: Callable[[Outcome], None] = lambda _: None,
    ) -> None:
        """Puts the call into the journal's queue, unless it has ended before."""
        if self._is_ended:
            return
        self._is_ended = True

        def finish(outcome: Outcome) -> None:
            self._note(outcome)
            done(outcome)

        try:
            line = self.capture.line(end, problem)
            if self.reserved is not None:
                self.reserved.settle(line)
        except Exception as error:  # the rim of one call: its client must not wait for ever
            finish(error)
        else:
            self._journal.append(line, finish)


async def _reserved(
    budget: CallBudget, body: RequestBody | None, capture: CallCapture
) -> Reservation:
    """Returns once a call's part of the budget is held; its body has arrived by then.

    Raises RefusedError if the budget does not suffice, or the call cannot be priced.
    """
    if body is not None and not await body.whole():
        raise RefusedError(
            413, "too_long", "the call has a budget, and its request is too long to be priced",
            "start `stillroom record` again with a higher --max-body-mb",
        )  # fmt: skip
    return await budget.reserve(capture.request_content())


async def _forward_recorded_reply(
    request: web.Request, upstream: Upstream, reply: UpstreamReply, call: _RecordedExchange
) -> web.StreamResponse:
    """Forwards a reply, and holds back its end, or the event after which clients stop reading."""
    response = _response(request, reply)
    call.capture.begin_reply(reply.status, reply.reason, reply.headers)
    if not reply.is_received:
        await response.prepare(request)
    held: list[bytes] = []
    problem = None
    try:
        await _forward_until_end(response, reply, call.capture, held)
    except UpstreamError as error:
        problem = f"{upstream.origin}: {error}"
    if not await call.recorded("upstream_left" if problem else "whole", problem):
        abort(request)
        return response
    await response.prepare(request)
    for block in held:
        await response.write(block)
    if problem is None:
        await _forward_rest(request, response, reply)
    else:
        cut_off(request, response)
    return response


async def _forward_until_end(
    response: web.StreamResponse, reply: UpstreamReply, capture: CallCapture, held: list[bytes]
) -> None:
    """Forwards blocks as they arrive; those that may end the reply for the client go to `held`."""
    while block := await reply.next_block():
        held.append(block)
        if capture.add(block):
            with suppress(TimeoutError):
                async with asyncio.timeout(_WAIT_FOR_END_S):
                    while block := await reply.next_block():
                        held.append(block)
                        capture.add(block)
            return
        if reply.is_read or not response.prepared:
            continue
        await response.write(block)
        held.clear()
        capture.process_pending()


async def _forward_rest(
    request: web.Request, response: web.StreamResponse, reply: UpstreamReply
) -> None:
    """Forwards the rest of a reply."""
    try:
        while block := await reply.next_block():
            await response.write(block)
    except UpstreamError:
        cut_off(request, response)


def _response(request: web.Request, reply: UpstreamReply) -> web.StreamResponse:
    return response_with(request, reply.status, reply.reason, end_to_end(reply.headers))
