"""The whole of config.yml: one class for each dataset_type, and which settings exclude others."""

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
    """What config.yml holds whatever is trained."""

    project_id: str | None = None
    project_name: str | None = None
    description: str | None = None
    rollout: RolloutSection = RolloutSection()
    evals: tuple[EvalSection, ...] = ()
    launcher: LauncherSection = LauncherSection()

    @model_validator(mode="after")
    def _evals_have_names_of_their_own(self) -> Self:
        names = [section.name for section in self.evals]
        if len(set(names)) < len(names):
            raise ValueError("evals need names of their own, for their metrics")
        return self


class _RowsConfig(_CommonConfig):
    """What config.yml holds if rows are trained, not the student's own rollouts."""

    data: RowsSection
    model: ModelSection
    trainer: RowsTrainer = RowsTrainer()

    @model_validator(mode="after")
    def _early_stop_has_a_loss_to_watch(self) -> Self:
        if self.trainer.early_stop is not None and self.data.val_split == 0:
            raise ValueError(
                "trainer.early_stop watches val_loss, which needs data.val_split (0.05, say)"
            )
        return self

    @model_validator(mode="after")
    def _rows_are_not_mixed(self) -> Self:
        if self.rollout.on_policy_share is not None:
            raise ValueError(
                "rollout.on_policy_share mixes rows into the rollouts of dataset_type distill"
            )
        return self

    @model_validator(mode="after")
    def _only_whole_numbers_are_sharded(self) -> Self:
        if self.launcher.is_sharded and self.model.quantization is not None:
            raise ValueError(
                "launcher.strategy: fsdp2 cannot shard 4-bit weights: use ddp, or leave "
                "model.quantization out"
            )
        return self


class SftConfig(_RowsConfig):
    """The whole of config.yml for supervised fine-tuning."""

    dataset_type: Literal["sft"]
    teacher: TeacherSection | None = None
    soft_targets: SoftTargetsSection | None = None
    """Set wherever a teacher is."""

    @model_validator(mode="after")
    def _targets_are_named(self) -> Self:
        """Sets `soft_targets` if the config names a teacher, so that the record names it."""
        if self.soft_targets is not None or self.teacher is None:
            return self
        settings = SoftTargetsSection(top_k=16 if self.teacher.is_served else None)
        return self.model_copy(update={"soft_targets": settings})

    @model_validator(mode="after")
    def _a_teacher_gives_the_targets(self) -> Self:
        if self.soft_targets is not None:
            _check_targets(self.soft_targets, self.teachers, self.launcher)
        return self

    @property
    def teachers(self) -> list[DatasetTeacher]:
        """The teacher whose probabilities are learnt, if there is one."""
        return [] if self.teacher is None else self.teacher.for_datasets(1)

    @property
    def num_listed_tokens(self) -> int | None:
        """The number of likeliest tokens that a served teacher returns with each score, or None."""
        return None if self.soft_targets is None else self.soft_targets.top_k


class DpoConfig(_RowsConfig):
    """The whole of config.yml for direct preference optimisation."""

    dataset_type: Literal["dpo"]
    dpo: DpoSection = DpoSection()
    teacher: ClassVar[None] = None
    soft_targets: ClassVar[None] = None

    @property
    def teachers(self) -> list[DatasetTeacher]:
        """No teacher: the rows say which answer is better."""
        return []

    @property
    def num_listed_tokens(self) -> None:
        """None: no teacher scores anything."""


