"""What all methods share: steps, metrics, limits and checkpoints."""

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
)
from stillroom.train.loop.evaluations import TrainingEvaluations
from stillroom.train.loop.rows import batches_of, epoch_order
from stillroom.train.student.collective import Collective, local_shard
from stillroom.train.student.model import Optimizer, Student, peak_memory_gb

_IDLE_STEPS = 3
"""The number of consecutive steps without a gradient that raises an alarm."""


class TrainResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a training run."""

    checkpoint: str
    """The folder of the final checkpoint."""
    method: str
    steps: int
    """The number of steps that were taken."""
    planned_steps: int
    """The number of steps that the configuration gives; `steps` is lower if the run ended early."""
    stopped_by: str | None = None
    """The limit that ended the run early, e.g. trainer.max_minutes; None if it ran to its end."""
    kept_step: int
    """The step of the final checkpoint; with early_stop, the step with the lowest val_loss."""
    rows: int
    """The number of rows, pairs or prompts that were trained on."""
    skipped: dict[str, int]
    """The number of rows that were skipped, by reason."""
    trained_tokens: int
    metrics: dict[str, float]
    """The metrics of the last step."""
    seconds: float
    """The seconds of the work; on another machine without installation and transfers."""
    parameters: int | None = None
    """The number of the student's parameters; None in runs of older versions."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a run: the steps after `first_step`, up to and including `last_step`."""

    name: str
    first_step: int
    last_step: int


