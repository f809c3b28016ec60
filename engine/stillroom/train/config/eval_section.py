"""What config.yml's `evals` may say: how the student does on other prompts while it is trained."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator


class EvalSection(BaseModel):
    """One evaluation, made every so many steps and after the last."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(pattern=r"^[\w.-]+$")]
    """Of its metrics: eval/NAME/pass1 and so on."""
    step: Annotated[int, Field(ge=1)]
    """Every so many steps."""
    file: str | None = None
    """Prompts, relative to the folder of config.yml; default: NAME.jsonl."""
    n: Annotated[int, Field(ge=1)] | None = None
    """Only the first n prompts."""
    pass1: bool = True
    pass1_temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    pass4: bool = False
    """Of how many prompts at least one of four samples is right."""
    pass4_temperature: Annotated[float, Field(gt=0, le=2)] = 1.0
    pass8: bool = False
    pass8_temperature: Annotated[float, Field(gt=0, le=2)] = 1.0

    @model_validator(mode="after")
    def _asks_something(self) -> "EvalSection":
        if not self.counts:
            raise ValueError("an evaluation needs pass1, pass4 or pass8")
        return self

    @property
    def prompts_file(self) -> str:
        """The file that its prompts are in."""
        return self.file or f"{self.name}.jsonl"

    @property
    def counts(self) -> dict[int, float]:
        """The temperature at which each k of pass@k is sampled."""
        asked = {
            1: (self.pass1, self.pass1_temperature),
            4: (self.pass4, self.pass4_temperature),
            8: (self.pass8, self.pass8_temperature),
        }
        return {k: temperature for k, (is_asked, temperature) in asked.items() if is_asked}

    def is_due(self, step: int, total: int) -> bool:
        """Returns whether it is made after a step."""
        return step % self.step == 0 or step == total
