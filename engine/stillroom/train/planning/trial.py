"""Measures a run before it starts: renders its rows, and runs some steps or a short iteration."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import anyio

from stillroom.data.chat.render import ChatRenderer
from stillroom.data.formats import Task, load_datasets
from stillroom.data.instruction import PromptViews
from stillroom.data.row_notes import notes_on_rows
from stillroom.models.batches import TokenSequence, sampled_sequence
from stillroom.models.load import context_length
from stillroom.models.reread.rereading import ReadingPair
from stillroom.policy.hf import HFPolicy
from stillroom.settings import Workspace
from stillroom.teachers.local_hf import LocalTeacher
from stillroom.train.config.request import TrainingPlan
from stillroom.train.config.schema import DistillConfig, DpoConfig, TrainConfig
from stillroom.train.config.sections import DpoSection
from stillroom.train.loop.rows import hold_out
from stillroom.train.methods.dpo import (
    TokenPair,
    accumulate_preference,
    add_reference,
    encode_pairs,
)
from stillroom.train.methods.sft import Targets, accumulate_loss, cold_start_steps, encode_sft
from stillroom.train.on_policy.policy_update import update_student
from stillroom.train.on_policy.teachers import (
    load_local_teacher,
    load_teachers,
    prompt_replacer,
    teacher_sequences,
)
from stillroom.train.on_policy.training_sequences import TrainingSequence
from stillroom.train.planning.forecast import RowTokens, Speed
from stillroom.train.planning.model_checks import divergence_note, end_token_notes
from stillroom.train.planning.weightless_models import WeightlessStudent
from stillroom.train.soft_targets.targets import SoftTargets
from stillroom.train.student.model import Optimizer, Student, load_student, peak_memory_gb
from stillroom.types import SamplingSettings

Unit = TokenSequence | TokenPair
"""One item of a batch: a sequence or a pair."""

# The maximum floating-point operations of a trial step: a few seconds on the slowest machine that
# is useful for training.
MAX_OPERATIONS = {"cpu": 1e12, "mps": 1e13, "cuda": 3e14}


@dataclass(frozen=True, slots=True)
class Trial:
    """The measurements of the trial steps."""

    speed: Speed
    memory_gb: float
    """The peak memory (GB) of the whole process (on CUDA: of the GPU)."""
    is_partial: bool
    """Whether the trial steps had fewer rows than a batch."""
    load_s: float
    """The seconds that loading the student took."""
    notes: list[str]
    """Notes on how rows run (packed, padded or one by one) and on how answers end."""
    teacher_s_per_token: float = 0.0
    """The seconds per token of a teacher that scores rows before the first step; 0 without one."""


def try_steps(workspace: Workspace, config: TrainConfig, units: Sequence[Unit]) -> Trial:
    """Measures the memory of a step on the longest rows and the time of one on the first rows."""
    started = time.monotonic()
    student = load_student(workspace, config.model, seed=config.trainer.seed)
    teacher = _load_scoring_teacher(workspace, config, student)
    load_s = time.monotonic() - started
    num_parameters = sum(p.numel() for p in student.module.parameters())
    # A forward and backward pass takes about 6 operations per parameter and token.
    max_tokens = int(MAX_OPERATIONS[student.loaded.device.type] / (6 * num_parameters))
    size = config.data.batch_size
    longest = sorted(units, key=num_tokens)[-size:][::-1]
    optimizer = student.optimizer(config.trainer, total_steps=2)
    longest_batch, first_batch = (
        _first_units(longest, max_tokens),
        _first_units(units[:size], max_tokens),
    )
    settings, targets, scoring_s = config.soft_targets, None, 0.0
    if settings is not None and teacher is not None:
        if settings.top_k is None:
            targets = SoftTargets(settings, teacher=teacher)
        else:
            scoring_s = _scoring_seconds(teacher, first_batch)
    answers = [unit.chosen if isinstance(unit, TokenPair) else unit for unit in first_batch]
    end_notes = end_token_notes(student, answers, teacher)
    _take_timed_step(student, config, longest_batch, optimizer, targets)
    accumulate_s, step_s = _take_timed_step(student, config, first_batch, optimizer, targets)
    num_first = sum(map(num_tokens, first_batch))
    speed = Speed(token_s=accumulate_s / num_first, step_s=step_s)
    return Trial(
        speed,
        memory_gb=peak_memory_gb(student.loaded.device),
        is_partial=len(longest_batch) < len(longest) or len(first_batch) < len(units[:size]),
        load_s=load_s,
        notes=[*student.head.notes, *end_notes],
        teacher_s_per_token=scoring_s / num_first,
    )


def _load_scoring_teacher(
    workspace: Workspace, config: TrainConfig, student: Student
) -> LocalTeacher | None:
    """Loads the teacher of soft targets; returns None if there is none or a server runs it."""
    if config.soft_targets is None or config.teachers[0].section.is_served:
        return None
    return load_local_teacher(workspace, config.teachers[0], student.loaded)


def _scoring_seconds(teacher: LocalTeacher, units: Sequence[Unit]) -> float:
    """Returns the seconds that the teacher takes to score the sequences."""
    sequences = teacher_sequences([unit for unit in units if isinstance(unit, TokenSequence)])
    teacher.score_tokens(sequences[:1])
    started = time.monotonic()
    teacher.score_tokens(sequences)
    return time.monotonic() - started


def num_tokens(unit: Unit) -> int:
    """Returns the number of tokens of a sequence, or of both sides of a pair."""
    if isinstance(unit, TokenPair):
        return len(unit.chosen.ids) + len(unit.rejected.ids)
    return len(unit.ids)


def num_trained(unit: Unit) -> int:
    """Returns the number of trained tokens, counted as in a run's `tokens_per_s`."""
    if isinstance(unit, TokenPair):
        return unit.chosen.num_trained + unit.rejected.num_trained
    return unit.num_trained


