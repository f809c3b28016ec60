"""Training steps on a GPU, ours beside TRL's trainers, on the same tokens in the same batches.

    python benchmarks/gpu/train.py [--sizes 0.6B,1.7B,3.5-0.8B,3.5-4B] [--works sft,dpo,opd]
        [--kinds lora,full] [--only ours,trl] [--ways auto,padded,spans,varlen] [--tiny]

`way`: how our rows run; auto is what a run takes (`layout` and `kernel` say which that was).

Rates count tokens that are not padding. Both train in bf16 over LoRA (rank 32, all linear layers)
or over fp32 weights (`full`), without gradient checkpointing. `losses` are those of the first
steps, so that it shows that both do the same work. One step of ours in DPO is charged its share of
scoring the reference, which TRL does in every step.
"""

import gc
import os
import random
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_DISABLE_PROGRESS_BARS="1")
os.environ.update(TRL_EXPERIMENTAL_SILENCE="1", TOKENIZERS_PARALLELISM="false")

import torch
import transformers
from shapes import (
    SCALE,
    forget_peak,
    packed_by,
    parse_args,
    peak_gib,
    random_ids,
    random_model,
    skewed_lengths,
    synchronize,
    teacher_of,
    tell,
    tell_machine,
)

from stillroom.data.chat.render import ChatRenderer
from stillroom.demo import DEMO_MODELS
from stillroom.models.batches import TokenSequence
from stillroom.models.load import LoadedModel, load_model
from stillroom.models.resolve import ModelLocation
from stillroom.policy.decode import DecodeEngine
from stillroom.policy.sequences import DecodedSequence
from stillroom.settings import Workspace
from stillroom.teachers.local_hf import LocalTeacher
from stillroom.train.config.distill_sections import AlgorithmSection
from stillroom.train.config.sections import DpoSection, ModelSection, TrainerSection
from stillroom.train.methods.dpo import TokenPair, accumulate_preference, add_reference
from stillroom.train.methods.sft import accumulate_loss
from stillroom.train.on_policy.policy_update import UpdateStats, accumulate_gradient
from stillroom.train.on_policy.training_sequences import TrainingSequence
from stillroom.train.student.model import Optimizer, Student, load_student
from stillroom.types import SamplingSettings

RANK = 32
STEPS, WARMUP = 5, 2
SFT_BATCH, DPO_BATCH, ROLLOUTS, NEW_TOKENS = 16, 8, 64, 256
TRAINER = TrainerSection(
    num_epochs=1, learning_rate=1e-5, schedule="constant", warmup_steps=0, adam_beta2=0.999
)


@dataclass
class Meter:
    """Seconds and losses of each step; the peak of memory from the first one on."""

    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    begun: float = 0.0

    def begin(self) -> None:
        synchronize()
        forget_peak()
        self.begun = time.perf_counter()

    def end_step(self) -> None:
        synchronize()
        now = time.perf_counter()
        self.seconds.append(now - self.begun)
        self.begun = now

    def reported(self, tokens: Sequence[int], extra_s: float = 0.0) -> dict[str, Any]:
        """Returns the figures of the steps after the warm-up; `extra_s` is added to each step."""
        pairs = zip(tokens[WARMUP:], self.seconds[WARMUP:], strict=True)
        rates = [count / (seconds + extra_s) for count, seconds in pairs]
        return {
            "tokens_per_s": round(statistics.median(rates)),
            "rates": [round(rate) for rate in rates],
            "step_s": round(statistics.median(self.seconds[WARMUP:]) + extra_s, 3),
            "first_step_s": round(self.seconds[0], 2),
            "peak_gib": peak_gib(),
            "losses": [round(loss, 4) for loss in self.losses[:3]],
        }


def sft_batches() -> list[list[TokenSequence]]:
    rng = random.Random(1)
    size = SCALE.rows(SFT_BATCH)
    count = size * (STEPS + WARMUP)
    sequences: list[TokenSequence] = []
    for length in skewed_lengths(count, median=400, sigma=0.7, most=2048, rng=rng):
        # Two turns: what is given, then what is learnt.
        quarter = length // 4
        marks = [False] * quarter + [True] * quarter
        trained = [*marks, *marks, *[True] * (length - 4 * quarter)]
        sequences.append(TokenSequence(random_ids(length, rng), trained))
    return [sequences[i : i + size] for i in range(0, count, size)]


