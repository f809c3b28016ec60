"""Tells how a run on this machine stands, until it has ended."""

import time
from collections.abc import Callable, Generator

import msgspec

from stillroom.jobs.supervise import read_run
from stillroom.remote.agent.agent_run import AgentRun, StartRecord, agent_run
from stillroom.remote.agent.appended import AppendedFiles
from stillroom.remote.agent.finished import FinishedFiles
from stillroom.remote.agent.folders import AgentFolder
from stillroom.remote.agent.store import keep_file
from stillroom.remote.records import Heartbeat, RemoteState, RunUpdate
from stillroom.run_folder import RunState

_LOOK_EVERY_S = 0.5
_PULSE_S = 2.0
_GROWTH_S = 2.0
_BYTES_PER_S = 4000
"""How much of states is sent that only count on, before it is packed to a tenth or less; what
matters is sent at once."""
_KEEPER_WAIT_S = 15.0


class FollowRequest(msgspec.Struct, frozen=True, array_like=True):
    """What `follow` is asked for: a run, and the bytes of its growing files that are known."""

    run_id: str
    seen: dict[str, int] = {}


def follow_run(there: AgentFolder) -> None:
    """The command `follow`: sends a run's news until the run has ended and all is said."""
    request = there.receive(FollowRequest)
    if request is None:
        return
    for news in follow(there, request):
        there.frames.send(news, is_packed=True)


def follow(
    there: AgentFolder, request: FollowRequest, *, sleep: Callable[[float], None] = time.sleep
) -> Generator[RunUpdate]:
    """Yields a run's news: its state first, and its last files last.

    Raises MachineGoneError if the run is not on this machine.
    """
    place = agent_run(there, request.run_id)
    started = place.read_start()
    growing = AppendedFiles(place, request.seen, started.outputs)
    finished, pace, said_at = FinishedFiles(place, started), _Pace(), time.monotonic()
    grown_at = said_at
    while True:
        state = read_run(place.folder)
        has_ended = state.status.is_final and _has_let_go(place, sleep)
        is_due = pace.is_due(state, time.monotonic()) or has_ended
        if is_due:
            yield _state_there(place, started, state)
            said_at = time.monotonic()
        # Many lines at once cost much less than one by one.
        if is_due or time.monotonic() - grown_at >= _GROWTH_S:
            grown_at = time.monotonic()
            for news in growing.news(is_last=has_ended):
                yield news
                said_at = time.monotonic()
        if has_ended:
            files = yield from finished.news(is_last=True)
            for file in files:
                keep_file(there, place.workspace / file.path, file.sha256)
            return
        for news in finished.news(is_last=False):
            yield news
            said_at = time.monotonic()
        if time.monotonic() - said_at >= _PULSE_S:
            yield Heartbeat()
            said_at = time.monotonic()
        sleep(_LOOK_EVERY_S)


def _state_there(place: AgentRun, started: StartRecord, state: RunState) -> RemoteState:
    return RemoteState(
        run_json=msgspec.json.encode(state),
        elapsed_s=max(0.0, time.monotonic() - started.started),
        root=str(place.base),
        clock=time.time(),
    )


def _has_let_go(place: AgentRun, sleep: Callable[[float], None]) -> bool:
    """Returns whether the processes of a run that has ended are gone, which write its last lines.

    One that does not end holds up nothing for long.
    """
    lock = place.keeper_lock()
    deadline = time.monotonic() + _KEEPER_WAIT_S
    while not (is_free := lock.try_acquire()) and time.monotonic() < deadline:
        sleep(_LOOK_EVERY_S / 5)
    if is_free:
        lock.release()
    return True


class _Pace:
    """When a state is sent: at once if something matters, else as often as it may cost."""

    def __init__(self) -> None:
        self._sent: RunState | None = None
        self._size, self._sent_at = 0, 0.0

    def is_due(self, state: RunState, clock: float) -> bool:
        """Returns whether to send the state, and then takes it as sent."""
        if state == self._sent:
            return False
        is_waiting = clock - self._sent_at < max(_GROWTH_S, self._size / _BYTES_PER_S)
        if is_waiting and self._sent is not None and _matters(state) == _matters(self._sent):
            return False
        self._sent, self._sent_at = state, clock
        self._size = len(msgspec.json.encode(state))
        return True


def _matters(state: RunState) -> tuple[object, ...]:
    phase = state.progress.phase if state.progress is not None else None
    names = [alarm.partition(":")[0] for alarm in state.alarms]
    return state.status, state.notes, names, state.error, phase
