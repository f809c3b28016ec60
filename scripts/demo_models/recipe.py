"""Makes the demo's tokenizer, student and teacher from nothing.

Run it in the folder scripts: `python -m demo_models.recipe --out FOLDER`.
The numbers of steps and the seeds are fixed, so that the same machine gives the same models again.
"""

import argparse
import logging
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3ForCausalLM

from demo_models.accuracy import measure_accuracy
from demo_models.curriculum import ClerkMix, TrainingExample, clerk_examples, echo_examples
from demo_models.pretrain import FitReport, build_model, deepen, fit, shuffled_batches
from demo_models.tokenizer import train_tokenizer
from stillroom.demo.world import heldout_tasks
from stillroom.files import write_json

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrainingPhase:
    """How many examples to draw, and how long to train on them."""

    num_examples: int
    num_steps: int
    batch_size: int
    seed: int


@dataclass(frozen=True, slots=True)
class RecipeSettings:
    """All settings of the recipe; the defaults made the shipped models."""

    max_length: int = 512
    vocabulary_size: int = 640
    num_tokenizer_tasks: int = 3000
    tokenizer_seed: int = 0
    weights_seed: int = 0
    student_layers: int = 3
    teacher_layers: int = 5
    echo: TrainingPhase = TrainingPhase(num_examples=20_000, num_steps=600, batch_size=32, seed=1)
    base: TrainingPhase = TrainingPhase(num_examples=30_000, num_steps=3600, batch_size=16, seed=2)
    base_mix: ClerkMix = field(
        default_factory=lambda: ClerkMix(0.5, {"easy": 0.3, "medium": 0.12, "hard": 0.1})
    )
    base_learning_rate: float = 6e-3
    gold: TrainingPhase = TrainingPhase(num_examples=24_000, num_steps=2200, batch_size=16, seed=3)
    gold_mix: ClerkMix = field(
        default_factory=lambda: ClerkMix(0.3, {"easy": 0.98, "medium": 0.98, "hard": 0.98})
    )
    gold_learning_rate: float = 4e-3
    num_heldout: int = 300
    heldout_seed: int = 4


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A model at the end of its training."""

    model: Qwen3ForCausalLM
    report: FitReport
    cpu_s: float


def build_models(folder: Path, settings: RecipeSettings) -> None:
    """Writes student/, teacher/ and RECIPE.json under the folder."""
    started_s = time.process_time()
    torch.set_num_threads(1)
    tokenizer = train_tokenizer(
        num_tasks=settings.num_tokenizer_tasks,
        seed=settings.tokenizer_seed,
        vocabulary_size=settings.vocabulary_size,
        max_length=settings.max_length,
    )
    student = _train_student(tokenizer, settings)
    teacher = _train_teacher(tokenizer, student.model, settings)
    models = {
        "student": ship(student, tokenizer, folder / "student", settings=settings),
        "teacher": ship(teacher, tokenizer, folder / "teacher", settings=settings),
    }
    record = {
        "command": "cd scripts && python -m demo_models.recipe",
        "settings": asdict(settings),
        "vocabulary": len(tokenizer),
        "models": models,
        "cpu_s": _seconds_since(started_s),
        "versions": {
            "python": platform.python_version(),
            "tokenizers": tokenizers.__version__,
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
        },
    }
    write_json(folder / "RECIPE.json", record)


def _train_student(tokenizer: PreTrainedTokenizerFast, settings: RecipeSettings) -> TrainedModel:
    """Returns a model that knows the format, copying and one-call tasks, but few longer plans."""
    started_s = time.process_time()
    echo, base = settings.echo, settings.base
    echoes = echo_examples(tokenizer, echo.num_examples, seed=echo.seed)
    clerks = clerk_examples(tokenizer, base.num_examples, mix=settings.base_mix, seed=base.seed)
    model = build_model(
        tokenizer,
        num_layers=settings.student_layers,
        max_length=settings.max_length,
        seed=settings.weights_seed,
    )
    report = fit(
        model,
        chain(batches(echoes, echo), batches(clerks, base)),
        num_steps=echo.num_steps + base.num_steps,
        peak_learning_rate=settings.base_learning_rate,
    )
    log.info("student: %s", report)
    return TrainedModel(model, report, _seconds_since(started_s))


def _train_teacher(
    tokenizer: PreTrainedTokenizerFast, student: Qwen3ForCausalLM, settings: RecipeSettings
) -> TrainedModel:
    """Returns a deeper copy of the student, trained on clerks that are nearly always right."""
    started_s = time.process_time()
    gold = settings.gold
    clerks = clerk_examples(tokenizer, gold.num_examples, mix=settings.gold_mix, seed=gold.seed)
    model = deepen(
        student, tokenizer, num_layers=settings.teacher_layers, seed=settings.weights_seed
    )
    report = fit(
        model,
        batches(clerks, gold),
        num_steps=gold.num_steps,
        peak_learning_rate=settings.gold_learning_rate,
    )
    log.info("teacher: %s", report)
    return TrainedModel(model, report, _seconds_since(started_s))


def batches(
    examples: Sequence[TrainingExample], phase: TrainingPhase
) -> Iterator[list[TrainingExample]]:
    """Returns a phase's batches."""
    drawn = shuffled_batches(examples, batch_size=phase.batch_size, seed=phase.seed)
    return islice(drawn, phase.num_steps)


def ship(
    trained: TrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    *,
    settings: RecipeSettings,
) -> dict[str, Any]:
    """Saves the model at half precision and returns the figures of the saved model."""
    model = trained.model
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.half().save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(folder)
    saved = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tasks = heldout_tasks(settings.num_heldout, seed=settings.heldout_seed)
    accuracy = measure_accuracy(saved, PreTrainedTokenizerFast.from_pretrained(folder), tasks)
    log.info("%s: %s", folder.name, accuracy)
    return {
        "parameters": saved.num_parameters(),
        "bytes": {path.name: path.stat().st_size for path in sorted(folder.iterdir())},
        "training": {**asdict(trained.report), "cpu_s": trained.cpu_s},
        "heldout": asdict(accuracy),
    }


def _seconds_since(started_s: float) -> float:
    return round(time.process_time() - started_s, 1)


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m demo_models.recipe", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the models to")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    transformers.utils.logging.disable_progress_bar()
    build_models(parser.parse_args().out, RecipeSettings())


if __name__ == "__main__":
    _main()