def dpo_batches() -> list[list[TokenPair]]:
    rng = random.Random(2)
    size = SCALE.rows(DPO_BATCH)
    count = size * (STEPS + WARMUP)
    pairs: list[TokenPair] = []
    for _ in range(count):
        given, *lengths = skewed_lengths(3, median=220, sigma=0.6, most=1024, rng=rng)
        prompt = random_ids(given, rng)
        sides = [
            TokenSequence([*prompt, *random_ids(n, rng)], [False] * given + [True] * n)
            for n in lengths
        ]
        pairs.append(TokenPair(*sides))
    return [pairs[i : i + size] for i in range(0, count, size)]


def chats() -> list[list[dict[str, str]]]:
    rng = random.Random(3)
    words = ["what", "does", "the", "red", "lamp", "cost", "how", "many", "are", "in", "stock"]
    prompts = [
        " ".join(rng.choices(words, k=rng.randrange(30, 90))) for _ in range(SCALE.rows(ROLLOUTS))
    ]
    return [[{"role": "user", "content": prompt}] for prompt in prompts]


def saved(size: str, root: Path, *, seed: int = 0) -> Path:
    """Returns the folder of a model with random weights in bf16."""
    folder = root / f"qwen3-{size}-{seed}"
    if not folder.exists():
        random_model(size, torch.bfloat16, seed=seed).save_pretrained(folder)
        for file in DEMO_MODELS["demo/student"].iterdir():
            if file.name.startswith(("tokenizer", "chat_template")):
                shutil.copy(file, folder)
    return folder


def student_of(folder: Path, *, is_full: bool) -> Student:
    section = ModelSection(path=str(folder), qlora_rank=0 if is_full else RANK)
    return load_student(Workspace(folder.parent), section, seed=0)


def nonpad(sequences: Sequence[TokenSequence]) -> int:
    return sum(len(sequence.ids) for sequence in sequences)


def passes_of(student: Student) -> dict[str, Any]:
    rules, notes = student.head.rules, student.head.notes
    found = {"layout": rules.layout, "microbatch_tokens": student.max_microbatch_tokens}
    if rules.layout == "packed":
        found["kernel"] = rules.kernel
    return {**found, "notes": notes} if notes else found


def our_sft(folder: Path, *, is_full: bool) -> dict[str, Any]:
    student = student_of(folder, is_full=is_full)
    optimizer = Optimizer(student.trainable(), TRAINER, total_steps=STEPS + WARMUP)
    student.module.train()
    meter, batches = Meter(), sft_batches()
    meter.begin()
    for batch in batches:
        meter.losses.append(accumulate_loss(student, batch).loss)
        optimizer.step()
        meter.end_step()
    reported = meter.reported([nonpad(batch) for batch in batches])
    return {**reported, **passes_of(student)}


def our_dpo(folder: Path, *, is_full: bool) -> dict[str, Any]:
    student = student_of(folder, is_full=is_full)
    optimizer = Optimizer(student.trainable(), TRAINER, total_steps=STEPS + WARMUP)
    meter, batches = Meter(), dpo_batches()
    add_reference(student, batches[0], is_mean=False)
    meter.begin()
    every = [pair for batch in batches for pair in batch]
    referenced = add_reference(student, every, is_mean=False)
    meter.end_step()
    reference_s = meter.seconds.pop() / len(batches)
    size = len(batches[0])
    for start in range(0, len(every), size):
        stats = accumulate_preference(student, referenced[start : start + size], DpoSection())
        meter.losses.append(stats.loss)
        optimizer.step()
        meter.end_step()
    counts = [nonpad([s for p in batch for s in (p.chosen, p.rejected)]) for batch in batches]
    reported = meter.reported(counts, reference_s)
    return {**reported, **passes_of(student), "reference_s": round(reference_s, 3)}


