"""The stages of a recipe that train: on the first answers, on all, and on-policy."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from stillroom.api.recipe.measuring import Evaluated, measure_validation
from stillroom.api.recipe.session import RecipeSession
from stillroom.api.recipe.teaching import Taught
from stillroom.data.chat.template import is_chatml_without_tools
from stillroom.errors import EngineError, RunError
from stillroom.files import file_sha256
from stillroom.lines import read_lines
from stillroom.models.resolve import ModelLocation
from stillroom.models.tokenizer import tokenizer_for
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
_NAMES = {
    TRAIN: "student after the first answers",
    TRAIN_ALL: "student after all answers",
    DISTIL: "student after on-policy distillation",
}
_CONFIGS = {TRAIN: "sft-first", TRAIN_ALL: "sft-all"}
_GUESS = SftSettings(0, 2e-4)
_TRAINING_SHARE = 0.5
"""The share of all minutes that trainings may take; asking and measuring take the rest."""
_FIRST_SHARE = 0.3
"""The first training's share of the time for both."""
_ANEW_EPOCHS = 2
"""The epochs from which on the second training begins anew; it then does no worse on new texts."""
_TEACHER_TOKENS = ("same", "reread")
"""Whether the teacher reads the student's tokens, or its text: with another tokenizer."""
_EXPORT_S, _MIN_S = 60.0, 60.0


@dataclass(frozen=True, slots=True)
class TrainedStudent:
    """A trained student, and how it did on the prompts that decide which one is kept."""

    run_id: str
    validated: Evaluated

    @property
    def accuracy(self) -> float:
        """The share of the validation prompts that it was right on."""
        return self.validated.result.accuracy.value


