"""Reporters that remember what they were told, and can ask a run to stop."""

from collections.abc import Callable, Mapping, Sequence


class KeptReporter:
    """Keeps progress, metrics and notes; `stop_when` decides whether the run is cancelled."""

    def __init__(self, stop_when: Callable[[], bool] = lambda: False) -> None:
        self.progressed: list[tuple[int, int]] = []
        self.etas: list[float | None] = []
        self.measured: list[Mapping[str, float]] = []
        self.notes: list[str] = []
        self.alarmed: list[list[str]] = []
        self._stop_when = stop_when

    def progress(
        self, done: int, total: int, *, unit: str, phase: str, eta_s: float | None = None
    ) -> None:
        self.progressed.append((done, total))
        self.etas.append(eta_s)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self.measured.append(dict(values))

    def note(self, text: str) -> None:
        self.notes.append(text)

    def alarms(self, current: Sequence[str]) -> None:
        self.alarmed.append(list(current))

    def is_cancelled(self) -> bool:
        return self._stop_when()
