"""The whole of config.yml: its sections, their defaults, and which settings exclude each other."""

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from stillroom.models.precision import Precision, Quantization
from stillroom.train.config.distill_sections import (
    AlgorithmSection,
    ColdStartSection,
    ConfigSection,
    CurriculumSection,
    DatasetTeacher,
    RolloutSection,
    SoftTargetsSection,
    TeacherSection,
)
from stillroom.train.config.launcher import LauncherSection
from stillroom.train.config.teacher_settings import teacher_problem

LoraChoice = (
    Literal["auto", "attention", "all-linear"]
    | Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)]
    | None
)
"""The layers that a LoRA adapter is put on, by a word or by their names."""


class ModelSection(ConfigSection):
    """The student: which model it is and how it is held in memory."""

    path: str
    """The student: a hub id, folder, run id or demo/student."""
    qlora_rank: Annotated[int, Field(ge=0, le=1024)] = 32
    """The rank of the LoRA adapter; 0 trains all weights instead."""
    qlora_alpha: Annotated[int, Field(ge=1)] | None = None
    """The numerator of the LoRA scale; None: twice the rank."""
    lora_targets: LoraChoice = None
    """The layers under the LoRA adapter: attention (whatever mixes tokens), all-linear (MLPs and
    experts too) or a list of names; auto or None: all but experts."""
    name: str | None = None
    description: str | None = None
    system: str | None = None
    """The system message that the student reads in place of the prompt rows' own (distill and its
    evals); "": none. None: the rows' own."""
    precision: Precision = "auto"
    quantization: Quantization = None
    """nf4 holds the base model in 4 bits under a LoRA adapter, which fits the unquantised base
    too."""
    gradient_checkpointing: bool = False
    """Whether the backward pass computes layers again, which saves memory for a third more time."""
    microbatch_tokens: Annotated[int, Field(ge=1)] | None = None
    """The most tokens of one forward pass; None: as many as the memory allows."""
    max_length: Annotated[int, Field(ge=8)] | None = None
    """The most tokens of a row (sft, dpo); longer rows are left out and counted. None: the model's
    context."""

    @field_validator("lora_targets")
    @classmethod
    def _auto_is_none(cls, value: LoraChoice) -> LoraChoice:
        """Returns None for auto, as runs of earlier versions record it."""
        return None if value == "auto" else value

    @model_validator(mode="after")
    def _targets_have_an_adapter(self) -> "ModelSection":
        if self.lora_targets is not None and self.qlora_rank == 0:
            raise ValueError(
                "lora_targets chooses an adapter's layers, and qlora_rank: 0 trains all weights"
            )
        return self

    @model_validator(mode="after")
    def _quantised_weights_are_frozen(self) -> "ModelSection":
        if self.quantization is not None and self.qlora_rank == 0:
            raise ValueError(
                "quantization needs an adapter, since weights of 4 bits cannot be trained: set "
                "qlora_rank, e.g. 32"
            )
        return self

    def row_length(self, context: int) -> int:
        """Returns the most tokens of a row, for a model whose context has `context` tokens."""
        return min(self.max_length or context, context)

    @property
    def student_precision(self) -> Precision:
        """The number format that the student's weights are loaded in."""
        # If all weights are trained they need fp32, or small updates are lost in bf16's rounding.
        is_whole = self.precision == "auto" and self.qlora_rank == 0
        return "fp32" if is_whole else self.precision

    @property
    def alpha(self) -> int:
        """The numerator of the LoRA scale alpha / rank."""
        return self.qlora_alpha or 2 * self.qlora_rank


