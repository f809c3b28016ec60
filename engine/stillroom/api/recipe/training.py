"""The stages of a recipe that train: on the first answers, on all, and on-policy."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from stillroom.api.recipe.baselines import EXPORT_S
from stillroom.api.recipe.measuring import ModelEvaluation, measure_validation
from stillroom.api.recipe.session import RecipeSession
from stillroom.api.recipe.teaching import TaughtRows
from stillroom.errors import EngineError, RunError
from stillroom.files import file_sha256
from stillroom.models.resolve import ModelLocation
from stillroom.recipe.files import RecipeFiles
from stillroom.recipe.splits import PromptSplit
from stillroom.recipe.training import (
    Pace,
    PlannedTraining,
    planned_epochs,
    settings_for_templates,
    wanted_epochs,
)
from stillroom.rollout.request import NO_FILE
from stillroom.train.config.request import PlanTraining, StartTraining, plan_request
from stillroom.train.planning.forecast import (
    SftSettings,
    TrainingForecast,
    suitable_sft_settings,
)

PLAN, TRAIN, TRAIN_ALL, DISTIL = (
    "plan training",
    "train",
    "train (2)",
    "distil on-policy",
)
MEASURE = {TRAIN: "validate", TRAIN_ALL: "validate (2)", DISTIL: "validate (3)"}
_STUDENT_NAMES = {
    TRAIN: "student after the first answers",
    TRAIN_ALL: "student after all answers",
    DISTIL: "student after on-policy distillation",
}
_CONFIG_NAMES = {TRAIN: "sft-first", TRAIN_ALL: "sft-all"}
_INITIAL_SETTINGS = SftSettings(0, 2e-4)
_TRAINING_SHARE = 0.5
"""The share of all minutes for training; asking and measuring take the rest."""
_FIRST_SHARE = 0.3
"""The first training's share of the time for both."""
_MIN_RESTART_EPOCHS = 2
"""The second training starts from the untrained student if this many epochs are possible."""
_TEACHER_TOKENS = ("same", "reread")
"""The teacher scores the student's tokens, or its text with the teacher's own tokenizer."""
_MIN_TRAINING_S = 60.0


@dataclass(frozen=True, slots=True)
class TrainedStudent:
    """A trained student, and its evaluation on the validation prompts, by which one is chosen."""

    run_id: str
    evaluation: ModelEvaluation

    @property
    def accuracy(self) -> float:
        """The share of the validation prompts that it answers correctly."""
        return self.evaluation.result.accuracy.value


