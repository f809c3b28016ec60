"""The session of a training run, the same for all methods: steps, metrics and checkpoints."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import msgspec

from stillroom.errors import DivergedError, RunCancelledError
from stillroom.reporting import Reporter
from stillroom.train.config.resume import (
    BestValidation,
    CarriedRollout,
    ResumePoint,
    RunInputs,
    TrainingState,
)
from stillroom.train.config.schema import TrainConfig
from stillroom.train.loop.checkpoints import (
    RunSnapshot,
    RunSources,
    adopt_checkpoint,
    final_checkpoint,
    promote_checkpoint,
    prune_checkpoints,
    random_state,
    restore_snapshot,
    restore_weights,
    save_checkpoint,
    step_name,
)
from stillroom.train.loop.evaluations import TrainingEvaluations
from stillroom.train.student.collective import Collective, own_part
from stillroom.train.student.encode import batches_of, epoch_order
from stillroom.train.student.model import Student, peak_memory_gb
from stillroom.train.student.optimizer import Optimizer


class TrainResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a training run."""

    checkpoint: str
    """The folder of the final checkpoint."""
    method: str
    steps: int
    kept_step: int
    """The step of the final checkpoint; with early_stop, the step with the lowest val_loss."""
    rows: int
    """The number of rows, pairs or prompts that were trained on."""
    skipped: dict[str, int]
    """The number of rows that were left out, by reason."""
    trained_tokens: int
    metrics: dict[str, float]
    """The metrics of the last step."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a run: the steps after `first_step` up to and including `last_step`."""

    name: str
    first_step: int
    last_step: int


class MethodProgress(Protocol):
    """The state that a method keeps from step to step; the session saves and restores it."""

    carried: list[CarriedRollout]
    """The rollouts that continue in a later step; kept in checkpoints."""

    def alarms_after(self, metrics: Mapping[str, float]) -> Sequence[str]:
        """Adds the metrics of one more step and returns the alarms that now hold."""
        ...


ConfigT_co = TypeVar("ConfigT_co", bound=TrainConfig, covariant=True)


