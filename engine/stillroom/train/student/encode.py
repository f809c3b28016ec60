"""Encodes rows as token sequences; rows that cannot be trained on are counted by reason."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from stillroom.data.chat.render import ChatRenderer
from stillroom.data.formats import DpoRow, SftRow
from stillroom.errors import DataError, ModelError
from stillroom.models.batches import TokenSequence

TOO_LONG = "longer than max_length"
NOTHING_TRAINED = "no assistant token to train"


@dataclass(frozen=True, slots=True)
class TokenPair:
    """A preference pair as tokens; only the assistant turns of the answers are trained on."""

    chosen: TokenSequence
    rejected: TokenSequence


@dataclass(slots=True)
class EncodedSft:
    """The rows that can be trained on, as tokens."""

    sequences: list[TokenSequence] = field(default_factory=list[TokenSequence])
    """One sequence for each row, or several if the template renders a turn differently once others
    follow it."""
    num_rows: int = 0
    skipped: Counter[str] = field(default_factory=Counter[str])


@dataclass(slots=True)
class EncodedPairs:
    """The pairs that can be trained on, as tokens."""

    pairs: list[TokenPair] = field(default_factory=list[TokenPair])
    skipped: Counter[str] = field(default_factory=Counter[str])


def encode_sft(rows: Sequence[SftRow], renderer: ChatRenderer, *, max_length: int) -> EncodedSft:
    """Returns the rows as token sequences, without those that cannot be trained on.

    Raises DataError if no row is left.
    """
    encoded = EncodedSft()
    for row in rows:
        try:
            rendered = renderer.sequences(row.messages, row.tools)
        except ModelError as error:
            encoded.skipped[_unrenderable(error)] += 1
            continue
        sequences = [TokenSequence(one.ids, one.trained) for one in rendered]
        reasons = [reason for one in sequences if (reason := _unusable(one, max_length))]
        if reasons:
            encoded.skipped[reasons[0]] += 1
        else:
            encoded.sequences += sequences
            encoded.num_rows += 1
    _need_some(encoded.num_rows, encoded.skipped, max_length)
    return encoded


def encode_pairs(
    rows: Sequence[DpoRow], renderer: ChatRenderer, *, max_length: int
) -> EncodedPairs:
    """Returns the preference rows as token pairs, without those that cannot be trained on.

    Raises DataError if no row is left.
    """
    encoded = EncodedPairs()
    for row in rows:
        try:
            sides = _sides(row, renderer)
        except ModelError as error:
            encoded.skipped[_unrenderable(error)] += 1
            continue
        reasons = [reason for side in sides if (reason := _unusable(side, max_length))]
        if reasons:
            encoded.skipped[reasons[0]] += 1
        else:
            encoded.pairs.append(TokenPair(*sides))
    _need_some(len(encoded.pairs), encoded.skipped, max_length)
    return encoded


def _sides(row: DpoRow, renderer: ChatRenderer) -> list[TokenSequence]:
    """Returns the chosen and the rejected conversation; turns of the prompt are not trained on."""
    num_given_turns = sum(message["role"] == "assistant" for message in row.prompt)
    rendered = [
        renderer.conversation([*row.prompt, *answer], row.tools, num_given_turns=num_given_turns)
        for answer in (row.chosen, row.rejected)
    ]
    return [TokenSequence(side.ids, side.trained) for side in rendered]


def _unrenderable(error: ModelError) -> str:
    return f"refused by the chat template: {error.problem}"


def _unusable(sequence: TokenSequence, max_length: int) -> str | None:
    if len(sequence.ids) > max_length:
        return TOO_LONG
    return NOTHING_TRAINED if sequence.num_trained == 0 else None


def _need_some(num_left: int, skipped: Counter[str], max_length: int) -> None:
    if num_left == 0:
        why = ", ".join(f"{count} {reason}" for reason, count in skipped.items()) or "no rows"
        raise DataError(
            f"no row is left to train on: {why} (max_length {max_length})",
            "raise model.max_length, or look at the rows with inspect_examples",
        )
