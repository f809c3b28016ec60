"""The sizes of the demo's stages, for the full and the short version."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """The sizes of the demo's stages; all other settings are in the project's files."""

    num_rollouts: int
    """The number of prompts that the teacher answers."""
    num_heldout: int
    """The number of held-out prompts in each evaluation."""
    num_iterations: int
    """The number of iterations of on-policy distillation."""
    num_kl_prompts: int
    """The number of held-out prompts on which the KL to the teacher is measured."""


FULL = DemoSettings(num_rollouts=300, num_heldout=300, num_iterations=44, num_kl_prompts=90)
SMOKE = DemoSettings(num_rollouts=160, num_heldout=120, num_iterations=8, num_kl_prompts=30)

ACTING = {
    "tools": "tools.py",
    "rewards": "rewards.py",
    "max_turns": 5,
    "max_tokens": 48,
    "concurrency": 64,
}
"""The arguments of every call that generates rollouts, evaluations included."""
