"""The schema of config.yml: one class per dataset_type, and which settings exclude others."""

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal, Self, get_args

from pydantic import BaseModel, model_validator

from stillroom.train.config.distill_sections import (
    AlgorithmSection,
    ColdStartSection,
    CurriculumSection,
    DatasetTeacher,
    RolloutSection,
    SoftTargetsSection,
    TeacherSection,
)
from stillroom.train.config.losses import LOSSES
from stillroom.train.config.sections import (
    ConfigSection,
    DistillTrainer,
    DpoSection,
    EvalSection,
    LauncherSection,
    ModelSection,
    PromptsSection,
    RowsSection,
    RowsTrainer,
    StudentSection,
)


class _CommonConfig(ConfigSection):
    """The part of config.yml that all dataset_types share."""

    project_id: str | None = None
    project_name: str | None = None
    description: str | None = None
    rollout: RolloutSection = RolloutSection()
    evals: tuple[EvalSection, ...] = ()
    launcher: LauncherSection = LauncherSection()

    @model_validator(mode="after")
    def _check_eval_names(self) -> Self:
        names = [section.name for section in self.evals]
        if len(set(names)) < len(names):
            raise ValueError("the names of evals must differ, since they name the metrics")
        return self


class _RowsConfig(_CommonConfig):
    """The part of config.yml for training on rows (sft, dpo) instead of rollouts."""

    data: RowsSection
    model: ModelSection
    trainer: RowsTrainer = RowsTrainer()

    @model_validator(mode="after")
    def _check_early_stop(self) -> Self:
        if self.trainer.early_stop is not None and self.data.val_split == 0:
            raise ValueError("trainer.early_stop needs val_loss: set data.val_split, e.g. 0.05")
        return self

    @model_validator(mode="after")
    def _check_no_mixing(self) -> Self:
        if self.rollout.on_policy_share is not None:
            raise ValueError(
                "rollout.on_policy_share mixes rows into rollouts, so it needs dataset_type distill"
            )
        return self

    @model_validator(mode="after")
    def _check_sharding(self) -> Self:
        if self.launcher.is_sharded and self.model.quantization is not None:
            raise ValueError(
                "launcher.strategy: fsdp2 cannot shard 4-bit weights: use ddp, or leave "
                "model.quantization out"
            )
        return self


class SftConfig(_RowsConfig):
    """config.yml for supervised fine-tuning."""

    dataset_type: Literal["sft"]
    teacher: TeacherSection | None = None
    soft_targets: SoftTargetsSection | None = None
    """Training on the teacher's probabilities; set to the defaults if there is only a teacher."""

    @model_validator(mode="after")
    def _set_soft_targets(self) -> Self:
        """Sets `soft_targets` if the config has a teacher, so that the run records it."""
        if self.soft_targets is not None or self.teacher is None:
            return self
        settings = SoftTargetsSection(top_k=16 if self.teacher.is_served else None)
        return self.model_copy(update={"soft_targets": settings})

    @model_validator(mode="after")
    def _check_teacher(self) -> Self:
        if self.soft_targets is not None:
            _check_targets(self.soft_targets, self.teachers, self.launcher)
        return self

    @property
    def teachers(self) -> list[DatasetTeacher]:
        """The teacher whose probabilities are the targets, if there is one."""
        return [] if self.teacher is None else self.teacher.for_datasets(1)

    @property
    def served_top_k(self) -> int | None:
        """The number of most likely tokens that a served teacher returns per position, or None."""
        return None if self.soft_targets is None else self.soft_targets.top_k


class DpoConfig(_RowsConfig):
    """config.yml for direct preference optimisation."""

    dataset_type: Literal["dpo"]
    dpo: DpoSection = DpoSection()
    teacher: ClassVar[None] = None
    soft_targets: ClassVar[None] = None

    @property
    def teachers(self) -> list[DatasetTeacher]:
        """Always empty: the rows say which answer is better."""
        return []

    @property
    def served_top_k(self) -> None:
        """Always None: no teacher scores tokens."""