class Trainer:
    """Trains the student of a recipe within the time that is left."""

    def __init__(self, session: RecipeSession, parts: PromptSplit, validation: Path) -> None:
        self._session, self._parts, self._validation = session, parts, validation
        self._settings = _INITIAL_SETTINGS
        self._pace: Pace | None = None
        """How fast the student trains; known after the plan, if that measured it."""

    def train_first(self, taught: TaughtRows, *, asking_s: float) -> TrainedStudent:
        """Trains and measures a student on the first answers.

        asking_s: the seconds that asking the teacher for the rest will take.
        """
        return self._train_untrained(
            TRAIN, taught, num_evals=2, other_s=asking_s, share=_FIRST_SHARE
        )

    def train_once(self, taught: TaughtRows) -> TrainedStudent:
        """Trains and measures a student on all answers, without a training on the first ones."""
        return self._train_untrained(TRAIN_ALL, taught, num_evals=1)

    def _train_untrained(
        self,
        title: str,
        taught: TaughtRows,
        *,
        num_evals: int,
        other_s: float = 0.0,
        share: float = 1.0,
    ) -> TrainedStudent:
        """Trains and measures the untrained student with a share of the time that is left."""
        student = self._session.request.student
        available_s = self._training_time_s(num_evals=num_evals, other_s=other_s)
        is_late = available_s is not None and available_s < _MIN_TRAINING_S
        if config := self._finished_config(title, [student], taught, is_late=is_late):
            return self._train(title, config)
        if available_s is not None:
            if is_late:
                raise RunError(
                    f"{max(0.0, available_s):.0f} seconds are left for training, fewer than "
                    f"{_MIN_TRAINING_S:.0f}",
                    "give the recipe more time (minutes), or fewer labelled texts; finished stages "
                    "are not repeated",
                )
            available_s *= share
        return self._sft(title, student, taught, available_s)

    def can_train_only_once(self, num_rows: float) -> bool:
        """Returns whether there is time to train only once on `num_rows` rows."""
        minutes = self._session.request.minutes
        if minutes is None or self._pace is None:
            return False
        # Depends on all minutes, not on those left, so that a resumed recipe decides the same.
        return _MIN_RESTART_EPOCHS * num_rows * self._pace.row_s > _TRAINING_SHARE * 60 * minutes

    def train_all(self, student: TrainedStudent, taught: TaughtRows) -> TrainedStudent | None:
        """Trains on all answers: the untrained student if there is time, else `student` further.

        Returns None if there is no time for either.
        """
        available_s = self._training_time_s(num_evals=1)
        is_late = available_s is not None and available_s < _MIN_TRAINING_S
        starts = (self._session.request.student, student.run_id)
        if config := self._finished_config(TRAIN_ALL, starts, taught, is_late=is_late):
            return self._train(TRAIN_ALL, config)
        if is_late:
            self._session.caveats.append(
                f"no time was left to train on all {taught.num_rows} answers: raise minutes"
            )
            return None
        start = self._session.request.student
        if available_s is not None and self._pace is not None:
            possible = self._pace.epochs_within(taught.num_rows, available_s)
            can_restart = possible >= (1 if self._are_templated else _MIN_RESTART_EPOCHS)
            start = start if can_restart else student.run_id
        return self._sft(TRAIN_ALL, start, taught, available_s)

    def distil(self, student: TrainedStudent) -> TrainedStudent | None:
        """Distils on-policy from an open teacher; returns None on failure or too little time."""
        session = self._session
        # tools.py is read next to the config, and the user may have one in the output folder.
        files = RecipeFiles(session.files.folder / "distil")
        key = {"start": student.run_id, "minutes": session.request.minutes}
        configs = {tokens: files.config_path(tokens, key) for tokens in _TEACHER_TOKENS}
        for config in configs.values():
            if self._training_result(config) is not None:
                return self._train(DISTIL, config)
        available_s = self._training_time_s(num_evals=1)
        if available_s is not None and available_s < _MIN_TRAINING_S:
            session.caveats.append("no time was left for on-policy distillation: raise minutes")
            return None
        prompts = files.write_prompts(
            "prompts",
            [*self._parts.first_round, *self._parts.second_round, *self._parts.of_new_forms],
        )
        training = PlannedTraining(
            student.run_id, prompts.name, self._settings, session.request.seed, 1, available_s
        )
        options = session.plan.teacher
        for name, file in (("tools.py", options.tools), ("rewards.py", session.plan.rewards)):
            if file != NO_FILE:
                files.copy_code(name, session.workspace.existing(file, label=name))
        problems = list[str]()
        for tokens, path in configs.items():
            make = partial(
                training.distill_config,
                {"path": self._teacher_path, "tokens": tokens},
                max_turns=options.max_turns,
                max_tokens=session.max_tokens,
                system=session.student_system,
            )
            config = files.write_config(path, make)
            request = StartTraining(config=session.workspace.shown(config))
            try:
                plan_request(session.workspace, request)
            except EngineError as error:
                problems.append(error.problem)
                continue
            try:
                return self._train(DISTIL, config)
            except RunError as error:
                problems = [error.problem]
                break
        session.note_failure("on-policy distillation was not done", problems[0])
        return None

    @property
    def _teacher_path(self) -> str:
        """The teacher for config.yml: the name of an endpoint's model, or of a local model."""
        plan = self._session.plan
        location = plan.teacher_location
        return location.name if isinstance(location, ModelLocation) else plan.teacher.model

    def plan(self, taught: TaughtRows) -> None:
        """Sets the training settings for the student's size, and how fast it trains with them."""
        session, forecast = self._session, self._forecast(taught)
        suitable = suitable_sft_settings(forecast.parameters)
        if suitable.qlora_rank != self._settings.qlora_rank:
            self._settings = suitable
            forecast = self._forecast(taught)
        self._settings = suitable
        if not forecast.fits:
            raise RunError(
                f"training {session.request.student!r} needs {forecast.memory_gb:.1f} GB of "
                "memory, more than is free",
                "; ".join(forecast.changes) or "use a smaller student",
            )
        session.caveats += [f"plan_training: {note}" for note in forecast.checks]
        self._pace = Pace.of(forecast)

    def _forecast(self, taught: TaughtRows) -> TrainingForecast:
        """Returns the forecast of an epoch over the rows with the current settings."""
        session, rows = self._session, taught.train_file.name
        training = PlannedTraining(
            session.request.student, rows, self._settings, session.request.seed,
            chat_template=session.chat_template,
        )  # fmt: skip
        key = {
            "student": session.request.student,
            "rows": file_sha256(taught.train_file),
            "rank": self._settings.qlora_rank,
            **self._template_key,
        }
        path = session.files.config_path("plan", key)
        config = session.files.write_config(path, training.sft_config)
        request = PlanTraining(config=session.workspace.shown(config))

        def plan() -> TrainingForecast:
            return session.stages.call(PLAN, "plan_training", request, TrainingForecast)

        return session.files.stored_document("plan", key, TrainingForecast, plan)

    def _training_time_s(self, *, num_evals: int, other_s: float = 0.0) -> float | None:
        """Returns the seconds left for training, less those of later stages; None without a limit.

        num_evals: validation runs still to come. other_s: the seconds of further stages.
        """
        left = self._session.stages.remaining_s
        if left is None:
            return None
        num_prompts = num_evals * len(self._parts.validation) + 1.5 * len(self._parts.test)
        return left - num_prompts * self._session.prompt_s - EXPORT_S - other_s

    @property
    def _are_templated(self) -> bool:
        """Whether the rows are labels of texts made from templates."""
        return self._parts.are_templated and self._session.has_labels

    def _wanted_epochs(self, taught: TaughtRows) -> int:
        return wanted_epochs(taught.num_rows, are_templated=self._are_templated)

    def _sft(
        self, title: str, start: str, taught: TaughtRows, available_s: float | None
    ) -> TrainedStudent:
        session, epochs = self._session, self._wanted_epochs(taught)
        if available_s is not None and self._pace is not None:
            possible = self._pace.epochs_within(taught.num_rows, available_s)
            if possible < 1:
                session.caveats.append(
                    f"{title}: not enough time for an epoch over {taught.num_rows} rows"
                )
            epochs = max(1, min(epochs, possible))
        settings = self._settings
        if self._are_templated:
            settings = settings_for_templates(settings, epochs)
        training = PlannedTraining(
            start, taught.train_file.name, settings, session.request.seed, epochs, available_s,
            session.chat_template,
        )  # fmt: skip
        config = self._sft_config_path(title, start, taught)
        return self._train(title, session.files.write_config(config, training.sft_config))

    def _sft_config_path(self, title: str, start: str, taught: TaughtRows) -> Path:
        """Returns the path of a training's config, which differs for other `minutes`."""
        key = {"start": start, "rows": file_sha256(taught.train_file), **self._template_key}
        path = self._session.files.config_path(_CONFIG_NAMES[title], key)
        return path.with_stem(f"{path.stem}-{self._session.request.minutes or 0:g}")

    @property
    def _template_key(self) -> dict[str, str]:
        """The chat template that the request names, with which a student is another one."""
        name = self._session.request.chat_template
        return {} if name is None else {"chat_template": name}

    def _finished_config(
        self, title: str, starts: Sequence[str], taught: TaughtRows, *, is_late: bool = False
    ) -> Path | None:
        """Returns the config of a training that an earlier call finished; None if there is none.

        A training that fewer minutes cut short does not count, unless no time is left for another.
        """
        for start in starts:
            current = self._sft_config_path(title, start, taught)
            stem = current.stem.rpartition("-")[0]
            for config in sorted(current.parent.glob(f"{stem}-*.yml")):
                if (result := self._training_result(config)) is None:
                    continue
                epochs = planned_epochs(config.read_text(encoding="utf-8"))
                is_complete = epochs >= self._wanted_epochs(taught) and not result.get("stopped_by")
                if is_complete or is_late or config == current:
                    return config
        return None

    def _training_result(self, config: Path) -> dict[str, Any] | None:
        """Returns the result of the training with this config; None if none has succeeded."""
        if not config.exists():
            return None
        request = StartTraining(config=self._session.workspace.shown(config))
        return self._session.stages.result_of("start_training", request)

    def _train(self, title: str, config: Path) -> TrainedStudent:
        session = self._session
        request = StartTraining(config=session.workspace.shown(config))
        run = session.stages.run(title, "start_training", request)
        if (result := run.result or {}).get("stopped_by"):
            session.caveats.append(
                f"{title}: its share of the time ran out after step {result.get('steps')} of "
                f"{result.get('planned_steps')}"
            )
        evaluation = measure_validation(
            session, MEASURE[title], _STUDENT_NAMES[title], run.run_id, self._validation,
            is_first=title == TRAIN,
        )  # fmt: skip
        return TrainedStudent(run.run_id, evaluation)
