"""A run's models without their weights: the memory they need, and settings that need less."""

import math
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from stillroom.data.chat.template import reasoning_variables
from stillroom.errors import ConfigError, ModelError
from stillroom.models.cpu.gradients import tile_positions
from stillroom.models.lm_head import HeadRunner, max_positions
from stillroom.models.load import LoadedModel, context_length, load_tokenizer
from stillroom.models.multimodal import language_config
from stillroom.models.pairing import check_pair
from stillroom.models.placement import base_model, best_device, check_options, dtype_for
from stillroom.models.precision import Precision
from stillroom.models.reread.pair_check import open_pair
from stillroom.models.reread.rereading import ReadingPair
from stillroom.models.resolve import ModelLocation, adapter_base, locate_model
from stillroom.policy.passes import SlotPasses
from stillroom.policy.slot_cache import new_slot_cache
from stillroom.settings import Workspace
from stillroom.train.config.distill_sections import DatasetTeacher
from stillroom.train.config.schema import TrainConfig
from stillroom.train.config.sections import LauncherSection, ModelSection
from stillroom.train.on_policy.teachers import open_served_pair
from stillroom.train.planning import forecast
from stillroom.train.planning.forecast import ONE_PROCESS, ModelSize, RowTokens, Speed
from stillroom.train.student.adapters import (
    check_no_new_targets,
    choose_targets,
    describe_adapter,
    new_adapter,
)
from stillroom.train.student.chat import student_tokenizer
from stillroom.train.student.collective import gathered_bytes
from stillroom.train.student.model import max_pass_tokens, router_notes

# Multiples of the chunk lengths of recurrent layers, which pad incomplete chunks (gated delta net
# 64, Mamba 256).
_PROBE_LENGTHS = (256, 512, 768)
# Half a byte per weight, plus the scales of its block.
_NF4_BYTES = 0.5625


class _MetaTensorMode(TorchDispatchMode):
    """Runs operations on meta tensors that need real values.

    Reading a number from a tensor returns 1, since meta tensors hold no values. Experts' matrix
    products run in bf16, the only dtype that the meta device supports for them.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1
        if func is torch.ops.aten._grouped_mm.default:
            first, second, *others = args
            product = func(first.bfloat16(), second.bfloat16(), *others, **(kwargs or {}))
            return product.to(first.dtype)
        return func(*args, **(kwargs or {}))


def empty_model(location: ModelLocation, *, precision: Precision, device: torch.device) -> Any:
    """Returns the model of a folder or hub id without its weights, as it would be on the device."""
    try:
        config = language_config(location)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=dtype_for(precision, device))
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"the configuration of {location.name!r} cannot be read: {error}",
            "check the name, or the folder's config.json",
        ) from error


def size_of(model: Any, *, is_quantized: bool = False) -> ModelSize:
    """Returns the size of a model without weights, or of the peft model that wraps it."""
    vocabulary = int(base_model(model).config.get_text_config().vocab_size)
    trained = [p for p in model.parameters() if p.requires_grad]
    return ModelSize(
        weight_bytes=sum(p.nbytes for p in model.parameters())
        - (_saved_by_quantizing(model) if is_quantized else 0),
        num_parameters=sum(p.numel() for p in model.parameters()),
        trained_bytes=sum(p.nbytes for p in trained),
        num_trained=sum(p.numel() for p in trained),
        activation_bytes=_activation_bytes(model),
        vocab_size=vocabulary,
        tile_positions=min(HeadRunner(model).max_positions, tile_positions(vocabulary)),
    )


def active_parameters(model: Any) -> int:
    """Returns the number of parameters active for one token, of experts only the routed ones."""
    text: Any = base_model(model).config.get_text_config()
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    num_experts = next((n for name in names if (n := getattr(text, name, None))), None)
    num_routed = getattr(text, "num_experts_per_tok", None)
    share = num_routed / num_experts if num_experts and num_routed else 1.0
    parameters = model.named_parameters()
    return round(sum(p.numel() * (share if ".experts." in name else 1) for name, p in parameters))


def sampling_bytes(model: Any, *, num_tokens: int) -> int:
    """Returns how many bytes a conversation of `num_tokens` keeps while it is sampled.

    Counted are its KV cache, and the states of recurrent layers, which do not grow.
    """
    cache = new_slot_cache(base_model(model).config, num_slots=1)
    if cache is not None:
        try:
            with torch.no_grad(), _MetaTensorMode():
                SlotPasses(model, cache).logits([0], [0], [[0, 0]])
        # A model that does not support this is sampled with transformers' own cache.
        except (ValueError, TypeError, AttributeError, RuntimeError):
            cache = None
    if cache is not None:
        return cache.state_bytes + num_tokens * cache.token_bytes
    text: Any = base_model(model).config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * text.num_hidden_layers * heads * head_size * model.dtype.itemsize * num_tokens


def _saved_by_quantizing(model: Any) -> int:
    """Returns how many bytes nf4 saves on all frozen matrices except the output head's."""
    head = base_model(model).get_output_embeddings()
    frozen = [
        module.weight
        for module in model.modules()
        if isinstance(module, nn.Linear) and module is not head and not module.weight.requires_grad
    ]
    return sum(int(weight.nbytes - weight.numel() * _NF4_BYTES) for weight in frozen)


