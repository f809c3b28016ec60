"""How much each stage of the demo does."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """The size of the demo's stages; everything else stands in the project's files."""

    num_rollouts: int
    """Prompts that the teacher answers."""
    num_heldout: int
    num_iterations: int
    """Of on-policy distillation."""
    num_kl_prompts: int


FULL = DemoSettings(num_rollouts=300, num_heldout=300, num_iterations=80, num_kl_prompts=90)
SMOKE = DemoSettings(num_rollouts=160, num_heldout=120, num_iterations=12, num_kl_prompts=30)

ACTING = {
    "tools": "tools.py",
    "rewards": "rewards.py",
    "max_turns": 5,
    "max_tokens": 48,
    "concurrency": 64,
}
"""What every call that plays rollouts is given."""
