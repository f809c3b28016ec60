"""The recording proxy: it forwards requests to their upstreams and journals the model calls."""

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from aiohttp import web

from stillroom import bounds
from stillroom.recording.admission import Admission, RefusedError
from stillroom.recording.capture import CallCapture, CapturedBody
from stillroom.recording.encodings import decodable_encodings
from stillroom.recording.headers import RequestHead, end_to_end_headers, upstream_headers
from stillroom.recording.journal import CallJournal, Outcome
from stillroom.recording.records import CallEnd, call_kind, decode_call
from stillroom.recording.serving import Service, abort, cut_off, response_with
from stillroom.recording.spending import CallBudget, Reservation
from stillroom.recording.upstream_client import (
    RequestBody,
    UpstreamClient,
    UpstreamError,
    UpstreamReply,
)
from stillroom.recording.upstreams import Upstream, route
from stillroom.teachers.budget import NO_COST, Cost

MAX_RECORDED_BYTES = bounds.RECORDED.limit
"""The default maximum number of bytes recorded per request and per reply."""
_MAX_RESENT_BYTES = 1 << 20
"""The length of the longest unrecorded request body that can be sent again."""
_UNBILLED_PATHS = ("/count_tokens", "/tokenize", "/detokenize")
"""Endings of the paths at which a POST request calls no model."""
_IDLE_S = 10.0
"""Seconds after a call is written until the budget records that none is in flight, if so. The next
call then waits for such a record of its own, which takes a few milliseconds."""
_WAIT_FOR_END_S = 0.025
"""Seconds for which the last event of a stream is held back to wait for the end of the reply."""