class MethodProgress(Protocol):
    """The state that a method keeps between steps; the session saves and restores it."""

    carried: list[CarriedRollout]
    """The unfinished rollouts that continue in a later step; saved in checkpoints."""

    def alarms_after(self, metrics: Mapping[str, float]) -> Sequence[str]:
        """Adds the metrics of one more step and returns the current alarms."""
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
    """The start on the monotonic clock (s), minus the seconds trained before the run was
    resumed."""
    sources: RunSources | None = None
    """The files, models and request for the checkpoints' manifests."""
    resumed: ResumePoint | None = None
    """The checkpoint that this run resumes from."""
    inputs: RunInputs | None = None
    """The inputs that must be unchanged when the run is resumed."""
    evaluations: TrainingEvaluations | None = None
    progress: MethodProgress | None = None
    """The state of the method besides the weights (distill); None for other methods."""
    trained_tokens: int = 0
    clock: Callable[[], float] = time.monotonic
    """The clock of `started` and of the time limit, in seconds."""
    deadline: float = math.inf
    """When the run has to end, in seconds on `clock`."""
    stopped_by: str | None = None
    """The limit that the run has reached; None before that."""
    planned_steps: int = 0
    """The number of steps of the whole run."""
    step: int = 0
    """The number of finished steps."""
    saved_step: int = 0
    """The step of the latest checkpoint; 0 before there is one."""
    validation: BestValidation = field(default_factory=BestValidation)
    last_metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    _optimizer: Optimizer | None = None
    _speed_start: tuple[float, int] | None = None
    """The monotonic time (s) of the first step, and the tokens trained on before it."""
    _phase_start: float = 0.0
    """The start of the phase on `clock` (s), moved back on a resume by the time already spent, so
    `clock() - _phase_start` is the phase's total duration."""
    _num_idle: int = 0
    """The number of consecutive steps without a gradient."""

    def begin(self, optimizer: Optimizer, *, substeps: int = 1, first_step: int = 0) -> None:
        """Registers the optimiser that checkpoints save, and restores the state of a resumed run.

        Call this after everything that needs the initial weights (such as the scores of a DPO
        reference), because it overwrites them. The optimiser takes the steps after `first_step`,
        each in `substeps` updates; a later phase calls this again.
        """
        self._optimizer, self._phase_start = optimizer, self.clock()
        self._speed_start = self._speed_start or (self.clock(), self.trained_tokens)
        if (point := self.resumed) is None or self.step > 0:
            return
        state = point.state
        restore_weights(self.student, point.checkpoint)
        tensors = restore_snapshot(point.checkpoint, rank=self._peers.rank)
        if state.step > first_step:
            optimizer.restore(tensors, num_steps=(state.step - first_step) * substeps)
            self._phase_start -= state.seconds_of_phase
            self._note_time_share()
        self.step, self.trained_tokens = state.step, state.trained_tokens
        self._speed_start = self.clock(), state.trained_tokens
        if self.progress is not None:
            self.progress.carried = list(state.carried)
        self.validation = state.validation
        self.started -= state.seconds
        if self._peers.is_first and point.best_checkpoint is not None:
            adopt_checkpoint(point.best_checkpoint, self.run)
        self._copy_metrics(point)

    def batches(
        self, num_rows: int, *, size: int | None = None, num_epochs: int | None = None
    ) -> Iterator[Sequence[int]]:
        """Yields the row indices of each remaining step.

        size, num_epochs: the batch size and epochs of a phase; None: those of the configuration.
        Stops when `trainer.early_stop` or `trainer.max_minutes` is reached.
        """
        data, trainer = self.config.data, self.config.trainer
        step = 0
        for epoch in range(num_epochs or trainer.num_epochs):
            order = epoch_order(num_rows, epoch, trainer.seed)
            for rows in batches_of(order, size or data.batch_size):
                step += 1
                if self.is_stalled or self.stopped_by is not None:
                    return
                if step > self.step:
                    yield rows

    def train_rows(
        self,
        num_rows: int,
        accumulate: Callable[[Sequence[int]], Mapping[str, float]],
        validate: Callable[[], Mapping[str, float]],
    ) -> int:
        """Takes the steps of all epochs on fixed rows and returns their number.

        accumulate: adds the gradient of a batch of rows and returns its metrics.
        validate: returns the metrics of held-out rows, after each epoch; {} without such rows.
        """
        trainer = self.config.trainer
        per_epoch = math.ceil(num_rows / self.config.data.batch_size)
        total_steps = per_epoch * trainer.num_epochs
        optimizer = self.student.optimizer(trainer, total_steps=total_steps)
        self.begin(optimizer)
        for rows in self.batches(num_rows):
            metrics = {**accumulate(rows), **optimizer.step().metrics}
            # The number of epochs done, as TRL logs it: 0.25 after a quarter of the first one.
            metrics["epoch"] = round(optimizer.num_steps / per_epoch, 4)
            if optimizer.num_steps % per_epoch == 0:
                metrics |= validate()
            self.after_step(optimizer.num_steps, total_steps, metrics)
        return optimizer.num_steps

    @property
    def is_stalled(self) -> bool:
        """Whether val_loss has not improved for `early_stop` validations."""
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
        """Reports step `step` of `total`, saves a checkpoint if due, and stops a cancelled run.

        At the time limit it sets `stopped_by`, and the caller takes no further step.
        phase: the current phase of a run with several; progress is reported per phase.
        Raises RunCancelledError after writing a checkpoint.
        """
        phase = phase or Phase(self.config.dataset_type, 0, total)
        self.step, self.planned_steps = step, total
        evaluated = self.evaluations.measure(step, total) if self.evaluations else {}
        self.last_metrics = {
            **metrics,
            **evaluated,
            "tokens_per_s": self._tokens_per_s(),
            # Of the process with the most memory, since it is the first to run out.
            "memory_gb": self._peers.largest(peak_memory_gb(self.student.loaded.device)),
        }
        self.reporter.metrics(step, self.last_metrics)
        self._report_alarms(self.last_metrics, num_steps=total)
        done, num_steps = step - phase.first_step, phase.last_step - phase.first_step
        eta_s = self._seconds_left(done, num_steps)
        self.reporter.progress(done, num_steps, unit="steps", phase=phase.name, eta_s=eta_s)
        is_best = self._record_validation(step, metrics.get("val_loss"))
        every = self.config.trainer.save_step
        is_phase_end = step == phase.last_step < total
        is_due = is_best or is_phase_end or (every > 0 and step % every == 0 and step < total)
        is_stopping = self._peers.is_any(self.reporter.is_cancelled())
        is_at_time_limit = step < total and self._peers.is_any(self.clock() >= self.deadline)
        if is_due or is_stopping or is_at_time_limit:
            self._save_and_prune(step)
        if is_stopping:
            raise RunCancelledError
        if is_at_time_limit and not self.is_stalled:
            self._stop_at_limit(step, total)
        self._note_time_share()

    def _seconds_left(self, done: int, total: int) -> float | None:
        """Returns the seconds until the phase's last step or the time limit; None: without one."""
        if self.deadline == math.inf or done < 1:
            return None
        now_s = self.clock()
        by_rate = (now_s - self._phase_start) / done * (total - done)
        return round(max(0.0, min(by_rate, self.deadline - now_s)), 1)

    def _note_time_share(self) -> None:
        """Passes the used share of the time limit to the optimiser, the same in all processes."""
        if self._optimizer is not None and self.deadline < math.inf:
            limit_s = max(1e-9, self.deadline - self._phase_start)
            share = min(1.0, (self.clock() - self._phase_start) / limit_s)
            self._optimizer.time_share = self._peers.largest(share)

    def _stop_at_limit(self, step: int, total: int) -> None:
        self.stopped_by = "trainer.max_minutes"
        self.reporter.note(
            f"stopped at its time limit after step {step} of {total} (trainer.max_minutes "
            f"{self.config.trainer.max_minutes:g}); resume the run with a higher limit to take the "
            "remaining steps"
        )

    def stop_before_update(self, step: int) -> None:
        """Stops a cancelled run before the weights of `step` are updated.

        Raises RunCancelledError after writing a checkpoint.
        """
        if self._peers.is_any(self.reporter.is_cancelled()):
            self._save_and_prune(step)
            raise RunCancelledError

    @property
    def is_cancelled(self) -> bool:
        """Whether this process has seen the run's cancellation; others may see it later."""
        return self.reporter.is_cancelled()

    def finish(self, step: int, *, rows: int, skipped: Mapping[str, int]) -> TrainResult:
        """Writes the final checkpoint (with early_stop the best step's) and returns the result."""
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
            planned_steps=max(step, self.planned_steps),
            stopped_by=self.stopped_by,
            kept_step=kept_step,
            rows=rows,
            skipped=dict(skipped),
            trained_tokens=self.trained_tokens,
            metrics=dict(self.last_metrics),
            seconds=round(self.clock() - self.started, 3),
            parameters=sum(p.numel() for p in self.student.module.parameters()),
        )

    def _report_alarms(self, metrics: Mapping[str, float], *, num_steps: int) -> None:
        """Reports the method's current alarms, and one for steps without a gradient.

        num_steps: the total number of steps of the run.
        """
        self._num_idle = self._num_idle + 1 if metrics.get("grad_norm") == 0 else 0
        alarms = [] if self.progress is None else list(self.progress.alarms_after(metrics))
        if self._num_idle >= min(_IDLE_STEPS, num_steps):
            alarms.insert(
                0,
                f"no_gradient: the gradient of the last {self._num_idle} steps was zero, so the "
                "student learns nothing: the teacher may be the student itself, or no token of the "
                "rows or rollouts is trained on; cancel, and inspect them with inspect_examples",
            )
        self.reporter.alarms(alarms)

    def _record_validation(self, step: int, loss: float | None) -> bool:
        """Records a val_loss; returns whether it is the lowest so far (its checkpoint is kept)."""
        if loss is None or self.config.trainer.early_stop is None:
            return False
        self.validation = self.validation.with_validation(step, loss)
        if self.is_stalled:
            best = self.validation.best_step
            self.reporter.note(f"early stopping: val_loss was lowest at step {best}")
        return self.validation.best_step == step

    def _tokens_per_s(self) -> float:
        """Returns the trained tokens per second since the first step, excluding model loading."""
        start, start_tokens = self._speed_start or (self.started, 0)
        return (self.trained_tokens - start_tokens) / max(1e-9, self.clock() - start)

    @property
    def _peers(self) -> Collective:
        return self.student.peers

    def _save_and_prune(self, step: int) -> None:
        """Saves a checkpoint of the step, unless it has one, and deletes the oldest ones.

        Raises DivergedError if a weight is not finite.
        """
        # A run cancelled right after the checkpoint of this step has nothing new to save.
        if self.saved_step != step:
            is_finite = all(bool(local_shard(p).isfinite().all()) for p in self.student.trainable())
            if self._peers.is_any(not is_finite):
                raise DivergedError(
                    f"the weights of step {step} are not finite: training has diverged",
                    "lower trainer.learning_rate (try a tenth)",
                )
            folder = self._save(step, is_final=False)
            self.saved_step = step
            self.reporter.note(f"checkpoint written: {folder}")
            keep = self.config.trainer.keep_checkpoints
            if keep is not None and self._peers.is_first:
                prune_checkpoints(self.run, keep=keep, best_step=self.validation.best_step)

    def _save(self, step: int, *, is_final: bool) -> Path:
        """Writes a checkpoint and returns its folder."""
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
        """Returns the state to resume from; None before the first phase has an optimiser."""
        if self._optimizer is None:
            return None
        state = TrainingState(
            step=step,
            trained_tokens=self.trained_tokens,
            seconds=round(self.clock() - self.started, 3),
            phase_seconds=round(self.clock() - self._phase_start, 3),
            validation=self.validation,
            inputs=self.inputs,
            carried=[] if self.progress is None else self.progress.carried,
        )
        return RunSnapshot(state, self._optimizer.state(), self._peers.gathered(random_state()))

    def _copy_metrics(self, point: ResumePoint) -> None:
        """Copies earlier steps' metrics into a resumed run, so that its curves are complete."""
        for step, values in point.recorded_metrics():
            if step <= point.state.step:
                self.reporter.metrics(step, values)
                self._report_alarms(values, num_steps=_IDLE_STEPS)
        self.reporter.note(f"resumes at step {point.state.step} of {point.run_id}")