def _first_units(units: Sequence[Unit], max_tokens: int) -> list[Unit]:
    """Returns the first units with at most `max_tokens` in total; at least one unit."""
    chosen, total = [units[0]], num_tokens(units[0])
    for unit in units[1:]:
        if (total := total + num_tokens(unit)) > max_tokens:
            break
        chosen.append(unit)
    return chosen


def _take_timed_step(
    student: Student,
    config: TrainConfig,
    units: Sequence[Unit],
    optimizer: Optimizer,
    targets: Targets | None,
) -> tuple[float, float]:
    """Takes one step; returns the seconds of its forward and backward passes, and of AdamW."""
    pairs = [unit for unit in units if isinstance(unit, TokenPair)]
    dpo = config.dpo if isinstance(config, DpoConfig) else DpoSection()
    referenced = add_reference(student, pairs, is_mean=dpo.loss == "ipo") if pairs else []
    started = time.monotonic()
    if referenced:
        accumulate_preference(student, referenced, dpo)
    else:
        rows = [unit for unit in units if isinstance(unit, TokenSequence)]
        accumulate_loss(student, rows, targets)
    accumulated = time.monotonic()
    optimizer.step()
    return accumulated - started, time.monotonic() - accumulated


_MAX_ROLLOUTS, _MAX_TOKENS = 16, 32
_PROMPT_TOKENS = 100


@dataclass(frozen=True, slots=True)
class RolloutTrial:
    """The measurements of a short iteration."""

    token_s: float
    """The seconds per sampled token for sampling, scoring and training together."""
    answer_tokens: float
    """The tokens of a turn: the measured mean, or rollout.max_tokens if the trial truncated a
    turn."""
    is_cut: bool
    """Whether the trial truncated a turn."""
    longest_tokens: int
    """The tokens of the longest rollout, prompt included."""
    memory_gb: float
    load_s: float
    """The seconds that loading student and teachers took."""
    checks: list[str]
    """A note on how far apart student and teacher are on the sampled answers."""

    def seconds(self, config: DistillConfig, steps: int, *, token_s: float) -> float:
        """Returns the seconds of `steps` iterations whose rollouts have one turn each."""
        rollouts = config.data.batch_size * config.data.group_size
        return steps * rollouts * self.answer_tokens * token_s


