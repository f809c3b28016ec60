"""The reporter of a run's process, which writes to run.json and events.jsonl."""

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from stillroom.files import AppendLog
from stillroom.lineage import now
from stillroom.run_folder import Progress, RunEvent, RunFolder, RunState
from stillroom.secrecy.redaction import NO_SECRETS, Redactor

_MAX_NOTES = 12
_MAX_WRITES, _WRITE_WINDOW_S = 3, 0.5
"""The maximum number of writes of run.json per window. A step reports metrics, alarms and progress;
all three must be written at once, since the next step may take minutes."""


class JobReporter:
    """Writes the reports of a run's work to its folder.

    `state` is the run's latest state. run.json may lag behind it, since it is written at most
    three times in half a second. Secrets known to `redactor` are removed from all texts.
    """

    def __init__(self, folder: RunFolder, state: RunState, redactor: Redactor = NO_SECRETS) -> None:
        self.state, self.redactor = state, redactor
        self._folder = folder
        self._events = AppendLog(folder.events)
        self._is_cancelled = False
        self._phase_started = (0.0, 0, "")
        """When the current phase started (monotonic), what was done by then, and its name."""
        # The times of the latest writes of run.json, oldest first.
        self._written_at = deque([-math.inf] * _MAX_WRITES, maxlen=_MAX_WRITES)

    def cancel(self) -> None:
        """Makes `is_cancelled` True; safe to call from a signal handler."""
        self._is_cancelled = True

    def is_cancelled(self) -> bool:
        """Returns whether the run has been cancelled."""
        return self._is_cancelled

    def progress(
        self, done: int, total: int, *, unit: str, phase: str, eta_s: float | None = None
    ) -> None:
        """Records the phase's progress, with an ETA: eta_s, else extrapolated from its rate."""
        now_s = time.monotonic()
        if self._phase_started[2] != phase:
            self._phase_started = (now_s, done, phase)
        started_at, done_before, _ = self._phase_started
        rate = (done - done_before) / (now_s - started_at) if now_s > started_at else 0.0
        if eta_s is None and rate > 0:
            eta_s = round((total - done) / rate, 1)
        progress = Progress(phase=phase, done=done, total=total, unit=unit, eta_s=eta_s)
        self._update(progress=progress)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Appends the values to events.jsonl and records them as each metric's latest value.

        A value that is not finite becomes None, since JSON has no NaN.
        """
        finite = {k: v if math.isfinite(v) else None for k, v in values.items()}
        self._events.append(RunEvent(time=now(), event="metrics", step=step, values=finite))
        self._update(metrics={**self.state.metrics, **finite})

    def note(self, text: str) -> None:
        """Appends a note to events.jsonl, and to run.json if it has fewer than twelve notes."""
        text = self.redactor.redact_text(text)
        self._events.append(RunEvent(time=now(), event="note", text=text))
        if len(self.state.notes) < _MAX_NOTES and text not in self.state.notes:
            self._update(notes=[*self.state.notes, text])

    def alarms(self, current: Sequence[str]) -> None:
        """Replaces the current problems in run.json and appends the new ones to events.jsonl."""
        current = [self.redactor.redact_text(text) for text in current]
        for text in current:
            # An alarm's figures change at every step, so its subject decides whether it is new.
            if _subject(text) not in map(_subject, self.state.alarms):
                self._events.append(RunEvent(time=now(), event="alarm", text=text))
        if current != self.state.alarms:
            self._update(alarms=current)

    def close(self) -> None:
        """Flushes events.jsonl to disk and closes it."""
        self._events.close()

    def _update(self, **changes: Any) -> None:
        """Changes the state, and writes run.json unless it was just written three times."""
        self.state = msgspec.structs.replace(self.state, **changes)
        now_s = time.monotonic()
        if now_s - self._written_at[0] >= _WRITE_WINDOW_S:
            self._folder.write(self.state, durable=False)
            self._written_at.append(now_s)


def _subject(alarm: str) -> str:
    """Returns the alarm's name, with which its text begins."""
    return alarm.partition(":")[0]
