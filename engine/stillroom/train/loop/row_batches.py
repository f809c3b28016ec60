"""Holds out rows for validation, orders the others for an epoch, and cuts them into batches."""

import random
from collections.abc import Sequence
from typing import TypeVar

from stillroom.data.formats import DpoRow, SftRow
from stillroom.files import content_hash

_Row = TypeVar("_Row", SftRow, DpoRow)


def hold_out(rows: Sequence[_Row], share: float, *, seed: int) -> tuple[list[_Row], list[_Row]]:
    """Returns the rows to train on, and a random `share` (about) of all rows for validation.

    Rows that answer the same prompt stay on the same side; at least one prompt is trained on.
    """
    held_out = _drawn([_prompt_of(row) for row in rows], share, seed=seed)
    train = [row for index, row in enumerate(rows) if index not in held_out]
    return train, [row for index, row in enumerate(rows) if index in held_out]


def _drawn(prompts: Sequence[str], share: float, *, seed: int) -> set[int]:
    """Returns the indices of about a `share` of the rows; rows of one prompt are drawn together."""
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


def _prompt_of(row: SftRow | DpoRow) -> str:
    """Returns a hash of the prompt: of the messages before the first answer."""
    if isinstance(row, DpoRow):
        return content_hash(row.prompt)
    first_answer = next(
        i for i, message in enumerate(row.messages) if message["role"] == "assistant"
    )
    return content_hash(row.messages[:first_answer])


def epoch_order(num_rows: int, epoch: int, seed: int) -> Sequence[int]:
    """Returns the row indices in the order of an epoch; the same seed gives the same order."""
    order = list(range(num_rows))
    random.Random(seed * 1_000_003 + epoch).shuffle(order)
    return order


def batches_of(order: Sequence[int], size: int) -> list[Sequence[int]]:
    """Returns the row indices in batches of `size`; the last batch may be smaller."""
    return [order[start : start + size] for start in range(0, len(order), size)]