def our_opd(folder: Path, teacher_folder: Path, *, is_full: bool) -> dict[str, Any]:
    """Sampling, scoring by the teacher and the update; scoring is also measured alone."""
    student = student_of(folder, is_full=is_full)
    location = ModelLocation("teacher", str(teacher_folder), is_local=True)
    teacher = LocalTeacher(load_model(Workspace(folder.parent), location))
    optimizer = Optimizer(student.trainable(), TRAINER, total_steps=STEPS + WARMUP)
    student.module.eval()
    meter, split, counts = Meter(), [], []
    meter.begin()
    for _ in range(2 + WARMUP):
        begun = time.perf_counter()
        sequences = sampled(student.loaded)
        sampled_s = clock() - begun
        stats = UpdateStats()
        algorithm = AlgorithmSection(loss_fn="importance_sampling")
        accumulate_gradient(student, {0: teacher}, sequences, algorithm, stats)
        optimizer.step()
        meter.end_step()
        counts.append(stats.num_tokens)
        meter.losses.append(stats.teacher_kl / stats.num_tokens)
        gap = stats.logprob_gap / stats.num_tokens
        begun = clock()
        teacher.score_tokens([sequence.tokens for sequence in sequences])
        scored_s = clock() - begun
        meter.begun = clock()
        split.append((sampled_s, scored_s, meter.seconds[-1] - sampled_s - scored_s))
    names = ("generate_s", "score_s", "update_s")
    middle = [round(statistics.median(part), 3) for part in zip(*split[WARMUP:], strict=True)]
    return {
        **meter.reported(counts),
        **passes_of(student),
        **dict(zip(names, middle, strict=True)),
        "logprob_gap": round(gap, 5),
    }


def clock() -> float:
    synchronize()
    return time.perf_counter()


def sampled(loaded: LoadedModel) -> list[TrainingSequence]:
    endless = LoadedModel(loaded.location, loaded.model, loaded.tokenizer, frozenset())
    engine = DecodeEngine(endless, max_rows=SCALE.rows(ROLLOUTS), max_context=2048)
    renderer = ChatRenderer(loaded.tokenizer)
    settings = SamplingSettings(temperature=1.0, max_tokens=SCALE.tokens(NEW_TOKENS))
    sequences: list[DecodedSequence] = []
    for index, messages in enumerate(chats()):
        sequence = DecodedSequence(settings, rng=random.Random(index))
        sequence.append_given(renderer.prompt_ids(messages, []))
        engine.request_turn(sequence)
        sequences.append(sequence)
    while engine.has_work:
        for sequence in engine.step():
            engine.release(sequence)
    return [
        TrainingSequence(
            TokenSequence(s.ids, s.sampled),
            [
                logprob
                for logprob, is_sampled in zip(s.logprobs, s.sampled, strict=True)
                if is_sampled
            ],
        )
        for s in sequences
    ]


def trl_options(batch: int, steps: int) -> dict[str, Any]:
    return {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": batch,
        "max_steps": steps,
        "learning_rate": TRAINER.learning_rate,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "bf16": True,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": [],
        "logging_steps": 1,
        "disable_tqdm": True,
    }


def plain(folder: Path, *, is_full: bool) -> Any:
    dtype = torch.float32 if is_full else torch.bfloat16
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def adapter(*, is_full: bool) -> Any:
    from peft import LoraConfig

    if is_full:
        return None
    return LoraConfig(
        r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM"
    )


def trl_run(trainer: Any, meter: Meter, counts: Sequence[int]) -> dict[str, Any]:
    class Told(transformers.TrainerCallback):
        def on_step_end(self, *_args: Any, **_more: Any) -> None:
            meter.end_step()

        def on_log(
            self, _args: Any, _state: Any, _control: Any, logs: Any = None, **_more: Any
        ) -> None:
            if logs and "loss" in logs:
                meter.losses.append(float(logs["loss"]))

    trainer.add_callback(Told())
    meter.begin()
    trainer.train()
    return meter.reported(counts)


