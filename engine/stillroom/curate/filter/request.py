"""The options of filter_dataset, its result, and the row format of its side file."""

import re
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from stillroom.data.distribution import Quantiles

ANY_TOOL = "any"


def _kind_of_duplicates(value: Any) -> Any:
    """Returns the kind that true or false stands for: the option once had these values only."""
    kinds = {True: "exact", "true": "exact", False: None, "false": None}
    return kinds.get(value, value) if isinstance(value, bool | str) else value


class FilterDataset(BaseModel):
    """Ask for the rows that pass every given filter; a filter left out lets all pass."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    input: Annotated[str, Field(description="Rollouts (also of rnow or NeMo Gym) or SFT rows")]
    output: Annotated[str, Field(description="Rows that pass; replaced when complete")]
    min_reward: float | None = None
    success: Annotated[bool | None, Field(description="Keep only these")] = None
    min_success_rate: Annotated[float | None, Field(gt=0, le=1, description="Of its task")] = None
    min_turns: Annotated[int | None, Field(ge=0, description="Assistant turns")] = None
    max_turns: Annotated[int | None, Field(ge=1)] = None
    require_final_answer: Annotated[
        bool, Field(description="Must end with text, not with a tool call")
    ] = False
    require_tool_use: Annotated[str | None, Field(description="any, or a tool's name")] = None
    max_tool_errors: Annotated[int | None, Field(ge=0)] = None
    max_tokens: Annotated[int | None, Field(ge=1, description="By model's template")] = None
    model: Annotated[str | None, Field(description="Student")] = None
    contains: Annotated[str | None, Field(description="Regex")] = None
    not_contains: str | None = None
    match: Annotated[
        Literal["answer", "conversation"], Field(description="Where the regexes look")
    ] = "answer"
    language: Annotated[str | None, Field(description="Of the answer, e.g. en")] = None
    drop_secrets: bool = False
    drop_pii: bool = False
    dedupe: Annotated[
        Literal["exact", "near"] | None,
        BeforeValidator(_kind_of_duplicates),
    ] = None
    decontaminate: Annotated[
        tuple[str, ...], Field(description="Evaluation files: drop rows with their prompts")
    ] = ()
    verdicts: Annotated[str | None, Field(description="Reviewed JSONL: id, verdict")] = None
    reviewed_only: bool = False
    max_per_category: Annotated[int | None, Field(ge=1, description="Chosen at random")] = None
    category_field: Annotated[str, Field(description="Of metadata")] = "task_type"
    seed: int = 0
    ray_address: str | None = None

    @field_validator("contains", "not_contains")
    @classmethod
    def _is_regex(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
        return pattern

    @model_validator(mode="after")
    def _belongs_together(self) -> "FilterDataset":
        if self.max_tokens is not None and self.model is None:
            raise ValueError("max_tokens needs model: the student whose tokens are counted")
        if self.reviewed_only and self.verdicts is None:
            raise ValueError("reviewed_only needs verdicts: the file with the reviewed rows")
        return self

    @property
    def is_heavy(self) -> bool:
        """Whether it loads libraries that the server must not, or takes long for each row."""
        return bool(
            self.model
            or self.ray_address
            or self.language
            or self.contains
            or self.not_contains
            or self.dedupe == "near"
            or self.decontaminate
            or self.drop_secrets
            or self.drop_pii
        )


class Distributions(msgspec.Struct, frozen=True, kw_only=True):
    """The distributions of rewards, turns, characters and tokens over some rows."""

    reward: Quantiles | None
    turns: Quantiles | None
    characters: Quantiles | None
    """Of a row's JSON."""
    tokens: Quantiles | None
    """With `model` only."""


class FilterResult(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of a filter. read = kept + the sum of dropped, always."""

    output: str
    read: int
    kept: int
    dropped: dict[str, int]
    """By the first reason; the side file has all reasons of each row."""
    dropped_file: str
    before: Distributions
    after: Distributions
    categories_before: dict[str, int]
    categories_after: dict[str, int]
    success_derived: int
    """Rows without `success`: their reward (from 0.5), else a complete answer, decided."""
    problems: list[str]
    """The first lines that cannot be read as rows, with file:line, and what else is odd."""


class DroppedRow(msgspec.Struct, frozen=True, gc=False):
    """A line of the side file `OUTPUT.dropped`: a row that was dropped, and why."""

    file: str
    line: int
    id: str | None
    reasons: list[str]
    like: str | None = None
    """`file:line` of what it repeats: the row that was kept, or the evaluation prompt."""
