"""Makes a student and a teacher of Qwen3.5's shape for the demo world, by the demo's own recipe.

    python benchmarks/families/qwen3_5_world.py FOLDER
    python benchmarks/on_policy/margin.py FOLDER/margin --kinds long --seeds 1 --student FOLDER/student --teacher FOLDER/teacher

Two layers of a gated delta net are around one of full attention. The teacher is the student, taught
on. A model that is in FOLDER is not made again. The second command compares on-policy distillation
with SFT continued.
"""

import argparse
import logging
import sys
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "scripts"))

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers import (  # noqa: E402
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from demo_models.curriculum import clerk_examples, echo_examples  # noqa: E402
from demo_models.pretrain import fit, shuffled_batches  # noqa: E402
from demo_models.recipe import RecipeSettings, TrainingPhase  # noqa: E402
from demo_models.tokenizer import PAD, TURN_END, train_tokenizer  # noqa: E402

LAYERS = ["linear_attention", "full_attention", "linear_attention"]
SETTINGS = replace(
    RecipeSettings(),
    echo=TrainingPhase(num_examples=16_000, num_steps=500, batch_size=32, seed=1),
    base=TrainingPhase(num_examples=30_000, num_steps=2000, batch_size=16, seed=2),
    gold=TrainingPhase(num_examples=24_000, num_steps=1600, batch_size=16, seed=3),
)


def new_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3_5ForCausalLM:
    torch.manual_seed(SETTINGS.weights_seed)
    ids = tokenizer.get_vocab()
    return Qwen3_5ForCausalLM(
        Qwen3_5TextConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=len(LAYERS),
            layer_types=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            max_position_embeddings=SETTINGS.max_length,
            initializer_range=0.15,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=ids[TURN_END],
            pad_token_id=ids[PAD],
        )
    )


def make_models(folder: Path) -> None:
    """Writes student/ and teacher/ unless they are there; the teacher is the student, taught on."""
    if (folder / "teacher" / "config.json").exists():
        return
    tokenizer = train_tokenizer(
        num_tasks=SETTINGS.num_tokenizer_tasks,
        seed=SETTINGS.tokenizer_seed,
        vocabulary_size=SETTINGS.vocabulary_size,
        max_length=SETTINGS.max_length,
    )
    model = new_model(tokenizer)
    echo, base, gold = SETTINGS.echo, SETTINGS.base, SETTINGS.gold
    if (folder / "student" / "config.json").exists():
        model = Qwen3_5ForCausalLM.from_pretrained(folder / "student", dtype=torch.float32)
    else:
        lessons = [
            (echo, echo_examples(tokenizer, echo.num_examples, seed=echo.seed)),
            (base, clerk_examples(tokenizer, base.num_examples, mix=SETTINGS.base_mix, seed=base.seed)),
        ]  # fmt: skip
        learn(model, lessons, SETTINGS.base_learning_rate)
        save(model, tokenizer, folder / "student")
    clerks = clerk_examples(tokenizer, gold.num_examples, mix=SETTINGS.gold_mix, seed=gold.seed)
    learn(model, [(gold, clerks)], SETTINGS.gold_learning_rate)
    save(model, tokenizer, folder / "teacher")


def learn(model: Qwen3_5ForCausalLM, lessons: list, peak_learning_rate: float) -> None:
    def batches():
        for phase, examples in lessons:
            endless = shuffled_batches(examples, batch_size=phase.batch_size, seed=phase.seed)
            for number, batch in enumerate(endless):
                if number == phase.num_steps:
                    break
                if number % 100 == 0:
                    logging.info("step %d of %d", number, phase.num_steps)
                yield batch

    steps = sum(phase.num_steps for phase, _ in lessons)
    logging.info(
        "%s", fit(model, batches(), num_steps=steps, peak_learning_rate=peak_learning_rate)
    )


def save(model: Qwen3_5ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    options.folder.mkdir(parents=True, exist_ok=True)
    make_models(options.folder)


if __name__ == "__main__":
    main()
