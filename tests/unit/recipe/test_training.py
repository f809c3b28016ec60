from pathlib import Path

import pytest

from stillroom.recipe.training import Pace, PlannedTraining, settings_for_templates, wanted_epochs
from stillroom.train.config.file import load_config
from stillroom.train.planning.forecast import SftSettings, suitable_sft_settings


@pytest.mark.parametrize(
    ("num_rows", "epochs"), [(20, 6), (200, 6), (400, 4), (600, 3), (800, 2), (50_000, 2)]
)
def test_few_rows_are_trained_more_often(num_rows: int, epochs: int) -> None:
    assert wanted_epochs(num_rows) == epochs


@pytest.mark.parametrize(
    ("num_rows", "epochs"), [(20, 6), (150, 6), (270, 4), (560, 2), (50_000, 1)]
)
def test_texts_from_templates_are_trained_less_often(num_rows: int, epochs: int) -> None:
    assert wanted_epochs(num_rows, are_templated=True) == epochs


def test_epochs_are_those_that_the_time_suffices_for() -> None:
    pace = Pace(start_s=10, row_s=0.5)

    assert pace.epochs_within(100, 10 + 50) == 1
    assert pace.epochs_within(100, 10 + 149) == 2
    assert pace.epochs_within(100, 5) == 0


def test_a_models_size_decides_between_all_weights_and_an_adapter() -> None:
    assert suitable_sft_settings(5_000_000) == SftSettings(0, 1e-3)
    assert suitable_sft_settings(135_000_000) == SftSettings(0, 2e-4)
    assert suitable_sft_settings(1_700_000_000) == SftSettings(32, 1e-4)


def test_only_a_second_epoch_over_templates_is_at_half_the_rate() -> None:
    assert settings_for_templates(SftSettings(0, 2e-4), 1) == SftSettings(0, 2e-4)
    assert settings_for_templates(SftSettings(0, 2e-4), 2) == SftSettings(0, 1e-4)


def test_configurations_are_read_as_they_are_meant(tmp_path: Path) -> None:
    training = PlannedTraining(
        "run: x", "sft-1.jsonl", SftSettings(0, 2e-4), 7, 3, available_s=90.0
    )
    sft, distill = tmp_path / "sft.yml", tmp_path / "distill.yml"
    sft.write_text(training.sft_config(), encoding="utf-8")
    distill.write_text(
        training.distill_config({"path": "big"}, max_turns=5, max_tokens=48), encoding="utf-8"
    )

    config = load_config(sft)
    assert config.dataset_type == "sft"
    assert (config.model.path, config.model.qlora_rank) == ("run: x", 0)
    assert config.data.train_file == "sft-1.jsonl"
    assert (config.trainer.num_epochs, config.trainer.seed) == (3, 7)
    assert (config.trainer.learning_rate, config.trainer.max_minutes) == (2e-4, 1.5)

    config = load_config(distill)
    assert config.dataset_type == "distill"
    assert (config.teacher.path, config.rollout.max_turns, config.rollout.max_tokens) == (
        "big",
        5,
        48,
    )
    assert (config.trainer.schedule, config.trainer.learning_rate) == ("constant", 5e-5)