def _activation_bytes(model: Any) -> float:
    """Returns the activation bytes per token, without attention's quadratic part.

    On the meta device attention keeps its probabilities, which it does not on CPU and CUDA. So
    three lengths are measured, and the part that grows quadratically is removed.
    """
    body: nn.Module = base_model(model).get_decoder()
    low, middle, high = (_kept_bytes(body, num_tokens) for num_tokens in _PROBE_LENGTHS)
    step = _PROBE_LENGTHS[1] - _PROBE_LENGTHS[0]
    quadratic = (high - 2 * middle + low) / (2 * step * step)
    return (middle - low) / step - quadratic * (_PROBE_LENGTHS[0] + _PROBE_LENGTHS[1])


def _kept_bytes(body: nn.Module, num_tokens: int) -> int:
    """Returns how many bytes a forward pass keeps for the backward pass, weights excluded."""
    weights = {StorageWeakRef(p.untyped_storage()) for p in body.parameters()}
    kept: dict[StorageWeakRef, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if (storage := StorageWeakRef(tensor.untyped_storage())) not in weights:
            kept[storage] = tensor
        return tensor

    ids = torch.zeros(1, num_tokens, dtype=torch.int64, device="meta")
    with _MetaTensorMode(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = body(input_ids=ids, use_cache=False)
    del out
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


_PROMPT_TOKENS = 512
"""The assumed tokens of a prompt; also the length below which no shorter one is suggested."""


@dataclass(frozen=True, slots=True)
class WeightlessStudent:
    """The student without its weights, with the configuration of its run."""

    config: TrainConfig
    location: ModelLocation
    tokenizer: Any
    empty: Any
    """The model on the meta device, without an adapter."""
    size: ModelSize
    device: torch.device
    notes: list[str]
    """Notes on the layers with an adapter."""
    num_gpus: int | None = None
    """The number of GPUs of the machine that would train; None: of this one."""

    @property
    def layout(self) -> forecast.ProcessLayout:
        """How work and weights are divided between processes."""
        return process_layout(self.config.launcher, self.empty, self.device, num_gpus=self.num_gpus)

    def memory_parts(
        self, tokens: int, cache_bytes: int, *, process_bytes: int, teacher_bytes: int
    ) -> dict[str, float]:
        """Returns the peak bytes of training, by purpose, for a largest pass of `tokens`."""
        return forecast.memory_parts(
            self.size,
            tokens=tokens,
            process_bytes=process_bytes,
            teacher_bytes=teacher_bytes,
            cache_bytes=cache_bytes,
            layout=self.layout,
        )


def load_without_weights(
    workspace: Workspace,
    config: TrainConfig,
    *,
    device: torch.device | None = None,
    num_gpus: int | None = None,
) -> WeightlessStudent:
    """Returns the student without weights, as it would be on `device` (None: the best here).

    Raises EngineError if the config cannot train it.
    """
    location = locate_model(workspace, config.model.path)
    tokenizer = student_tokenizer(workspace, config.model, location)
    if config.dataset_type == "distill":
        reasoning_variables(tokenizer.chat_template, config.rollout.reasoning_mode)
    base = adapter_base(workspace, location) if location.is_adapter else location
    device = device or best_device()
    check_options(device, quantization=config.model.quantization, spread=False)
    empty = empty_model(base, precision=config.model.student_precision, device=device)
    LoadedModel(location, empty, tokenizer, frozenset()).check_vocabulary()
    size, notes = _student_size_and_notes(empty, config.model, location)
    if location.record is not None:
        notes.insert(0, f"the student is {workspace.shown(Path(location.location))}")
    notes += router_notes(empty.config)
    return WeightlessStudent(config, location, tokenizer, empty, size, device, notes, num_gpus)


def _student_size_and_notes(
    empty: Any, section: ModelSection, location: ModelLocation
) -> tuple[ModelSize, list[str]]:
    """Returns the size of the student and notes on its adapter."""
    if section.qlora_rank == 0:
        return _student_size(empty, section), []
    if location.is_adapter:
        check_no_new_targets(section)
        with _with_adapter(empty, section, like=location.location) as model:
            return _student_size(model, section), describe_adapter(model)
    targets = choose_targets(empty, section.lora_targets)
    with _with_adapter(empty, section) as model:
        return _student_size(model, section), describe_adapter(model, targets.unsupported)


@contextmanager
def _with_adapter(empty: Any, section: ModelSection, *, like: str | None = None) -> Generator[Any]:
    """Adds an adapter without weights to the model, and removes it at the end."""
    with torch.device("meta"):
        model = new_adapter(empty, section, like=like)
    yield model
    model.unload()


def _student_size(model: Any, section: ModelSection) -> ModelSize:
    size = size_of(model, is_quantized=section.quantization is not None)
    if section.gradient_checkpointing:
        text: Any = model.config.get_text_config()
        kept = forecast.recomputed_bytes(
            size.activation_bytes,
            num_layers=text.num_hidden_layers,
            state_bytes=text.hidden_size * model.dtype.itemsize,
        )
        size = replace(size, activation_bytes=kept)
    return size


@dataclass(frozen=True, slots=True)
class WeightlessTeachers:
    """The teachers that run in this process, before their weights are loaded."""

    weight_bytes: int
    num_active: int
    """The parameters active for one token, in all teachers together."""
    contexts: Mapping[DatasetTeacher, int]
    """The context length of each teacher."""
    cross_tokenizer: Mapping[DatasetTeacher, list[str]]
    """The served teachers with another tokenizer, each with the results of its checks."""
    pairs: Mapping[DatasetTeacher, ReadingPair]
    """The student paired with each teacher that has another tokenizer."""


def load_teachers_without_weights(
    workspace: Workspace, student: WeightlessStudent
) -> WeightlessTeachers:
    """Returns size and context of the teachers in this process, and pairs with other tokenizers.

    Servers of teachers with another tokenizer are queried.
    Raises ModelError for a teacher that cannot tokenize the student's text.
    """
    total, num_active, no_stop_ids = 0, 0, frozenset[int]()
    contexts: dict[DatasetTeacher, int] = {}
    cross_tokenizer: dict[DatasetTeacher, list[str]] = {}
    pairs: dict[DatasetTeacher, ReadingPair] = {}
    student_model = LoadedModel(student.location, student.empty, student.tokenizer, no_stop_ids)
    for teacher in dict.fromkeys(student.config.teachers):
        if teacher.section.is_served:
            if teacher.section.tokens == "reread":
                opened = open_served_pair(workspace, teacher, student_model, student.config)
                if opened.pair is not None:
                    cross_tokenizer[teacher], pairs[teacher] = opened.notes, opened.pair
            continue
        location = locate_model(workspace, teacher.path)
        base = adapter_base(workspace, location) if location.is_adapter else location
        empty = empty_model(base, precision=teacher.section.precision, device=student.device)
        loaded = LoadedModel(location, empty, load_tokenizer(location), no_stop_ids)
        if teacher.section.tokens == "reread":
            pair = open_pair(student_model, loaded, student.config.rollout.reasoning_mode)
            if pair is not None:
                pairs[teacher] = pair
        else:
            check_pair(student_model, loaded)
        is_quantized = teacher.section.quantization is not None
        total += size_of(empty, is_quantized=is_quantized).weight_bytes
        num_active += active_parameters(empty)
        contexts[teacher] = context_length(empty)
    return WeightlessTeachers(total, num_active, contexts, cross_tokenizer, pairs)


def largest_pass(
    student: WeightlessStudent, rows: RowTokens, *, rollout_tokens: int | None = None
) -> tuple[int, int]:
    """Returns the tokens of the largest pass with gradient, and the bytes of sampling's KV cache.

    rollout_tokens: the tokens of a rollout with its prompt; None: the maximum.
    """
    config = student.config
    max_tokens = config.model.microbatch_tokens or max_pass_tokens(
        max_positions(student.size.vocab_size)
    )
    if config.dataset_type != "distill":
        share = math.ceil(config.data.batch_size / student.layout.num_processes)
        longest = sorted(rows.lengths)[-share:]
        return forecast.pass_tokens(longest, max_tokens=max_tokens), 0
    rollout = config.rollout
    most = _PROMPT_TOKENS + rollout.max_turns * rollout.max_tokens
    length = min(rollout.max_context_window, rollout_tokens or most)
    num = config.data.batch_size * config.data.group_size
    at_once = min(rollout.concurrency, num)
    cache_bytes = at_once * sampling_bytes(student.empty, num_tokens=length)
    return forecast.pass_tokens([length] * num, max_tokens=max_tokens), cache_bytes


def suggest_settings(
    student: WeightlessStudent, rows: RowTokens, parts: dict[str, float], free: float
) -> list[str]:
    """Returns the settings that fit into memory, with their memory; else the smallest one."""
    config, needs = student.config, dict[str, float]()
    layout = student.layout
    sharing = layout.num_sharing
    tokens = largest_pass(student, rows)[0]

    def need(size: ModelSize, tokens: int) -> float:
        changed = forecast.memory_parts(
            size,
            tokens=tokens,
            process_bytes=int(parts.get("process", 0) / sharing),
            teacher_bytes=int(parts.get("teacher", 0) / sharing),
            cache_bytes=int(parts.get("sampling", 0) / sharing),
            layout=layout,
        )
        return sum(changed.values())

    shorter = tokens // 2
    if rows.lengths and tokens > _PROMPT_TOKENS:
        single = max(rows.lengths)
        if config.data.batch_size > 1 and single < tokens:
            needs[f"model.microbatch_tokens={single}"] = need(student.size, single)
        else:
            needs[f"model.max_length={shorter}"] = need(student.size, shorter)
    for setting, change in _smaller_sections(config.model).items():
        section = config.model.model_copy(update=change)
        needs[setting] = need(
            _student_size_and_notes(student.empty, section, student.location)[0], tokens
        )
    is_lora = config.model.qlora_rank > 0
    if is_lora and student.device.type != "cuda" and config.model.precision != "bf16":
        half = replace(student.size, weight_bytes=student.size.weight_bytes // 2)
        needs["model.precision=bf16"] = need(half, tokens)
    return forecast.describe_settings(needs, free)


def _smaller_sections(section: ModelSection) -> dict[str, dict[str, Any]]:
    """Returns changes of the `model` section that need less memory, by their override."""
    changes: dict[str, dict[str, Any]] = {}
    if not section.gradient_checkpointing:
        changes["model.gradient_checkpointing=true"] = {"gradient_checkpointing": True}
    if section.qlora_rank == 0:
        changes["model.qlora_rank=32"] = {"qlora_rank": 32}
    elif section.quantization is None:
        changes["model.quantization=nf4"] = {"quantization": "nf4"}
    return changes


def process_count(section: LauncherSection, *, num_gpus: int | None = None) -> int:
    """Returns the total number of processes: as configured, or one per GPU.

    num_gpus: the number of GPUs of the machine that would train; None: this machine's.
    Raises ConfigError if no number is configured and there are no GPUs to count.
    """
    if section.num_processes is not None:
        return section.num_processes
    if num_gpus is None and torch.cuda.is_available():
        num_gpus = torch.cuda.device_count()
    if section.kind == "accelerate" and num_gpus:
        return num_gpus * section.num_machines
    raise ConfigError(
        f"launcher.kind: {section.kind} needs the number of training processes",
        "set launcher.num_processes, e.g. 2",
    )


def process_layout(
    launcher: LauncherSection, empty: Any, device: torch.device, *, num_gpus: int | None = None
) -> forecast.ProcessLayout:
    """Returns how a run is divided between processes; `empty` is the model without weights.

    num_gpus: the number of GPUs of the machine that would train; None: this machine's.
    """
    if launcher.kind == "local":
        return ONE_PROCESS
    size = process_count(launcher, num_gpus=num_gpus)
    return forecast.ProcessLayout(
        size,
        1 if device.type == "cuda" else size // launcher.num_machines,
        # Including their gradients.
        2 * gathered_bytes(empty) if launcher.is_sharded else None,
    )


def combined_speed(speed: Speed, layout: forecast.ProcessLayout) -> Speed:
    """Returns the combined speed of all processes, counting at most as many as can run at once."""
    cpu_slots = (os.cpu_count() or 1) // torch.get_num_threads()
    num_parallel = layout.num_processes if layout.num_sharing == 1 else cpu_slots
    return replace(speed, token_s=speed.token_s / max(1, min(layout.num_processes, num_parallel)))


def layout_notes(
    launcher: LauncherSection, layout: forecast.ProcessLayout, *, is_time_of_all: bool = False
) -> list[str]:
    """Returns notes that explain a forecast for several processes; none for one process.

    is_time_of_all: whether the time was measured in a run with all processes.
    """
    if layout.num_processes == 1:
        return []
    machines = f" on {launcher.num_machines} machines" if launcher.num_machines > 1 else ""
    scope = "one GPU"
    if layout.num_sharing > 1:
        scope = f"the {layout.num_sharing} processes of one machine"
    note = f"the run has {layout.num_processes} processes{machines}: the memory is for {scope}"
    if not is_time_of_all:
        note += "; the time excludes communication between them"
    return [note]
