"""Chooses how a student is trained from what a plan measured and from the time that is left."""

import json
import math
from dataclasses import dataclass, replace

from stillroom.train.planning.forecast import SftSettings, TrainingForecast

BATCH_SIZE = 8
_WANTED_STEPS, _MIN_EPOCHS, _MAX_EPOCHS = 200, 2, 6
_TEMPLATED_STEPS, _TEMPLATED_RATE = 150, 0.5
"""For labels of texts made from templates: the steps of training (a student memorises the templates
in more), and the share of the usual learning rate for more than one epoch."""
_ON_POLICY_SHARE = 0.25
"""The learning rate of on-policy distillation as a share of that of SFT."""


@dataclass(frozen=True, slots=True)
class Pace:
    """The speed of a training run, as a plan of one epoch measured it."""

    start_s: float
    """The seconds before the first step."""
    row_s: float
    """The seconds per row and epoch."""

    @staticmethod
    def of(forecast: TrainingForecast) -> "Pace | None":
        """Returns the pace that a plan of one epoch forecasts; None if it measured none."""
        if forecast.seconds is None or not forecast.rows:
            return None
        start_s = forecast.start_s or 0.0
        return Pace(start_s, max(0.0, forecast.seconds - start_s) / forecast.rows)

    def epochs_within(self, num_rows: int, available_s: float) -> int:
        """Returns how many epochs over the rows fit into the available seconds."""
        return int(max(0.0, available_s - self.start_s) / max(1e-9, self.row_s * num_rows))


def wanted_epochs(num_rows: int, *, are_templated: bool = False) -> int:
    """Returns the number of epochs after which a student learns little more from the same rows.

    are_templated: whether the rows are labels of texts made from templates.
    """
    steps_per_epoch = math.ceil(num_rows / BATCH_SIZE)
    if are_templated:
        return min(_MAX_EPOCHS, max(1, round(_TEMPLATED_STEPS / steps_per_epoch)))
    return min(_MAX_EPOCHS, max(_MIN_EPOCHS, math.ceil(_WANTED_STEPS / steps_per_epoch)))


def settings_for_templates(settings: SftSettings, epochs: int) -> SftSettings:
    """Returns the settings for labels of texts made from templates.

    Training for more than one epoch halves the learning rate of all of them: at the full rate,
    accuracy on other templates falls.
    """
    if epochs == 1:
        return settings
    return replace(settings, learning_rate=_TEMPLATED_RATE * settings.learning_rate)


@dataclass(frozen=True, slots=True)
class PlannedTraining:
    """A training run of a recipe: its starting model, its rows, and how long it may take."""

    start: str
    """The model or run whose weights are trained."""
    train_file: str
    settings: SftSettings
    seed: int
    epochs: int = 1
    available_s: float | None = None
    """The seconds that the training run may take; None without a limit."""
    chat_template: str | None = None
    """The chat template to give to the student; None if it has one."""

    def sft_config(self) -> str:
        """Returns the text of a config.yml for SFT."""
        return _yaml(
            dataset_type="sft",
            data={"train_file": self.train_file, "batch_size": BATCH_SIZE},
            model=self._model,
            trainer={**self._trainer, "num_epochs": self.epochs},
        )

    def distill_config(
        self,
        teacher: dict[str, str],
        *,
        max_turns: int,
        max_tokens: int,
        system: str | None = None,
    ) -> str:
        """Returns the text of a config.yml for on-policy distillation from an open model.

        teacher: the config's section `teacher`. max_turns, max_tokens: for the student's rollouts.
        system: the student's system message in place of those of the prompts; None keeps them.
        """
        rate = self.settings.learning_rate * _ON_POLICY_SHARE
        # See docs/results.md: few steps fit into the time, and a decay would halve their rate.
        schedule = {} if self.available_s is None else {"schedule": "constant"}
        return _yaml(
            dataset_type="distill",
            data={"train_file": self.train_file, "batch_size": 4 * BATCH_SIZE},
            model={**self._model, **({} if system is None else {"system": system})},
            teacher=teacher,
            rollout={"max_turns": max_turns, "max_tokens": max_tokens},
            algorithm={"substeps": 2},
            trainer={
                **self._trainer,
                **schedule,
                "num_epochs": self.epochs,
                "learning_rate": rate,
            },
        )

    @property
    def _model(self) -> dict[str, object]:
        model: dict[str, object] = {"path": self.start, "qlora_rank": self.settings.qlora_rank}
        return model | ({"chat_template": self.chat_template} if self.chat_template else {})

    @property
    def _trainer(self) -> dict[str, object]:
        trainer: dict[str, object] = {
            "learning_rate": self.settings.learning_rate,
            "seed": self.seed,
        }
        if self.available_s is not None:
            trainer["max_minutes"] = round(max(0.1, self.available_s / 60), 2)
        return trainer


def planned_epochs(config: str) -> int:
    """Returns the epochs in the text of a config.yml from `sft_config`."""
    [trainer] = [line for line in config.splitlines() if line.startswith("trainer: ")]
    return json.loads(trainer.removeprefix("trainer: "))["num_epochs"]


def _yaml(**sections: object) -> str:
    """Returns a config file; each section is JSON, which is YAML."""
    lines = (
        f"{name}: {json.dumps(value, ensure_ascii=False)}\n" for name, value in sections.items()
    )
    return "".join(lines)
