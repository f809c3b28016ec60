"""Sends metrics to TensorBoard, Weights & Biases and trackio, in addition to events.jsonl.

A tracker that fails is dropped with a note, so that it cannot stop a run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stillroom.errors import missing_extra
from stillroom.reporting import Reporter
from stillroom.train.config.schema import TrainConfig

_Log = Callable[[int, Mapping[str, float]], None]


@dataclass(frozen=True, slots=True)
class Tracker:
    """A service or folder that metrics are sent to."""

    name: str
    log: _Log
    close: Callable[[], object]


def open_trackers(config: TrainConfig, run: Path) -> list[Tracker]:
    """Returns the trackers that config.yml enables; their files go into the run's folder.

    Raises MissingExtraError if a tracker is not installed.
    """
    trainer, trackers = config.trainer, list[Tracker]()
    settings = config.model_dump(mode="json")
    try:
        if trainer.tensorboard:
            trackers.append(_tensorboard(run))
        if trainer.wandb_project is not None:
            name = trainer.wandb_name or run.name
            trackers.append(_wandb(trainer.wandb_project, name, run, settings))
        if trainer.trackio_project is not None:
            trackers.append(_trackio(trainer.trackio_project, run, settings))
    except ModuleNotFoundError as error:
        raise missing_extra("track", "tracking a run") from error
    return trackers


def _tensorboard(run: Path) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(run / "tensorboard"))

    def log(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return Tracker("TensorBoard", log, writer.close)


def _wandb(project: str, name: str, run: Path, settings: dict[str, Any]) -> Tracker:
    import wandb

    library: Any = wandb
    # Without a key W&B would prompt for one at the terminal and wait forever.
    mode = None if library.api.api_key else "offline"
    session = library.init(
        project=project, name=name, id=run.name, dir=str(run), config=settings, mode=mode
    )

    def log(step: int, values: Mapping[str, float]) -> None:
        session.log(dict(values), step=step)

    return Tracker("W&B", log, session.finish)


def _trackio(project: str, run: Path, settings: dict[str, Any]) -> Tracker:
    import trackio

    library: Any = trackio
    session = library.init(project=project, name=run.name, config=settings, embed=False)

    def log(step: int, values: Mapping[str, float]) -> None:
        session.log(dict(values), step=step)

    return Tracker("trackio", log, session.finish)


@dataclass(slots=True)
class TrackedReporter:
    """A reporter that forwards all reports to the run's own reporter, and metrics to trackers."""

    reporter: Reporter
    trackers: list[Tracker] = field(default_factory=list[Tracker])

    def progress(
        self, done: int, total: int, *, unit: str, phase: str, eta_s: float | None = None
    ) -> None:
        """Reports the progress of the current phase."""
        self.reporter.progress(done, total, unit=unit, phase=phase, eta_s=eta_s)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Records the metrics of a step, then sends them to the trackers."""
        self.reporter.metrics(step, values)
        for tracker in list(self.trackers):
            self._try(tracker, lambda tracker=tracker: tracker.log(step, values))

    def note(self, text: str) -> None:
        """Records a note."""
        self.reporter.note(text)

    def alarms(self, current: Sequence[str]) -> None:
        """Reports the current alarms, which replace those of the previous step."""
        self.reporter.alarms(current)

    def is_cancelled(self) -> bool:
        """Returns whether the run has been cancelled."""
        return self.reporter.is_cancelled()

    def close(self) -> None:
        """Closes the trackers, which flushes their files."""
        for tracker in list(self.trackers):
            self._try(tracker, tracker.close)

    def _try(self, tracker: Tracker, action: Callable[[], object]) -> None:
        """Runs an action of a tracker; a tracker that raises an error is dropped with a note."""
        try:
            action()
        # Whatever a tracker raises is noted, and the run continues without that tracker.
        except Exception as error:
            self.trackers.remove(tracker)
            self.reporter.note(f"{tracker.name} failed and gets no more metrics: {error}")
