"""Measures a model's size and a forward pass's activations on the meta device, without weights."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from stillroom.errors import ModelError
from stillroom.models.cpu.gradients import tile_positions
from stillroom.models.lm_head import OutputHead
from stillroom.models.multimodal import language_config
from stillroom.models.placement import base_model, dtype_for
from stillroom.models.precision import Precision
from stillroom.models.resolve import ModelLocation
from stillroom.policy.passes import SlotPasses
from stillroom.policy.slot_cache import slot_cache
from stillroom.train.planning.forecast import ModelSize

# Whole chunks of recurrent layers, which fill up shorter ones (gated delta net 64, Mamba 256).
_PROBES = (256, 512, 768)
# Half a byte for each weight, and the scales of its block.
_NF4_BYTES = 0.5625


class _WithoutNumbers(TorchDispatchMode):
    """Runs on meta tensors what only runs on others.

    Code that reads a number from a tensor gets 1, since meta tensors hold no numbers. Experts'
    products run in bf16, the one format in which the meta device knows them.
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
    """Returns the size of a model without weights (or of the peft model around one)."""
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
        tile_positions=min(OutputHead(model).max_positions, tile_positions(vocabulary)),
    )


def passed_parameters(model: Any) -> int:
    """Returns how many parameters a token passes: of a mixture's experts only those chosen."""
    text: Any = base_model(model).config.get_text_config()
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    num_experts = next((n for name in names if (n := getattr(text, name, None))), None)
    chosen = getattr(text, "num_experts_per_tok", None)
    share = chosen / num_experts if num_experts and chosen else 1.0
    parameters = model.named_parameters()
    return round(sum(p.numel() * (share if ".experts." in name else 1) for name, p in parameters))


def sampling_bytes(model: Any, *, num_tokens: int) -> int:
    """Returns the bytes that a conversation of so many tokens keeps while it is sampled.

    They are its keys and values, and the states of recurrent layers, which do not grow.
    """
    cache = slot_cache(base_model(model).config, num_slots=1)
    if cache is not None:
        try:
            with torch.no_grad(), _WithoutNumbers():
                SlotPasses(model, cache).logits([0], [0], [[0, 0]])
        # A model that cannot be run like this is sampled over transformers' own cache.
        except (ValueError, TypeError, AttributeError, RuntimeError):
            cache = None
    if cache is not None:
        return cache.state_bytes + num_tokens * cache.token_bytes
    text: Any = base_model(model).config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * text.num_hidden_layers * heads * head_size * model.dtype.itemsize * num_tokens


def _saved_by_quantizing(model: Any) -> int:
    """Returns the bytes that nf4 saves on all frozen matrices except the output head's."""
    head = base_model(model).get_output_embeddings()
    frozen = [
        module.weight
        for module in model.modules()
        if isinstance(module, nn.Linear) and module is not head and not module.weight.requires_grad
    ]
    return sum(int(weight.nbytes - weight.numel() * _NF4_BYTES) for weight in frozen)


def _activation_bytes(model: Any) -> float:
    """Returns the activation bytes of each token, without attention's bytes for pairs of tokens.

    On the meta device attention keeps its probabilities, which it does not on CPU and CUDA. So
    three lengths are tried, and the part that grows with the length's square is left out.
    """
    body: nn.Module = base_model(model).get_decoder()
    low, middle, high = (_kept_bytes(body, num_tokens) for num_tokens in _PROBES)
    step = _PROBES[1] - _PROBES[0]
    quadratic = (high - 2 * middle + low) / (2 * step * step)
    return (middle - low) / step - quadratic * (_PROBES[0] + _PROBES[1])


def _kept_bytes(body: nn.Module, num_tokens: int) -> int:
    """Returns the bytes that a forward pass keeps for the backward pass, besides the weights."""
    weights = {StorageWeakRef(p.untyped_storage()) for p in body.parameters()}
    kept: dict[StorageWeakRef, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if (storage := StorageWeakRef(tensor.untyped_storage())) not in weights:
            kept[storage] = tensor
        return tensor

    ids = torch.zeros(1, num_tokens, dtype=torch.int64, device="meta")
    with _WithoutNumbers(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = body(input_ids=ids, use_cache=False)
    del out
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
