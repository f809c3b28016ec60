import pytest

from stillroom.api.recipe.rewording import with_text
from stillroom.errors import DataError
from stillroom.recipe.inputs import RecipePrompt
from stillroom.recipe.splits import FORM_FIELD, NEW_FORM, PromptSplit, split

TEMPLATES = (
    "Where is the parcel with order {}?",
    "I want my money back for invoice {}.",
    "The lamp number {} does not switch on.",
    "How do I change the password of account {}?",
    "Please send a catalogue to customer {}.",
    "Which colours does chair {} come in?",
    "Your driver left box {} in the rain.",
    "Can somebody call me about contract {}?",
)


def prompts(start: int, num: int) -> list[RecipePrompt]:
    texts = [TEMPLATES[n % len(TEMPLATES)].format(n) for n in range(start, start + num)]
    return [
        RecipePrompt({"messages": [{"role": "user", "content": text}], "metadata": {}}, text, "x")
        for text in texts
    ]


def templates_of(some: list[RecipePrompt]) -> set[int]:
    starts = [template.split("{}")[0] for template in TEMPLATES]
    return {next(n for n, start in enumerate(starts) if p.text.startswith(start)) for p in some}


def texts_of(parts: PromptSplit) -> list[str]:
    every = (
        *parts.first_round,
        *parts.second_round,
        *parts.of_new_forms,
        *parts.validation,
        *parts.test,
    )
    return [prompt.text for prompt in every]


def test_no_text_is_in_two_parts_and_whole_templates_are_held_out_at_first() -> None:
    parts = split(prompts(0, 400), prompts(1000, 90), seed=1)

    assert len(set(texts_of(parts))) == len(texts_of(parts)) == 490
    assert parts.are_templated
    new = templates_of(parts.of_new_forms)
    assert new
    assert not new & templates_of([*parts.first_round, *parts.second_round])
    marked = [p for p in parts.validation if p.row["metadata"][FORM_FIELD] == NEW_FORM]
    assert templates_of(marked) == new
    assert not new & templates_of(parts.test)
    assert texts_of(split(prompts(0, 400), prompts(1000, 90), seed=1)) == texts_of(parts)


def test_labelled_texts_are_not_trained_on_whatever_their_spaces_and_case() -> None:
    labelled = [
        RecipePrompt(p.row, f" {p.text.upper()} ", p.answer) for p in prompts(0, 40)
    ]  # the first of the others, as a spreadsheet may change them

    parts = split(prompts(0, 100), labelled, seed=0)

    trained = {p.text for p in (*parts.first_round, *parts.second_round, *parts.of_new_forms)}
    assert not trained & {p.text for p in prompts(0, 40)}
    assert parts.num_overlapping == 40


@pytest.mark.parametrize("labelled", [prompts(1000, 40), []], ids=["labelled", "set aside"])
def test_texts_that_contain_one_to_evaluate_on_are_not_trained_on(
    labelled: list[RecipePrompt],
) -> None:
    some = prompts(1000, 40) if labelled else prompts(0, 100)
    quoting = [with_text(one, f"Hello again! {one.text.upper()} Thanks.") for one in some]

    parts = split([*prompts(0, 100), *quoting], labelled, seed=0)

    measured = [one.text for one in (*parts.validation, *parts.test)]
    trained = [one for one in texts_of(parts) if one not in measured]
    assert not [one for one in trained for text in measured if text.casefold() in one.casefold()]
    assert parts.num_overlapping == 40 if labelled else 10 < parts.num_overlapping < 50


def test_a_conversation_may_contain_a_short_text_to_evaluate_on() -> None:
    plain, labelled = prompts(0, 40), prompts(1000, 40)
    labelled = [*labelled, with_text(labelled[0], "Thanks!"), with_text(labelled[0], "refund")]
    earlier = [
        {"role": "user", "content": "Thanks"},
        {"role": "assistant", "content": "refund"},
        {"role": "user", "content": "It is late."},
        {"role": "assistant", "content": labelled[1].text},
    ]
    longer = [
        RecipePrompt(
            {**one.row, "messages": [*earlier, *one.row["messages"]]},
            f"Thanks\nIt is late.\n{one.text}",
            one.answer,
        )
        for one in plain
    ]

    parts = split([*longer, with_text(plain[0], "thanks")], labelled, seed=0)

    # Only the prompt that is nothing but that text is left out.
    assert len(texts_of(parts)) == 40 + 42
    assert "thanks" not in texts_of(parts)


def test_without_labelled_texts_a_part_is_set_aside() -> None:
    parts = split(prompts(0, 200), [], seed=0)

    assert len(parts.validation) + len(parts.test) == 50
    assert len(parts.test) >= 25


@pytest.mark.parametrize(("num", "num_labelled"), [(19, 40), (100, 19)])
def test_too_few_prompts_are_refused(num: int, num_labelled: int) -> None:
    with pytest.raises(DataError, match="too few prompts"):
        split(prompts(0, num), prompts(1000, num_labelled), seed=0)


@pytest.mark.parametrize(
    ("seconds", "trained_s", "share"), [(4000, 1, 1), (1200, 1, 0.65), (1200, 2.5, 0.3), (60, 1, 0)]
)
def test_little_time_leaves_fewer_prompts_to_evaluate_on_but_enough(
    seconds: float, trained_s: float, share: float
) -> None:
    parts = split(prompts(0, 400), prompts(1000, 260), seed=1)
    num_test, num_validation = len(parts.test), len(parts.validation)

    fewer = parts.within(seconds, untrained_s=1, trained_s=trained_s)

    assert len(fewer.test) == pytest.approx(max(50, share * num_test), rel=0.1)
    assert len(fewer.validation) == pytest.approx(max(20, share * num_validation), rel=0.1)
    assert [*fewer.test, *fewer.more_test] == parts.test
    new = [one for one in fewer.validation if one.row["metadata"][FORM_FIELD] == NEW_FORM]
    assert 0 < len(new) < len(fewer.validation)
    assert (fewer.first_round, fewer.second_round) == (parts.first_round, parts.second_round)


def test_a_text_with_two_system_messages_is_not_in_two_parts() -> None:
    some = prompts(0, 200)
    again = [
        RecipePrompt(
            {**one.row, "messages": [{"role": "system", "content": "v2"}, *one.row["messages"]]},
            one.text,
            one.answer,
        )
        for one in some
    ]

    parts = split([*some, *again], [], seed=1)

    trained = {one.text for one in (*parts.first_round, *parts.second_round, *parts.of_new_forms)}
    measured = [one.text for one in (*parts.validation, *parts.test)]
    assert len(set(measured)) == len(measured) > 40
    assert not trained & set(measured)
