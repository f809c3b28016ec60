"""Stillroom compared with TRL on SmolLM2-135M on a CPU: the same rows, batches and arithmetic (fp32).

    beside_trl.py FOLDER [--works sft distill sample] [--kinds full lora] [--turns 3]

Needs trl and datasets in this environment. Each measurement is a process of its own, theirs and
ours in turns. `sft`: training steps on tickets (batches of 8), tokens read and trained per CPU
second. `distill`: on-policy steps with reverse KL over the whole vocabulary, 16 rollouts of 40
tokens, student and teacher SmolLM2; TRL's trainer is its DistillationTrainer, else GKD. `sample`:
16 rows of 48 tokens, compared with `generate`. Prints a JSON line per measurement, and one per pair with
the ratio of the medians. FOLDER keeps the model.
"""

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1", TOKENIZERS_PARALLELISM="false")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import transformers
from smollm2 import base_model
from task import gold_row, prompt_row
from tasks import TASKS

from stillroom.data.chat.render import ChatRenderer
from stillroom.models.batches import TokenSequence
from stillroom.models.load import LoadedModel, load_model
from stillroom.models.resolve import ModelLocation
from stillroom.policy.decode import DecodeEngine
from stillroom.policy.sequences import DecodedSequence
from stillroom.settings import Workspace
from stillroom.teachers.local_hf import LocalTeacher
from stillroom.train.config.distill_sections import AlgorithmSection
from stillroom.train.config.sections import ModelSection, TrainerSection
from stillroom.train.methods.sft import accumulate_loss
from stillroom.train.on_policy.policy_update import UpdateStats, accumulate_gradient
from stillroom.train.on_policy.training_sequences import TrainingSequence
from stillroom.train.student.model import Optimizer, Student, load_student
from stillroom.types import SamplingSettings

TASK = TASKS["tickets"]
RANK, STEPS, BATCH = 32, 6, 8
ROLLOUTS, NEW_TOKENS, ITERATIONS = 16, 40, 3
ROWS, SAMPLED_TOKENS = 16, 48
LIMIT_S = 1800
TRAINER = TrainerSection(
    num_epochs=1, learning_rate=1e-5, schedule="constant", warmup_steps=0, adam_beta2=0.999
)
Figures = dict[str, Any]


