"""The model being trained: all its weights, or a LoRA adapter on a frozen base."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stillroom.errors import DivergedError, ModelError
from stillroom.lineage import ModelRecord
from stillroom.models.batches import TokenBatch, TokenSequence, add_empty_passes, microbatches
from stillroom.models.cpu.gradients import HandGradients
from stillroom.models.lm_head import HeadRunner
from stillroom.models.load import LoadedModel, load_weights, stop_token_ids
from stillroom.models.multimodal import multimodal_config
from stillroom.models.placement import enable_gradient_checkpointing, input_device
from stillroom.models.precision import Precision
from stillroom.models.probe import choose_passes
from stillroom.models.resolve import ModelLocation, adapter_base, locate_model
from stillroom.processes import peak_memory_bytes
from stillroom.settings import Workspace
from stillroom.train.config.sections import ModelSection, TrainerSection
from stillroom.train.student.adapters import load_trained_adapter, new_adapter
from stillroom.train.student.chat import student_tokenizer
from stillroom.train.student.collective import (
    ALONE,
    Collective,
    full_tensor,
    run_inside,
    shard,
    shard_like,
)

_FINAL_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class StepInfo:
    """The metrics of one optimiser step."""

    grad_norm: float
    """The global gradient norm, before clipping."""
    learning_rate: float

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics, named as in events.jsonl."""
        return {"learning_rate": self.learning_rate, "grad_norm": self.grad_norm}