class DistillConfig(_CommonConfig):
    """config.yml for on-policy distillation."""

    dataset_type: Literal["distill"]
    data: PromptsSection
    model: StudentSection
    teacher: TeacherSection
    algorithm: AlgorithmSection = AlgorithmSection()
    curriculum: CurriculumSection = CurriculumSection()
    cold_start: ColdStartSection | None = None
    soft_targets: SoftTargetsSection | None = None
    trainer: DistillTrainer = DistillTrainer()

    @property
    def teachers(self) -> list[DatasetTeacher]:
        """The teacher of each dataset."""
        return self.teacher.for_datasets(len(self.data.train_files))

    @property
    def served_top_k(self) -> int | None:
        """The number of most likely tokens that a served teacher returns per position, or None."""
        return self.algorithm.served_top_k

    @model_validator(mode="after")
    def _check_soft_targets(self) -> Self:
        if self.soft_targets is None:
            return self
        if self.cold_start is None:
            raise ValueError(
                "soft_targets sets the loss of cold_start's rows in distill: name them in "
                "cold_start.train_file, or leave soft_targets out (algorithm.loss_fn is the loss "
                "of rollouts)"
            )
        _check_targets(self.soft_targets, self.teachers, self.launcher)
        return self

    @model_validator(mode="after")
    def _check_mixed_rows(self) -> Self:
        name = "rollout.on_policy_share"
        if self.rollout.on_policy_share is None:
            if self.rollout.rows_file is not None:
                raise ValueError(f"rollout.rows_file needs {name}: set it")
            return self
        if self.rollout.rows_file is None and self.cold_start is None:
            raise ValueError(f"{name} needs rollout.rows_file: name the file of rows to mix in")
        if self.teacher.is_served:
            raise ValueError(
                f"{name} needs a teacher in this process (teacher.provider hf), which scores the "
                "rows in every update; a served one can provide soft_targets for a cold_start"
            )
        if self.teacher.tokens == "reread":
            raise ValueError(
                f"{name} compares rows token by token, but teacher.tokens: reread compares bytes: "
                f"leave {name} out, or train on the rows first as a cold_start"
            )
        if not isinstance(self.teacher.path, str):
            raise ValueError(f"{name} needs a single teacher: teacher.path cannot be a list")
        if self.algorithm.has_ratio:
            losses = [
                loss.name for loss in LOSSES.values() if loss.reads in ("distribution", "top_k")
            ]
            raise ValueError(
                f"{name} needs a loss that compares distributions ({', '.join(losses)}) without "
                "algorithm.reward_coef: rows were not sampled from the student"
            )
        return self

    @model_validator(mode="after")
    def _resolve_defaults(self) -> Self:
        """Replaces the loss `auto` by its name, and sets group_size if rewards compare groups.

        The run's record then has the values in use.
        """
        algorithm, data = self.algorithm.resolved(self.teacher), self.data
        if "group_size" not in data.model_fields_set and self._compares_groups:
            data = data.model_copy(update={"group_size": 4})
        return self.model_copy(update={"algorithm": algorithm, "data": data})

    @property
    def _compares_groups(self) -> bool:
        return self.algorithm.reward_coef > 0 and self.algorithm.adv_estimator != "reinforce"

    @model_validator(mode="after")
    def _check_server(self) -> Self:
        if self.rollout.server is not None and self.model.qlora_rank == 0:
            raise ValueError(
                "rollout.server loads the student's adapter in each iteration, not full weights: "
                "set model.qlora_rank, or leave rollout.server out"
            )
        if self.rollout.server is not None and self.curriculum.teacher_share:
            raise ValueError(
                "curriculum.teacher_share needs the student in this process: leave rollout.server "
                "out"
            )
        return self

    @model_validator(mode="after")
    def _check_deterministic(self) -> Self:
        for key in ("server", "max_staleness") if self.rollout.deterministic else ():
            if getattr(self.rollout, key):
                raise ValueError(
                    f"rollout.{key} cannot be combined with rollout.deterministic, which samples "
                    f"one conversation at a time in this process: remove rollout.{key}"
                )
        return self

    @model_validator(mode="after")
    def _check_teachers(self) -> Self:
        files, teacher = self.data.train_files, self.teacher
        if isinstance(teacher.path, str):
            return self
        if len(teacher.path) != len(files):
            raise ValueError(
                f"teacher.path is a list of {len(teacher.path)}, but data.train_file has "
                f"{len(files)} files: give one teacher for each, or one for all"
            )
        if self.curriculum.teacher_share and len(set(teacher.path)) > 1:
            raise ValueError("curriculum.teacher_share needs a single teacher, not a list")
        return self

    @model_validator(mode="after")
    def _check_loss(self) -> Self:
        self.algorithm.check_teacher(self.teacher)
        return self

    @model_validator(mode="after")
    def _check_curriculum(self) -> Self:
        curriculum, max_turns = self.curriculum, self.rollout.max_turns
        if curriculum.first_turns is not None and curriculum.first_turns > max_turns:
            raise ValueError(
                f"curriculum.first_turns {curriculum.first_turns} must not be above "
                f"rollout.max_turns {max_turns}, to which it grows"
            )
        if curriculum.prefix_tokens is not None and self.algorithm.reward_coef > 0:
            raise ValueError(
                "algorithm.reward_coef needs whole answers, but curriculum.prefix_tokens truncates "
                "them: set only one of the two"
            )
        if not curriculum.teacher_share:
            return self
        if max_turns < 2:
            raise ValueError(
                "curriculum.teacher_share lets the teacher write some turns of each rollout: set "
                "rollout.max_turns to 2 or more"
            )
        if self.teacher.is_served:
            raise ValueError(
                "curriculum.teacher_share needs a teacher in this process (teacher.provider hf), "
                "which writes some of the turns"
            )
        if self.teacher.tokens == "reread":
            raise ValueError(
                "curriculum.teacher_share needs a teacher with the student's tokenizer, not "
                "teacher.tokens: reread: leave teacher_share out"
            )
        return self

    @model_validator(mode="after")
    def _check_launcher(self) -> Self:
        if self.launcher.is_sharded:
            raise ValueError(
                "launcher.strategy: fsdp2 shards the weights that distill samples from: use ddp"
            )
        for key in ("max_staleness", "server") if self.launcher.kind != "local" else ():
            if getattr(self.rollout, key):
                raise ValueError(
                    f"rollout.{key} needs a single process: remove rollout.{key} or launcher"
                )
        return self

    @model_validator(mode="after")
    def _check_temperature(self) -> Self:
        if self.algorithm.has_ratio and self.rollout.temperature != 1.0:
            raise ValueError(
                "rollout.temperature must be 1.0 with importance_sampling, ppo and reward_coef, "
                "whose probability ratio assumes it"
            )
        return self

    @model_validator(mode="after")
    def _check_group_size(self) -> Self:
        if self._compares_groups and self.data.group_size == 1:
            raise ValueError(
                f"algorithm.adv_estimator {self.algorithm.adv_estimator} compares the rollouts of "
                "a prompt: set data.group_size to 2 or more, or use reinforce, which compares all "
                "rollouts of an iteration"
            )
        return self


