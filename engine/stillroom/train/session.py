"""What every training method shares: the student, its settings, and what it tells and saves."""

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from stillroom.errors import RunCancelledError
from stillroom.reporting import Reporter
from stillroom.train.checkpoints import Origin, save_checkpoint
from stillroom.train.config import TrainConfig
from stillroom.train.student import Student


class TrainResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a training run came to."""

    checkpoint: str
    """Folder of the final checkpoint."""
    method: str
    steps: int
    rows: int
    """Rows, pairs or prompts that were trained on."""
    skipped: dict[str, int]
    """Rows that were left out, by reason."""
    trained_tokens: int
    metrics: dict[str, float]
    """The last step's."""
    seconds: float


@dataclass(slots=True)
class Session:
    """One training run in this process."""

    config: TrainConfig
    student: Student
    run: Path
    reporter: Reporter
    started: float
    origin: Origin | None = None
    """For the checkpoints' manifests."""
    trained_tokens: int = 0
    saved_step: int = 0
    """Of the latest checkpoint; at step 0 there is nothing to save."""
    last_metrics: Mapping[str, float] = field(default_factory=dict[str, float])

    def after_step(self, step: int, total: int, metrics: Mapping[str, float]) -> None:
        """Tells of step 1 … total, saves a checkpoint if one is due, and stops if asked to.

        Raises RunCancelledError after writing a checkpoint.
        """
        seconds = time.monotonic() - self.started
        self.last_metrics = {**metrics, "tokens_per_s": self.trained_tokens / seconds}
        self.reporter.metrics(step, self.last_metrics)
        self.reporter.progress(step, total, unit="steps", phase=self.config.dataset_type)
        every = self.config.trainer.save_step
        is_due = every > 0 and step % every == 0 and step < total
        if is_due and not self.reporter.is_cancelled():
            self._checkpoint(step)
        self.stop_before_update(step)

    def stop_before_update(self, step: int) -> None:
        """Stops where the weights are those of `step`, if asked to.

        Raises RunCancelledError after writing a checkpoint.
        """
        if self.reporter.is_cancelled():
            self._checkpoint(step)
            raise RunCancelledError

    def finish(self, step: int, *, rows: int, skipped: Mapping[str, int]) -> TrainResult:
        """Writes the final checkpoint and returns the result."""
        folder = self._save(step, is_final=True)
        return TrainResult(
            checkpoint=str(folder),
            method=self.config.dataset_type,
            steps=step,
            rows=rows,
            skipped=dict(skipped),
            trained_tokens=self.trained_tokens,
            metrics=dict(self.last_metrics),
            seconds=round(time.monotonic() - self.started, 3),
        )

    def _checkpoint(self, step: int) -> None:
        if self.saved_step != step:
            folder = self._save(step, is_final=False)
            self.saved_step = step
            self.reporter.note(f"checkpoint written: {folder}")

    def _save(self, step: int, *, is_final: bool) -> Path:
        return save_checkpoint(
            self.run,
            self.student,
            method=self.config.dataset_type,
            step=step,
            is_final=is_final,
            origin=self.origin,
        )


def epoch_order(num_rows: int, epoch: int, seed: int) -> Sequence[int]:
    """Returns the rows' order in an epoch; the same for the same seed."""
    order = list(range(num_rows))
    random.Random(seed * 1_000_003 + epoch).shuffle(order)
    return order


def batches_of(order: Sequence[int], size: int) -> list[Sequence[int]]:
    """Returns the order cut into batches; the last one may be smaller."""
    return [order[start : start + size] for start in range(0, len(order), size)]
