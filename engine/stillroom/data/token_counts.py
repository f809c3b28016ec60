"""Counts the tokens of rows for a student, and the rows that training would leave out."""

from collections import Counter
from pathlib import Path
from typing import Any, cast

import msgspec

from stillroom.data.chat.render import ChatRenderer
from stillroom.data.chat.views import titled_sequences
from stillroom.data.checks import Problem, decode_row, decode_text_row
from stillroom.data.distribution import Bar, Distribution, Quantiles
from stillroom.data.formats import RowFormat, task_from_row
from stillroom.data.layouts.detect import as_rollout
from stillroom.data.row_files import RowReader
from stillroom.data.statistics import RowPosition
from stillroom.data.tool_names import NamedTools
from stillroom.errors import DataError, ModelError
from stillroom.types import RowReason
from stillroom.validation import StrictModel

_MAX_BYTES = 24 << 20
"""Counting stops after this number of bytes, so that it never takes long."""


class CountTokens(StrictModel):
    """The request to count the tokens of rows; `places` has the fields of each RowPosition."""

    model: str
    chat_template: str | None
    format: RowFormat
    places: tuple[tuple[str, int, int], ...]


class TokenCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of tokens of rows, with a student's tokenizer.

    If a row becomes several sequences, `tokens` and `bars` count its longest one, and `trained`
    counts all of them.
    """

    rows: int
    """The number of rows whose tokens were counted, or that the template refused."""
    tokens: Quantiles | None
    trained: Quantiles | None
    """The number of trained tokens per row; None for prompts."""
    bars: list[Bar]
    left_out: dict[str, int]
    """The number of rows that training would leave out, by reason."""


def count_tokens(
    request: CountTokens, tokenizer: Any, *, named_tools: NamedTools | None = None
) -> TokenCounts:
    """Returns how many tokens the rows have with a student's tokenizer and chat template."""
    renderer = ChatRenderer(tokenizer, named_tools=named_tools)
    tokens, trained = Distribution(), Distribution()
    left_out: Counter[str] = Counter()
    rows = num_bytes = 0
    with RowReader() as reader:
        for position in (RowPosition(*values) for values in request.places):
            num_bytes += position.num_bytes
            if rows and num_bytes > _MAX_BYTES:
                break
            rows += 1
            row = _read_row(reader, position, request.format)
            try:
                lengths = _lengths(row, request.format, renderer)
            except (ModelError, DataError):
                left_out[RowReason.REFUSED] += 1
                continue
            tokens.add(max(length for length, _ in lengths))
            if request.format is not RowFormat.PROMPTS:
                trained.add(sum(count for _, count in lengths))
                if not all(count for _, count in lengths):
                    left_out[RowReason.NOTHING_TRAINED] += 1
    return TokenCounts(
        rows=rows,
        tokens=tokens.quantiles(),
        trained=trained.quantiles(),
        bars=tokens.bars(),
        left_out=dict(left_out),
    )


def _read_row(reader: RowReader, position: RowPosition, row_format: RowFormat) -> dict[str, Any]:
    """Returns the row at a position, with rollouts in Stillroom's layout."""
    path = Path(position.path)
    decode = decode_text_row if path.suffix == ".txt" else decode_row
    row = decode(reader.read(path, position.offset, position.num_bytes))
    if isinstance(row, Problem):  # Only rows without problems were sampled.
        raise ModelError(
            f"{path} has changed while it was read",
            "repeat the call once no other program is writing to the file",
        )
    return as_rollout(row) if row_format is RowFormat.ROLLOUTS else row


def _lengths(
    row: dict[str, Any], row_format: RowFormat, renderer: ChatRenderer
) -> list[tuple[int, int]]:
    """Returns the numbers of tokens and of trained tokens of each sequence of a row."""
    if row_format is RowFormat.PROMPTS:
        task = task_from_row(row)
        schemas = cast("list[Any]", task.tool_schemas or [])
        return [(len(renderer.prompt_ids(task.messages, schemas)), 0)]
    return [
        (len(rendered.ids), sum(rendered.trained))
        for _, rendered in titled_sequences(row, renderer)
    ]
