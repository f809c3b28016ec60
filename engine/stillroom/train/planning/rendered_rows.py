"""Reads and renders the rows or prompts that a run would train on, for its forecast."""

from dataclasses import dataclass, field

from stillroom.data.chat.render import ChatRenderer
from stillroom.data.formats import Task, load_datasets, load_dpo_rows
from stillroom.models.load import context_length
from stillroom.train.config.request import TrainingPlan
from stillroom.train.loop.row_batches import hold_out
from stillroom.train.methods.cold_start import cold_start_steps
from stillroom.train.planning import trial
from stillroom.train.planning.forecast import RowTokens
from stillroom.train.planning.unloaded_models import UnloadedStudent
from stillroom.train.student.encode import encode_pairs, encode_sft


@dataclass(frozen=True, slots=True)
class RenderedRows:
    """The rows or prompts that are trained on, read and rendered."""

    tokens: RowTokens
    units: list[trial.Unit] = field(default_factory=list[trial.Unit])
    """The sequences or pairs for the steps of a trial."""
    tasks: list[Task] = field(default_factory=list[Task])
    """The prompts of all files; a trial samples those of the first (distill)."""


def rendered_rows(plan: TrainingPlan, unloaded: UnloadedStudent) -> RenderedRows:
    """Returns the rows of a plan in the student's tokens; of a distillation the prompts alone."""
    config = unloaded.config
    max_length = config.model.row_length(context_length(unloaded.empty))
    renderer = ChatRenderer(unloaded.tokenizer, include_thinking=config.rollout.include_thinking)
    match config.dataset_type:
        case "sft":
            kept, apart = hold_out(
                plan.load_rows(plan.train_file), config.data.val_split, seed=config.trainer.seed
            )
            own = plan.rows_instruction
            sft = encode_sft(kept, renderer, max_length=max_length, teacher=own)
            lengths = [len(sequence.ids) for sequence in sft.sequences]
            tokens = RowTokens(lengths, sft.num_rows, len(apart), sft.skipped)
            return RenderedRows(tokens, list(sft.sequences))
        case "dpo":
            kept, apart = hold_out(
                load_dpo_rows(plan.train_file), config.data.val_split, seed=config.trainer.seed
            )
            dpo = encode_pairs(kept, renderer, max_length=max_length)
            lengths = [trial.num_tokens(pair) for pair in dpo.pairs]
            tokens = RowTokens(lengths, len(dpo.pairs), len(apart), dpo.skipped)
            return RenderedRows(tokens, list(dpo.pairs))
        case "distill":
            tasks = load_datasets(plan.train_files)
            if plan.cold_start_file is None:
                return RenderedRows(RowTokens([], len(tasks)), tasks=tasks)
            rows = plan.load_rows(plan.cold_start_file)
            cold = encode_sft(rows, renderer, max_length=max_length)
            num_steps = cold_start_steps(config, len(cold.sequences))
            tokens = RowTokens([], len(tasks), skipped=cold.skipped, num_first_steps=num_steps)
            return RenderedRows(tokens, tasks=tasks)