def trl_sft(folder: Path, *, is_full: bool) -> dict[str, Any]:
    import trl
    from datasets import Dataset

    batches = sft_batches()
    rows = [
        {
            "input_ids": s.ids,
            "labels": [i if is_on else -100 for i, is_on in zip(s.ids, s.trained, strict=True)],
        }
        for batch in batches
        for s in batch
    ]
    options = trl_options(len(batches[0]), len(batches))
    trainer = trl.SFTTrainer(
        model=plain(folder, is_full=is_full),
        args=trl.SFTConfig(
            **options, max_length=None, train_sampling_strategy="sequential", shuffle_dataset=False
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder),
        peft_config=adapter(is_full=is_full),
    )
    return trl_run(trainer, Meter(), [nonpad(batch) for batch in batches])


def trl_dpo(folder: Path, *, is_full: bool) -> dict[str, Any]:
    import trl
    from datasets import Dataset

    class OnTokens(trl.DPOTrainer):
        """The tokens are given, so that both train on the very same."""

        def _prepare_dataset(self, dataset: Any, *_args: Any, **_more: Any) -> Any:
            return dataset

    batches = dpo_batches()
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
    options = trl_options(len(batches[0]), len(batches))
    trainer = OnTokens(
        model=plain(folder, is_full=is_full),
        ref_model=plain(folder, is_full=True) if is_full else None,
        args=trl.DPOConfig(**options, max_length=None, train_sampling_strategy="sequential"),
        train_dataset=Dataset.from_list(rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder),
        peft_config=adapter(is_full=is_full),
    )
    counts = [nonpad([s for p in batch for s in (p.chosen, p.rejected)]) for batch in batches]
    return trl_run(trainer, Meter(), counts)


def trl_opd(folder: Path, teacher_folder: Path, *, is_full: bool) -> dict[str, Any]:
    import trl
    from datasets import Dataset

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    steps = 2 + WARMUP
    options = trl_options(SCALE.rows(ROLLOUTS), steps)
    model = plain(folder, is_full=is_full)
    model.generation_config.eos_token_id = None
    trainer = trl.DistillationTrainer(
        model=model,
        teacher_model=plain(teacher_folder, is_full=False),
        args=trl.DistillationConfig(
            **options, max_completion_length=SCALE.tokens(NEW_TOKENS), beta=1.0
        ),
        train_dataset=Dataset.from_list([{"prompt": chat} for chat in chats()] * steps),
        processing_class=tokenizer,
        peft_config=adapter(is_full=is_full),
    )
    return trl_run(trainer, Meter(), [SCALE.rows(ROLLOUTS) * SCALE.tokens(NEW_TOKENS)] * steps)


RUNS: dict[tuple[str, str], Callable[..., dict[str, Any]]] = {
    ("sft", "ours"): our_sft,
    ("sft", "trl"): trl_sft,
    ("dpo", "ours"): our_dpo,
    ("dpo", "trl"): trl_dpo,
    ("opd", "ours"): our_opd,
    ("opd", "trl"): trl_opd,
}


def main(given: Sequence[str] | None = None) -> None:
    args = parse_args(given, ("ours", "trl"), ("sft", "dpo", "opd"))
    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    tell_machine()
    root = Path(tempfile.mkdtemp())
    for size, work, kind in (
        (size, work, kind) for size in args.sizes for work in args.works for kind in args.kinds
    ):
        folders = [saved(size, root)]
        if work == "opd":
            folders.append(saved(teacher_of(size), root, seed=1))
        # TRL runs rows in one way only.
        rows = [("ours", way) for way in args.ways if "ours" in args.only]
        rows += [(who, None) for who in args.only if who != "ours"]
        for who, way in rows:
            gc.collect()
            forget_peak()
            torch.manual_seed(0)
            what = {"bench": work, "who": who, "size": size, "kind": kind}
            what |= {"way": way} if way else {}
            try:
                with packed_by(way or "auto"):
                    tell(**what, **RUNS[work, who](*folders, is_full=kind == "full"))
            # A peer that fails is a result too.
            except Exception as error:
                tell(**what, error=f"{type(error).__name__}: {str(error)[:300]}")
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