def learning_rate_at(
    step: int, total_steps: int, settings: TrainerSection, *, time_share: float = 0.0
) -> float:
    """Returns the learning rate of a step, counted from 0 to total_steps - 1.

    It rises during warmup (at most a tenth of the run), then decays to a tenth of its peak unless
    the schedule is constant. time_share: the used share of the time limit; if it is ahead of the
    steps, the run ends after fewer of them, and so does the decay.
    """
    warmup = min(settings.warmup_steps, total_steps // 10)
    if step < warmup:
        return settings.learning_rate * (step + 1) / (warmup + 1)
    num_steps = min(total_steps, step / time_share) if time_share > 0 else total_steps
    share = min(1.0, (step - warmup) / max(1, num_steps - warmup))
    match settings.schedule:
        case "constant":
            factor = 1.0
        case "linear":
            factor = 1 - (1 - _FINAL_SHARE) * share
        case "cosine":
            cosine = 0.5 * (1 + math.cos(math.pi * share))
            factor = _FINAL_SHARE + (1 - _FINAL_SHARE) * cosine
    return settings.learning_rate * factor


class Optimizer:
    """AdamW over the trained parameters, one step at a time."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        settings: TrainerSection,
        *,
        total_steps: int,
        peers: Collective = ALONE,
    ) -> None:
        self._parameters = list(parameters)
        self._peers = peers
        self._settings = settings
        self._total_steps = total_steps
        self._adam = torch.optim.AdamW(
            self._parameters,
            lr=settings.learning_rate,
            betas=(0.9, settings.adam_beta2),
            weight_decay=settings.weight_decay,
            # Fused AdamW on CUDA needs one pass and no copies of the gradients; elsewhere torch
            # chooses.
            fused=True if all(p.is_cuda for p in self._parameters) else None,
        )
        self.num_steps = 0
        self.time_share = 0.0
        """The used share of the run's time limit; 0 without a limit."""

    def step(self) -> StepInfo:
        """Sums the gradients of all processes, applies them and clears them.

        Raises DivergedError, in every process, if the gradients are not finite.
        """
        self._peers.sum_gradients(self._parameters)
        rate = learning_rate_at(
            self.num_steps, self._total_steps, self._settings, time_share=self.time_share
        )
        for group in self._adam.param_groups:
            group["lr"] = rate
        clipped = nn.utils.clip_grad_norm_(self._parameters, self._settings.max_grad_norm)
        norm = full_tensor(clipped).item()
        if not math.isfinite(norm):
            raise DivergedError(
                f"the gradient of step {self.num_steps} is {norm}: training has diverged",
                "lower trainer.learning_rate (try a tenth); earlier checkpoints are not affected",
            )
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        self.num_steps += 1
        return StepInfo(norm, rate)

    def state(self) -> dict[str, Tensor]:
        """Returns AdamW's full state tensors, by the parameter's index and the tensor's name.

        All processes must call this. Only the first one gets tensors that are sharded, on its CPU:
        together they may be larger than the memory of a GPU.
        """
        states: dict[int, dict[str, Tensor]] = self._adam.state_dict()["state"]
        full: dict[str, Tensor] = {}
        for index, state in states.items():
            for name, tensor in state.items():
                gathered = full_tensor(tensor)
                if gathered is tensor:
                    full[f"{index}.{name}"] = tensor
                elif self._peers.is_first:
                    full[f"{index}.{name}"] = gathered.cpu()
        return full

    def restore(self, tensors: Mapping[str, Tensor], *, num_steps: int) -> None:
        """Restores the tensors that `state` returned after `num_steps` steps."""
        states: dict[int, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            index, _, name = key.partition(".")
            parameter = self._parameters[int(index)]
            # Scalars, such as the number of steps, are not sharded.
            is_moment = tensor.shape == parameter.shape
            states.setdefault(int(index), {})[name] = (
                shard_like(tensor, parameter) if is_moment else tensor
            )
        groups = self._adam.state_dict()["param_groups"]
        self._adam.load_state_dict({"state": states, "param_groups": groups})
        self.num_steps = num_steps


_MIN_MICROBATCH, _MAX_MICROBATCH = 512, 16384
# On a GPU a larger pass pays off: launching a pass costs as much as many padding tokens.
_MAX_MICROBATCH_CUDA = 32768
# The share of free memory, after weights and optimiser, for activations; the backward pass and the
# head need the rest.
_ACTIVATION_SHARE = 0.5
_PROBE_TOKENS = (64, 320)
_PACKED_SEQUENCES = 3
# The activations that a pack keeps for the backward pass stay within about this.
_PACK_BYTES = 1 << 30
_UNTRAINED = TokenSequence([0], [False])


@dataclass(frozen=True, slots=True)
class Student:
    """A trainable model with its tokenizer and output head."""

    loaded: LoadedModel
    head: HeadRunner
    base: ModelLocation
    """The model that training starts from; for an adapter, its base model."""
    is_adapter: bool
    precision: Precision = "auto"
    """The `precision` of config.yml; `auto` and `bf16` compute in bf16 on CUDA."""
    microbatch_tokens: int | None = None
    """The `microbatch_tokens` of config.yml; None: as many as fit into memory."""
    activation_bytes: float | None = None
    """The bytes per token that a forward pass with gradient keeps; None unless on CUDA."""
    peers: Collective = ALONE
    """The processes that train the student together."""
    text_part_of: ModelRecord | None = None
    """The multimodal model of which this is the text part, without its hash, or None."""
    root: nn.Module | None = None
    """The module whose forward pass must contain all computation if weights are sharded; else
    None."""

    @property
    def module(self) -> nn.Module:
        """The torch module (for an adapter, the peft model)."""
        return self.loaded.model

    def trainable(self) -> Iterator[nn.Parameter]:
        """Yields the parameters that are trained."""
        return (p for p in self.module.parameters() if p.requires_grad)

    def optimizer(self, settings: TrainerSection, *, total_steps: int) -> Optimizer:
        """Returns an optimiser of the trained parameters, which all processes step together."""
        return Optimizer(self.trainable(), settings, total_steps=total_steps, peers=self.peers)

    def autocast(self) -> AbstractContextManager[Any]:
        """Returns a context that runs matrix products in bf16 on CUDA, unless precision is fp32."""
        if self.compute_dtype is None:
            return nullcontext()
        return torch.autocast(self.loaded.device.type, dtype=self.compute_dtype)

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """The dtype of matrix products under `autocast`; None: the weights'."""
        return autocast_dtype(self.loaded.device, self.precision)

    def collate(self, sequences: Sequence[TokenSequence]) -> TokenBatch:
        """Collates the sequences into one batch that the model supports.

        Without sequences the batch has no trained token.
        """
        batch = self.head.collate(sequences or [_UNTRAINED])
        if not self.head.rules.may_split:
            return batch
        # As in `passes`: processes with sharded weights must run the model equally often.
        missing = self.peers.num_missing_passes(len(batch.passes))
        return add_empty_passes(batch, missing)

    def passes(self, lengths: Sequence[int]) -> list[list[int]]:
        """Returns the indices of this process's sequences in each forward pass.

        With sharded weights all processes make equally many passes, some of which may be empty.
        """
        groups = microbatches(
            lengths, max_tokens=self.max_microbatch_tokens, are_packed=self.head.can_pack
        )
        return self.peers.passes(groups)

    def run(self, compute: Callable[[], Tensor]) -> Tensor:
        """Runs `compute` while all weights are gathered, and returns its result."""
        return compute() if self.root is None else run_inside(self.root, compute)

    @property
    def hand_gradients(self) -> HandGradients | None:
        """The student with hand-written gradients of its head; None: autograd only."""
        # A sharded model's weights are full only inside its forward pass.
        return None if self.root is not None else self.head.hand_gradients

    def logprobs(self, batch: TokenBatch) -> Tensor:
        """Returns the log-probability (nats) of each of the batch's trained tokens, [N].

        They carry a gradient if gradients are enabled, for a single backward pass.
        """
        if (hand_gradients := self.hand_gradients) is not None:
            return hand_gradients.logprobs(batch)
        with self.autocast():
            return self.run(lambda: self.head.batch_logprobs(batch))

    def add_nll_gradient(self, batch: TokenBatch, *, scale: float) -> float:
        """Adds the gradient of `scale` × the summed negative log-likelihood; returns the sum."""
        if (hand_gradients := self.hand_gradients) is not None:
            return hand_gradients.add_nll_gradient(batch, scale=scale)
        nll = -self.logprobs(batch).sum()
        (nll * scale).backward()
        return nll.item()

    @property
    def max_microbatch_tokens(self) -> int:
        """The maximum number of tokens (padding included) of a forward pass with gradient."""
        if self.microbatch_tokens is not None:
            return self.microbatch_tokens
        if self.activation_bytes is not None and self.loaded.device.type == "cuda":
            return microbatch_tokens(self._activation_memory(), self.activation_bytes)
        return max_pass_tokens(self.head.max_positions)

    def pack_tokens(self, longest: int) -> int:
        """Returns the maximum tokens of a pack; `longest` is the longest sequence's length.

        That is a pass's limit or, if `_PACK_BYTES` allows, room for three of the longest sequences:
        rollouts of one prompt share its computation only inside one pack.
        """
        if self.microbatch_tokens is not None:
            return self.microbatch_tokens
        text: Any = self.loaded.model.config.get_text_config()
        inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
        # Layers of Gemma 3n differ in size.
        inner = max(inner) if isinstance(inner, list) else inner
        # Autograd keeps about 14 values of the hidden size for each layer (norms, queries, keys,
        # values, attention) and 4 or 5 of the MLP's size (gate, up, their activation and product).
        activations_per_token = text.num_hidden_layers * (14 * text.hidden_size + 5 * inner)
        affordable_tokens = _PACK_BYTES // (4 * activations_per_token)
        return max(self.max_microbatch_tokens, min(_PACKED_SEQUENCES * longest, affordable_tokens))

    def _activation_memory(self) -> float:
        """Returns how many bytes of GPU memory are available for activations."""
        device = self.loaded.device
        weights = sum(p.nbytes for p in self.module.parameters())
        # Each trained parameter has a gradient and two moments.
        state = 3 * sum(p.nbytes for p in self.trainable())
        used = max(torch.cuda.memory_allocated(device), weights + state)
        total = torch.cuda.get_device_properties(device).total_memory
        return _ACTIVATION_SHARE * (total - used)


def microbatch_tokens(free_bytes: float, activation_bytes: float) -> int:
    """Returns how many tokens fit, rounded to a power of two so that runs differ less in it."""
    fitting = max(1, int(free_bytes / max(1.0, activation_bytes)))
    return max(_MIN_MICROBATCH, min(_MAX_MICROBATCH_CUDA, 1 << (fitting.bit_length() - 1)))


def _measure_activations(student: Student) -> Student:
    """Returns the student with `activation_bytes` measured."""
    held = [_activation_bytes_of_pass(student, num_tokens) for num_tokens in _PROBE_TOKENS]
    # Bytes that do not depend on the number of tokens (such as weights cast to bf16) cancel out.
    per_token = (held[1] - held[0]) / (_PROBE_TOKENS[1] - _PROBE_TOKENS[0])
    return replace(student, activation_bytes=per_token)


def _activation_bytes_of_pass(student: Student, num_tokens: int) -> int:
    """Returns the GPU memory that a forward pass with gradient holds."""
    device = student.loaded.device
    before = torch.cuda.memory_allocated(device)
    ids_BT = torch.zeros(1, num_tokens, dtype=torch.int64, device=device)
    with student.autocast():
        hidden = student.run(lambda: student.head.hidden(ids_BT))
    held = torch.cuda.memory_allocated(device) - before
    if student.root is not None:
        # Only a backward pass frees the gathered weights.
        hidden.sum().backward()
        student.module.zero_grad(set_to_none=True)
    del hidden
    return held


def load_student(
    workspace: Workspace,
    section: ModelSection,
    *,
    seed: int,
    peers: Collective = ALONE,
    resumed: Path | None = None,
) -> Student:
    """Returns the model of config.yml's `model` section, ready to train.

    A section that names an adapter's checkpoint continues that adapter. All of `peers` load the
    model. resumed: the checkpoint whose weights will replace those of a new adapter.
    Raises:
        ConfigError: the checkpoint and the section are incompatible.
        ModelError: some weights are not finite.
    """
    location = locate_model(workspace, section.path)
    torch.manual_seed(seed)
    tokenizer = student_tokenizer(workspace, section, location, resumed=resumed)
    if location.is_adapter:
        model = load_trained_adapter(workspace, location, section, keep_on_cpu=peers.is_sharded)
        base = adapter_base(workspace, location)
    else:
        base = location
        model = load_weights(
            location,
            precision=section.student_precision,
            quantization=section.quantization,
            keep_on_cpu=peers.is_sharded,
        )
        if section.qlora_rank > 0:
            model = new_adapter(model, section, like=resumed)
    _check_finite(model, section.path)
    if section.gradient_checkpointing:
        enable_gradient_checkpointing(model)
    head = HeadRunner(model)
    head.check()
    # Sharded weights are still on the CPU.
    device = torch.device(peers.device) if peers.is_sharded else input_device(model)
    choose_passes(head, device=device, compute_dtype=autocast_dtype(device, section.precision))
    root = None
    if peers.is_sharded:
        root = shard(model, device=peers.device, size=peers.size)
    loaded = LoadedModel(location, model, tokenizer, stop_token_ids(model, tokenizer))
    loaded.check_vocabulary()
    student = Student(
        loaded, head, base, is_adapter=section.qlora_rank > 0, precision=section.precision,
        microbatch_tokens=section.microbatch_tokens, peers=peers, root=root,
        text_part_of=_text_part_of(location, base),
    )  # fmt: skip
    peers.broadcast(student.trainable())
    return _measure_activations(student) if student.loaded.device.type == "cuda" else student


def _text_part_of(location: ModelLocation, base: ModelLocation) -> ModelRecord | None:
    """Returns the multimodal model whose text part the student is, or None."""
    for record in (location.record, base.record):
        if record is not None and record.text_part_of is not None:
            return record.text_part_of
    if multimodal_config(base) is None:
        return None
    return ModelRecord(role="multimodal", name=base.name, location=base.recorded)


def _check_finite(model: nn.Module, name: str) -> None:
    """Raises ModelError if a weight is not finite, which training cannot repair."""
    for parameter_name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not bool(parameter.isfinite().all()):
            raise ModelError(
                f"the weights of {name!r} are damaged: {parameter_name} has values that are not "
                "finite",
                "download or export the model again, or start from an earlier checkpoint",
            )


def router_notes(config: Any) -> list[str]:
    """Returns a note on the missing load-balancing loss, for a model with experts."""
    if getattr(config.get_text_config(), "router_aux_loss_coef", None) is None:
        return []
    return ["the loss has no load-balancing term for the experts (TRL: output_router_logits false)"]


def autocast_dtype(device: torch.device, precision: Precision) -> torch.dtype | None:
    """Returns the dtype of autocast on a device; None: the weights'."""
    return torch.bfloat16 if device.type == "cuda" and precision != "fp32" else None


def max_pass_tokens(max_positions: int) -> int:
    """Returns the maximum number of padded tokens of a pass on the CPU.

    max_positions: the number of positions whose logits may be in memory at a time.
    """
    return max(_MIN_MICROBATCH, min(_MAX_MICROBATCH, max_positions))


def peak_memory_gb(device: torch.device) -> float:
    """Returns the peak memory so far (GB): of the GPU, or else of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    if device.type == "mps":
        return torch.mps.driver_allocated_memory() / 1e9
    return peak_memory_bytes() / 1e9
