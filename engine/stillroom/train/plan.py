"""plan_training: everything that can be known before a run is started, and what to change."""

import math
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch

from stillroom.data.formats import load_dpo_rows, load_sft_rows, load_tasks
from stillroom.data.reasoning import reasoning_variables
from stillroom.data.render import ChatRenderer
from stillroom.models.heads import max_positions
from stillroom.models.load import LoadedModel, context_length, load_tokenizer
from stillroom.models.pairing import check_pair
from stillroom.models.resolve import ModelLocation, adapter_base, locate_model
from stillroom.settings import Workspace
from stillroom.train import forecast, trial
from stillroom.train.cold_start import cold_start_steps
from stillroom.train.config import ModelSection, TrainConfig
from stillroom.train.contract import check_teacher_server
from stillroom.train.dry_forward import empty_model, size_of
from stillroom.train.encode import encode_pairs, encode_sft
from stillroom.train.forecast import GB, ModelSize, RowTokens, TrainingForecast
from stillroom.train.held_out import hold_out
from stillroom.train.processes import shared_speed, spread_notes, spread_of
from stillroom.train.request import PlanTraining, TrainingPlan, plan_request
from stillroom.train.student import max_pass_tokens, new_adapter, student_precision
from stillroom.train.trial_rollouts import try_iteration

_FEW_TOKENS = 512


@dataclass(frozen=True, slots=True)
class _Planned:
    """The student without weights, and what is trained on."""

    config: TrainConfig
    location: ModelLocation
    tokenizer: Any
    empty: Any
    size: ModelSize
    device: torch.device


def plan_training(workspace: Workspace, request: PlanTraining) -> TrainingForecast:
    """Returns what the run will need. Raises an EngineError for what would end it.

    All rows are rendered; a model that is small enough is loaded for two steps, which are lost.
    """
    plan = plan_request(workspace, request)
    planned = _without_weights(workspace, plan.config)
    teacher_bytes = _teacher_bytes(workspace, planned)
    checks = _checks(workspace, planned)
    rows, units = _tokens_of(plan, planned)
    tokens, cache_bytes = _largest_pass(planned, rows)
    spread = _spread(planned)
    # By now all libraries are loaded, and nothing that has weights is.
    is_cuda = planned.device.type == "cuda"
    process_bytes = 0 if is_cuda else psutil.Process().memory_info().rss
    parts = forecast.memory_parts(
        planned.size,
        tokens=tokens,
        process_bytes=process_bytes,
        teacher_bytes=teacher_bytes,
        cache_bytes=cache_bytes,
        spread=spread,
    )
    alone = forecast.memory_parts(planned.size, tokens=tokens, process_bytes=process_bytes)
    need, free = max(sum(parts.values()), sum(alone.values())), _free_bytes(planned.device)
    tried = None
    # The steps are tried in this process alone.
    if units and forecast.fits(need, free):
        tried = trial.try_steps(workspace, plan.config, units)
    told = _forecast(workspace, planned, rows, parts, free, tried, tokens)
    if plan.config.dataset_type == "distill" and told.fits:
        told = _with_iteration(workspace, plan, told, spread)
    return msgspec.structs.replace(told, checks=checks)


def _with_iteration(
    workspace: Workspace, plan: TrainingPlan, told: TrainingForecast, spread: forecast.Spread
) -> TrainingForecast:
    """Returns the forecast with the time that a short iteration tells, where one can be made."""
    config = plan.config
    tried = try_iteration(workspace, config, load_tasks(plan.train_files[0]))
    if tried is None:
        return told
    speed = shared_speed(forecast.Speed(token_s=tried.token_s, step_s=0.0), spread)
    assumed = "the most there may be" if tried.is_cut else "as a short trial gave"
    note = (
        f"the time is for one turn a rollout of {tried.answer_tokens:.0f} tokens ({assumed}), "
        "without tools: multiply by the turns you expect"
    )
    return msgspec.structs.replace(
        told,
        seconds=tried.seconds(config, told.steps, token_s=speed.token_s),
        tokens_per_s=1 / speed.token_s,
        measured_memory_gb=tried.memory_gb,
        notes=[*told.notes, note],
    )


