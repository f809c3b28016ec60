"""The result of a verification."""

import msgspec

from stillroom.evaluate.intervals import Estimate


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
