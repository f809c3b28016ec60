"""The sections of config.yml for on-policy distillation: sampling, teacher, loss, curriculum."""

from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from stillroom.data.chat.template import ReasoningMode
from stillroom.models.precision import Precision, Quantization
from stillroom.rollout.request import EpisodeOptions
from stillroom.secrecy.commands import WITHOUT_SECRETS
from stillroom.serving.model_server import ModelServerClient, ServerSettings
from stillroom.serving.scoring import ServedTeacher
from stillroom.settings import Workspace
from stillroom.teachers.providers import endpoint_for
from stillroom.train.config.losses import LOSSES, Loss, LossName, losses_with
from stillroom.train.config.sections import ConfigSection

AdvantageEstimator = Literal["grpo", "reinforce", "gae"]


class StudentServerSection(ConfigSection):
    """A vLLM server that samples the student (distill)."""

    base_url: str
    """The URL of the server; it serves the student's base model with --enable-lora and can read the
    run's folder."""
    api_key_env: str | None = None
    """The name of the environment variable that holds the server's key; None: no key is sent."""
    timeout: Annotated[float, Field(gt=0)] = 600.0
    """The time limit of one turn, in seconds."""


class RolloutSection(ConfigSection, EpisodeOptions):
    """How the student is sampled (distill).

    Options shared with rollout requests are in `EpisodeOptions`.
    """

    max_turns: Annotated[int, Field(ge=1, le=1000)] = 1
    max_context_window: Annotated[int, Field(ge=16)] = 32768
    mcp_url: Annotated[str | tuple[str, ...] | None, WITHOUT_SECRETS] = None
    """MCP servers whose tools are added to those of tools.py, each a URL or a command line."""
    max_tool_response: Annotated[int, Field(ge=1)] | None = None
    """The maximum number of tokens of a tool's reply; longer replies are truncated and marked.
    None: no limit."""
    reasoning_mode: ReasoningMode | None = None
    """Whether the chat template lets the student think; None: the template's own default."""
    temperature: Annotated[float, Field(gt=0, le=2)] = 1.0
    concurrency: Annotated[int, Field(ge=1, le=4096)] = 64
    """The maximum number of conversations sampled in one batch."""
    deterministic: bool = False
    """Whether each conversation is sampled alone, some ten times slower, so that its numbers do
    not depend on the rest of the batch: on a CPU in fp32 a run is then bit-for-bit reproducible at
    any concurrency, also with tools (on the same kind of processor, threads and torch)."""
    server: StudentServerSection | None = None
    """The server that samples the student, with the adapter of each iteration; None: sampled in
    this process."""
    max_staleness: Annotated[int, Field(ge=0, le=16)] = 0
    """The number of later iterations in which a rollout may finish before it is dropped.

    0: every token is sampled from the weights that are updated. Source: arXiv 2505.24298 (AReaL).
    """
    stragglers: Annotated[float, Field(gt=0, lt=1)] = 0.25
    """The share of an iteration's rollouts that it does not wait for (max_staleness above 0)."""
    on_policy_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """The share of the student's rollouts among an iteration's sequences; the rest are rows of
    `rows_file`. None: rollouts only.

    Source: arXiv 2306.13649, algorithm 1 (λ).
    """
    rows_file: str | None = None
    """The file of the mixed-in rows, relative to the folder of config.yml; None:
    cold_start.train_file."""

    @property
    def mcp_servers(self) -> tuple[str, ...]:
        """The URLs or command lines of the MCP servers that offer tools."""
        return (self.mcp_url,) if isinstance(self.mcp_url, str) else self.mcp_url or ()

    def num_mixed_rows(self, num_rollouts: int) -> int:
        """Returns the number of rows mixed into an iteration of `num_rollouts` rollouts."""
        share = self.on_policy_share
        return 0 if share is None else max(1, round(num_rollouts * (1 - share) / share))

    @model_validator(mode="after")
    def _check_browse_allow(self) -> "RolloutSection":
        if self.browse_allow and not self.browse:
            raise ValueError("browse_allow needs browse: true: set it, or leave browse_allow out")
        return self


