"""The `teacher` section of config.yml: who scores the student's tokens, and where it runs."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from stillroom.models.precision import Precision, Quantization


class TeacherSection(BaseModel):
    """Who scores the student's tokens (distill)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str | tuple[str, ...]
    """Hub id, folder, run id, or demo/teacher; with a server, the model's name there.

    A list has one for each of `data.train_file`'s files, whose prompts it alone scores.
    """
    provider: Literal["hf", "vllm", "sglang"] = "hf"
    """hf: in the training process. vllm, sglang: a server that scores by prompt logprobs."""
    base_url: str | tuple[str, ...] | None = None
    """Of the server; default: http://127.0.0.1:8000/v1 (vllm), http://127.0.0.1:30000/v1.

    A list has one for each of `path`.
    """
    api_key_env: str | None = None
    """Name of the environment variable with the server's key; default: no key is sent."""
    tokenizer: str | tuple[str, ...] | None = None
    """Folder or hub id with the served model's tokenizer; default: the server is asked.

    A list has one for each of `path`.
    """
    concurrency: Annotated[int, Field(ge=1, le=1024)] = 32
    """Rollouts that a server scores at once."""
    timeout: Annotated[float, Field(gt=0)] = 300.0
    """Seconds that a server may take for one rollout."""
    precision: Precision = "auto"
    quantization: Quantization = None
    """nf4: its layers in 4 bits."""
    spread: bool = False
    """Its layers over all GPUs, and in main memory what does not fit there."""

    @property
    def name(self) -> str:
        """What it is called; several are joined."""
        return self.path if isinstance(self.path, str) else ", ".join(self.path)

    def for_datasets(self, num: int) -> "list[OneTeacher]":
        """Returns who scores each of so many datasets; one path scores all of them."""
        paths = self.path if isinstance(self.path, tuple) else (self.path,) * num
        return [
            OneTeacher(self, path, _at(self.base_url, i), _at(self.tokenizer, i))
            for i, path in enumerate(paths)
        ]

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
        here = sorted({"precision", "quantization", "spread"} & self.model_fields_set)
        if self.is_served and here:
            raise ValueError(
                f"{here[0]} is of a teacher in this process; a server has its own: leave it out"
            )
        return self

    @model_validator(mode="after")
    def _lists_go_together(self) -> "TeacherSection":
        num = len(self.path) if isinstance(self.path, tuple) else None
        for name, listed in (("base_url", self.base_url), ("tokenizer", self.tokenizer)):
            if isinstance(listed, tuple) and len(listed) != num:
                raise ValueError(
                    f"{name} is a list of {len(listed)}, so path must be a list of as many models"
                )
        return self


@dataclass(frozen=True, slots=True)
class OneTeacher:
    """Who scores one dataset's rollouts."""

    section: TeacherSection
    path: str
    base_url: str | None
    tokenizer: str | None


def _at(given: str | tuple[str, ...] | None, index: int) -> str | None:
    return given[index] if isinstance(given, tuple) else given
