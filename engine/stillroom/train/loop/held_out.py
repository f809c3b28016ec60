"""Which rows are kept from training to measure the loss on: drawn at random, by their prompts."""

import random
from collections.abc import Sequence
from typing import TypeVar

from stillroom.data.formats import DpoRow, SftRow
from stillroom.files import content_hash

Row = TypeVar("Row", SftRow, DpoRow)


def hold_out(rows: Sequence[Row], share: float, *, seed: int) -> tuple[list[Row], list[Row]]:
    """Returns the rows to train on and about `share` of them, drawn at random, for validation.

    Rows that answer the same prompt stay on the same side; at least one prompt is trained on.
    """
    apart = _drawn([_prompt_of(row) for row in rows], share, seed=seed)
    train = [row for index, row in enumerate(rows) if index not in apart]
    return train, [row for index, row in enumerate(rows) if index in apart]


def _drawn(prompts: Sequence[str], share: float, *, seed: int) -> set[int]:
    """Returns the places of about `share` of the prompts, all places of each that is drawn."""
    places: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        places.setdefault(prompt, []).append(index)
    order = list(places)
    random.Random(seed).shuffle(order)
    apart: set[int] = set()
    for prompt in order[1:]:
        if len(apart) >= round(len(prompts) * share):
            break
        apart.update(places[prompt])
    return apart


def _prompt_of(row: SftRow | DpoRow) -> str:
    """Returns a hash of what is answered: of messages, those before the first answer."""
    if isinstance(row, DpoRow):
        return content_hash(row.prompt)
    first = next(i for i, message in enumerate(row.messages) if message["role"] == "assistant")
    return content_hash(row.messages[:first])
