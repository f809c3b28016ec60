"""The rows of a run: which are held out, in which order they are taken, and as token sequences."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from stillroom.data.chat.render import ChatRenderer
from stillroom.data.formats import DpoRow, SftRow
from stillroom.data.instruction import UNINSTRUCTED, Instruction
from stillroom.errors import DataError, ModelError
from stillroom.files import content_hash
from stillroom.models.batches import TokenSequence

TOO_LONG = "longer than max_length"
NOTHING_TRAINED = "no assistant token to train"

_Row = TypeVar("_Row", SftRow, DpoRow)


@dataclass(frozen=True, slots=True)
class TokenPair:
    """A preference pair as tokens; only the assistant turns of the answers are trained on."""

    chosen: TokenSequence
    rejected: TokenSequence


@dataclass(frozen=True, slots=True)
class EncodedSft:
    """The rows that can be trained on, as tokens."""

    sequences: list[TokenSequence]
    """One sequence for each row, or several if the template renders a turn differently once others
    follow it."""
    num_rows: int
    skipped: Counter[str]


@dataclass(frozen=True, slots=True)
class EncodedPairs:
    """The pairs that can be trained on, as tokens."""

    pairs: list[TokenPair]
    skipped: Counter[str]


def encode_sft(
    rows: Sequence[SftRow],
    renderer: ChatRenderer,
    *,
    max_length: int,
    teacher: Instruction = UNINSTRUCTED,
) -> EncodedSft:
    """Returns the rows as token sequences, without those that cannot be trained on.

    teacher: what the teacher reads before the rows, if it is to read them.
    Raises DataError if no row is left.
    """

    def encode(row: SftRow) -> list[TokenSequence]:
        rendered = renderer.sequences(row.messages, row.tools)
        sequences = [TokenSequence(one.ids, one.trained) for one in rendered]
        messages = teacher.put_before(row.messages)
        if messages == row.messages:
            return sequences
        instructed = renderer.sequences(messages, row.tools)
        own = [TokenSequence(one.ids, one.trained) for one in instructed]
        if [one.trained_ids for one in own] != [one.trained_ids for one in sequences]:
            raise ModelError(
                "the teacher's instruction changes the tokens of the answers",
                "leave teacher.system and teacher.context_file out",
            )
        pairs = zip(sequences, own, strict=True)
        return [replace(sequence, for_teacher=one) for sequence, one in pairs]

    kept, skipped = _encode(rows, encode, max_length)
    return EncodedSft([one for sequences in kept for one in sequences], len(kept), skipped)


def encode_pairs(
    rows: Sequence[DpoRow], renderer: ChatRenderer, *, max_length: int
) -> EncodedPairs:
    """Returns the preference rows as token pairs, without those that cannot be trained on.

    Raises DataError if no row is left.
    """
    kept, skipped = _encode(rows, lambda row: _sides(row, renderer), max_length)
    return EncodedPairs([TokenPair(*sides) for sides in kept], skipped)


def _encode(
    rows: Sequence[_Row], encode: Callable[[_Row], list[TokenSequence]], max_length: int
) -> tuple[list[list[TokenSequence]], Counter[str]]:
    """Returns the sequences of each usable row, and the number of the others by reason."""
    kept, skipped = list[list[TokenSequence]](), Counter[str]()
    for row in rows:
        try:
            sequences = encode(row)
        except ModelError as error:
            skipped[f"refused by the chat template: {error.problem}"] += 1
            continue
        reasons = [reason for one in sequences if (reason := _unusable(one, max_length))]
        if reasons:
            skipped[reasons[0]] += 1
        else:
            kept.append(sequences)
    if not kept:
        why = ", ".join(f"{count} {reason}" for reason, count in skipped.items()) or "no rows"
        raise DataError(
            f"no row is left to train on: {why} (max_length {max_length})",
            "raise model.max_length, or look at the rows with inspect_examples",
        )
    return kept, skipped


def _sides(row: DpoRow, renderer: ChatRenderer) -> list[TokenSequence]:
    """Returns the chosen and the rejected conversation; turns of the prompt are not trained on."""
    num_given_turns = sum(message["role"] == "assistant" for message in row.prompt)
    rendered = [
        renderer.conversation([*row.prompt, *answer], row.tools, num_given_turns=num_given_turns)
        for answer in (row.chosen, row.rejected)
    ]
    return [TokenSequence(side.ids, side.trained) for side in rendered]


def _unusable(sequence: TokenSequence, max_length: int) -> str | None:
    if len(sequence.ids) > max_length:
        return TOO_LONG
    return NOTHING_TRAINED if sequence.num_trained == 0 else None


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
