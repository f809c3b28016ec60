"""Five steps of SFT and DPO have the losses that TRL's trainers have on the same batches."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from fakes.training import make_student
from stillroom.models.batches import TokenSequence
from stillroom.train.config.sections import DpoSection, TrainerSection
from stillroom.train.methods.dpo import TokenPair, accumulate_preference, add_reference
from stillroom.train.methods.sft import accumulate_loss
from stillroom.train.student.model import Optimizer, Student

pytestmark = [pytest.mark.trl, pytest.mark.filterwarnings("default")]

STEPS, BATCH, RANK = 5, 4, 4
SETTINGS = TrainerSection(
    num_epochs=1, learning_rate=1e-4, schedule="constant", warmup_steps=0, adam_beta2=0.999
)


def ids(draw: random.Random, length: int) -> list[int]:
    return [draw.randrange(30, 340) for _ in range(length)]


def rows() -> list[TokenSequence]:
    draw = random.Random(0)
    found = []
    for _ in range(STEPS * BATCH):
        length = draw.randrange(12, 90)
        found.append(TokenSequence(ids(draw, length), [i % 7 > 3 for i in range(length)]))
    return found


def pairs() -> list[TokenPair]:
    draw = random.Random(1)
    found = []
    for _ in range(STEPS * BATCH):
        prompt = ids(draw, draw.randrange(5, 60))
        sides = [
            TokenSequence([*prompt, *ids(draw, length)], [False] * len(prompt) + [True] * length)
            for length in (draw.randrange(2, 30), draw.randrange(2, 30))
        ]
        found.append(TokenPair(*sides))
    return found


@pytest.fixture(params=[0, RANK], ids=["full", "adapter"])
def student(request, tiny_models) -> Student:
    return make_student(tiny_models, tiny_models.folder("qwen3", "chatml"), rank=request.param)


def peer_model(student: Student, folder: Path) -> Any:
    """The same model, with the same adapter, as TRL takes it."""
    from peft import PeftModel

    plain = AutoModelForCausalLM.from_pretrained(student.base.location, dtype=torch.float32)
    if not student.is_adapter:
        return plain
    student.loaded.model.save_pretrained(folder / "adapter")
    return PeftModel.from_pretrained(plain, folder / "adapter", is_trainable=True)


def options(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": BATCH,
        "max_steps": STEPS,
        "learning_rate": SETTINGS.learning_rate,
        "lr_scheduler_type": "constant",
        "max_length": None,
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": [],
        "logging_steps": 1,
        "train_sampling_strategy": "sequential",
    }


def losses_of(trainer: Any) -> list[float]:
    found: list[float] = []

    class Told(TrainerCallback):
        def on_log(self, *_args: Any, logs: Any = None, **_more: Any) -> None:
            if logs and "loss" in logs:
                found.append(float(logs["loss"]))

    trainer.add_callback(Told())
    trainer.train()
    return found


def test_supervised_losses_are_those_of_trl(
    student: Student, tmp_path: Path, record_property: Any
) -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    data = [
        {
            "input_ids": row.ids,
            "labels": [
                token if is_on else -100 for token, is_on in zip(row.ids, row.trained, strict=True)
            ],
        }
        for row in rows()
    ]
    trainer = SFTTrainer(
        model=peer_model(student, tmp_path),
        args=SFTConfig(**options(tmp_path), shuffle_dataset=False),
        train_dataset=Dataset.from_list(data),
        processing_class=AutoTokenizer.from_pretrained(student.base.location),
    )
    reference = losses_of(trainer)

    optimizer = Optimizer(student.trainable(), SETTINGS, total_steps=STEPS)
    ours = []
    for start in range(0, STEPS * BATCH, BATCH):
        ours.append(accumulate_loss(student, rows()[start : start + BATCH]).loss)
        optimizer.step()

    record_property("largest gap", max(abs(a - b) for a, b in zip(ours, reference, strict=True)))
    assert ours == pytest.approx(reference, abs=1e-5)
    assert max(ours) - min(ours) > 1e-3


def test_preference_losses_are_those_of_trl(
    student: Student, tmp_path: Path, record_property: Any
) -> None:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    class OnTokens(DPOTrainer):
        """The tokens are given, so that both train on the very same."""

        def _prepare_dataset(self, dataset: Any, *_args: Any, **_more: Any) -> Any:
            return dataset

    data = []
    for pair in pairs():
        given = pair.chosen.trained.index(True)
        data.append(
            {
                "prompt_ids": pair.chosen.ids[:given],
                "chosen_ids": pair.chosen.ids[given:],
                "rejected_ids": pair.rejected.ids[given:],
            }
        )
    is_full = not student.is_adapter
    trainer = OnTokens(
        model=peer_model(student, tmp_path),
        ref_model=peer_model(student, tmp_path) if is_full else None,
        args=DPOConfig(**options(tmp_path)),
        train_dataset=Dataset.from_list(data),
        processing_class=AutoTokenizer.from_pretrained(student.base.location),
    )
    reference = losses_of(trainer)

    optimizer = Optimizer(student.trainable(), SETTINGS, total_steps=STEPS)
    referenced = add_reference(student, pairs(), is_mean=False)
    ours = []
    for start in range(0, STEPS * BATCH, BATCH):
        batch = referenced[start : start + BATCH]
        ours.append(accumulate_preference(student, batch, DpoSection()).loss)
        optimizer.step()

    record_property("largest gap", max(abs(a - b) for a, b in zip(ours, reference, strict=True)))
    assert ours == pytest.approx(reference, abs=1e-5)
    assert max(ours) - min(ours) > 1e-4
