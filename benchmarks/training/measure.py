"""One side of one training benchmark, in a process of its own; prints a JSON line.

    python benchmarks/training/measure.py {ours,trl} WORK MODEL_FOLDER [--steps 3]

The rate counts tokens that are not padding per second of CPU time, after one step of warm-up; the
peak of memory is that of the whole process from the first step on.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_DISABLE_PROGRESS_BARS="1")
os.environ.update(TRL_EXPERIMENTAL_SILENCE="1", TOKENIZERS_PARALLELISM="false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.append(str(Path(__file__).parents[1]))

import transformers
from beside_trl.models import RANK, adapter, draw_adapter, plain
from beside_trl.steps import LEARNING_RATE, WARMUP, Meter, be_quiet, options, trl_run
from work import WORKS, Work, dpo_batches, num_tokens, sft_batches


def ours(work: Work, folder: Path, steps: int) -> dict[str, Any]:
    from stillroom.settings import Workspace
    from stillroom.train.config.sections import DpoSection, ModelSection, TrainerSection
    from stillroom.train.methods.dpo import accumulate_preference, add_reference
    from stillroom.train.methods.sft import accumulate_loss
    from stillroom.train.student.model import Optimizer, load_student

    trainer = TrainerSection(
        num_epochs=1, learning_rate=LEARNING_RATE, schedule="constant", warmup_steps=0,
        adam_beta2=0.999,
    )  # fmt: skip
    section = ModelSection(
        path=str(folder), qlora_rank=RANK if work.is_lora else 0, precision="fp32"
    )
    student = load_student(Workspace(folder.parent), section, seed=0)
    draw_adapter(student.module)
    optimizer = Optimizer(student.trainable(), trainer, total_steps=steps)
    meter = Meter()
    if work.method == "sft":
        student.module.train()
        batches = sft_batches(work, steps)
        meter.begin()
        for batch in batches:
            meter.losses.append(accumulate_loss(student, batch).loss)
            optimizer.step()
            meter.end_step()
        return meter.reported([num_tokens(batch) for batch in batches])
    pairs = dpo_batches(work, steps)
    add_reference(student, pairs[0], is_mean=False)
    meter.begin()
    referenced = [add_reference(student, batch, is_mean=False) for batch in pairs]
    meter.end_step()
    reference_s = meter.seconds.pop() / steps
    for batch in referenced:
        meter.losses.append(accumulate_preference(student, batch, DpoSection()).loss)
        optimizer.step()
        meter.end_step()
    reported = meter.reported([num_tokens(batch) for batch in pairs], reference_s)
    return {**reported, "reference_s": round(reference_s, 2)}


def trl(work: Work, folder: Path, steps: int) -> dict[str, Any]:
    import trl.trainer.utils as trl_utils

    # As it does on a GPU: of the hidden states only those of scored tokens reach the head.
    trl_utils._use_triton = lambda _device: True
    return (trl_sft if work.method == "sft" else trl_dpo)(work, folder, steps)


def trl_sft(work: Work, folder: Path, steps: int) -> dict[str, Any]:
    import trl
    from datasets import Dataset

    batches = sft_batches(work, steps)
    rows = [
        {
            "input_ids": s.ids,
            "labels": [
                i if is_on and place else -100
                for place, (i, is_on) in enumerate(zip(s.ids, s.trained, strict=True))
            ],
        }
        for batch in batches
        for s in batch
    ]
    trainer = trl.SFTTrainer(
        model=plain(folder),
        args=trl.SFTConfig(
            **options(work.batch, steps), max_length=None, shuffle_dataset=False,
            padding_free=work.is_packed, train_sampling_strategy="sequential",
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder),
        peft_config=adapter(is_lora=work.is_lora),
    )  # fmt: skip
    return trl_run(trainer).reported([num_tokens(batch) for batch in batches])


def trl_dpo(work: Work, folder: Path, steps: int) -> dict[str, Any]:
    import trl
    from datasets import Dataset

    class OnTokens(trl.DPOTrainer):
        """The tokens are given, so that both train on the very same."""

        def _prepare_dataset(self, dataset: Any, *_args: Any, **_more: Any) -> Any:
            return dataset

    batches = dpo_batches(work, steps)
    rows = []
    for pair in (pair for batch in batches for pair in batch):
        given = pair.chosen.trained.index(True)
        rows.append(
            {
                "prompt_ids": pair.chosen.ids[:given],
                "chosen_ids": pair.chosen.ids[given:],
                "rejected_ids": pair.rejected.ids[given:],
            }
        )
    trainer = OnTokens(
        model=plain(folder),
        ref_model=None if work.is_lora else plain(folder),
        args=trl.DPOConfig(
            **options(work.batch, steps), max_length=None, train_sampling_strategy="sequential"
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder),
        peft_config=adapter(is_lora=work.is_lora),
    )
    return trl_run(trainer).reported([num_tokens(batch) for batch in batches])


SIDES: dict[str, Callable[[Work, Path, int], dict[str, Any]]] = {"ours": ours, "trl": trl}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("who", choices=SIDES)
    parser.add_argument("work", choices=WORKS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=3, help="after the warm-up")
    args = parser.parse_args()
    be_quiet()
    reported = SIDES[args.who](WORKS[args.work], args.folder, args.steps + WARMUP)
    print(json.dumps({"bench": args.work, "who": args.who, **reported}), flush=True)


if __name__ == "__main__":
    main()
