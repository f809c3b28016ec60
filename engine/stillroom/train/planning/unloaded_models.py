"""A run's models without their weights: what they will need, and what would need less."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from stillroom.data.chat.reasoning import reasoning_variables
from stillroom.models.heads import max_positions
from stillroom.models.load import LoadedModel, context_length, load_tokenizer
from stillroom.models.pairing import check_pair
from stillroom.models.resolve import ModelLocation, adapter_base, locate_model
from stillroom.settings import Workspace
from stillroom.train.config.schema import ModelSection, TrainConfig
from stillroom.train.on_policy.preflight import check_teacher_server
from stillroom.train.planning import forecast
from stillroom.train.planning.dry_forward import empty_model, size_of
from stillroom.train.planning.forecast import ModelSize, RowTokens
from stillroom.train.planning.processes import spread_of
from stillroom.train.student.model import max_pass_tokens, new_adapter, student_precision

_FEW_TOKENS = 512


@dataclass(frozen=True, slots=True)
class UnloadedStudent:
    """The student without weights, and what is trained on."""

    config: TrainConfig
    location: ModelLocation
    tokenizer: Any
    empty: Any
    size: ModelSize
    device: torch.device

    @property
    def spread(self) -> forecast.Spread:
        """How many processes will share the work, and the weights."""
        return spread_of(self.config.launcher, self.empty, self.device)


def load_without_weights(workspace: Workspace, config: TrainConfig) -> UnloadedStudent:
    """Returns what is planned. Raises an EngineError if the student is not fit for it."""
    location = locate_model(workspace, config.model.path)
    tokenizer = load_tokenizer(location)
    if config.dataset_type == "distill":
        reasoning_variables(tokenizer.chat_template, config.rollout.reasoning_mode)
    base = adapter_base(workspace, location) if location.is_adapter else location
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    empty = empty_model(base, precision=student_precision(config.model), device=device)
    return UnloadedStudent(
        config, location, tokenizer, empty, _student_size(empty, config.model), device
    )


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


def count_teacher_bytes(workspace: Workspace, planned: UnloadedStudent) -> int:
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


def check_models(workspace: Workspace, planned: UnloadedStudent) -> list[str]:
    """Returns what was found of the teacher; raises an EngineError for what would end the run."""
    config = planned.config
    here = dict.fromkeys(t.path for t in config.teachers if not t.section.is_served)
    checks = [f"{path} has the student's tokens and chat template" for path in here]
    most = min(context_length(planned.empty), config.rollout.max_context_window)
    return checks + check_teacher_server(workspace, config, planned.tokenizer, max_context=most)


def largest_pass(planned: UnloadedStudent, rows: RowTokens) -> tuple[int, int]:
    """Returns the tokens of the largest pass with gradient, and the bytes sampling caches."""
    config = planned.config
    most = config.model.microbatch_tokens or max_pass_tokens(max_positions(planned.size.vocab_size))
    if config.dataset_type != "distill":
        share = math.ceil(config.data.batch_size / planned.spread.num_processes)
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


def settings_of_less_memory(
    planned: UnloadedStudent, rows: RowTokens, parts: dict[str, float], free: float
) -> list[str]:
    """Returns the settings that need less memory, with what they need."""
    config, needs = planned.config, dict[str, float]()
    spread = planned.spread
    sharing = spread.num_sharing
    tokens = largest_pass(planned, rows)[0]

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
