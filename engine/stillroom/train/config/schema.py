"""What config.yml may say, and its defaults; config_file.py reads it."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from stillroom.train.config.algorithm_section import AlgorithmSection
from stillroom.train.config.curriculum import ColdStartSection, CurriculumSection
from stillroom.train.config.eval_section import EvalSection
from stillroom.train.config.launcher_section import LauncherSection
from stillroom.train.config.model_section import ModelSection
from stillroom.train.config.rollout_section import RolloutSection
from stillroom.train.config.teacher_section import OneTeacher, TeacherSection


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DataSection(_Section):
    """The rows to train on."""

    train_file: str | tuple[str, ...] = "train.jsonl"
    """Relative to the folder of config.yml. distill: or a list of files, which every iteration
    takes prompts from in proportion to their sizes."""
    batch_size: Annotated[int, Field(ge=1, le=4096)]
    """Rows, pairs or prompts per optimiser step (distill: per iteration)."""
    group_size: Annotated[int, Field(ge=1, le=64)] = 4
    """distill: rollouts of each prompt."""
    val_split: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """sft, dpo: share of the rows held out by their prompts, measured after every epoch."""

    @property
    def train_files(self) -> tuple[str, ...]:
        """The names of the files."""
        return (self.train_file,) if isinstance(self.train_file, str) else self.train_file


class TrainerSection(_Section):
    """The optimiser and how long it runs."""

    num_epochs: Annotated[int, Field(ge=1)]
    learning_rate: Annotated[float, Field(gt=0)] = 1e-4
    save_step: int = -1
    """A checkpoint every so many steps; -1: only at the end."""
    keep_checkpoints: Annotated[int, Field(ge=1)] | None = None
    """Of the steps' checkpoints only so many of the last stay, and the best; default: all."""
    early_stop: Annotated[int, Field(ge=1)] | None = None
    """Ends after so many validations in a row without a lower val_loss; the best one is kept."""
    max_steps: Annotated[int, Field(ge=1)] | None = None
    """distill: iterations; stops earlier than num_epochs would."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """Down to a tenth of the learning rate."""
    warmup_steps: Annotated[int, Field(ge=0)] = 10
    """At most a tenth of the run."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    adam_beta2: Annotated[float, Field(gt=0, lt=1)] = 0.95
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    seed: int = 0
    tensorboard: bool = False
    """Metrics also to the run's tensorboard folder; they are in events.jsonl in any case."""
    wandb_project: str | None = None
    """Metrics also to Weights & Biases: in the run's folder, unless WANDB_API_KEY is set."""
    trackio_project: str | None = None
    """Metrics also to trackio, in runs/trackio unless TRACKIO_DIR says where."""


class DpoSection(_Section):
    """The preference loss."""

    beta: Annotated[float, Field(gt=0)] = 0.1
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    nll_coef: Annotated[float, Field(ge=0)] = 0.0
    """Adds this much of the chosen answer's negative log-likelihood per token."""


class TrainConfig(_Section):
    """All of config.yml."""

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
    trainer: TrainerSection
    evals: tuple[EvalSection, ...] = ()
    dpo: DpoSection = DpoSection()
    launcher: LauncherSection = LauncherSection()

    @model_validator(mode="after")
    def _needs_teacher(self) -> "TrainConfig":
        if self.dataset_type == "distill" and self.teacher is None:
            raise ValueError("dataset_type distill needs teacher.path: the model that scores")
        return self

    @model_validator(mode="after")
    def _loss_is_named(self) -> "TrainConfig":
        """Says which loss `auto` is, so that a run's record does too."""
        is_served = self.teacher is not None and self.teacher.is_served
        named = self.algorithm.resolved(is_served=is_served)
        return self if named is self.algorithm else self.model_copy(update={"algorithm": named})

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
    def teachers(self) -> list[OneTeacher]:
        """Who scores each dataset's rollouts; none unless dataset_type is distill."""
        if self.teacher is None or self.dataset_type != "distill":
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
    def _whole_distributions_are_in_process(self) -> "TrainConfig":
        is_served = self.teacher is not None and self.teacher.is_served
        if self.dataset_type == "distill" and is_served and self.algorithm.needs_logits:
            name = "kl_baseline exact" if self.algorithm.is_sampled_loss else self.algorithm.loss_fn
            raise ValueError(
                f"algorithm: {name} needs the teacher's whole distribution, which no server gives: "
                "take importance_sampling or top_k_reverse_kl, or a teacher in this process "
                "(teacher.provider hf)"
            )
        return self

    @model_validator(mode="after")
    def _curriculum_fits(self) -> "TrainConfig":
        curriculum, max_turns = self.curriculum, self.rollout.max_turns
        is_asked = curriculum != CurriculumSection() or self.cold_start is not None
        if is_asked and self.dataset_type != "distill":
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
        algorithm = self.algorithm
        if (
            self.dataset_type == "distill"
            and algorithm.reward_coef > 0
            and algorithm.adv_estimator != "reinforce"
            and self.data.group_size == 1
        ):
            raise ValueError(
                f"algorithm.adv_estimator {algorithm.adv_estimator} compares rollouts of one "
                "prompt, so data.group_size must be 2 or more; reinforce compares all of them"
            )
        return self