class TeacherSection(ConfigSection):
    """The teacher that scores tokens: the student's (distill), or those of rows (soft_targets)."""

    path: str | tuple[str, ...]
    """The teacher: a hub id, folder, run id or demo/teacher; on a server, the served model's name.

    A list names one teacher for each file of `data.train_file`, which scores only that file's
    rollouts.
    """
    provider: Literal["hf", "vllm", "sglang"] = "hf"
    """Where the teacher runs: in the training process (hf), or on a vllm or sglang server, which
    returns the logprobs of prompt tokens."""
    base_url: str | tuple[str, ...] | None = None
    """The URL of the server; None: http://127.0.0.1:8000/v1 (vllm) or http://127.0.0.1:30000/v1.

    A list has one entry for each model of `path`.
    """
    api_key_env: str | None = None
    """The name of the environment variable that holds the server's key; None: no key is sent."""
    tokenizer: str | tuple[str, ...] | None = None
    """The folder or hub id of the served model's tokenizer, to check that it is the student's;
    None: the server tokenizes texts for this check. With `tokens` reread the teacher's text is
    rendered and tokenized with it; None: the tokenizer of `path`.

    A list has one entry for each model of `path`.
    """
    system: str | None = None
    """The system message of the teacher's prompt. None keeps the system message of each prompt row;
    an empty string removes it."""
    context_file: Annotated[str, Field(min_length=1)] | None = None
    """A text file, relative to the folder of config.yml, appended to the teacher's system message:
    a policy, a SKILL.md, examples, tool documentation."""
    tokens: Literal["same", "reread"] = "same"
    """same: the teacher scores the student's own tokens, so both must have the same tokenizer and
    chat template. reread: a teacher with another tokenizer or template tokenizes the student's text
    itself, and both are compared byte by byte (algorithm.loss_fn byte_reverse_kl), from a server's
    algorithm.top_k most likely tokens, or in this process from full distributions."""
    concurrency: Annotated[int, Field(ge=1, le=1024)] = 32
    """The maximum number of rollouts that a server scores at once."""
    timeout: Annotated[float, Field(gt=0)] = 300.0
    """The time limit for scoring one rollout on a server, in seconds."""
    precision: Precision = "auto"
    quantization: Quantization = None
    """nf4 loads the teacher's layers in 4 bits; None: not quantised."""
    spread: bool = False
    """Whether the teacher's layers are spread over all GPUs, and those that do not fit over CPU
    memory."""

    @property
    def name(self) -> str:
        """The name of the teacher, or the names of several teachers, joined by commas."""
        return self.path if isinstance(self.path, str) else ", ".join(self.path)

    def for_datasets(self, num: int) -> "list[DatasetTeacher]":
        """Returns the teacher of each of `num` datasets; a single path stands for all of them."""
        paths = self.path if isinstance(self.path, tuple) else (self.path,) * num
        return [
            DatasetTeacher(self, path, _entry_at(self.base_url, i), _entry_at(self.tokenizer, i))
            for i, path in enumerate(paths)
        ]

    @property
    def is_served(self) -> bool:
        """Whether the teacher runs on a server."""
        return self.provider != "hf"

    @model_validator(mode="after")
    def _check_ignored_keys(self) -> "TeacherSection":
        server_keys = {"base_url", "api_key_env", "tokenizer", "concurrency", "timeout"}
        set_keys = sorted(server_keys & self.model_fields_set)
        if not self.is_served and set_keys:
            raise ValueError(
                f"{set_keys[0]} needs a served teacher: remove {set_keys[0]}, or set provider to "
                "vllm or sglang"
            )
        local_keys = sorted({"precision", "quantization", "spread"} & self.model_fields_set)
        if self.is_served and local_keys:
            raise ValueError(
                f"{local_keys[0]} needs a teacher in this process (provider hf): remove "
                f"{local_keys[0]}, since the server decides how it loads the model"
            )
        return self

    @model_validator(mode="after")
    def _check_lists(self) -> "TeacherSection":
        num = len(self.path) if isinstance(self.path, tuple) else None
        for name, listed in (("base_url", self.base_url), ("tokenizer", self.tokenizer)):
            if isinstance(listed, tuple) and len(listed) != num:
                raise ValueError(
                    f"{name} is a list of {len(listed)}, so path must list that many models"
                )
        return self


