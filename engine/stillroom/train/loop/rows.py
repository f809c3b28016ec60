"""The rows of a training: encoded and checked, held out for validation, ordered and batched."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from stillroom.data.formats import DpoRow, SftRow
from stillroom.errors import DataError, ModelError
from stillroom.files import content_hash
from stillroom.models.batches import TokenSequence
from stillroom.types import RowReason

_Row = TypeVar("_Row", SftRow, DpoRow)


def encode_rows(
    rows: Sequence[_Row], encode: Callable[[_Row], list[TokenSequence]], max_length: int
) -> tuple[list[list[TokenSequence]], Counter[str]]:
    """Returns the sequences of each usable row, and the number of skipped rows by reason."""
    kept, skipped, first_problem = list[list[TokenSequence]](), Counter[str](), ""
    for row in rows:
        try:
            sequences = encode(row)
        except ModelError as error:
            skipped[RowReason.REFUSED] += 1
            first_problem = first_problem or f"; {error.problem}"
            continue
        reasons = [reason for one in sequences if (reason := _skip_reason(one, max_length))]
        if reasons:
            skipped[reasons[0]] += 1
        else:
            kept.append(sequences)
    if not kept:
        raise _all_skipped_error(skipped, max_length, first_problem)
    return kept, skipped


def _all_skipped_error(skipped: Counter[str], max_length: int, problem: str) -> DataError:
    """Returns the error for rows that were all skipped.

    problem: the chat template's first error, or "".
    """
    if not skipped:
        return DataError("there is no row to train on", "check the rows with inspect_examples")
    counts = ", ".join(
        f"{count} × {reason}" + (f" {max_length}" if reason == RowReason.TOO_LONG else "")
        for reason, count in skipped.items()
    )
    advice = "raise model.max_length, or " if RowReason.TOO_LONG in skipped else ""
    return DataError(
        f"all rows were skipped: {counts}{problem}",
        f"{advice}inspect the rows with inspect_examples",
    )


def _skip_reason(sequence: TokenSequence, max_length: int) -> str | None:
    """Returns why a sequence cannot be trained on; None if it can."""
    if len(sequence.ids) > max_length:
        return RowReason.TOO_LONG
    return RowReason.NOTHING_TRAINED if sequence.num_trained == 0 else None


def hold_out(rows: Sequence[_Row], share: float, *, seed: int) -> tuple[list[_Row], list[_Row]]:
    """Splits the rows into training rows and about a `share` of validation rows, at random.

    Rows with the same prompt stay together; at least one prompt is trained on.
    """
    held_out = _draw_rows([_prompt_hash(row) for row in rows], share, seed=seed)
    train = [row for index, row in enumerate(rows) if index not in held_out]
    return train, [row for index, row in enumerate(rows) if index in held_out]


def _draw_rows(prompts: Sequence[str], share: float, *, seed: int) -> set[int]:
    """Returns the indices of about a `share` of the rows; rows of one prompt stay together."""
    rows_of_prompt: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        rows_of_prompt.setdefault(prompt, []).append(index)
    order = list(rows_of_prompt)
    random.Random(seed).shuffle(order)
    drawn: set[int] = set()
    for prompt in order[1:]:
        if len(drawn) >= round(len(prompts) * share):
            break
        drawn.update(rows_of_prompt[prompt])
    return drawn


def _prompt_hash(row: SftRow | DpoRow) -> str:
    """Returns a hash of the prompt: the messages before the first answer."""
    if isinstance(row, DpoRow):
        return content_hash(row.prompt)
    first_answer = next(
        i for i, message in enumerate(row.messages) if message["role"] == "assistant"
    )
    return content_hash(row.messages[:first_answer])


def epoch_order(num_rows: int, epoch: int, seed: int) -> Sequence[int]:
    """Returns the row indices in the order of an epoch, determined by the seed."""
    order = list(range(num_rows))
    random.Random(seed * 1_000_003 + epoch).shuffle(order)
    return order


def batches_of(order: Sequence[int], size: int) -> list[Sequence[int]]:
    """Returns the row indices in batches of `size`; the last batch may be smaller."""
    return [order[start : start + size] for start in range(0, len(order), size)]
