"""Splits a recipe's prompts into those to train on and those to measure with, by form."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stillroom.curate.filter.contamination import ContaminationIndex
from stillroom.data.words import words_of
from stillroom.errors import DataError
from stillroom.recipe.forms import forms_of, held_out_forms
from stillroom.recipe.inputs import RecipePrompt
from stillroom.recipe.selection import find_overlap

_MIN_TRAINED, _MIN_MEASURED = 20, 20
_MAX_TEST, _MAX_VALIDATION = 200, 60
_LEAST_TEST, _LEAST_VALIDATION = 50, 20
"""The fewest prompts to evaluate on, however short the time is, if there are as many: 50 give an
interval of about 15 points to either side."""
_EVALUATIONS_SHARE = 0.3
"""The share of the time for evaluations, if that leaves enough prompts to evaluate on."""
_HELD_OUT_SHARE = 0.1
_FIRST_SHARE, _MIN_FIRST = 0.5, 150
_MIN_TEXTS_PER_FORM = 3
"""The least mean number of texts per form at which texts count as made from templates."""
FORM_FIELD, NEW_FORM, TRAINED_FORM = "form", "not trained", "trained"
"""The metadata field of prompts that says whether the first training run saw their form."""


@dataclass(frozen=True, slots=True)
class PromptSplit:
    """The prompts of a recipe by their use; no text has two uses."""

    first_round: list[RecipePrompt]
    """The prompts of the first training run, none of a held-out form."""
    second_round: list[RecipePrompt]
    """More prompts of the same forms, for the second training run."""
    of_new_forms: list[RecipePrompt]
    """The prompts of the held-out forms, for the second training run."""
    validation: list[RecipePrompt]
    """The prompts that decide which student is kept, among them all of held-out forms."""
    test: list[RecipePrompt]
    """The prompts that the final figures are measured on."""
    more_test: list[RecipePrompt]
    """Further ones, which only a trained student answers, if it turns out to be fast enough."""
    num_forms: int
    """The number of different forms of all prompts; about as many as prompts for free texts."""
    num_texts: int
    evaluation: ContaminationIndex
    """Finds the texts to measure with, none of which may be in a row to train on."""
    num_overlapping: int
    """The number of prompts that are not trained on because they equal or contain such a text."""

    @property
    def are_templated(self) -> bool:
        """Whether most texts are made from templates."""
        return self.num_texts >= _MIN_TEXTS_PER_FORM * self.num_forms

    @property
    def may_evaluate_fewer(self) -> bool:
        """Whether there are more prompts to evaluate on than the fewest that suffice."""
        return len(self.test) > _LEAST_TEST or len(self.validation) > _LEAST_VALIDATION

    def within(self, seconds: float, *, untrained_s: float, trained_s: float) -> "PromptSplit":
        """Returns the split with only as many evaluation prompts as a recipe's time allows.

        untrained_s, trained_s: the seconds per prompt of the untrained and of a trained student.
        """
        # Test prompts are answered before and after training, and some again when reworded;
        # validation prompts are answered after each of two training runs.
        trained = 1.5 * len(self.test) + 2 * len(self.validation)
        all_s = max(1e-9, len(self.test) * untrained_s + trained * trained_s)
        share = _EVALUATIONS_SHARE * seconds / all_s
        num = max(_LEAST_VALIDATION, int(share * len(self.validation)))
        num = min(num, len(self.validation))
        num_test = max(_LEAST_TEST, int(share * len(self.test)))
        return replace(
            self,
            test=self.test[:num_test],
            more_test=self.test[num_test:],
            # At equal distances, so that both trained and new forms are among them.
            validation=[self.validation[n * len(self.validation) // num] for n in range(num)],
        )


def split(
    prompts: Sequence[RecipePrompt], labelled: Sequence[RecipePrompt], *, seed: int
) -> PromptSplit:
    """Splits prompts for training and measuring. Raises DataError if there are too few.

    labelled: the prompts to measure with; if there are none, a part of `prompts` is taken.
    """
    rng = random.Random(seed)
    measured = {_normalised_text(prompt) for prompt in labelled}
    pool = [prompt for prompt in prompts if _normalised_text(prompt) not in measured]
    rng.shuffle(pool)
    eval_prompts, num_set_aside = list(labelled), 0
    if not eval_prompts:
        num_set_aside = min(_MAX_TEST + _MAX_VALIDATION, max(_MIN_MEASURED, len(pool) // 4))
        eval_prompts = list(
            {_normalised_text(prompt): prompt for prompt in pool[:num_set_aside]}.values()
        )
        measured = {_normalised_text(prompt) for prompt in eval_prompts}
        pool = [
            prompt for prompt in pool[num_set_aside:] if _normalised_text(prompt) not in measured
        ]
    rng.shuffle(eval_prompts)
    evaluation = ContaminationIndex.of_texts({one.task_id: one.text for one in eval_prompts})
    pool = [one for one in pool if find_overlap(evaluation, one.row["messages"]) is None]
    if len(pool) < _MIN_TRAINED or len(eval_prompts) < _MIN_MEASURED:
        raise DataError(
            f"too few prompts: {len(pool)} to train on, {len(eval_prompts)} to evaluate on",
            f"give more: at least {_MIN_TRAINED} to train on and {_MIN_MEASURED} to evaluate on; "
            "texts that equal or contain one to evaluate on are not trained on",
        )
    forms = forms_of([prompt.text for prompt in (*pool, *eval_prompts)])
    pool_forms, eval_forms = forms[: len(pool)], forms[len(pool) :]
    held_out = held_out_forms(pool_forms, share=_HELD_OUT_SHARE, rng=rng)
    # Most evaluation prompts must be of trained forms, like the prompts in later use.
    sizes = Counter(form for form in eval_forms if form in held_out)
    while sizes.total() > len(eval_prompts) // 3:
        largest = max(sizes, key=lambda form: (sizes[form], form))
        held_out.discard(largest)
        del sizes[largest]
    new = [one for one, form in zip(eval_prompts, eval_forms, strict=True) if form in held_out]
    seen = [one for one, form in zip(eval_prompts, eval_forms, strict=True) if form not in held_out]
    num_validation = min(_MAX_VALIDATION, len(seen) // 3)
    trainable = [one for one, form in zip(pool, pool_forms, strict=True) if form not in held_out]
    num_first = max(_MIN_FIRST, round(len(trainable) * _FIRST_SHARE))
    others = [one for one, form in zip(pool, pool_forms, strict=True) if form in held_out]
    return PromptSplit(
        first_round=trainable[:num_first],
        second_round=trainable[num_first:],
        of_new_forms=others,
        validation=[
            *(_with_form_field(one, NEW_FORM) for one in new[:_MAX_VALIDATION]),
            *(_with_form_field(one, TRAINED_FORM) for one in seen[:num_validation]),
        ],
        test=seen[num_validation : num_validation + _MAX_TEST],
        more_test=[],
        num_forms=len(set(forms)),
        num_texts=len(forms),
        evaluation=evaluation,
        num_overlapping=len(prompts) - num_set_aside - len(pool),
    )


def _normalised_text(prompt: RecipePrompt) -> str:
    """Returns a prompt's text without case, punctuation and spaces around words."""
    return " ".join(words_of(prompt.text)) or prompt.text


def _with_form_field(prompt: RecipePrompt, form: str) -> RecipePrompt:
    metadata = {**(prompt.row.get("metadata") or {}), FORM_FIELD: form}
    return RecipePrompt({**prompt.row, "metadata": metadata}, prompt.text, prompt.answer)
