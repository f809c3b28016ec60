"""What a teacher can give: which of its settings go with which loss."""

from typing import Protocol

from stillroom.train.config.distill_sections import (
    AlgorithmSection,
    CurriculumSection,
    TeacherSection,
)


class _Settings(Protocol):
    """The sections of config.yml that exclude one another here."""

    @property
    def dataset_type(self) -> str: ...
    @property
    def teacher(self) -> TeacherSection | None: ...
    @property
    def algorithm(self) -> AlgorithmSection: ...
    @property
    def curriculum(self) -> CurriculumSection: ...
    @property
    def soft_targets(self) -> object: ...


def teacher_problem(config: _Settings) -> str | None:
    """Returns what the teacher cannot give, and what to do; None if it gives all it has to."""
    teacher = config.teacher
    if teacher is None:
        return None
    is_reread, loss = teacher.tokens == "reread", config.algorithm.loss_fn
    if is_reread and config.soft_targets is not None:
        return (
            "soft_targets are probabilities of the student's own tokens, which a teacher with "
            "teacher.tokens: reread does not give: leave soft_targets out (in sft leave teacher "
            "out, for the rows' own tokens)"
        )
    if config.dataset_type != "distill":
        return None
    if is_reread and loss != "byte_reverse_kl":
        return (
            f"teacher.tokens: reread compares both models byte by byte, and {loss} compares "
            "tokens: set algorithm.loss_fn: byte_reverse_kl (or auto)"
        )
    if not is_reread and loss == "byte_reverse_kl":
        return (
            "algorithm.loss_fn byte_reverse_kl is for a teacher with another tokenizer: set "
            "teacher.tokens: reread, or take full_reverse_kl"
        )
    default = AlgorithmSection.model_fields["top_k"].default
    if is_reread and not teacher.is_served and config.algorithm.top_k != default:
        return (
            "algorithm.top_k is the number of tokens that a server lists, and a teacher in this "
            "process gives its whole distribution to byte_reverse_kl: leave top_k out"
        )
    if is_reread and config.curriculum.teacher_share:
        return (
            "curriculum.teacher_share has the teacher write turns in the student's tokens, which "
            "teacher.tokens: reread does without: leave teacher_share out"
        )
    if teacher.is_served and not is_reread and config.algorithm.needs_logits:
        name = "kl_baseline exact" if config.algorithm.is_sampled_loss else loss
        return (
            f"algorithm: {name} needs the teacher's whole distribution, which no server gives: "
            "take importance_sampling or top_k_reverse_kl, or a teacher in this process "
            "(teacher.provider hf)"
        )
    return None
