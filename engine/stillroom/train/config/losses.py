"""The losses of on-policy distillation: what each one needs, in one table.

The functions of each are in `train/methods/losses.py`, under the same name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

LossName = Literal[
    "importance_sampling", "ppo", "full_reverse_kl", "jsd", "top_k_reverse_kl", "byte_reverse_kl"
]


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss of on-policy distillation, as config.yml may name it."""

    name: LossName
    reads: Literal["token", "top_k", "distribution", "bytes"]
    """What the loss needs from the teacher at each position: the probability of the sampled token,
    its most likely tokens, its full distribution, or its next bytes (a teacher with another
    tokenizer)."""
    options: frozenset[str] = frozenset()
    """The `algorithm` keys that this loss reads but some other losses ignore."""
    default_coef: float = 1.0
    """The weight of the divergence if `algorithm.kl_penalty_coef` is not set."""

    @property
    def is_policy_gradient(self) -> bool:
        """Whether the loss weights the sampled token alone by an advantage."""
        return self.reads == "token"

    @property
    def needs_top_tokens(self) -> bool:
        """Whether a served teacher must return its most likely tokens for the loss."""
        return self.reads in ("top_k", "bytes")


_POLICY_GRADIENT_OPTIONS = frozenset({"kl_baseline", "importance_cap"})

LOSSES: Mapping[LossName, Loss] = {
    loss.name: loss
    for loss in (
        Loss("importance_sampling", "token", _POLICY_GRADIENT_OPTIONS, default_coef=0.1),
        Loss("ppo", "token", _POLICY_GRADIENT_OPTIONS | {"clip_ratio"}, default_coef=0.1),
        Loss("full_reverse_kl", "distribution"),
        Loss("jsd", "distribution", frozenset({"jsd_beta"})),
        Loss("top_k_reverse_kl", "top_k", frozenset({"top_k"})),
        Loss("byte_reverse_kl", "bytes", frozenset({"top_k"})),
    )
}
"""Every loss by its name."""


def losses_with(option: str) -> list[LossName]:
    """Returns the names of the losses that read an option of `algorithm`."""
    return [name for name, loss in LOSSES.items() if option in loss.options]
