"""Chooses which of a student's own right rollouts are mixed into its training rows."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from stillroom.curate.rows.read import read_curated_rows
from stillroom.data.row_names import row_hash

BEYOND_PROMPT, BEYOND_SHARE = "beyond own_per_prompt", "beyond own_share"


RowPlaces = dict[tuple[Path, int], str]
"""Reasons by the file and the offset of a row."""


def own_left_out(files: Iterable[Path], *, most: int, per_prompt: int) -> RowPlaces:
    """Returns the right rollouts that are one too many, with the reason.

    At most `most` are not among them, and at most `per_prompt` of each prompt. Which ones follows
    from the rows' contents alone: all prompts have the same chance, and the same rows give the same
    choice in any order.
    """
    right = sorted(
        (row_hash(row.line.data), row.path, row.line.offset, row.facts.task_id)
        for file in files
        for row in read_curated_rows(file)
        if row.facts is not None and row.facts.is_success and row.facts.error is None
    )
    num_taken, left_out, of_prompt = 0, RowPlaces(), Counter[str | None]()
    for _, path, offset, task_id in right:
        if of_prompt[task_id] == per_prompt:
            left_out[path, offset] = BEYOND_PROMPT
        elif num_taken >= most:
            left_out[path, offset] = BEYOND_SHARE
        else:
            of_prompt[task_id] += 1
            num_taken += 1
    return left_out