class DistillConfig(_CommonConfig):
    """The whole of config.yml for on-policy distillation."""

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
    def num_listed_tokens(self) -> int | None:
        """The number of likeliest tokens that a served teacher returns with each score, or None."""
        return self.algorithm.num_listed_tokens

    @model_validator(mode="after")
    def _soft_targets_are_for_the_cold_start(self) -> Self:
        if self.soft_targets is None:
            return self
        if self.cold_start is None:
            raise ValueError(
                "soft_targets is the loss of cold_start's rows in distill: name them in "
                "cold_start.train_file, or leave it out; algorithm.loss_fn is the loss of rollouts"
            )
        _check_targets(self.soft_targets, self.teachers, self.launcher)
        return self

    @model_validator(mode="after")
    def _rows_are_compared_like_rollouts(self) -> Self:
        name = "rollout.on_policy_share"
        if self.rollout.on_policy_share is None:
            if self.rollout.rows_file is not None:
                raise ValueError(f"rollout.rows_file is mixed in by {name}: set it")
            return self
        if self.rollout.rows_file is None and self.cold_start is None:
            raise ValueError(f"{name} needs rollout.rows_file: the rows that are mixed in")
        if self.teacher.is_served:
            raise ValueError(
                f"{name} has the teacher read rows in every update, which takes one in this "
                "process (teacher.provider hf); a served one may teach a cold_start by soft_targets"
            )
        if self.teacher.tokens == "reread":
            raise ValueError(
                f"{name} compares rows token by token, and teacher.tokens: reread bytes: leave it "
                "out; rows may come first as a cold_start"
            )
        if not isinstance(self.teacher.path, str):
            raise ValueError(f"{name} has one teacher read the rows: teacher.path cannot be a list")
        if self.algorithm.has_ratio:
            raise ValueError(
                f"{name} needs a loss that compares distributions (full_reverse_kl, jsd, "
                "top_k_reverse_kl) without algorithm.reward_coef: rows were not sampled from the "
                "student"
            )
        return self

    @model_validator(mode="after")
    def _defaults_are_named(self) -> Self:
        """Replaces the loss `auto` by its name, and sizes groups that rewards compare.

        The run's record then holds what is used.
        """
        algorithm, data = self.algorithm.resolved(self.teacher), self.data
        if "group_size" not in data.model_fields_set and self._compares_groups:
            data = data.model_copy(update={"group_size": 4})
        return self.model_copy(update={"algorithm": algorithm, "data": data})

    @property
    def _compares_groups(self) -> bool:
        return self.algorithm.reward_coef > 0 and self.algorithm.adv_estimator != "reinforce"

    @model_validator(mode="after")
    def _a_server_is_handed_adapters(self) -> Self:
        if self.rollout.server is not None and self.model.qlora_rank == 0:
            raise ValueError(
                "rollout.server receives the student's adapter in each iteration, and cannot "
                "receive all weights: set model.qlora_rank, or leave rollout.server out"
            )
        if self.rollout.server is not None and self.curriculum.teacher_share:
            raise ValueError(
                "curriculum.teacher_share has student and teacher take turns in this process: "
                "leave rollout.server out"
            )
        return self

    @model_validator(mode="after")
    def _nothing_depends_on_when_it_ends(self) -> Self:
        for key in ("server", "max_staleness") if self.rollout.deterministic else ():
            if getattr(self.rollout, key):
                raise ValueError(
                    f"rollout.deterministic samples each conversation by itself and to its end, in "
                    f"this process: leave rollout.{key} out"
                )
        return self

    @model_validator(mode="after")
    def _datasets_have_their_teachers(self) -> Self:
        files, teacher = self.data.train_files, self.teacher
        if isinstance(teacher.path, str):
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
    def _teacher_gives_what_the_loss_needs(self) -> Self:
        self.algorithm.check_teacher(self.teacher)
        return self

    @model_validator(mode="after")
    def _curriculum_fits(self) -> Self:
        curriculum, max_turns = self.curriculum, self.rollout.max_turns
        if curriculum.first_turns is not None and curriculum.first_turns > max_turns:
            raise ValueError(
                f"curriculum.first_turns {curriculum.first_turns} is above rollout.max_turns "
                f"{max_turns}, to which it grows"
            )
        if curriculum.prefix_tokens is not None and self.algorithm.reward_coef > 0:
            raise ValueError(
                "algorithm.reward_coef judges whole answers, and curriculum.prefix_tokens cuts "
                "them off: leave one of them out"
            )
        if not curriculum.teacher_share:
            return self
        if max_turns < 2:
            raise ValueError(
                "curriculum.teacher_share mixes turns of one rollout: set rollout.max_turns to 2 "
                "or more"
            )
        if self.teacher.is_served:
            raise ValueError(
                "curriculum.teacher_share has the teacher write turns, which takes one in this "
                "process (teacher.provider hf)"
            )
        if self.teacher.tokens == "reread":
            raise ValueError(
                "curriculum.teacher_share has the teacher write turns in the student's tokens, "
                "which teacher.tokens: reread does without: leave teacher_share out"
            )
        return self

    @model_validator(mode="after")
    def _launcher_can_sample(self) -> Self:
        if self.launcher.is_sharded:
            raise ValueError(
                "launcher.strategy: fsdp2 splits the weights that distill samples from: use ddp"
            )
        for key in ("max_staleness", "server") if self.launcher.kind != "local" else ():
            if getattr(self.rollout, key):
                raise ValueError(f"rollout.{key} is for one process: leave it or launcher out")
        return self

    @model_validator(mode="after")
    def _ratio_needs_temperature_one(self) -> Self:
        if self.algorithm.has_ratio and self.rollout.temperature != 1.0:
            raise ValueError(
                "rollout.temperature must be 1.0 with importance_sampling, ppo and reward_coef, "
                "whose ratio compares with what was sampled"
            )
        return self

    @model_validator(mode="after")
    def _rewards_have_others_to_compare_with(self) -> Self:
        if self._compares_groups and self.data.group_size == 1:
            raise ValueError(
                f"algorithm.adv_estimator {self.algorithm.adv_estimator} compares rollouts of one "
                "prompt, so data.group_size must be 2 or more; reinforce compares all of them"
            )
        return self


