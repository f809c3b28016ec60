"""Streams the state and files of a run on this machine until it has ended."""

import math
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from datetime import datetime

import msgspec

from stillroom.jobs.supervise import read_run
from stillroom.remote.agent.output_files import AppendedFiles, FinishedFiles
from stillroom.remote.agent.runs import AgentRun, StartRecord, agent_run
from stillroom.remote.agent.store import AgentFolder, store_output
from stillroom.remote.records import FollowRequest, Heartbeat, RemoteState, RunUpdate
from stillroom.run_folder import RunState

_POLL_S = 0.5
_HEARTBEAT_S = 2.0
_SEND_EVERY_S = 2.0
"""Sending many lines at once is much cheaper than one at a time."""
_KEEPER_WAIT_S = 15.0


def follow(
    agent: AgentFolder, request: FollowRequest, *, sleep: Callable[[float], None] = time.sleep
) -> Generator[RunUpdate]:
    """The command `follow`: yields a run's updates, from its state to its last files.

    Yields a heartbeat after two seconds without another update. Raises MachineGoneError if the run
    is not on this machine.
    """
    sent_at = time.monotonic()
    for update in _updates(agent, request, sleep):
        if update is not None or time.monotonic() - sent_at >= _HEARTBEAT_S:
            yield update or Heartbeat()
            sent_at = time.monotonic()


def _updates(
    agent: AgentFolder, request: FollowRequest, sleep: Callable[[float], None]
) -> Generator[RunUpdate | None]:
    """Yields the run's updates until it has ended, and None while there are none."""
    run = agent_run(agent, request.run_id)
    start = run.read_start()
    appended = AppendedFiles(run, request.seen, start.outputs)
    finished = FinishedFiles(run, start)
    sent_state: RunState | None = None
    sent_at = -math.inf
    while True:
        state = read_run(run.folder)
        has_ended = state.status.is_final
        if has_ended:
            _wait_for_processes(run, sleep)
        if has_ended or time.monotonic() - sent_at >= _SEND_EVERY_S:
            sent_at = time.monotonic()
            if state != sent_state:
                yield _remote_state(run, start, state)
                sent_state = state
            yield from appended.updates(is_last=has_ended)
        files = yield from finished.updates(is_last=has_ended)
        if has_ended:
            for file in files:
                store_output(agent, run.workspace / file.path, file.sha256)
            return
        yield None
        sleep(_POLL_S)


def _remote_state(run: AgentRun, start: StartRecord, state: RunState) -> RemoteState:
    """Returns the message with a state, the run's elapsed time, and this machine's clock."""
    return RemoteState(
        run_json=msgspec.json.encode(state),
        elapsed_s=max(0.0, time.monotonic() - start.started_at - _seconds_since_end(state)),
        root=str(run.base),
        clock=time.time(),
    )


def _seconds_since_end(state: RunState) -> float:
    """Returns how long ago a run ended; 0 while it runs, or if its end time is invalid."""
    with suppress(ValueError):
        ended_at = datetime.fromisoformat(state.ended_at or "")
        return max(0.0, time.time() - ended_at.timestamp())
    return 0.0


def _wait_for_processes(run: AgentRun, sleep: Callable[[float], None]) -> None:
    """Waits until the processes of an ended run have exited, since they write its last lines.

    Gives up after 15 seconds.
    """
    lock = run.keeper_lock()
    if lock.acquire_within(_KEEPER_WAIT_S, sleep=sleep):
        lock.release()