@dataclass(slots=True)
class Session(Generic[ConfigT_co]):
    """One training run in this process."""

    config: ConfigT_co
    student: Student
    run: Path
    """The run's folder."""
    reporter: Reporter
    started: float
    """The monotonic clock's time (s) at the start, less the seconds that the run took before it was
    resumed."""
    sources: RunSources | None = None
    """The files, models and request that the checkpoints' manifests name."""
    resumed: ResumePoint | None = None
    """The checkpoint that this run is resumed from."""
    inputs: RunInputs | None = None
    """The inputs that must be the same when the run is resumed."""
    evaluations: TrainingEvaluations | None = None
    progress: MethodProgress | None = None
    """The state that a method keeps besides the weights (distill); None for other methods."""
    trained_tokens: int = 0
    step: int = 0
    """The number of finished steps."""
    saved_step: int = 0
    """The step of the latest checkpoint; 0 before there is one."""
    validation: BestValidation = field(default_factory=BestValidation)
    last_metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    _optimizer: Optimizer | None = None

    def begin(self, optimizer: Optimizer, *, substeps: int = 1, first_step: int = 0) -> None:
        """Registers the optimiser that checkpoints save, and restores the state of a resumed run.

        Call this after everything that needs the weights at the run's start (such as the scores of
        a DPO reference), because it overwrites them. The optimiser takes the steps after
        `first_step`, each in `substeps` updates; a later phase calls this again.
        """
        self._optimizer = optimizer
        if (point := self.resumed) is None or self.step > 0:
            return
        state = point.state
        restore_weights(self.student, point.checkpoint)
        tensors = restore_snapshot(point.checkpoint, rank=self._peers.rank)
        if state.step > first_step:
            optimizer.restore(tensors, num_steps=(state.step - first_step) * substeps)
        self.step, self.trained_tokens = state.step, state.trained_tokens
        if self.progress is not None:
            self.progress.carried = list(state.carried)
        self.validation = state.validation
        self.started -= state.seconds
        if self._peers.is_first and (best := state.validation.best_step):
            adopt_checkpoint(point.checkpoint.with_name(step_name(best)), self.run)
        self._report_again(point)

    def batches(
        self, num_rows: int, *, size: int | None = None, num_epochs: int | None = None
    ) -> Iterator[tuple[int, Sequence[int]]]:
        """Yields the epoch (from 0) and the rows of each step that has not been taken yet.

        size, num_epochs: the batch size and epochs of a phase; None: those of the configuration.
        Ends early once `trainer.early_stop` is reached.
        """
        data, trainer = self.config.data, self.config.trainer
        step = 0
        for epoch in range(num_epochs or trainer.num_epochs):
            order = epoch_order(num_rows, epoch, trainer.seed)
            for rows in batches_of(order, size or data.batch_size):
                step += 1
                if self.is_stalled:
                    return
                if step > self.step:
                    yield epoch, rows

    def train_rows(
        self,
        num_rows: int,
        accumulate: Callable[[Sequence[int]], Mapping[str, float]],
        validate: Callable[[], Mapping[str, float]],
    ) -> int:
        """Takes the steps of all epochs on fixed rows and returns their number.

        accumulate: adds the gradient of some rows and returns their metrics.
        validate: returns the metrics of held-out rows, after each epoch; none without such rows.
        """
        trainer = self.config.trainer
        per_epoch = math.ceil(num_rows / self.config.data.batch_size)
        total_steps = per_epoch * trainer.num_epochs
        optimizer = self.student.optimizer(trainer, total_steps=total_steps)
        self.begin(optimizer)
        for epoch, rows in self.batches(num_rows):
            metrics = {**accumulate(rows), **optimizer.step().metrics, "epoch": epoch + 1}
            if optimizer.num_steps % per_epoch == 0:
                metrics |= validate()
            self.after_step(optimizer.num_steps, total_steps, metrics)
        return optimizer.num_steps

    @property
    def is_stalled(self) -> bool:
        """Whether val_loss has not improved for as many validations as early_stop allows."""
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
        """Reports a step (from 1 to `total`), saves a checkpoint if due, and stops a cancelled run.

        phase: the phase of a run that has several; progress is reported by phase.
        Raises RunCancelledError after writing a checkpoint.
        """
        phase = phase or Phase(self.config.dataset_type, 0, total)
        self.step = step
        evaluated = self.evaluations.measure(step, total) if self.evaluations else {}
        seconds = time.monotonic() - self.started
        self.last_metrics = {
            **metrics,
            **evaluated,
            "tokens_per_s": self.trained_tokens / seconds,
            # The process with the most memory, since it is the first to run out.
            "memory_gb": self._peers.largest(peak_memory_gb(self.student.loaded.device)),
        }
        self.reporter.metrics(step, self.last_metrics)
        self._watch(self.last_metrics)
        self.reporter.progress(
            step - phase.first_step,
            phase.last_step - phase.first_step,
            unit="steps",
            phase=phase.name,
        )
        is_best = self._validated(step, metrics.get("val_loss"))
        every = self.config.trainer.save_step
        is_phase_end = step == phase.last_step < total
        is_due = is_best or is_phase_end or (every > 0 and step % every == 0 and step < total)
        is_stopping = self._peers.is_any(self.reporter.is_cancelled())
        if is_due or is_stopping:
            self._checkpoint(step)
        if is_stopping:
            raise RunCancelledError

    def stop_before_update(self, step: int) -> None:
        """Stops a cancelled run while the weights are still those of `step`.

        Raises RunCancelledError after writing a checkpoint.
        """
        if self._peers.is_any(self.reporter.is_cancelled()):
            self._checkpoint(step)
            raise RunCancelledError

    @property
    def is_cancelled(self) -> bool:
        """Whether this process has seen that the run is cancelled; others may see it later."""
        return self.reporter.is_cancelled()

    def finish(self, step: int, *, rows: int, skipped: Mapping[str, int]) -> TrainResult:
        """Writes the final checkpoint (with early_stop of the best step) and returns the result."""
        kept_step = self.validation.best_step or step
        if kept_step < step:
            folder = final_checkpoint(self.run)
            if self._peers.is_first:
                promote_checkpoint(self.run, step=kept_step, sources=self.sources)
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
        """Reports the alarms that now hold, if the method raises any."""
        if self.progress is not None:
            self.reporter.alarms(self.progress.alarms_after(metrics))

    def _validated(self, step: int, loss: float | None) -> bool:
        """Returns whether the step has the lowest val_loss so far; its checkpoint is then kept."""
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
        # A run that is cancelled right after a checkpoint of this step has nothing new to save.
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
                prune_checkpoints(self.run, keep=keep, best_step=self.validation.best_step)

    def _save(self, step: int, *, is_final: bool) -> Path:
        return save_checkpoint(
            self.run,
            self.student,
            method=self.config.dataset_type,
            step=step,
            is_final=is_final,
            sources=self.sources,
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
            inputs=self.inputs,
            carried=[] if self.progress is None else self.progress.carried,
        )
        return RunSnapshot(state, self._optimizer.state(), self._peers.gathered(random_state()))

    def _report_again(self, point: ResumePoint) -> None:
        """Copies earlier steps' metrics into a resumed run, so that its curves are complete."""
        for step, values in point.recorded_metrics():
            if step <= point.state.step:
                self.reporter.metrics(step, values)
                self._watch(values)
        self.reporter.note(f"resumes at step {point.state.step} of {point.run_id}")