TrainConfig = SftConfig | DpoConfig | DistillConfig
"""The whole of config.yml, by its `dataset_type`."""

CONFIGS: Mapping[str, type[TrainConfig]] = {
    "sft": SftConfig,
    "dpo": DpoConfig,
    "distill": DistillConfig,
}


def section_of(model: type[BaseModel], name: str) -> type[BaseModel] | None:
    """Returns the class of the section that a key of `model` holds; None for any other key."""
    field = model.model_fields.get(name)
    kinds = (field.annotation, *get_args(field.annotation)) if field is not None else ()
    found = (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel))
    return next(found, None)


def keys_of(model: type[BaseModel], above: str = "") -> Iterator[str]:
    """Yields the dotted keys of a configuration: each section, then the keys in it."""
    for name in model.model_fields:
        yield above + name
        if (section := section_of(model, name)) is not None:
            yield from keys_of(section, f"{above}{name}.")


def keys_of_others(dataset_type: str) -> dict[str, list[str]]:
    """Returns the keys that this dataset_type does without, with the types that have each.

    A section that it does without stands for all keys in it.
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
    """Raises ValueError if the teacher cannot give the probabilities that rows are to learn."""
    if not teachers:
        raise ValueError("soft_targets needs teacher.path: the model whose probabilities count")
    section = teachers[0].section
    if section.is_served and settings.top_k is None:
        raise ValueError(
            "soft_targets without top_k needs the teacher's whole distribution, which no "
            "server gives: set soft_targets.top_k, e.g. 16, or take a teacher in this process"
        )
    if len(set(teachers)) > 1:
        raise ValueError(
            "soft_targets has one teacher read the rows: teacher.path cannot be a list"
        )
    if section.tokens == "reread":
        raise ValueError(
            "soft_targets needs probabilities of the student's own tokens, which a teacher with "
            "teacher.tokens: reread cannot give: leave soft_targets out (in sft, leave teacher out "
            "too: training is then on the rows' tokens alone)"
        )
    if launcher.is_sharded:
        raise ValueError(
            "launcher.strategy: fsdp2 splits the output head, whose whole distributions "
            "soft_targets compares: use ddp"
        )
