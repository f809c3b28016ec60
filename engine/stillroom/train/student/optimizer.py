"""The optimiser step: clipped gradients, AdamW, and the learning rate's schedule."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stillroom.errors import DivergedError
from stillroom.train.config.sections import TrainerSection
from stillroom.train.student.collective import ALONE, Collective, like, whole

_FINAL_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class StepInfo:
    """The figures of one optimiser step."""

    grad_norm: float
    """The norm of all gradients together, before clipping."""
    learning_rate: float

    @property
    def metrics(self) -> dict[str, float]:
        """The figures, named as in events.jsonl."""
        return {"learning_rate": self.learning_rate, "grad_norm": self.grad_norm}


def learning_rate_at(step: int, total_steps: int, settings: TrainerSection) -> float:
    """Returns the learning rate of a step, counted from 0 to total_steps - 1.

    It rises over the warm-up (at most a tenth of the run), then falls to a tenth of its peak unless
    the schedule is constant.
    """
    warmup = min(settings.warmup_steps, total_steps // 10)
    if step < warmup:
        return settings.learning_rate * (step + 1) / (warmup + 1)
    share = (step - warmup) / max(1, total_steps - warmup)
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

    def step(self) -> StepInfo:
        """Applies all processes' gradients and clears them.

        Raises DivergedError, in every process, if the gradients aren't finite.
        """
        self._peers.add_gradients(self._parameters)
        rate = learning_rate_at(self.num_steps, self._total_steps, self._settings)
        for group in self._adam.param_groups:
            group["lr"] = rate
        clipped = nn.utils.clip_grad_norm_(self._parameters, self._settings.max_grad_norm)
        norm = whole(clipped).item()
        if not math.isfinite(norm):
            raise DivergedError(
                f"the gradient of step {self.num_steps} is {norm}: training has diverged",
                "lower trainer.learning_rate (a tenth is a good try); checkpoints written before "
                "are good",
            )
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        self.num_steps += 1
        return StepInfo(norm, rate)

    def state(self) -> dict[str, Tensor]:
        """Returns AdamW's whole tensors, by the parameter's index and the tensor's name."""
        states: dict[int, dict[str, Tensor]] = self._adam.state_dict()["state"]
        named = {f"{i}.{name}": t for i, state in states.items() for name, t in state.items()}
        return {name: whole(tensor) for name, tensor in named.items()}

    def restore(self, tensors: Mapping[str, Tensor], *, num_steps: int) -> None:
        """Restores the tensors that `state` returned after `num_steps` steps."""
        states: dict[int, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            place, _, name = key.partition(".")
            parameter = self._parameters[int(place)]
            is_share = tensor.shape == parameter.shape
            states.setdefault(int(place), {})[name] = (
                like(tensor, parameter) if is_share else tensor
            )
        groups = self._adam.state_dict()["param_groups"]
        self._adam.load_state_dict({"state": states, "param_groups": groups})
        self.num_steps = num_steps