class DataSection(ConfigSection):
    """The rows to train on."""

    train_file: str | tuple[str, ...] = "train.jsonl"
    """The file of rows, relative to the folder of config.yml; for distill also a list of files,
    from which every iteration takes prompts in proportion to their sizes."""
    batch_size: Annotated[int, Field(ge=1, le=4096)]
    """The rows (sft) or pairs (dpo) per optimiser step, or the prompts per iteration (distill)."""
    group_size: Annotated[int, Field(ge=1, le=64)] = 1
    """The number of rollouts of each prompt in an iteration (distill); 4 if it is not given and
    rewards compare rollouts of one prompt."""
    val_split: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The share of rows that are held out, by prompt, and measured after every epoch (sft, dpo)."""

    @property
    def train_files(self) -> tuple[str, ...]:
        """The names of the training files as a tuple, even if there is only one."""
        return (self.train_file,) if isinstance(self.train_file, str) else self.train_file


class TrainerSection(ConfigSection):
    """The optimiser and how long it runs."""

    num_epochs: Annotated[int, Field(ge=1)] = 1
    learning_rate: Annotated[float, Field(gt=0)] = 1e-4
    save_step: int = -1
    """The number of steps between two checkpoints; -1: a checkpoint at the end only."""
    keep_checkpoints: Annotated[int, Field(ge=1)] | None = None
    """The number of latest checkpoints that are kept, beside the best one; None: all of them."""
    early_stop: Annotated[int, Field(ge=1)] | None = None
    """The number of validations in a row without a lower val_loss after which the run stops and
    keeps the best step; None: the run never stops early."""
    max_steps: Annotated[int, Field(ge=1)] | None = None
    """The most iterations (distill), if num_epochs would give more."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """How the learning rate falls to a tenth by the run's end; constant: it does not fall."""
    warmup_steps: Annotated[int, Field(ge=0)] = 10
    """The number of steps over which the learning rate rises; at most a tenth of the run's
    steps."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    adam_beta2: Annotated[float, Field(gt=0, lt=1)] = 0.95
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    seed: int = 0
    tensorboard: bool = False
    """Whether metrics are also written to the run's tensorboard folder; events.jsonl always has
    them."""
    wandb_project: str | None = None
    """The Weights & Biases project to send metrics to; without WANDB_API_KEY they are written to
    the run's folder instead. None: W&B is not used."""
    trackio_project: str | None = None
    """The trackio project to write metrics to, in runs/trackio unless TRACKIO_DIR names another
    folder. None: trackio is not used."""
    wandb_name: str | None = None
    """The run's name in Weights & Biases; None: the run's id."""

    @model_validator(mode="after")
    def _a_name_needs_its_project(self) -> "TrainerSection":
        if self.wandb_name is not None and self.wandb_project is None:
            raise ValueError("wandb_name is the run's name in W&B: set trainer.wandb_project too")
        return self


class DpoSection(ConfigSection):
    """The preference loss."""

    beta: Annotated[float, Field(gt=0)] = 0.1
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    nll_coef: Annotated[float, Field(ge=0)] = 0.0
    """The weight at which the chosen answer's negative log-likelihood per token is added to the
    loss."""


class EvalSection(ConfigSection):
    """An evaluation on a file of prompts, made every `step` steps and after the last step."""

    name: Annotated[str, Field(pattern=r"^[\w.-]+$")]
    """The evaluation's name in its metrics, such as eval/NAME/pass1."""
    step: Annotated[int, Field(ge=1)]
    """The number of steps between two evaluations."""
    file: str | None = None
    """The file of prompts, relative to the folder of config.yml; None: NAME.jsonl."""
    n: Annotated[int, Field(ge=1)] | None = None
    """The number of prompts to take from the start of the file; None: all of them."""
    pass1: bool = True
    pass1_temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    pass4: bool = False
    """Whether to measure the share of prompts for which at least one of four samples is right."""
    pass4_temperature: Annotated[float, Field(gt=0, le=2)] = 1.0
    pass8: bool = False
    pass8_temperature: Annotated[float, Field(gt=0, le=2)] = 1.0

    @model_validator(mode="after")
    def _measures_something(self) -> "EvalSection":
        if not self.counts:
            raise ValueError("an evaluation needs pass1, pass4 or pass8")
        return self

    @property
    def prompts_file(self) -> str:
        """The file with the prompts, relative to the folder of config.yml."""
        return self.file or f"{self.name}.jsonl"

    @property
    def counts(self) -> dict[int, float]:
        """The sampling temperature for each k whose pass@k is measured."""
        settings = {
            1: (self.pass1, self.pass1_temperature),
            4: (self.pass4, self.pass4_temperature),
            8: (self.pass8, self.pass8_temperature),
        }
        return {k: temperature for k, (is_on, temperature) in settings.items() if is_on}

    def is_due(self, step: int, total: int) -> bool:
        """Returns whether the evaluation is made after the step `step` of `total`."""
        return step % self.step == 0 or step == total