@dataclass(frozen=True, slots=True)
class DatasetTeacher:
    """The teacher that scores the rollouts of one dataset."""

    section: TeacherSection
    path: str
    base_url: str | None
    tokenizer: str | None


def served_teacher(
    workspace: Workspace,
    teacher: DatasetTeacher,
    *,
    top_k: int | None = None,
) -> ServedTeacher:
    """Returns a client of the teacher's server; nothing is sent yet.

    top_k: the number of most likely tokens that the server returns per position; None: none.
    Raises InputError if the server's key is missing.
    """
    section = teacher.section
    provider = "sglang" if section.provider == "sglang" else "vllm"
    endpoint = endpoint_for(
        workspace, provider, base_url=teacher.base_url, api_key_env=section.api_key_env
    )
    server = ModelServerClient(
        endpoint,
        key=workspace.read_key(endpoint.api_key_env),
        settings=ServerSettings(section.concurrency, section.timeout),
    )
    return ServedTeacher(server, teacher.path, provider=provider, top_k=top_k)


def _entry_at(value: str | tuple[str, ...] | None, index: int) -> str | None:
    """Returns the entry of a list at `index`; a single value stands for every entry."""
    return value[index] if isinstance(value, tuple) else value


class AlgorithmSection(ConfigSection):
    """The loss of on-policy distillation and its coefficients."""

    loss_fn: LossName | Literal["auto"] = "auto"
    """The loss; auto: full_reverse_kl with a teacher in this process, else top_k_reverse_kl;
    byte_reverse_kl with teacher.tokens reread."""
    kl_penalty_coef: Annotated[float, Field(gt=0)] | None = None
    """β, the weight of the divergence from the teacher. None: 0.1 in the advantage of
    importance_sampling and ppo, -β (log p_student - log p_teacher); 1 as other losses' factor."""
    kl_baseline: Literal["none", "exact"] = "none"
    """exact subtracts the advantage's expected value over the vocabulary, a baseline that lowers
    the variance; it needs a teacher in this process."""
    clip_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """ppo's clipping range around a probability ratio of 1."""
    importance_cap: Annotated[float, Field(ge=1)] | None = None
    """The cap of the token weight min(p_trainer / p_sampler, cap) (importance_sampling, ppo), with
    p_trainer from the weights before the iteration's first step; None: no such weight, as both are
    assumed to be equal."""
    jsd_beta: Annotated[float, Field(ge=0, le=1)] = 0.5
    """The teacher's share of jsd's mixture; 0 is the forward KL, 1 the reverse KL."""
    top_k: Annotated[int, Field(ge=1, le=1024)] = 16
    """The number of the teacher's most likely tokens that top_k_reverse_kl compares, and from which
    byte_reverse_kl derives a served teacher's next bytes; all other tokens count as one."""
    mask_special_tokens: bool = False
    """Whether special tokens (end of turn, markers of the template) are excluded from training."""
    reward_coef: Annotated[float, Field(ge=0)] = 0.0
    """The weight of the advantage from rewards; 0: rewards are only measured."""
    adv_estimator: AdvantageEstimator = "grpo"
    """The baseline subtracted from a reward: grpo, the mean of its group; reinforce, the mean of
    the iteration's other rollouts; gae, the mean of the group's other rollouts, discounted by
    `gae_lambda`."""
    gae_lambda: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The factor by which gae discounts a token's advantage per following token."""
    substeps: Annotated[int, Field(ge=1, le=64)] = 1
    """The number of optimiser steps per iteration, each on an equal share of the rollouts."""

    def resolved(self, teacher: TeacherSection) -> "AlgorithmSection":
        """Returns the section with `auto` replaced by the default loss for the kind of teacher."""
        if self.loss_fn != "auto":
            return self
        loss_fn = "top_k_reverse_kl" if teacher.is_served else "full_reverse_kl"
        if teacher.tokens == "reread":
            loss_fn = "byte_reverse_kl"
        return self.model_copy(update={"loss_fn": loss_fn})

    @property
    def loss(self) -> Loss:
        """The loss's entry in the table of losses; before `auto` is resolved, full_reverse_kl's."""
        return LOSSES["full_reverse_kl" if self.loss_fn == "auto" else self.loss_fn]

    @property
    def needs_distribution(self) -> bool:
        """Whether the loss uses full distributions, of tokens or of bytes."""
        return self.loss.reads in ("distribution", "bytes") or self.kl_baseline == "exact"

    @property
    def served_top_k(self) -> int | None:
        """The number of likeliest tokens that a served teacher returns per position.

        None if the loss does not need them.
        """
        return self.top_k if self.loss.needs_top_tokens else None

    @property
    def has_ratio(self) -> bool:
        """Whether the loss reads the ratio p_now / p_when_sampled of a token's probabilities."""
        return self.loss.is_policy_gradient or self.reward_coef > 0

    @property
    def kl_coef(self) -> float:
        """The weight β of the divergence: `kl_penalty_coef`, or its default for the loss."""
        default = self.loss.default_coef
        return default if self.kl_penalty_coef is None else self.kl_penalty_coef

    def check_teacher(self, teacher: TeacherSection) -> None:
        """Raises ValueError, with a fix, if the teacher cannot provide what the loss needs."""
        self._check_options()
        is_reread, name = teacher.tokens == "reread", self.loss.name
        if is_reread and self.loss.reads != "bytes":
            raise ValueError(
                f"teacher.tokens: reread compares both models byte by byte, but {name} compares "
                "tokens: set algorithm.loss_fn: byte_reverse_kl (or auto)"
            )
        if not is_reread and self.loss.reads == "bytes":
            raise ValueError(
                f"algorithm.loss_fn {name} compares bytes: set teacher.tokens: reread, or, if the "
                "teacher has the student's tokenizer, algorithm.loss_fn: auto"
            )
        default = AlgorithmSection.model_fields["top_k"].default
        if is_reread and not teacher.is_served and self.top_k != default:
            raise ValueError(
                "algorithm.top_k has no effect: a teacher in this process gives its full "
                f"distribution to {name}; leave top_k out"
            )
        if teacher.is_served and not is_reread and self.needs_distribution:
            needed = "kl_baseline exact" if self.loss.is_policy_gradient else name
            raise ValueError(
                f"algorithm: {needed} needs the teacher's full distribution, which servers do not "
                "return: use importance_sampling or top_k_reverse_kl, or a teacher in this process "
                "(teacher.provider hf)"
            )

    @model_validator(mode="after")
    def _check_ignored_keys(self) -> Self:
        # The loss of `auto` depends on the teacher: `check_teacher` checks its options.
        if self.loss_fn != "auto":
            self._check_options()
        return self

    def _check_options(self) -> None:
        """Raises ValueError if an option is set that the loss ignores."""
        all_options = frozenset[str]().union(*(loss.options for loss in LOSSES.values()))
        conditions = {
            name: f"loss_fn {' or '.join(losses_with(name))}"
            for name in sorted(all_options - self.loss.options)
        }
        if self.adv_estimator != "gae" or self.reward_coef == 0:
            conditions["gae_lambda"] = "adv_estimator gae and reward_coef above 0"
        for name, condition in conditions.items():
            if getattr(self, name) != AlgorithmSection.model_fields[name].default:
                raise ValueError(
                    f"algorithm.{name} needs {condition}: set that too, or leave {name} out"
                )


