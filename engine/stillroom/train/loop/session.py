"""What every training method shares: the student, its settings, and what it tells and saves."""

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from stillroom.errors import DivergedError, RunCancelledError
from stillroom.reporting import Reporter
from stillroom.train.config.resume import (
    Asked,
    CarriedRollout,
    ResumePoint,
    TrainingState,
    Validation,
)
from stillroom.train.config.schema import TrainConfig
from stillroom.train.loop.alarms import find_alarms
from stillroom.train.loop.checkpoints import (
    Origin,
    RunSnapshot,
    adopt_checkpoint,
    final_checkpoint,
    promote_checkpoint,
    prune_checkpoints,
    save_checkpoint,
    step_name,
)
from stillroom.train.loop.evaluations import Evaluations
from stillroom.train.loop.snapshot import random_state, restore_snapshot, restore_weights
from stillroom.train.student.collective import Collective
from stillroom.train.student.memory import peak_memory_gb
from stillroom.train.student.model import Student
from stillroom.train.student.optimizer import Optimizer
from stillroom.train.student.sharding import own_part


class TrainResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a training run came to."""

    checkpoint: str
    """Folder of the final checkpoint."""
    method: str
    steps: int
    kept_step: int
    """Whose weights the final checkpoint has: with early_stop those of the lowest val_loss."""
    rows: int
    """Rows, pairs or prompts that were trained on."""
    skipped: dict[str, int]
    """Rows that were left out, by reason."""
    trained_tokens: int
    metrics: dict[str, float]
    """The last step's."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a run: the steps after `first_step` up to `last_step`."""

    name: str
    first_step: int
    last_step: int


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
    resumed: ResumePoint | None = None
    """The checkpoint this run goes on from."""
    asked: Asked | None = None
    """What must not change when the run goes on."""
    evaluations: Evaluations | None = None
    trained_tokens: int = 0
    step: int = 0
    """How many steps are done."""
    saved_step: int = 0
    """Of the latest checkpoint; at step 0 there is nothing to save."""
    validation: Validation = field(default_factory=Validation)
    carried: list[CarriedRollout] = field(default_factory=list[CarriedRollout])
    """Rollouts that were begun before this step and go on after it (distill)."""
    history: list[Mapping[str, float]] = field(default_factory=list[Mapping[str, float]])
    """The metrics of the steps so far, also of those before the run was resumed (distill)."""
    last_metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    _optimizer: Optimizer | None = None

    def begin(self, optimizer: Optimizer, *, substeps: int = 1, first_step: int = 0) -> None:
        """Takes the optimiser into the checkpoints; goes on from one if the run is resumed.

        Comes after all that the weights of the run's start decide (a reference's scores, say).
        The optimiser is that of the steps after `first_step`; a later phase begins again.
        """
        self._optimizer = optimizer
        if (point := self.resumed) is None or self.step > 0:
            return
        state = point.state
        restore_weights(self.student, point.checkpoint)
        kept = restore_snapshot(point.checkpoint, rank=self._peers.rank)
        if state.step > first_step:
            optimizer.restore(kept, num_steps=(state.step - first_step) * substeps)
        self.step, self.trained_tokens = state.step, state.trained_tokens
        self.carried = list(state.carried)
        self.validation = state.validation
        self.started -= state.seconds
        if self._peers.is_first and (best := state.validation.best_step):
            adopt_checkpoint(point.checkpoint.with_name(step_name(best)), self.run)
        self._tell_again(point)

    def batches(
        self, num_rows: int, *, size: int | None = None, num_epochs: int | None = None
    ) -> Iterator[tuple[int, Sequence[int]]]:
        """Yields the epoch (from 0) and the rows of each step that is left.

        size, num_epochs: of a phase that has its own.
        Ends early where `trainer.early_stop` says so.
        """
        data, trainer = self.config.data, self.config.trainer
        step = 0
        for epoch in range(num_epochs or trainer.num_epochs):
            order = epoch_order(num_rows, epoch, trainer.seed)
            for chosen in batches_of(order, size or data.batch_size):
                step += 1
                if self.is_stalled:
                    return
                if step > self.step:
                    yield epoch, chosen

    @property
    def is_stalled(self) -> bool:
        """Whether the held-out rows have not got better for as long as early_stop allows."""
        patience = self.config.trainer.early_stop
        return patience is not None and self.validation.num_worse >= patience

    def after_step(
        self,
        step: int,
        total: int,
        metrics: Mapping[str, float],
        *,
        phase: Phase | None = None,
    ) -> None:
        """Tells of step 1 … total, saves a checkpoint if one is due, and stops if asked to.

        A run of several phases says in which it is, for how long that takes is told by phase.
        Raises RunCancelledError after writing a checkpoint.
        """
        within = phase or Phase(self.config.dataset_type, 0, total)
        self.step = step
        evaluated = self.evaluations.measure(step, total) if self.evaluations else {}
        seconds = time.monotonic() - self.started
        self.last_metrics = {
            **metrics,
            **evaluated,
            "tokens_per_s": self.trained_tokens / seconds,
            # Of the process that holds most.
            "memory_gb": self._peers.largest(peak_memory_gb(self.student.loaded.device)),
        }
        self.reporter.metrics(step, self.last_metrics)
        self._watch(self.last_metrics)
        self.reporter.progress(
            step - within.first_step,
            within.last_step - within.first_step,
            unit="steps",
            phase=within.name,
        )
        is_best = self._validated(step, metrics.get("val_loss"))
        every = self.config.trainer.save_step
        is_stage = step == within.last_step < total
        is_due = is_best or is_stage or (every > 0 and step % every == 0 and step < total)
        is_stopping = self._peers.is_any(self.reporter.is_cancelled())
        if is_due or is_stopping:
            self._checkpoint(step)
        if is_stopping:
            raise RunCancelledError

    def stop_before_update(self, step: int) -> None:
        """Stops where the weights are those of `step`, if asked to.

        Raises RunCancelledError after writing a checkpoint.
        """
        if self._peers.is_any(self.reporter.is_cancelled()):
            self._checkpoint(step)
            raise RunCancelledError

    @property
    def is_told_to_stop(self) -> bool:
        """Whether this process knows that the run has been asked to stop."""
        return self.reporter.is_cancelled()

    def finish(self, step: int, *, rows: int, skipped: Mapping[str, int]) -> TrainResult:
        """Writes the final checkpoint (with early_stop: the best one) and returns the result."""
        kept_step = self.validation.best_step or step
        if kept_step < step:
            folder = final_checkpoint(self.run)
            if self._peers.is_first:
                promote_checkpoint(self.run, step=kept_step, origin=self.origin)
        else:
            folder = self._save(step, is_final=True)
        return TrainResult(
            checkpoint=str(folder),
            method=self.config.dataset_type,
            steps=step,
            kept_step=kept_step,
            rows=rows,
            skipped=dict(skipped),
            trained_tokens=self.trained_tokens,
            metrics=dict(self.last_metrics),
            seconds=round(time.monotonic() - self.started, 3),
        )

    def _watch(self, metrics: Mapping[str, float]) -> None:
        """Tells what has gone wrong in the iterations so far (distill)."""
        if self.config.dataset_type == "distill":
            self.history.append(metrics)
            alarms = find_alarms(self.history)
            self.reporter.alarms([f"{alarm.name}: {alarm.text}" for alarm in alarms])

    def _validated(self, step: int, loss: float | None) -> bool:
        """Returns whether the step is the best so far and must be kept for the end."""
        if loss is None or self.config.trainer.early_stop is None:
            return False
        self.validation = self.validation.after(step, loss)
        if self.is_stalled:
            best = self.validation.best_step
            self.reporter.note(f"stops early: val_loss was lowest at step {best}")
        return self.validation.best_step == step

    @property
    def _peers(self) -> Collective:
        return self.student.peers

    def _checkpoint(self, step: int) -> None:
        if self.saved_step != step:
            is_finite = all(bool(own_part(p).isfinite().all()) for p in self.student.trainable())
            if self._peers.is_any(not is_finite):
                raise DivergedError(
                    f"the weights of step {step} are not finite: training has diverged",
                    "lower trainer.learning_rate (a tenth is a good try)",
                )
            folder = self._save(step, is_final=False)
            self.saved_step = step
            self.reporter.note(f"checkpoint written: {folder}")
            keep = self.config.trainer.keep_checkpoints
            if keep is not None and self._peers.is_first:
                prune_checkpoints(self.run, keep=keep, also=[self.validation.best_step])

    def _save(self, step: int, *, is_final: bool) -> Path:
        return save_checkpoint(
            self.run,
            self.student,
            method=self.config.dataset_type,
            step=step,
            is_final=is_final,
            origin=self.origin,
            snapshot=None if is_final else self._snapshot(step),
        )

    def _snapshot(self, step: int) -> RunSnapshot | None:
        if self._optimizer is None:
            return None
        state = TrainingState(
            step=step,
            trained_tokens=self.trained_tokens,
            seconds=round(time.monotonic() - self.started, 3),
            validation=self.validation,
            asked=self.asked,
            carried=self.carried,
        )
        return RunSnapshot(state, self._optimizer.state(), self._peers.gathered(random_state()))

    def _tell_again(self, point: ResumePoint) -> None:
        """Puts the steps that are done into this run's metrics, so that its curves are whole."""
        for step, values in point.recorded_metrics():
            if step <= point.state.step:
                self.reporter.metrics(step, values)
                self._watch(values)
        self.reporter.note(f"goes on from step {point.state.step} of {point.run_id}")


def epoch_order(num_rows: int, epoch: int, seed: int) -> Sequence[int]:
    """Returns the rows' order in an epoch; the same for the same seed."""
    order = list(range(num_rows))
    random.Random(seed * 1_000_003 + epoch).shuffle(order)
    return order


def batches_of(order: Sequence[int], size: int) -> list[Sequence[int]]:
    """Returns the order cut into batches; the last one may be smaller."""
    return [order[start : start + size] for start in range(0, len(order), size)]
