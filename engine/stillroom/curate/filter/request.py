"""The request and result of filter_dataset, and the row format of its side file."""

import re
from typing import Annotated, Any, Literal, cast

import msgspec
from pydantic import BeforeValidator, Field, field_validator, model_validator

from stillroom.curate.filter.contamination import ContaminationLevel
from stillroom.data.distribution import Quantiles
from stillroom.outputs import ReplacingRequest
from stillroom.types import OthersText, OwnText

ANY_TOOL = "any"


def _parse_dedupe(value: Any) -> Any:
    """Converts true and false, the values of `dedupe` in older versions."""
    kinds = {True: "exact", "true": "exact", False: None, "false": None}
    return kinds.get(value, value) if isinstance(value, bool | str) else value


def _parse_input(value: Any) -> Any:
    """Converts a list of one name, as the command line gives it, to the name."""
    names = cast("list[Any] | tuple[Any, ...]", value) if isinstance(value, list | tuple) else ()
    return names[0] if len(names) == 1 else value


class FilterDataset(ReplacingRequest):
    """The request for the rows that pass every filter that it sets."""

    input: Annotated[str | tuple[str, ...], BeforeValidator(_parse_input)]
    output: str
    min_reward: float | None = None
    success: Annotated[bool | None, Field(description="true: only successes")] = None
    min_success_rate: Annotated[float | None, Field(gt=0, le=1, description="Of its task")] = None
    min_turns: Annotated[int | None, Field(ge=0, description="Assistant turns")] = None
    max_turns: Annotated[int | None, Field(ge=1)] = None
    require_final_answer: Annotated[bool, Field(description="Ends with text")] = False
    require_tool_use: Annotated[str | None, Field(description="any, or a tool's name")] = None
    only_tools: Annotated[tuple[str, ...], Field(description="No others")] = ()
    answered_by: Annotated[tuple[str, ...], Field(description="Models: gpt*")] = ()
    max_tool_errors: Annotated[int | None, Field(ge=0)] = None
    max_tokens: Annotated[int | None, Field(ge=1, description="In model's tokens")] = None
    model: Annotated[str | None, Field(description="Student")] = None
    chat_template: str | None = None
    contains: str | None = None
    not_contains: str | None = None
    match: Annotated[Literal["answer", "conversation"], Field(description="For both regexes")] = (
        "answer"
    )
    language: Annotated[str | None, Field(description="Answer's, e.g. en")] = None
    drop_secrets: bool = False
    drop_pii: bool = False
    dedupe: Annotated[
        Literal["exact", "near"] | None,
        BeforeValidator(_parse_dedupe),
    ] = None
    decontaminate: Annotated[tuple[str, ...], Field(description="Prompts to keep out")] = ()
    decontaminate_level: ContaminationLevel = "near"
    verdicts: Annotated[str | None, Field(description="Reviewed JSONL")] = None
    verdicts_for_copies: bool = False
    reviewed_only: bool = False
    max_per_category: Annotated[int | None, Field(ge=1, description="Random sample")] = None
    category_field: Annotated[str, Field(description="Metadata field")] = "task_type"
    n: Annotated[int | None, Field(ge=1, description="Random passing rows")] = None
    seed: int = 0
    ray_address: str | None = None

    @field_validator("contains", "not_contains")
    @classmethod
    def _check_regex(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a valid regular expression: {error}") from error
        return pattern

    @model_validator(mode="after")
    def _validate_combinations(self) -> "FilterDataset":
        if self.max_tokens is not None and self.model is None:
            raise ValueError("max_tokens needs model: the student whose tokens are counted")
        for option in ("reviewed_only", "verdicts_for_copies"):
            if getattr(self, option) and self.verdicts is None:
                raise ValueError(f"{option} needs verdicts: the file with the reviewed rows")
        return self

    @property
    def inputs(self) -> tuple[str, ...]:
        """The inputs, whose rows are read in this order."""
        return (self.input,) if isinstance(self.input, str) else self.input

    @property
    def compares_rows(self) -> bool:
        """Whether some filters compare rows, so that all rows are read before any is written."""
        return bool(self.dedupe or self.max_per_category or self.n)

    @property
    def is_heavy(self) -> bool:
        """Whether filtering loads libraries that the server must not load, or is slow per row."""
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
    """The distributions of rewards, turns, characters and tokens over a set of rows."""

    reward: Quantiles | None
    """The rewards of the `rows_with_reward` rows that have one; other rows are not counted here."""
    rows_with_reward: int
    turns: Quantiles | None
    characters: Quantiles | None
    """The number of characters in a row's texts and tool calls."""
    tokens: Quantiles | None
    """The number of tokens of a rendered row; None unless the request names a `model`."""


class SourceFilterCount(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of kept and of dropped rows of one source."""

    kept: int
    dropped: int


class FilterResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of filtering. Always read = kept + the sum of dropped."""

    output: str
    read: int
    kept: int
    dropped: dict[OwnText, int]
    """The number of dropped rows by their first reason, so that the numbers add up."""
    failed_filters: dict[OwnText, int]
    """The number of dropped rows by reason; a row counts once for each of its reasons."""
    dropped_file: str
    """The dropped rows, each with all of its reasons."""
    before: Distributions
    after: Distributions
    categories_before: dict[str, int]
    categories_after: dict[str, int]
    success_derived: int
    """The number of rows that do not record their success.

    They count as a success if their reward is at least 0.5 or, without a reward, if they end with
    a complete answer.
    """
    sources: dict[str, SourceFilterCount] = {}
    """The counts by file, or for imported rows by their original file; empty for a single file.

    The files after the 20 largest are summed in one entry.
    """
    problems: list[OthersText]
    """The first lines (at most 5) that are not rows, as `file:line`, and other findings."""
    contamination: dict[OwnText, int] = {}
    """The number of rows that contain an evaluation prompt, by level: exact, contained or near."""
    warnings: list[OwnText] = []
    """Filters that dropped over a fifth of all rows or over half of a category, kept email
    addresses in reserved domains, and counts that other systems define differently."""


class DroppedRow(msgspec.Struct, frozen=True, gc=False):
    """A line of the side file `OUTPUT.dropped`: the location of a dropped row, and the reasons."""

    file: str
    line: int
    id: str | None
    reasons: list[str]
    like: str | None = None
    """The `file:line` of the kept row or evaluation prompt that the row repeats, if any."""
    row: str | None = None
    """The name of the row; None in files that older versions wrote."""
