"""The model section of config.yml: the student, and how it is held in memory."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from stillroom.models.precision import Precision, Quantization


class ModelSection(BaseModel):
    """The student."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    """Hub id, folder, run id, or demo/student."""
    qlora_rank: Annotated[int, Field(ge=0, le=1024)] = 32
    """Rank of the LoRA adapter; 0 trains all weights."""
    qlora_alpha: Annotated[int, Field(ge=1)] | None = None
    """Default: twice the rank."""
    name: str | None = None
    description: str | None = None
    precision: Precision = "auto"
    quantization: Quantization = None
    """nf4: the base in 4 bits under a LoRA adapter; checkpoints fit the base as it is."""
    gradient_checkpointing: bool = False
    """Layers are computed again for the backward pass: less memory, a third more time."""
    microbatch_tokens: Annotated[int, Field(ge=1)] | None = None
    """A batch runs in passes of at most so many tokens; default: what the memory allows."""
    max_length: Annotated[int, Field(ge=8)] | None = None
    """sft, dpo: longer rows are left out and counted; default: the model's context."""

    @model_validator(mode="after")
    def _quantised_weights_are_frozen(self) -> "ModelSection":
        if self.quantization is not None and self.qlora_rank == 0:
            raise ValueError(
                "quantization needs an adapter, since weights of 4 bits cannot be trained: set "
                "qlora_rank, e.g. 32"
            )
        return self

    def row_length(self, context: int) -> int:
        """Returns how many tokens a row may have, for a model with such a context."""
        return min(self.max_length or context, context)

    @property
    def alpha(self) -> int:
        """The LoRA scale's numerator."""
        return self.qlora_alpha or 2 * self.qlora_rank
