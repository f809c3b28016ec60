"""config.yml's `algorithm` section: how a teacher's scores become an update (distill)."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

AdvantageEstimator = Literal["grpo", "reinforce", "gae"]
LossName = Literal["importance_sampling", "ppo", "full_reverse_kl", "jsd", "top_k_reverse_kl"]
SAMPLED_LOSSES: tuple[LossName, ...] = ("importance_sampling", "ppo")
"""Those that learn from the sampled token alone; the others compare distributions."""


class AlgorithmSection(BaseModel):
    """Which loss, and what goes into it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    loss_fn: LossName | Literal["auto"] = "auto"
    """auto: full_reverse_kl with a teacher in this process, else top_k_reverse_kl."""
    kl_penalty_coef: Annotated[float, Field(gt=0)] | None = None
    """β: how much the divergence from the teacher counts. Default: 0.1 in importance_sampling's and
    ppo's advantage -β (log p_student - log p_teacher); 1 as a factor of the other losses."""
    kl_baseline: Literal["none", "exact"] = "none"
    """exact: that advantage less its mean over the vocabulary; needs the teacher in-process."""
    clip_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """ppo: how far the ratio may move."""
    importance_cap: Annotated[float, Field(ge=1)] | None = None
    """importance_sampling, ppo: tokens count by min(p_trainer / p_sampler, this), the trainer as it
    was before the iteration's first step; None: the sampler is taken for the trainer."""
    jsd_beta: Annotated[float, Field(ge=0, le=1)] = 0.5
    """jsd: the teacher's share of the mixture; 0: forward KL, 1: reverse KL."""
    top_k: Annotated[int, Field(ge=1, le=1024)] = 16
    """top_k_reverse_kl: how many tokens of the teacher's; all others count as one."""
    mask_special_tokens: bool = False
    """Tokens that are not text (a turn's end, a template's marks) are not learnt."""
    reward_coef: Annotated[float, Field(ge=0)] = 0.0
    """How much the rewards' advantage counts; 0: rewards are tracked only."""
    adv_estimator: AdvantageEstimator = "grpo"
    """Of rewards: less the group's mean, less the iteration's (reinforce), or the group's with
    `gae_lambda`."""
    gae_lambda: Annotated[float, Field(gt=0, le=1)] = 1.0
    """gae: a token's share of the advantage falls by this factor with each token that follows."""
    substeps: Annotated[int, Field(ge=1, le=64)] = 1
    """Optimiser steps per iteration, each on its share of the rollouts."""

    def resolved(self, *, is_served: bool) -> "AlgorithmSection":
        """Returns the section with the loss that `auto` stands for, for such a teacher."""
        if self.loss_fn != "auto":
            return self
        loss_fn = "top_k_reverse_kl" if is_served else "full_reverse_kl"
        return self.model_copy(update={"loss_fn": loss_fn})

    @property
    def is_sampled_loss(self) -> bool:
        """Whether the loss needs the probability of the sampled token only."""
        return self.loss_fn in SAMPLED_LOSSES

    @property
    def needs_logits(self) -> bool:
        """Whether the teacher must tell its whole distribution, so be in this process."""
        return self.loss_fn in ("auto", "full_reverse_kl", "jsd") or self.kl_baseline == "exact"

    @property
    def told_tokens(self) -> int | None:
        """How many of its likeliest tokens a served teacher must tell; None: none."""
        return self.top_k if self.loss_fn == "top_k_reverse_kl" else None

    @property
    def has_ratio(self) -> bool:
        """Whether a loss compares with the probabilities that were sampled with."""
        return self.is_sampled_loss or self.reward_coef > 0

    @property
    def kl_coef(self) -> float:
        """β, also where it is not said."""
        if self.kl_penalty_coef is not None:
            return self.kl_penalty_coef
        return 0.1 if self.is_sampled_loss else 1.0

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> "AlgorithmSection":
        used = {
            "kl_baseline": (self.is_sampled_loss, "loss_fn importance_sampling or ppo"),
            "importance_cap": (self.is_sampled_loss, "loss_fn importance_sampling or ppo"),
            "clip_ratio": (self.loss_fn == "ppo", "loss_fn ppo"),
            "jsd_beta": (self.loss_fn == "jsd", "loss_fn jsd"),
            "top_k": (self.loss_fn == "top_k_reverse_kl", "loss_fn top_k_reverse_kl"),
            "gae_lambda": (
                self.adv_estimator == "gae" and self.reward_coef > 0,
                "adv_estimator gae and reward_coef above 0",
            ),
        }
        fields = AlgorithmSection.model_fields
        for name, (is_used, needed) in used.items():
            if not is_used and self.model_dump()[name] != fields[name].default:
                raise ValueError(f"algorithm.{name} counts only with {needed}; leave it out")
        return self