class RecordingProxy(Service):
    """Answers each request with the reply of its upstream.

    `secrets` are removed from all records, and the API keys in a request from its own record. At
    most `max_recorded_bytes` of each request and each reply are recorded. With a `budget`,
    requests whose cost is unknown are refused.
    """

    def __init__(
        self,
        journal: CallJournal,
        upstreams: Sequence[Upstream],
        admission: Admission,
        *,
        secrets: Sequence[str] = (),
        max_recorded_bytes: int = MAX_RECORDED_BYTES,
        budget: CallBudget | None = None,
    ) -> None:
        super().__init__(admission)
        self.journal = journal
        has_tls = any(upstream.scheme == "https" for upstream in upstreams)
        self._client = UpstreamClient(has_tls=has_tls)
        self._secrets = tuple(secrets)
        self._upstreams, self._max_recorded_bytes, self._budget = (
            upstreams,
            max_recorded_bytes,
            budget,
        )
        self._unwritten = set[asyncio.Future[bool]]()
        self._is_failing = False
        """Whether writing the last call failed."""
        self._num_reports = Counter[str]()

    async def respond(self, request: web.Request, head: RequestHead) -> web.StreamResponse:
        """Forwards a request and returns the reply; a model call is recorded."""
        routed = route(head.target, self._upstreams)
        if routed is None:
            names = ", ".join(f"/{upstream.name}" for upstream in self._upstreams)
            raise RefusedError(
                404, "no_upstream", "the path does not begin with the name of an upstream",
                f"begin it with one of {names}, as in the printed base_url",
            )  # fmt: skip
        upstream, path = routed
        head = replace(head, target=path)
        kind = call_kind(head.method, path)
        if kind is None:
            self._check_cost_is_counted(head)
            return await self._forward(request, upstream, head)
        self._check_journal()
        capture = CallCapture(
            kind, upstream, head, limit=self._max_recorded_bytes, secrets=self._secrets
        )  # fmt: skip
        call = _RecordedExchange(capture, self.journal, self._note_outcome, self._note_unwritten)
        body = None
        if request.body_exists:
            body = RequestBody(request.content, capture.request, capture.prepare)
        if self._budget is not None:
            call.reservation = await _reserve(self._budget, body, capture)
        try:
            return await self._forward_and_record(request, upstream, head, body, call)
        except (asyncio.CancelledError, ConnectionError):
            call.end("proxy_stopped" if self.is_cancelling else "client_left")
            raise
        except Exception as error:
            # Outermost handler of a call: failed calls are recorded too, as they may be billed.
            call.end("proxy_stopped", f"unexpected {type(error).__name__}")
            raise

    async def aclose(self) -> None:
        """Waits until all calls are written, and closes the connections to the upstreams."""
        if self._unwritten:
            await asyncio.wait(self._unwritten)  # no limit: what calls cost must be counted
        await self._client.aclose()

    def _note_unwritten(self, is_written: asyncio.Future[bool]) -> None:
        """Stores a call that the journal is about to write."""
        self._unwritten.add(is_written)
        is_written.add_done_callback(self._note_written)

    def _note_written(self, is_written: asyncio.Future[bool]) -> None:
        self._unwritten.discard(is_written)
        if self._budget is not None:
            is_written.get_loop().call_later(_IDLE_S, self._budget.budget.announce_idle)

    def _check_journal(self) -> None:
        """Raises RefusedError if the next call could not be recorded, before it costs anything."""
        if self._is_failing and not self.journal.can_write():
            raise RefusedError(
                503, "journal", f"the journal in {self.journal.folder} cannot be written",
                "free space on the disk, or give another folder with --output; calls are "
                "forwarded again as soon as writing works",
            )  # fmt: skip
        self._is_failing = False

    async def _forward(
        self, request: web.Request, upstream: Upstream, head: RequestHead
    ) -> web.StreamResponse:
        """Forwards a request that is not recorded, and its reply."""
        body = None
        if request.body_exists:
            body = RequestBody(request.content, CapturedBody(_MAX_RESENT_BYTES))
        try:
            reply = await self._client.send(upstream, head, upstream_headers(head), body)
        except UpstreamError as error:
            raise RefusedError.no_reply(self._report_no_reply(upstream, error)) from error
        try:
            response = _response(request, reply)
            await response.prepare(request)
            await _forward_remaining(request, response, reply)
            return response
        finally:
            reply.close()

    def _check_cost_is_counted(self, head: RequestHead) -> None:
        """Raises RefusedError for a request that may cost money which the budget cannot count."""
        path = head.target.partition("?")[0].rstrip("/")
        if self._budget is None or self._budget.is_free:
            return
        if head.method != "POST" or path.endswith(_UNBILLED_PATHS):
            return
        raise RefusedError(
            402, "no_price", f"the budget cannot count the cost of POST {path}",
            "call the endpoint directly, or start `stillroom record` without a budget "
            "(--budget-usd, or workspace: budget_usd in prices.yml)",
        )  # fmt: skip

    async def _forward_and_record(
        self,
        request: web.Request,
        upstream: Upstream,
        head: RequestHead,
        body: RequestBody | None,
        call: "_RecordedExchange",
    ) -> web.StreamResponse:
        """Forwards a model call; the reply ends only once the call is on disk."""
        headers = upstream_headers(head)
        if accepted := headers.getall("accept-encoding", ()):
            headers["Accept-Encoding"] = decodable_encodings(", ".join(accepted))
        try:
            reply = await self._client.send(upstream, head, headers, body)
        except UpstreamError as error:
            problem = self._report_no_reply(upstream, error)
            if not error.was_sent:
                call.release()
            if not await call.end("upstream_left", problem):
                abort(request)
            raise RefusedError.no_reply(problem) from error
        try:
            return await _forward_recorded_reply(request, upstream, reply, call)
        finally:
            reply.close()

    def _report_no_reply(self, upstream: Upstream, error: UpstreamError) -> str:
        problem = f"{upstream.origin}: {error}"
        self._report_problem(f"no reply from {problem}")
        return problem

    def _note_outcome(self, outcome: Outcome) -> None:
        """Stores and reports whether a call could not be written. Runs in the journal's thread."""
        if outcome is not None:
            self._is_failing = True
            self._report_problem(f"a call was not recorded and its reply was aborted: {outcome}")

    def _report_problem(self, problem: str) -> None:
        """Writes a problem to standard error: the 1st, 2nd, 4th, 8th … time that it occurs."""
        self._num_reports[problem] += 1
        times = self._num_reports[problem]
        if times & (times - 1) == 0:
            again = f" ({times} times)" if times > 1 else ""
            sys.stderr.write(f"stillroom record: {problem}{again}\n")
            sys.stderr.flush()