TrainConfig = SftConfig | DpoConfig | DistillConfig
"""The content of config.yml, whatever its `dataset_type`."""

CONFIGS: Mapping[str, type[TrainConfig]] = {
    "sft": SftConfig,
    "dpo": DpoConfig,
    "distill": DistillConfig,
}
"""The config class of each `dataset_type`."""


def section_of(model: type[BaseModel], name: str) -> type[BaseModel] | None:
    """Returns the section class that a key of `model` holds; None if it is not a section."""
    field = model.model_fields.get(name)
    types = (field.annotation, *get_args(field.annotation)) if field is not None else ()
    sections = (each for each in types if isinstance(each, type) and issubclass(each, BaseModel))
    return next(sections, None)


def keys_of(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yields the dotted keys of a configuration, each section before its keys."""
    for name in model.model_fields:
        yield prefix + name
        if (section := section_of(model, name)) is not None:
            yield from keys_of(section, f"{prefix}{name}.")


def keys_of_other_types(dataset_type: str) -> dict[str, list[str]]:
    """Returns the keys that this dataset_type lacks, each with the types that have it.

    A missing section stands for all its keys.
    """
    own = set(keys_of(CONFIGS[dataset_type]))
    owners: dict[str, list[str]] = {}
    for name, model in CONFIGS.items():
        for key in keys_of(model):
            section = key.rpartition(".")[0]
            if key not in own and (not section or section in own):
                owners.setdefault(key, []).append(name)
    return owners


def _check_targets(
    settings: SoftTargetsSection, teachers: list[DatasetTeacher], launcher: LauncherSection
) -> None:
    """Raises ValueError if the teacher cannot provide soft targets."""
    if not teachers:
        raise ValueError("soft_targets needs teacher.path: name the model that provides them")
    section = teachers[0].section
    if section.is_served and settings.top_k is None:
        raise ValueError(
            "soft_targets without top_k needs the teacher's full distribution, which servers do "
            "not return: set soft_targets.top_k, e.g. 16, or use a teacher in this process"
        )
    if len(set(teachers)) > 1:
        raise ValueError("soft_targets needs a single teacher: teacher.path cannot be a list")
    if section.tokens == "reread":
        raise ValueError(
            "soft_targets needs probabilities of the student's own tokens, which a teacher with "
            "teacher.tokens: reread cannot give: leave soft_targets out (in sft, also teacher: "
            "training then uses the rows' tokens alone)"
        )
    if launcher.is_sharded:
        raise ValueError(
            "launcher.strategy: fsdp2 shards the output head, but soft_targets compares "
            "distributions over the whole vocabulary: use ddp"
        )