class Trainer:
    """Trains the student of a recipe within the time that is left."""

    def __init__(self, session: RecipeSession, parts: PromptSplit, validation: Path) -> None:
        self._session, self._parts, self._validation = session, parts, validation
        self._settings = _GUESS
        self._pace: Pace | None = None
        """How fast the student trains; known after the plan, if that measured it."""

    def train_first(self, taught: Taught, *, asking_s: float) -> TrainedStudent:
        """Trains and measures a student on the first answers.

        asking_s: the seconds that asking the teacher for the rest will take.
        """
        return self._train_anew(TRAIN, taught, num_measures=2, other_s=asking_s, share=_FIRST_SHARE)

    def train_once(self, taught: Taught) -> TrainedStudent:
        """Trains and measures a student on all answers, without a training on the first ones."""
        return self._train_anew(TRAIN_ALL, taught, num_measures=1)

    def _train_anew(
        self,
        title: str,
        taught: Taught,
        *,
        num_measures: int,
        other_s: float = 0.0,
        share: float = 1.0,
    ) -> TrainedStudent:
        """Trains and measures the untrained student with a share of the time that is left."""
        student = self._session.request.student
        available = self._time_left(num_measures=num_measures, other_s=other_s)
        is_late = available is not None and available < _MIN_S
        if (earlier := self._earlier(title, [student], taught, is_late=is_late)) is not None:
            return self._train(title, earlier)
        if available is not None:
            if is_late:
                raise RunError(
                    f"{max(0.0, available):.0f} seconds are left to train in, less than "
                    f"{_MIN_S:.0f}",
                    "give the recipe more time (minutes), or fewer labelled texts; what is done is "
                    "not done again",
                )
            available *= share
        return self._sft(title, student, taught, available)

    def is_slow(self, num_rows: float) -> bool:
        """Returns whether the time suffices for no more than one training on so many rows."""
        minutes = self._session.request.minutes
        if minutes is None or self._pace is None:
            return False
        # Of all the minutes: an answer that depended on those left would change on resuming.
        return _ANEW_EPOCHS * num_rows * self._pace.row_s > _TRAINING_SHARE * 60 * minutes

    def train_all(self, student: TrainedStudent, taught: Taught) -> TrainedStudent | None:
        """Trains on all answers, anew if the time suffices, else the student further.

        Returns None if the time does not suffice.
        """
        available = self._time_left(num_measures=1)
        is_late = available is not None and available < _MIN_S
        starts = (self._session.request.student, student.run_id)
        if (earlier := self._earlier(TRAIN_ALL, starts, taught, is_late=is_late)) is not None:
            return self._train(TRAIN_ALL, earlier)
        if is_late:
            self._session.caveats.append(
                f"no time was left to train on all {taught.num_rows} answers: more minutes help"
            )
            return None
        start = self._session.request.student
        if available is not None and self._pace is not None:
            possible = self._pace.epochs_within(taught.num_rows, available)
            is_anew = possible >= (1 if self._are_templated else _ANEW_EPOCHS)
            start = start if is_anew else student.run_id
        return self._sft(TRAIN_ALL, start, taught, available)

    def distil(self, student: TrainedStudent) -> TrainedStudent | None:
        """Distils on-policy from an open teacher; None if it cannot be done, or not in time."""
        session = self._session
        # tools.py is read next to the config, and the user may have another one in the output.
        files = RecipeFiles(session.files.folder / "distil")
        key = {"start": student.run_id, "minutes": session.request.minutes}
        configs = {tokens: files.config_path(tokens, key) for tokens in _TEACHER_TOKENS}
        for config in configs.values():
            if self._result(config) is not None:
                return self._train(DISTIL, config)
        available = self._time_left(num_measures=1)
        if available is not None and available < _MIN_S:
            session.caveats.append("no time was left for on-policy distillation: more minutes help")
            return None
        prompts = files.write_prompts(
            "prompts",
            [*self._parts.first_round, *self._parts.second_round, *self._parts.of_new_forms],
        )
        training = PlannedTraining(
            student.run_id, prompts.name, self._settings, session.request.seed, 1, available
        )
        options = session.plan.teacher
        for name, given in (("tools.py", options.tools), ("rewards.py", session.plan.rewards)):
            if given != NO_FILE:
                files.copy_code(name, session.workspace.existing(given, label=name))
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
        session.leave_out("on-policy distillation was not done", problems[0])
        return None

    @property
    def _teacher_path(self) -> str:
        """The teacher's name as config.yml takes it."""
        place = self._session.plan.teacher_at
        return place.name if isinstance(place, ModelLocation) else self._session.plan.teacher.model

    def plan(self, taught: Taught) -> None:
        """Finds the settings that suit the student's size, and its pace with them."""
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

    def _forecast(self, taught: Taught) -> TrainingForecast:
        """Returns the forecast of an epoch over the rows with the present settings."""
        session, rows = self._session, taught.train_file.name
        training = PlannedTraining(
            session.request.student, rows, self._settings, session.request.seed,
            chat_template=self._chat_template(taught),
        )  # fmt: skip
        key = {"rows": file_sha256(taught.train_file), "rank": self._settings.qlora_rank}
        path = session.files.config_path("plan", key)
        config = session.files.write_config(path, training.sft_config)
        request = PlanTraining(config=session.workspace.shown(config))

        def plan() -> TrainingForecast:
            return session.stages.do(PLAN, "plan_training", request, TrainingForecast)

        return session.files.stored_document("plan", key, TrainingForecast, plan)

    def _time_left(self, *, num_measures: int, other_s: float = 0.0) -> float | None:
        """Returns the seconds for training, less those of measuring and exporting after it.

        num_measures: how often students are still measured on the prompts for choosing.
        """
        left = self._session.stages.left_s
        if left is None:
            return None
        num_prompts = num_measures * len(self._parts.validation) + 1.5 * len(self._parts.test)
        return left - num_prompts * self._session.prompt_s - _EXPORT_S - other_s

    def _chat_template(self, taught: Taught) -> str | None:
        """Returns the template to train with: another one if the student's leaves tool calls out.

        None: its own.
        """
        session = self._session
        rows = read_lines(taught.train_file)
        if not session.has_tools and not any(b'"tool_calls"' in row.data for row in rows):
            return None
        return self._tool_template

    @cached_property
    def _tool_template(self) -> str | None:
        session = self._session
        tokenizer = tokenizer_for(session.workspace, session.request.student, "a recipe with tools")
        return "chatml" if is_chatml_without_tools(tokenizer.chat_template) else None

    @property
    def _are_templated(self) -> bool:
        """Whether the rows are labels of texts made from templates."""
        return self._parts.are_templated and self._session.has_labels

    def _wanted_epochs(self, taught: Taught) -> int:
        return wanted_epochs(taught.num_rows, are_templated=self._are_templated)

    def _sft(
        self, title: str, start: str, taught: Taught, available_s: float | None
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
            self._chat_template(taught),
        )  # fmt: skip
        config = self._config(title, start, taught)
        return self._train(title, session.files.write_config(config, training.sft_config))

    def _config(self, title: str, start: str, taught: Taught) -> Path:
        """Returns where the config of a training within these minutes is."""
        key = {"start": start, "rows": file_sha256(taught.train_file)}
        path = self._session.files.config_path(_CONFIGS[title], key)
        return path.with_stem(f"{path.stem}-{self._session.request.minutes or 0:g}")

    def _earlier(
        self, title: str, starts: Sequence[str], taught: Taught, *, is_late: bool = False
    ) -> Path | None:
        """Returns the config of a training that an earlier call has done; None if there is none.

        One that fewer minutes had limited counts as not done, unless it is too late for another.
        """
        for start in starts:
            here = self._config(title, start, taught)
            stem = here.stem.rpartition("-")[0]
            for config in sorted(here.parent.glob(f"{stem}-*.yml")):
                if (result := self._result(config)) is None:
                    continue
                epochs = planned_epochs(config.read_text(encoding="utf-8"))
                is_whole = epochs >= self._wanted_epochs(taught) and not result.get("stopped_by")
                if is_whole or is_late or config == here:
                    return config
        return None

    def _result(self, config: Path) -> dict[str, Any] | None:
        """Returns the result of a training with this config; None if none has succeeded."""
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
                f"{title}: ended at its share of the time, after step {result.get('steps')} of "
                f"{result.get('planned_steps')}"
            )
        validated = measure_validation(
            session, MEASURE[title], _NAMES[title], run.run_id, self._validation,
            is_first=title == TRAIN,
        )  # fmt: skip
        return TrainedStudent(run.run_id, validated)
