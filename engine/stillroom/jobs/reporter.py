"""The worker's reporter: progress into run.json, metrics and notes into events.jsonl."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from stillroom.files import AppendLog
from stillroom.lineage import now
from stillroom.run_folder import Progress, RunEvent, RunFolder, RunState

_WRITE_EVERY_S = 0.5


class JobReporter:
    """Writes what a stage tells to the run folder. `state` is what run.json says."""

    def __init__(self, folder: RunFolder, state: RunState) -> None:
        self.state = state
        self._folder = folder
        self._events = AppendLog(folder.events)
        self._is_cancelled = False
        self._phase_started = (0.0, 0, "")
        self._written_at = 0.0

    def cancel(self) -> None:
        """Makes `is_cancelled` True; safe to call from a signal handler."""
        self._is_cancelled = True

    def is_cancelled(self) -> bool:
        """Returns whether the run has been asked to stop."""
        return self._is_cancelled

    def progress(self, done: int, total: int, *, unit: str, phase: str) -> None:
        """Keeps how far the phase is; run.json follows at most twice a second."""
        clock = time.monotonic()
        if self._phase_started[2] != phase:
            self._phase_started = (clock, done, phase)
        started, first, _ = self._phase_started
        rate = (done - first) / (clock - started) if clock > started else 0.0
        eta_s = round((total - done) / rate, 1) if rate > 0 else None
        progress = Progress(phase=phase, done=done, total=total, unit=unit, eta_s=eta_s)
        self._update(progress=progress)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Appends the values to events.jsonl and keeps them as the latest; JSON has no NaN."""
        finite = {k: v if math.isfinite(v) else None for k, v in values.items()}
        self._events.append(RunEvent(time=now(), event="metrics", step=step, values=finite))
        self._update(metrics={**self.state.metrics, **finite})

    def note(self, text: str) -> None:
        """Appends a note to events.jsonl."""
        self._events.append(RunEvent(time=now(), event="note", text=text))

    def alarms(self, current: Sequence[str]) -> None:
        """Keeps what is wrong now in run.json; what is new goes to events.jsonl too."""
        for text in current:
            # Its figures change from step to step; what it is about does not.
            if _subject(text) not in map(_subject, self.state.alarms):
                self._events.append(RunEvent(time=now(), event="alarm", text=text))
        if list(current) != self.state.alarms:
            self._update(alarms=list(current))

    def close(self) -> None:
        """Waits for the disk."""
        self._events.close()

    def _update(self, **changes: Any) -> None:
        self.state = msgspec.structs.replace(self.state, **changes)
        clock = time.monotonic()
        if clock - self._written_at >= _WRITE_EVERY_S:
            self._folder.write(self.state, durable=False)
            self._written_at = clock


def _subject(alarm: str) -> str:
    """Returns the name that an alarm begins with."""
    return alarm.partition(":")[0]
