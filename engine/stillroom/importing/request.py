"""The request and the result of import_rollouts."""

from typing import Annotated, Any

import msgspec
from pydantic import BeforeValidator, Field, field_validator

from stillroom.data.distribution import Quantiles
from stillroom.importing.tally import FormatCount
from stillroom.outputs import ReplacingRequest
from stillroom.types import OthersText, OwnText
from stillroom.validation import did_you_mean

AUTO = "auto"


def _as_assignments(value: Any) -> Any:
    """Converts an object `{role: column}` to `role=column` strings, as on the command line."""
    if isinstance(value, dict):
        return tuple(f"{role}={column}" for role, column in value.items())
    return value


class ImportRollouts(ReplacingRequest):
    """The request to import rollouts from logs of other systems into a new file."""

    input: Annotated[
        str | tuple[str, ...],
        Field(description="Files, folders, globs"),
    ]
    output: Annotated[str, Field(description="Rollouts (.jsonl)")]
    format: Annotated[str, Field(description="If auto is wrong")] = AUTO
    columns: Annotated[
        tuple[str, ...],
        BeforeValidator(_as_assignments),
        Field(description="For tables: user=q, assistant=a+b"),
    ] = ()
    split_heldout: Annotated[
        float | None,
        Field(gt=0, lt=1, description="Share for .heldout.jsonl, by family"),
    ] = None
    prompts: Annotated[bool, Field(description="Also write .prompts.jsonl")] = False
    reward_from: Annotated[
        tuple[str, ...],
        Field(
            description="Scores averaged as the reward, all required; a|b: lowest; stars>=4: 1 or 0"
        ),
    ] = ()
    feedback_by: Annotated[
        str | None,
        Field(description="Also look up feedback ids in this field"),
    ] = None
    infer_tools: Annotated[bool, Field(description="From calls, if none are logged")] = False
    keep_secrets: Annotated[bool, Field(description="Else placeholders replace them")] = False
    keep_personal: bool = False

    @field_validator("format")
    @classmethod
    def _check_format(cls, name: str) -> str:
        if name == AUTO:
            return name
        # Imported here, so that the server does not load the readers.
        from stillroom.importing.formats.table import FORMATS

        names = [AUTO, *(trace_format.name for trace_format in FORMATS)]
        if name not in names:
            raise ValueError(
                f"{name!r} is not one of {', '.join(names)}{did_you_mean(name, names)}"
            )
        return name

    @field_validator("columns")
    @classmethod
    def _check_columns(cls, columns: tuple[str, ...]) -> tuple[str, ...]:
        for column in columns:
            role, _, name = column.partition("=")
            if not role or not name:
                raise ValueError(f"{column!r} is not an assignment such as user=question")
        return columns

    @property
    def inputs(self) -> tuple[str, ...]:
        """The files, folders and globs."""
        return (self.input,) if isinstance(self.input, str) else self.input

    @property
    def chosen_columns(self) -> dict[str, str]:
        """The column names by role."""
        split = (column.partition("=") for column in self.columns)
        return {role: name.strip() for role, _, name in split}


class HeldOut(msgspec.Struct, frozen=True, kw_only=True):
    """The part held out for evaluation."""

    output: str
    rollouts: int
    families: int
    """The number of held-out families; a family is never split."""
    by: OwnText
    """How families were chosen: `time` (the newest) or `hash`."""
    prompts: str | None = None


class ImportResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an import: read = kept + merged + refused, in total and per format."""

    output: str
    read: int
    """The number of source rows."""
    kept: int
    """The number of rollouts written, including those held out."""
    merged: int
    """The rows merged into another row's rollout: earlier calls, copies and feedback."""
    refused: int
    formats: dict[str, FormatCount]
    refused_by_reason: dict[OwnText, int]
    refused_file: str
    problems: list[OthersText]
    """The first 5 refused rows, each with its location and the problem."""
    losses: dict[OwnText, int]
    """The number of rollouts that lack something that their source had, by what they lack."""
    removed: dict[OwnText, int]
    """The number of secrets and personal data replaced by placeholders, by kind."""
    models: dict[str, int]
    """The number of rollouts by the model that answered."""
    calls_per_rollout: Quantiles | None
    branches: int
    """The number of rollouts that branch from another one."""
    scores: dict[str, int]
    """The number of rollouts with a score, by the score's name."""
    rewarded: int
    """The number of rollouts with a reward."""
    prompts: str | None
    heldout: HeldOut | None
    unread_files: list[str]
    """The first 20 files of which nothing was read."""
    notes: list[OwnText]
    """Notes on the sources and the rollouts, to read before they are used."""