class TrainConfig(ConfigSection):
    """The whole of config.yml."""

    project_id: str | None = None
    project_name: str | None = None
    description: str | None = None
    dataset_type: Literal["sft", "dpo", "distill"]
    data: DataSection
    model: ModelSection
    teacher: TeacherSection | None = None
    algorithm: AlgorithmSection = AlgorithmSection()
    rollout: RolloutSection = RolloutSection()
    curriculum: CurriculumSection = CurriculumSection()
    cold_start: ColdStartSection | None = None
    soft_targets: SoftTargetsSection | None = None
    trainer: TrainerSection = TrainerSection()
    evals: tuple[EvalSection, ...] = ()
    dpo: DpoSection = DpoSection()
    launcher: LauncherSection = LauncherSection()

    @model_validator(mode="after")
    def _needs_teacher(self) -> "TrainConfig":
        if self.dataset_type == "distill" and self.teacher is None:
            raise ValueError("dataset_type distill needs teacher.path: the model that scores")
        return self

    @model_validator(mode="after")
    def _targets_are_named(self) -> "TrainConfig":
        """Sets `soft_targets` where an sft config names a teacher, so that the record names it."""
        if self.soft_targets is not None or self.dataset_type != "sft" or self.teacher is None:
            return self
        settings = SoftTargetsSection(top_k=16 if self.teacher.is_served else None)
        return self.model_copy(update={"soft_targets": settings})

    @model_validator(mode="after")
    def _a_teacher_gives_the_targets(self) -> "TrainConfig":
        if self.soft_targets is None:
            return self
        if self.dataset_type == "dpo":
            raise ValueError("soft_targets is the loss of sft, and of distill's cold_start")
        if self.dataset_type == "distill" and self.cold_start is None:
            raise ValueError(
                "soft_targets is the loss of cold_start's rows in distill: name them in "
                "cold_start.train_file, or leave it out; algorithm.loss_fn is the loss of rollouts"
            )
        if self.teacher is None:
            raise ValueError("soft_targets needs teacher.path: the model whose probabilities count")
        if self.teacher.is_served and self.soft_targets.top_k is None:
            raise ValueError(
                "soft_targets without top_k needs the teacher's whole distribution, which no "
                "server gives: set soft_targets.top_k, e.g. 16, or take a teacher in this process"
            )
        if len(set(self.teacher.for_datasets(len(self.data.train_files)))) > 1:
            raise ValueError(
                "soft_targets has one teacher read the rows: teacher.path cannot be a list"
            )
        if self.launcher.is_sharded:
            raise ValueError(
                "launcher.strategy: fsdp2 splits the output head, whose whole distributions "
                "soft_targets compares: use ddp"
            )
        return self

    @model_validator(mode="after")
    def _rows_are_compared_like_rollouts(self) -> "TrainConfig":
        rollout, algorithm = self.rollout, self.algorithm
        if rollout.on_policy_share is None:
            if rollout.rows_file is not None:
                raise ValueError("rollout.rows_file is mixed in by rollout.on_policy_share: set it")
            return self
        name = "rollout.on_policy_share"
        if self.dataset_type != "distill":
            raise ValueError(f"{name} mixes rows into the rollouts of dataset_type distill")
        if rollout.rows_file is None and self.cold_start is None:
            raise ValueError(f"{name} needs rollout.rows_file: the rows that are mixed in")
        if self.teacher is not None and self.teacher.is_served:
            raise ValueError(
                f"{name} has the teacher read rows in every update, which takes one in this "
                "process (teacher.provider hf); a served one may teach a cold_start by soft_targets"
            )
        if self.teacher is not None and self.teacher.tokens == "reread":
            raise ValueError(
                f"{name} compares rows token by token, and teacher.tokens: reread bytes: leave it "
                "out; rows may come first as a cold_start"
            )
        if self.teacher is not None and not isinstance(self.teacher.path, str):
            raise ValueError(f"{name} has one teacher read the rows: teacher.path cannot be a list")
        if algorithm.is_sampled_loss or algorithm.reward_coef > 0:
            raise ValueError(
                f"{name} needs a loss that compares distributions (full_reverse_kl, jsd, "
                "top_k_reverse_kl) without algorithm.reward_coef: rows were not sampled from the "
                "student"
            )
        return self

    @model_validator(mode="after")
    def _loss_is_named(self) -> "TrainConfig":
        """Replaces the loss `auto`, so that the run's record names the loss that is used."""
        is_served = self.teacher is not None and self.teacher.is_served
        is_reread = self.teacher is not None and self.teacher.tokens == "reread"
        named = self.algorithm.resolved(is_served=is_served, is_reread=is_reread)
        return self if named is self.algorithm else self.model_copy(update={"algorithm": named})

    @model_validator(mode="after")
    def _groups_are_sized(self) -> "TrainConfig":
        """Gives rewards that compare rollouts of one prompt groups, if the user gave no size."""
        if "group_size" in self.data.model_fields_set or not self._compares_groups:
            return self
        return self.model_copy(update={"data": self.data.model_copy(update={"group_size": 4})})

    @property
    def _compares_groups(self) -> bool:
        rewards = self.algorithm.reward_coef > 0 and self.algorithm.adv_estimator != "reinforce"
        return self.dataset_type == "distill" and rewards

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> "TrainConfig":
        if self.data.val_split > 0 and self.dataset_type == "distill":
            raise ValueError(
                "data.val_split is for sft and dpo, whose rows have a loss; distill is judged on "
                "prompts of a file of their own: name it in evals"
            )
        names = [section.name for section in self.evals]
        if len(set(names)) < len(names):
            raise ValueError("evals need names of their own, for their metrics")
        if self.trainer.early_stop is not None and self.data.val_split == 0:
            raise ValueError(
                "trainer.early_stop watches val_loss, which needs data.val_split (0.05, say)"
            )
        if self.trainer.max_steps is not None and self.dataset_type != "distill":
            raise ValueError(
                "trainer.max_steps limits the iterations of distill only; set trainer.num_epochs"
            )
        return self

    @model_validator(mode="after")
    def _instructions_are_read(self) -> "TrainConfig":
        if self.model.system is not None and self.dataset_type != "distill":
            raise ValueError(
                "model.system is read by a student that is sampled (distill); supervised rows are "
                "trained as they are: convert_rollouts(system=…) writes them with another one"
            )
        own = {"system", "context_file"} & (
            self.teacher.model_fields_set if self.teacher else set()
        )
        if own and self.dataset_type == "dpo":
            raise ValueError(f"teacher.{min(own)} is for sft and distill: dpo reads no teacher")
        return self

    @model_validator(mode="after")
    def _a_server_is_handed_adapters(self) -> "TrainConfig":
        if self.rollout.server is not None and self.model.qlora_rank == 0:
            raise ValueError(
                "rollout.server is handed the student's adapter in each iteration; all weights "
                "cannot be: set model.qlora_rank, or leave rollout.server out"
            )
        if self.rollout.server is not None and self.curriculum.teacher_share:
            raise ValueError(
                "curriculum.teacher_share has student and teacher take turns in this process: "
                "leave rollout.server out"
            )
        return self

    @property
    def teachers(self) -> list[DatasetTeacher]:
        """The teacher of each dataset; empty for dpo, and for sft without soft_targets."""
        is_taught = self.dataset_type == "distill" or self.soft_targets is not None
        if self.teacher is None or not is_taught:
            return []
        return self.teacher.for_datasets(len(self.data.train_files))

    @model_validator(mode="after")
    def _datasets_have_their_teachers(self) -> "TrainConfig":
        files, teacher = self.data.train_files, self.teacher
        if isinstance(self.data.train_file, tuple) and self.dataset_type != "distill":
            raise ValueError(
                "data.train_file is a list only with distill: put the rows in one file"
            )
        if len(set(files)) < len(files) or not files:
            raise ValueError("data.train_file must name at least one file, and each once")
        if teacher is None or isinstance(teacher.path, str):
            return self
        if len(teacher.path) != len(files):
            raise ValueError(
                f"teacher.path is a list of {len(teacher.path)}, and data.train_file names "
                f"{len(files)} files: give one teacher for each, or one for all"
            )
        if self.curriculum.teacher_share and len(set(teacher.path)) > 1:
            raise ValueError("curriculum.teacher_share has one teacher write turns, not several")
        return self

    @model_validator(mode="after")
    def _teacher_gives_what_the_loss_needs(self) -> "TrainConfig":
        if (problem := teacher_problem(self)) is not None:
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _curriculum_fits(self) -> "TrainConfig":
        curriculum, max_turns = self.curriculum, self.rollout.max_turns
        is_set = curriculum != CurriculumSection() or self.cold_start is not None
        if is_set and self.dataset_type != "distill":
            raise ValueError("curriculum and cold_start are stages of dataset_type distill")
        if curriculum.first_turns is not None and curriculum.first_turns > max_turns:
            raise ValueError(
                f"curriculum.first_turns {curriculum.first_turns} is above rollout.max_turns "
                f"{max_turns}, to which it grows"
            )
        if curriculum.teacher_share and max_turns < 2:
            raise ValueError(
                "curriculum.teacher_share mixes turns of one rollout: set rollout.max_turns to 2 "
                "or more"
            )
        if curriculum.teacher_share and self.teacher is not None and self.teacher.is_served:
            raise ValueError(
                "curriculum.teacher_share has the teacher write turns, which takes one in this "
                "process (teacher.provider hf)"
            )
        if curriculum.prefix_tokens is not None and self.algorithm.reward_coef > 0:
            raise ValueError(
                "algorithm.reward_coef judges whole answers, and curriculum.prefix_tokens cuts "
                "them off: leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _distill_samples_everywhere(self) -> "TrainConfig":
        if self.dataset_type == "distill" and self.launcher.kind != "local":
            if self.launcher.is_sharded:
                raise ValueError(
                    "launcher.strategy: fsdp2 splits the weights that distill samples from: use ddp"
                )
            for key in ("max_staleness", "server"):
                if getattr(self.rollout, key):
                    raise ValueError(f"rollout.{key} is for one process: leave it or launcher out")
        return self

    @model_validator(mode="after")
    def _only_whole_numbers_are_sharded(self) -> "TrainConfig":
        if self.launcher.is_sharded and self.model.quantization is not None:
            raise ValueError(
                "launcher.strategy: fsdp2 cannot share out weights of 4 bits: use ddp, or leave "
                "model.quantization out"
            )
        return self

    @model_validator(mode="after")
    def _ratio_needs_temperature_one(self) -> "TrainConfig":
        is_other = self.rollout.temperature != 1.0
        if self.dataset_type == "distill" and self.algorithm.has_ratio and is_other:
            raise ValueError(
                "rollout.temperature must be 1.0 with importance_sampling, ppo and reward_coef, "
                "whose ratio compares with what was sampled"
            )
        return self

    @model_validator(mode="after")
    def _rewards_have_others_to_compare_with(self) -> "TrainConfig":
        if self._compares_groups and self.data.group_size == 1:
            raise ValueError(
                f"algorithm.adv_estimator {self.algorithm.adv_estimator} compares rollouts of one "
                "prompt, so data.group_size must be 2 or more; reinforce compares all of them"
            )
        return self