def _forecast(
    workspace: Workspace,
    planned: _Planned,
    rows: RowTokens,
    parts: dict[str, float],
    free: float,
    tried: "trial.Trial | None",
    tokens: int,
) -> TrainingForecast:
    config, size = planned.config, planned.size
    steps = forecast.num_steps(config, len(rows.lengths) or rows.num_rows) + rows.num_first_steps
    disk, disk_free = forecast.disk_bytes(config, size, steps=steps), _free_disk(workspace.root)
    spread = _spread(planned)
    measured = tried.memory_gb * GB if tried and spread.num_processes == 1 else 0.0
    need = max(sum(parts.values()), measured)
    fits_memory, fits_disk = forecast.fits(need, free), forecast.fits(disk, disk_free)
    changes = [] if fits_memory else _less_memory(planned, rows, parts, free)
    if not fits_disk:
        changes.append("trainer.keep_checkpoints=1 and a larger trainer.save_step need less disk")
    epoch_tokens = sum(rows.lengths) or None
    seconds = None
    if tried is not None and epoch_tokens is not None:
        share = rows.num_held_out / max(1, rows.num_rows)
        seconds = forecast.run_seconds(
            config,
            shared_speed(tried.speed, spread),
            steps=steps,
            epoch_tokens=epoch_tokens,
            held_out_share=share,
        )
    return TrainingForecast(
        method=config.dataset_type,
        device=planned.device.type,
        rows=rows.num_rows,
        skipped=dict(rows.skipped or {}),
        longest_tokens=max(rows.lengths, default=None),
        epoch_tokens=epoch_tokens,
        steps=steps,
        parameters=size.num_parameters,
        trained_parameters=size.num_trained,
        memory_gb=sum(parts.values()) / GB,
        memory_parts_gb={name: value / GB for name, value in parts.items()},
        memory_free_gb=free / GB,
        measured_memory_gb=tried.memory_gb if tried else None,
        seconds=seconds,
        tokens_per_s=1 / tried.speed.token_s if tried else None,
        checkpoint_gb=forecast.checkpoint_bytes(size, is_final=False) / GB,
        disk_gb=disk / GB,
        disk_free_gb=disk_free / GB,
        fits=fits_memory and fits_disk,
        changes=changes,
        notes=_notes(config, tried, tokens) + spread_notes(config.launcher, spread),
    )


def _notes(config: TrainConfig, tried: "trial.Trial | None", tokens: int) -> list[str]:
    notes = [f"the largest pass has {tokens} tokens"]
    if config.dataset_type == "distill":
        notes.append(
            "how long sampling takes depends on the student's answers and tools: "
            "trainer.max_steps=2 tells (sample_s and update_s of each step)"
        )
    elif tried is None:
        notes.append("no step was tried: it would not fit in memory")
    elif tried.is_partial:
        notes.append("the tried steps had fewer rows than a batch, for a whole one takes long")
    return notes


def _spread(planned: _Planned) -> forecast.Spread:
    return spread_of(planned.config.launcher, planned.empty, planned.device)


def _without_weights(workspace: Workspace, config: TrainConfig) -> _Planned:
    location = locate_model(workspace, config.model.path)
    tokenizer = load_tokenizer(location)
    if config.dataset_type == "distill":
        reasoning_variables(tokenizer.chat_template, config.rollout.reasoning_mode)
    base = adapter_base(workspace, location) if location.is_adapter else location
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    empty = empty_model(base, precision=student_precision(config.model), device=device)
    return _Planned(config, location, tokenizer, empty, _student_size(empty, config.model), device)


def _student_size(empty: Any, section: ModelSection) -> ModelSize:
    with torch.device("meta"):
        model = new_adapter(empty, section) if section.qlora_rank > 0 else empty
    size = size_of(model, is_quantized=section.quantization is not None)
    if section.gradient_checkpointing:
        text: Any = empty.config.get_text_config()
        kept = forecast.recomputed_bytes(
            size.activation_bytes,
            num_layers=text.num_hidden_layers,
            state_bytes=text.hidden_size * empty.dtype.itemsize,
        )
        size = replace(size, activation_bytes=kept)
    if section.qlora_rank > 0:
        model.unload()
    return size


def _teacher_bytes(workspace: Workspace, planned: _Planned) -> int:
    """Returns the teachers' weights; raises ModelError unless it reads tokens as the student."""
    total, nothing = 0, frozenset[int]()
    for teacher in dict.fromkeys(planned.config.teachers):
        if teacher.section.is_served:
            continue
        location = locate_model(workspace, teacher.path)
        base = adapter_base(workspace, location) if location.is_adapter else location
        empty = empty_model(base, precision=teacher.section.precision, device=planned.device)
        check_pair(
            LoadedModel(planned.location, planned.empty, planned.tokenizer, nothing),
            LoadedModel(location, empty, load_tokenizer(location), nothing),
        )
        is_quantized = teacher.section.quantization is not None
        total += size_of(empty, is_quantized=is_quantized).weight_bytes
    return total


def _checks(workspace: Workspace, planned: _Planned) -> list[str]:
    """Returns what was found of the teacher; raises an EngineError for what would end the run."""
    config = planned.config
    here = dict.fromkeys(t.path for t in config.teachers if not t.section.is_served)
    checks = [f"{path} has the student's tokens and chat template" for path in here]
    most = min(context_length(planned.empty), config.rollout.max_context_window)
    return checks + check_teacher_server(workspace, config, planned.tokenizer, max_context=most)