class SoftTargetsSection(ConfigSection):
    """Training supervised rows on the teacher's probabilities (sft, and a cold start)."""

    loss: Literal["forward_kl", "jsd", "reverse_kl"] = "forward_kl"
    """The divergence between the teacher's and the student's next-token distributions."""
    temperature: Annotated[float, Field(gt=0, le=100)] = 4.0
    """The temperature of both distributions; the loss is multiplied by its square. Above 1 the
    student also learns which other tokens the teacher finds likely.

    Source: arXiv 1503.02531, section 2.
    """
    top_k: Annotated[int, Field(ge=1, le=1024)] | None = None
    """The number of the teacher's most likely tokens per position that are scored once and kept in
    `store`; all other tokens count as one. None: the full distribution, from a teacher in this
    process that scores every step's rows."""
    label_coef: Annotated[float, Field(ge=0)] = 0.0
    """The weight of the rows' own negative log-likelihood, added to the loss."""
    store: str = "teacher_probabilities"
    """The folder, relative to the workspace, that keeps the teacher's probabilities (top_k)."""

    @model_validator(mode="after")
    def _check_ignored_keys(self) -> "SoftTargetsSection":
        if self.top_k is not None and self.loss != "forward_kl":
            raise ValueError(
                f"soft_targets.loss {self.loss} compares the whole vocabulary: leave top_k out, or "
                "use forward_kl"
            )
        default = type(self).model_fields["store"].default
        if self.top_k is None and self.store != default:
            raise ValueError("soft_targets.store needs soft_targets.top_k: set it too")
        return self


