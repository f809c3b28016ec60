"""Splits a recipe's prompts into those to train on and those to measure with, by form."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stillroom.errors import DataError
from stillroom.recipe.forms import forms_of, held_out_forms
from stillroom.recipe.inputs import RecipePrompt

_MIN_TRAINED, _MIN_MEASURED = 20, 10
_MAX_TEST, _MAX_CHOICE = 200, 60
_HELD_OUT_SHARE = 0.1
_FIRST_SHARE, _MIN_FIRST = 0.5, 150
FORM_FIELD, NEW_FORM, TRAINED_FORM = "form", "not trained", "trained"
"""The metadata field of prompts that says whether the first training saw their form."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The prompts of a recipe by their use; no text is in two parts."""

    first: list[RecipePrompt]
    """Those of the first training, without any of the held-out forms."""
    rest: list[RecipePrompt]
    """Those that are added for the second training."""
    choice: list[RecipePrompt]
    """Those that decide which model is kept, with all prompts of held-out forms."""
    test: list[RecipePrompt]
    """Those that the final figures are of."""
    num_forms: int
    """The number of different forms of all prompts; about as many as prompts for free texts."""
    num_texts: int
    is_labelled: bool
    """Whether measuring prompts have right answers; else the teacher's answers stand in."""


def split(
    examples: Sequence[RecipePrompt], labelled: Sequence[RecipePrompt], *, seed: int
) -> Parts:
    """Splits prompts for training and measuring. Raises DataError if there are too few.

    labelled: the prompts to measure with; if there are none, a part of `examples` is taken.
    """
    rng = random.Random(seed)
    measured = {example.text for example in labelled}
    pool = [example for example in examples if example.text not in measured]
    rng.shuffle(pool)
    judges = list(labelled)
    if not judges:
        num = min(_MAX_TEST + _MAX_CHOICE, max(_MIN_MEASURED, len(pool) // 4))
        judges, pool = pool[:num], pool[num:]
    rng.shuffle(judges)
    if len(pool) < _MIN_TRAINED or len(judges) < _MIN_MEASURED:
        raise DataError(
            f"there are {len(pool)} prompts to train on and {len(judges)} to measure with",
            f"give at least {_MIN_TRAINED} of the first and {_MIN_MEASURED} of the second; prompts "
            "that are in both count only as those to measure with",
        )
    forms = forms_of([example.text for example in (*pool, *judges)])
    of_pool, of_judges = forms[: len(pool)], forms[len(pool) :]
    held_out = held_out_forms(of_pool, share=_HELD_OUT_SHARE, rng=rng)
    new = [one for one, form in zip(judges, of_judges, strict=True) if form in held_out]
    seen = [one for one, form in zip(judges, of_judges, strict=True) if form not in held_out]
    num_choice = min(_MAX_CHOICE, len(seen) // 3)
    trainable = [one for one, form in zip(pool, of_pool, strict=True) if form not in held_out]
    num_first = max(_MIN_FIRST, round(len(trainable) * _FIRST_SHARE))
    first = trainable[:num_first]
    others = [one for one, form in zip(pool, of_pool, strict=True) if form in held_out]
    return Parts(
        first=first,
        rest=[*trainable[num_first:], *others],
        choice=[
            *(_marked(one, NEW_FORM) for one in new[:_MAX_CHOICE]),
            *(_marked(one, TRAINED_FORM) for one in seen[:num_choice]),
        ],
        test=seen[num_choice : num_choice + _MAX_TEST],
        num_forms=len(set(forms)),
        num_texts=len(forms),
        is_labelled=bool(labelled),
    )


def _marked(example: RecipePrompt, form: str) -> RecipePrompt:
    metadata = {**(example.row.get("metadata") or {}), FORM_FIELD: form}
    return replace(example, row={**example.row, "metadata": metadata})