def _tokens_of(plan: TrainingPlan, planned: _Planned) -> "tuple[RowTokens, list[trial.Unit]]":
    """Returns the rows' lengths and what the steps that are tried are made of."""
    config = planned.config
    max_length = config.model.row_length(context_length(planned.empty))
    renderer = ChatRenderer(planned.tokenizer, include_thinking=config.rollout.include_thinking)
    match config.dataset_type:
        case "sft":
            kept, apart = hold_out(
                load_sft_rows(plan.train_file), config.data.val_split, seed=config.trainer.seed
            )
            sft = encode_sft(kept, renderer, max_length=max_length)
            lengths = [len(sequence.ids) for sequence in sft.sequences]
            rows = RowTokens(lengths, sft.num_rows, len(apart), sft.skipped)
            return rows, list(sft.sequences)
        case "dpo":
            kept, apart = hold_out(
                load_dpo_rows(plan.train_file), config.data.val_split, seed=config.trainer.seed
            )
            dpo = encode_pairs(kept, renderer, max_length=max_length)
            lengths = [trial.num_tokens(pair) for pair in dpo.pairs]
            return RowTokens(lengths, len(dpo.pairs), len(apart), dpo.skipped), list(dpo.pairs)
        case "distill":
            num_tasks, first = (
                sum(len(load_tasks(f)) for f in plan.train_files),
                plan.cold_start_file,
            )
            if first is None:
                return RowTokens([], num_tasks), []
            cold = encode_sft(load_sft_rows(first), renderer, max_length=max_length)
            num_steps = cold_start_steps(config, len(cold.sequences))
            skipped = cold.skipped
            return RowTokens([], num_tasks, skipped=skipped, num_first_steps=num_steps), []


def _largest_pass(planned: _Planned, rows: RowTokens) -> tuple[int, int]:
    """Returns the tokens of the largest pass with gradient, and the bytes sampling caches."""
    config = planned.config
    most = config.model.microbatch_tokens or max_pass_tokens(max_positions(planned.size.vocab_size))
    if config.dataset_type != "distill":
        share = math.ceil(config.data.batch_size / _spread(planned).num_processes)
        longest = sorted(rows.lengths)[-share:]
        return forecast.pass_tokens(longest, max_tokens=most), 0
    rollout = config.rollout
    length = min(rollout.max_context_window, _FEW_TOKENS + rollout.max_turns * rollout.max_tokens)
    num = config.data.batch_size * config.data.group_size
    at_once = min(rollout.concurrency, num)
    text: Any = planned.empty.config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    width = 2 if planned.device.type == "cuda" else 4
    per_token = 2 * text.num_hidden_layers * heads * head_size * width
    return forecast.pass_tokens([length] * num, max_tokens=most), at_once * length * per_token


def _less_memory(
    planned: _Planned, rows: RowTokens, parts: dict[str, float], free: float
) -> list[str]:
    """Returns the settings that need less memory, with what they need."""
    config, needs = planned.config, dict[str, float]()
    spread = _spread(planned)
    sharing = spread.num_sharing
    tokens = _largest_pass(planned, rows)[0]

    def need(size: ModelSize, tokens: int) -> float:
        changed = forecast.memory_parts(
            size,
            tokens=tokens,
            process_bytes=int(parts.get("process", 0) / sharing),
            teacher_bytes=int(parts.get("teacher", 0) / sharing),
            cache_bytes=int(parts.get("sampling", 0) / sharing),
            spread=spread,
        )
        return sum(changed.values())

    shorter = tokens // 2
    if rows.lengths and tokens > _FEW_TOKENS:
        single = max(rows.lengths)
        if config.data.batch_size > 1 and single < tokens:
            needs[f"model.microbatch_tokens={single}"] = need(planned.size, single)
        else:
            needs[f"model.max_length={shorter}"] = need(planned.size, shorter)
    for setting, change in _smaller(config.model).items():
        section = config.model.model_copy(update=change)
        needs[setting] = need(_student_size(planned.empty, section), tokens)
    is_lora = config.model.qlora_rank > 0
    if is_lora and planned.device.type == "cpu" and config.model.precision != "bf16":
        half = replace(planned.size, weight_bytes=planned.size.weight_bytes // 2)
        needs["model.precision=bf16"] = need(half, tokens)
    return forecast.told(needs, free)


def _smaller(section: ModelSection) -> dict[str, dict[str, Any]]:
    """Returns what the model's section may say to need less memory."""
    found: dict[str, dict[str, Any]] = {}
    if not section.gradient_checkpointing:
        found["model.gradient_checkpointing=true"] = {"gradient_checkpointing": True}
    if section.qlora_rank == 0:
        found["model.qlora_rank=32"] = {"qlora_rank": 32}
    elif section.quantization is None:
        found["model.quantization=nf4"] = {"quantization": "nf4"}
    return found


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info()[0])
    return float(psutil.virtual_memory().available)


def _free_disk(folder: Path) -> float:
    return float(shutil.disk_usage(folder).free)