def try_iteration(
    workspace: Workspace, config: DistillConfig, tasks: Sequence[Task], views: PromptViews
) -> RolloutTrial | None:
    """Measures a short iteration; returns None if a server scores it or all answers are empty."""
    started = time.monotonic()
    student = load_student(workspace, config.model, seed=config.trainer.seed)
    teachers = load_teachers(workspace, config, student)
    if teachers.served or not teachers.local:
        return None
    load_s = time.monotonic() - started
    max_tokens = min(config.rollout.max_tokens, _MAX_TOKENS)
    num = min(config.data.batch_size * config.data.group_size, _MAX_ROLLOUTS)
    models = [student.loaded, *(teacher.loaded for teacher in teachers.local.values())]
    size = sum(p.numel() for loaded in models for p in loaded.model.parameters())
    operations = MAX_OPERATIONS[student.loaded.device.type]
    num = max(1, min(num, int(operations / (8 * size * (max_tokens + _PROMPT_TOKENS)))))
    chosen = [tasks[index // config.data.group_size % len(tasks)] for index in range(num)]
    started = time.monotonic()
    pair = teachers.pairs.get(0)
    sequences = anyio.run(_sample, student, config, chosen, views, max_tokens, pair)
    tokens = [sequence.tokens.num_trained for sequence in sequences]
    if not sum(tokens):
        return None
    sampled_s = time.monotonic() - started
    # The tokens of a teacher with another tokenizer cannot be compared.
    note = divergence_note(student, teachers.local[0], sequences) if pair is None else None
    started = time.monotonic()
    optimizer = student.optimizer(config.trainer, total_steps=config.algorithm.substeps)
    update_student(student, teachers.local, sequences, optimizer, config, 0)
    is_cut = max_tokens < config.rollout.max_tokens and max(tokens) >= max_tokens
    return RolloutTrial(
        token_s=(sampled_s + time.monotonic() - started) / sum(tokens),
        answer_tokens=config.rollout.max_tokens if is_cut else sum(tokens) / len(tokens),
        is_cut=is_cut,
        longest_tokens=max(len(sequence.tokens.ids) for sequence in sequences),
        memory_gb=peak_memory_gb(student.loaded.device),
        load_s=load_s,
        checks=[] if note is None else [note],
    )


async def _sample(
    student: Student,
    config: DistillConfig,
    tasks: Sequence[Task],
    views: PromptViews,
    max_tokens: int,
    pair: ReadingPair | None,
) -> list[TrainingSequence]:
    """Returns one sampled turn for each task, in both models' tokens.

    pair: the student and a teacher with another tokenizer; None: they have the same.
    """
    student.module.eval()
    sampling = SamplingSettings(temperature=1.0, max_tokens=max_tokens, seed=config.trainer.seed)
    sequences: list[TrainingSequence] = []
    policy = HFPolicy(
        student.loaded,
        sampling,
        max_rows=min(len(tasks), config.rollout.concurrency),
        max_context=config.rollout.max_context_window,
    )

    replace_prompt = prompt_replacer(policy.renderer, views)

    async def sample_turn(task: Task, number: int) -> None:
        messages = views.for_student(task).messages
        async with policy.converse(messages, [], seed_key=str(number)) as conversation:
            turn = await conversation.sample()
            trace = conversation.trace()
        if trace is None or not any(trace.sampled):
            return
        reading, teacher_trace = None, None
        if pair is not None:
            prompt = views.teacher.apply_to(task.messages)
            reading = pair.read(trace, [*prompt, turn.message], [], num_turns=1)
        else:
            teacher_trace = replace_prompt(task, trace, [])
        tokens = sampled_sequence(trace, teacher_trace)
        sequences.append(TrainingSequence(tokens, trace.sampled_logprobs, reading=reading))

    async with policy, anyio.create_task_group() as group:
        for number, task in enumerate(tasks):
            group.start_soon(sample_turn, task, number)
    return sequences


@dataclass(frozen=True, slots=True)
class RenderedRows:
    """The rows or prompts to train on, read and rendered."""

    tokens: RowTokens
    units: list[Unit] = field(default_factory=list[Unit])
    """The sequences or pairs for the trial steps."""
    tasks: list[Task] = field(default_factory=list[Task])
    """The prompts of all files; a trial samples those of the first file (distill)."""
    notes: list[str] = field(default_factory=list[str])
    """Notes on the rows themselves."""


def render_rows(plan: TrainingPlan, student: WeightlessStudent) -> RenderedRows:
    """Returns the rows of a plan in the student's tokens; for distillation the prompts alone."""
    config = student.config
    max_length = config.model.max_row_length(context_length(student.empty))
    renderer = ChatRenderer(student.tokenizer, include_thinking=config.rollout.include_thinking)
    match config.dataset_type:
        case "sft":
            rows = plan.load_rows(plan.train_file)
            kept, held_out = hold_out(rows, config.data.val_split, seed=config.trainer.seed)
            instruction = plan.rows_instruction
            sft = encode_sft(kept, renderer, max_length=max_length, instruction=instruction)
            lengths = [len(sequence.ids) for sequence in sft.sequences]
            tokens = RowTokens(lengths, sft.num_rows, len(held_out), sft.skipped)
            return RenderedRows(tokens, list(sft.sequences), notes=notes_on_rows(rows))
        case "dpo":
            pairs = plan.load_pairs(plan.train_file)
            kept, held_out = hold_out(pairs, config.data.val_split, seed=config.trainer.seed)
            dpo = encode_pairs(kept, renderer, max_length=max_length)
            lengths = [num_tokens(pair) for pair in dpo.pairs]
            tokens = RowTokens(lengths, len(dpo.pairs), len(held_out), dpo.skipped)
            return RenderedRows(tokens, list(dpo.pairs), notes=notes_on_rows(pairs))
        case "distill":
            tasks = load_datasets(plan.train_files)
            if plan.cold_start_file is None:
                return RenderedRows(RowTokens([], len(tasks)), tasks=tasks)
            rows = plan.load_rows(plan.cold_start_file)
            cold = encode_sft(rows, renderer, max_length=max_length)
            num_steps = cold_start_steps(config, len(cold.sequences))
            tokens = RowTokens([], len(tasks), skipped=cold.skipped, num_cold_start_steps=num_steps)
            return RenderedRows(tokens, tasks=tasks, notes=notes_on_rows(rows))