class _RecordedExchange:
    """A call that is written to the journal exactly once."""

    def __init__(
        self,
        capture: CallCapture,
        journal: CallJournal,
        note_outcome: Callable[[Outcome], None],
        note_unwritten: Callable[[asyncio.Future[bool]], None],
    ) -> None:
        self.capture = capture
        self.reservation: Reservation | None = None
        """The part of the budget that is reserved for the call."""
        self._journal = journal
        self._note_outcome, self._note_unwritten = note_outcome, note_unwritten
        self._is_written: asyncio.Future[bool] | None = None

    def release(self) -> None:
        """Frees the reservation of a call that did not reach its endpoint."""
        if self.reservation is not None:
            self.reservation.settle(NO_COST)
            self.reservation = None

    def end(self, end: CallEnd, problem: str | None = None) -> asyncio.Future[bool]:
        """Queues the call for the journal, unless it was queued before.

        The future's result is whether the call is on disk; False if writing failed.
        """
        if self._is_written is not None:
            return self._is_written
        loop = asyncio.get_running_loop()
        is_written = self._is_written = loop.create_future()
        self._note_unwritten(is_written)

        def settle(outcome: Outcome, cost: Cost | None) -> None:
            # Not before: if this process is killed, the call counts as in flight or as recorded.
            if self.reservation is not None and cost is not None:
                self.reservation.settle(cost)
            if not is_written.done():
                is_written.set_result(outcome is None)

        def finish(outcome: Outcome, cost: Cost | None = None) -> None:
            self._note_outcome(outcome)
            # The loop may have stopped while the journal is still writing.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, outcome, cost)

        try:
            line = self.capture.encode_line(end, problem)
            cost = self.reservation and self.reservation.cost_of(decode_call(line))
        except Exception as error:  # outermost handler: the client must not wait forever
            finish(error)
        else:
            self._journal.append(line, partial(finish, cost=cost))
        return is_written


async def _reserve(
    budget: CallBudget, body: RequestBody | None, capture: CallCapture
) -> Reservation:
    """Reads a call's body, and reserves the call's maximum cost.

    Raises RefusedError if the budget does not cover that cost, or it is unknown.
    """
    if body is not None and not await body.receive():
        raise RefusedError(
            413, "too_long", "the request is too long to estimate its cost for the budget",
            "start `stillroom record` again with a higher --max-body-mb",
        )  # fmt: skip
    return await budget.reserve(capture.request_content())


async def _forward_recorded_reply(
    request: web.Request, upstream: Upstream, reply: UpstreamReply, call: _RecordedExchange
) -> web.StreamResponse:
    """Forwards a reply, but holds back its end until the call is on disk."""
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
    if not await call.end("upstream_left" if problem else "whole", problem):
        abort(request)
        return response
    await response.prepare(request)
    for block in held:
        await response.write(block)
    if problem is None:
        await _forward_remaining(request, response, reply)
    else:
        cut_off(request, response)
    return response


async def _forward_until_end(
    response: web.StreamResponse, reply: UpstreamReply, capture: CallCapture, held: list[bytes]
) -> None:
    """Forwards blocks as they arrive, except those at the end of the reply: these go to `held`."""
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


async def _forward_remaining(
    request: web.Request, response: web.StreamResponse, reply: UpstreamReply
) -> None:
    """Forwards the blocks of a reply that were not read yet."""
    try:
        while block := await reply.next_block():
            await response.write(block)
    except UpstreamError:
        cut_off(request, response)


def _response(request: web.Request, reply: UpstreamReply) -> web.StreamResponse:
    return response_with(request, reply.status, reply.reason, end_to_end_headers(reply.headers))