class CurriculumSection(ConfigSection):
    """The curriculum of rollouts (distill); its iterations are counted after the cold start."""

    prefix_tokens: Annotated[int, Field(ge=1)] | None = None
    """The maximum number of tokens that the student samples in a rollout, over all its turns.

    Source: arXiv 2602.15260, 2605.27028: the first tokens of answers teach most and cost least.
    """
    prefix_tokens_end: Annotated[int, Field(ge=1)] | None = None
    """The value to which prefix_tokens grows by iteration prefix_steps; after that, no limit."""
    prefix_steps: Annotated[int, Field(ge=1)] | None = None
    first_turns: Annotated[int, Field(ge=1)] | None = None
    """The turn limit of the first rollouts; it grows to rollout.max_turns by iteration turn_steps.

    Source: arXiv 2604.24005: errors accumulate over turns and lead to states that the teacher
    has never seen.
    """
    turn_steps: Annotated[int, Field(ge=1)] | None = None
    teacher_share: Annotated[float, Field(ge=0, le=0.9)] = 0.0
    """The share of turns that the teacher writes; they are context for the student, not trained on.

    It falls to 0 by iteration teacher_steps. Source: arXiv 2606.15912.
    """
    teacher_steps: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _check_ramps(self) -> "CurriculumSection":
        ramps = (
            ("prefix_steps", self.prefix_steps, "prefix_tokens_end", self.prefix_tokens_end),
            ("turn_steps", self.turn_steps, "first_turns", self.first_turns),
            ("teacher_steps", self.teacher_steps, "teacher_share", self.teacher_share or None),
        )
        for steps_name, steps, name, value in ramps:
            if (steps is None) != (value is None):
                raise ValueError(
                    f"set both {name} and {steps_name}, or neither: {steps_name} is the iteration "
                    "at which the curriculum reaches its final value"
                )
        if self.prefix_tokens_end is not None and (
            self.prefix_tokens is None or self.prefix_tokens_end < self.prefix_tokens
        ):
            raise ValueError("prefix_tokens_end must be at least prefix_tokens: set both")
        return self


class ColdStartSection(ConfigSection):
    """Supervised steps before the first rollout (distill), to give the student a usable start.

    Source: arXiv 2604.13016, 2604.13010.
    """

    train_file: str
    """The file of supervised rows (see convert_rollouts), relative to the folder of config.yml."""
    num_epochs: Annotated[int, Field(ge=1)] = 1
    learning_rate: Annotated[float, Field(gt=0)] | None = None
    """The learning rate of the cold start; None: trainer.learning_rate."""
    batch_size: Annotated[int, Field(ge=1, le=4096)] | None = None
    """The number of rows per step; None: data.batch_size."""