class Meter:
    """The CPU seconds and the loss of each step after the first, which warms up."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self._begun = time.process_time()

    def end_step(self) -> None:
        now = time.process_time()
        self.seconds.append(now - self._begun)
        self._begun = now

    def figures(self, tokens: Sequence[int]) -> Figures:
        """Returns the tokens per CPU second and the peak memory; tokens: of each step."""
        return {
            "tokens_per_cpu_s": round(sum(tokens[1:]) / sum(self.seconds[1:]), 1),
            "peak_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
            "losses": [round(loss, 6) for loss in self.losses[:3]],
        }


def rows(folder: Path) -> list[TokenSequence]:
    """Returns tickets as rows for SFT."""
    renderer = ChatRenderer(transformers.AutoTokenizer.from_pretrained(folder))
    gold = [gold_row(TASK, row) for row in TASK.rows(1, STEPS * BATCH, is_new=False)]
    rendered = [renderer.conversation(row["messages"], []) for row in gold]
    return [TokenSequence(one.ids, one.trained) for one in rendered]


def chats(count: int) -> list[Any]:
    return [prompt_row(TASK, row)["messages"] for row in TASK.rows(2, count, is_new=False)]


def student_of(folder: Path, kind: str) -> Student:
    section = ModelSection(path=str(folder), qlora_rank=0 if kind == "full" else RANK)
    return load_student(Workspace(folder.parent), section, seed=0)


def our_sft(folder: Path, kind: str) -> Figures:
    student, every = student_of(folder, kind), rows(folder)
    optimizer = Optimizer(student.trainable(), TRAINER, total_steps=STEPS)
    student.module.train()
    batches = [every[i : i + BATCH] for i in range(0, len(every), BATCH)]
    meter = Meter()
    for batch in batches:
        meter.losses.append(accumulate_loss(student, batch).loss)
        optimizer.step()
        meter.end_step()
    return meter.figures([sum(len(row.ids) for row in batch) for batch in batches])


def sampled(loaded: LoadedModel, prompts: Sequence[Any], tokens: int) -> list[DecodedSequence]:
    """Samples as many tokens after each prompt, whatever they are."""
    endless = LoadedModel(loaded.location, loaded.model, loaded.tokenizer, frozenset())
    engine = DecodeEngine(endless, max_rows=len(prompts), max_context=512)
    renderer = ChatRenderer(loaded.tokenizer)
    settings = SamplingSettings(temperature=1.0, max_tokens=tokens)
    sequences: list[DecodedSequence] = []
    for number, messages in enumerate(prompts):
        sequence = DecodedSequence(settings, rng=random.Random(number))
        sequence.append_given(renderer.prompt_ids(messages, []))
        engine.request_turn(sequence)
        sequences.append(sequence)
    while engine.has_work:
        for sequence in engine.step():
            engine.release(sequence)
    return sequences


def our_distill(folder: Path, kind: str) -> Figures:
    student = student_of(folder, kind)
    location = ModelLocation("teacher", str(folder), is_local=True)
    teacher = LocalTeacher(load_model(Workspace(folder.parent), location))
    optimizer = Optimizer(student.trainable(), TRAINER, total_steps=ITERATIONS)
    prompts, meter = chats(ROLLOUTS * ITERATIONS), Meter()
    for start in range(0, len(prompts), ROLLOUTS):
        student.module.eval()
        answers = sampled(student.loaded, prompts[start : start + ROLLOUTS], NEW_TOKENS)
        sequences = [
            TrainingSequence(TokenSequence(one.ids, one.sampled), one.trace().sampled_logprobs)
            for one in answers
        ]
        accumulate_gradient(student, {0: teacher}, sequences, AlgorithmSection(), UpdateStats())
        optimizer.step()
        meter.end_step()
    return meter.figures([ROLLOUTS * NEW_TOKENS] * ITERATIONS)


def our_sample(folder: Path, kind: str) -> Figures:
    location = ModelLocation("model", str(folder), is_local=True)
    loaded, meter = load_model(Workspace(folder.parent), location), Meter()
    for _ in range(2):
        sampled(loaded, chats(ROWS), SAMPLED_TOKENS)
        meter.end_step()
    return meter.figures([ROWS * SAMPLED_TOKENS] * 2)


def plain(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def trl_run(trainer: Any, tokens: Sequence[int]) -> Figures:
    class Told(transformers.TrainerCallback):
        def on_train_begin(self, *_args: Any, **_more: Any) -> None:
            self.meter = Meter()

        def on_step_end(self, *_args: Any, **_more: Any) -> None:
            self.meter.end_step()

        def on_log(
            self, _args: Any, _state: Any, _control: Any, logs: Any = None, **_more: Any
        ) -> None:
            if logs and "loss" in logs:
                self.meter.losses.append(float(logs["loss"]))

    told = Told()
    trainer.add_callback(told)
    trainer.train()
    return told.meter.figures(tokens)


def trl_options(batch: int, steps: int) -> dict[str, Any]:
    return {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": batch,
        "max_steps": steps,
        "learning_rate": TRAINER.learning_rate,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": [],
        "logging_steps": 1,
        "disable_tqdm": True,
    }


def adapter(kind: str) -> Any:
    from peft import LoraConfig

    if kind == "full":
        return None
    return LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear")


def trl_sft(folder: Path, kind: str) -> Figures:
    import trl
    from datasets import Dataset

    every = rows(folder)
    labelled = [
        {
            "input_ids": row.ids,
            "labels": [i if on else -100 for i, on in zip(row.ids, row.trained, strict=True)],
        }
        for row in every
    ]
    trainer = trl.SFTTrainer(
        model=plain(folder),
        args=trl.SFTConfig(
            **trl_options(BATCH, STEPS),
            max_length=None,
            train_sampling_strategy="sequential",
            shuffle_dataset=False,
        ),
        train_dataset=Dataset.from_list(labelled),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder),
        peft_config=adapter(kind),
    )
    counts = [
        sum(len(row.ids) for row in every[i : i + BATCH]) for i in range(0, len(every), BATCH)
    ]
    return trl_run(trainer, counts)


def trl_distill(folder: Path, kind: str) -> Figures:
    import trl
    from datasets import Dataset

    model = plain(folder)
    model.generation_config.eos_token_id = None
    trainer = trl.DistillationTrainer(
        model=model,
        teacher_model=plain(folder),
        args=trl.DistillationConfig(
            **trl_options(ROLLOUTS, ITERATIONS), max_completion_length=NEW_TOKENS, beta=1.0
        ),
        train_dataset=Dataset.from_list(
            [{"prompt": messages} for messages in chats(ROLLOUTS * ITERATIONS)]
        ),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder),
        peft_config=adapter(kind),
    )
    return trl_run(trainer, [ROLLOUTS * NEW_TOKENS] * ITERATIONS)


def generate(folder: Path, kind: str) -> Figures:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = plain(folder).eval()
    prompts = [
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        for messages in chats(ROWS)
    ]
    batch = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    meter = Meter()
    for _ in range(2):
        model.generate(
            **batch,
            do_sample=True,
            top_k=0,
            min_new_tokens=SAMPLED_TOKENS,
            max_new_tokens=SAMPLED_TOKENS,
            pad_token_id=0,
        )
        meter.end_step()
    return meter.figures([ROWS * SAMPLED_TOKENS] * 2)


RUNS: dict[tuple[str, str], Callable[[Path, str], Figures]] = {
    ("sft", "ours"): our_sft,
    ("sft", "theirs"): trl_sft,
    ("distill", "ours"): our_distill,
    ("distill", "theirs"): trl_distill,
    ("sample", "ours"): our_sample,
    ("sample", "theirs"): generate,
}


def measured(folder: Path, work: str, kind: str, who: str) -> Figures:
    """Returns the figures of a process of its own."""
    words = [sys.executable, __file__, str(folder), "--one", work, kind, who]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)}\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(folder: Path, work: str, kind: str, turns: int) -> None:
    """Prints the figures of both in turns, and the ratio of their medians."""
    rates: dict[str, list[float]] = {"ours": [], "theirs": []}
    last: dict[str, Figures] = {}
    for _ in range(turns):
        for who, found in rates.items():
            last[who] = measured(folder, work, kind, who)
            found.append(last[who]["tokens_per_cpu_s"])
            print(json.dumps({"work": work, "kind": kind, "who": who, **last[who]}), flush=True)
    ours, theirs = (statistics.median(found) for found in rates.values())
    gaps = [abs(a - b) for a, b in zip(last["ours"]["losses"], last["theirs"]["losses"])]  # noqa: B905 - sampling has none
    summary = {
        "work": work, "kind": kind, "ratio": round(ours / theirs, 2),
        "tokens_per_cpu_s": [ours, theirs],
        "peak_gb": [last["ours"]["peak_gb"], last["theirs"]["peak_gb"]],
    }  # fmt: skip
    if work == "sft":
        summary["largest_loss_gap"] = max(gaps)
    print(json.dumps(summary), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--works", nargs="+", default=["sft", "distill", "sample"])
    parser.add_argument("--kinds", nargs="+", default=["full", "lora"])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder = options.folder.resolve()
    if options.one is not None:
        work, kind, who = options.one
        print(json.dumps(RUNS[work, who](folder, kind)))
        return
    model = Path(base_model(folder))
    for work in options.works:
        for kind in options.kinds if work != "sample" else ["full"]:
            compare(model, work, kind, options.turns)


if __name__ == "__main__":
    main()
