"""The `teacher` section of config.yml: who scores the student's tokens, and where it runs."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from stillroom.models.precision import Precision


class TeacherSection(BaseModel):
    """Who scores the student's tokens (distill)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    """Hub id, folder, run id, or demo/teacher; with a server, the model's name there."""
    provider: Literal["hf", "vllm", "sglang"] = "hf"
    """hf: in the training process. vllm, sglang: a server that scores by prompt logprobs."""
    base_url: str | None = None
    """Of the server; default: http://127.0.0.1:8000/v1 (vllm), http://127.0.0.1:30000/v1."""
    api_key_env: str | None = None
    """Name of the environment variable with the server's key; default: no key is sent."""
    tokenizer: str | None = None
    """Folder or hub id with the served model's tokenizer; default: the server is asked."""
    concurrency: Annotated[int, Field(ge=1, le=1024)] = 32
    """Rollouts that a server scores at once."""
    timeout: Annotated[float, Field(gt=0)] = 300.0
    """Seconds that a server may take for one rollout."""
    precision: Precision = "auto"

    @property
    def is_served(self) -> bool:
        """Whether a server scores."""
        return self.provider != "hf"

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> "TeacherSection":
        of_servers = {"base_url", "api_key_env", "tokenizer", "concurrency", "timeout"}
        given = sorted(of_servers & self.model_fields_set)
        if not self.is_served and given:
            raise ValueError(
                f"{given[0]} is of a served teacher: leave it out, or set provider to vllm "
                "or sglang"
            )
        if self.is_served and "precision" in self.model_fields_set:
            raise ValueError(
                "precision is of a teacher in this process; a server has its own: leave it out"
            )
        return self
