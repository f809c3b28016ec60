"""The facts known about a model once its files are written."""

from dataclasses import dataclass

import msgspec

from stillroom.evaluate.intervals import Estimate


class ReadBack(msgspec.Struct, frozen=True, kw_only=True):
    """The agreement of the reloaded files with the checkpoint on a few conversations."""

    positions: int
    same_token: float
    """Share of the positions at which the most probable token is the same."""
    kl: float
    """Mean KL(checkpoint || export) in nats."""


@dataclass(frozen=True, slots=True)
class Written:
    """The facts about a model that are learnt while it is written."""

    precision: str
    """fp32, bf16 or fp16; auto means the base's own format."""
    tool_parser: str | None
    """vLLM's name for the tool-call format, if it is known."""
    max_context: int | None = None
    parameters: int | None = None
    read_back: ReadBack | None = None
    """None for an adapter, whose files are copies."""
    is_multimodal: bool = False
    """Whether the files (or those of an adapter's base) are those of a multimodal model."""
    other_parts: str | None = None
    """What became of the parts of a multimodal model that were not trained."""


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """What the written files did on prompts that the checkpoint had answered in an evaluation."""

    served_by: str
    """transformers, vLLM or llama.cpp."""
    tasks: int
    accuracy: float
    checkpoint_accuracy: float
    difference: Estimate
    """The files' accuracy minus the checkpoint's, paired by task."""
    evaluation: str
    """The run that evaluated the checkpoint."""

    @property
    def sentence(self) -> str:
        """The result in one sentence."""
        return (
            f"Before this export counted as done, {self.served_by} loaded the written files: they "
            f"solved {self.accuracy:.1%} of {self.tasks} tasks of run {self.evaluation}, the "
            f"checkpoint {self.checkpoint_accuracy:.1%}."
        )
