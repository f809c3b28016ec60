import re
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stillroom.recipe.forms import forms_of, held_out_forms, reword

COMPLAINTS = (
    "I was charged twice for order {id}.",
    "The {item} from order {id} does not switch on.",
    "Tracking for order {id} has not moved for {days} days.",
    "How do I return the {item} of order {id}?",
    "Please change the address of the account behind order {id}.",
    "Do you give a discount if I buy {days} more like order {id}?",
)
GREETINGS = ("Hello, ", "Hi there, ", "Dear team, ", "")
CLOSINGS = (" I need this solved today.", " There is no hurry.", " Have a nice day.", "")
ITEMS = ("lamp", "kettle", "router", "speaker", "printer")
FREE_TEXTS = (
    "Yesterday the old lighthouse keeper repainted his boat.",
    "Compilers turn programs into instructions for machines.",
    "My grandmother bakes bread with walnuts and honey.",
    "Tidal rivers change direction twice between two dawns.",
    "Why do owls turn their heads so far?",
)


def tickets(num_texts: int, seed: int = 0) -> tuple[list[str], list[int]]:
    """Returns texts of three parts, and the number of the complaint in each."""
    rng = Random(seed)
    texts, numbers = [], []
    for _ in range(num_texts):
        number = rng.randrange(len(COMPLAINTS))
        fillings = {"id": f"A{rng.randint(1000, 9999)}", "days": rng.randint(3, 40)}
        complaint = COMPLAINTS[number].format(**fillings, item=rng.choice(ITEMS))
        texts.append(rng.choice(GREETINGS) + complaint + rng.choice(CLOSINGS))
        numbers.append(number)
    return texts, numbers


def by_first_appearance(values):
    numbers = {}
    return [numbers.setdefault(value, len(numbers)) for value in values]


@pytest.mark.parametrize("seed", range(3))
def test_the_form_of_a_text_is_its_complaint_whatever_is_around_it(seed):
    texts, complaints = tickets(150, seed)
    assert forms_of(texts) == by_first_appearance(complaints)


def test_each_free_text_has_its_own_form():
    assert forms_of(FREE_TEXTS) == [0, 1, 2, 3, 4]


def test_free_texts_with_the_same_closing_have_their_own_forms():
    assert forms_of([f"{text} Thank you very much!" for text in FREE_TEXTS]) == [0, 1, 2, 3, 4]


def test_free_texts_are_told_from_templates():
    texts, complaints = tickets(60)
    assert forms_of([*FREE_TEXTS, *texts]) == by_first_appearance(
        [*FREE_TEXTS, *map(str, complaints)]
    )


def test_fillings_may_be_quoted_texts_emails_and_names():
    assert forms_of(
        [
            "Translate 'a bird in the hand' to French.",
            "Translate 'good morning' to French.",
            "Write to bob@example.org about Winterbourne.",
            "Write to ann.lee@mail.example.com about Ashdown.",
        ]
    ) == [0, 0, 1, 1]


QUESTIONS = (
    "When is {} due back?", "Who wrote {}?", "Please put {} on hold.", "I lost my copy of {}.",
    "How many pages has {}?", "Is there an audiobook of {}?", "Which shelf is {} on?",
)  # fmt: skip
TITLES = [
    f"{start} {middle} {end}"
    for start in ("The Silent", "A Lost", "Golden")
    for middle in ("River", "Garden", "Mirror")
    for end in ("of Ash", "and the Crow", "Road")
]


def test_fillings_may_be_titles_of_several_words_that_many_texts_share():
    numbers = [n % len(QUESTIONS) for n in range(200)]
    texts = [QUESTIONS[number].format(Random(n).choice(TITLES)) for n, number in enumerate(numbers)]

    assert forms_of(texts) == numbers
    assert forms_of(["Where Is My Order?", "Please Cancel My Plan."] * 3) == [0, 1] * 3


@pytest.mark.parametrize(
    ("texts", "expected"),
    [([], []), ([""], [0]), (["", " ", "?"], [0, 0, 0]), (["12", "x", "13"], [0, 1, 0])],
)
def test_texts_with_few_words_have_forms(texts, expected):
    assert forms_of(texts) == expected


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("share", [0.1, 0.2, 0.3])
def test_held_out_forms_hold_about_the_share(share, seed):
    forms = [Random(1).choice(range(1 + n % 30)) for n in range(400)]
    forms = [form % 25 for form in range(400)] + forms
    held_out = held_out_forms(forms, share=share, rng=Random(seed))
    num_texts = sum(form in held_out for form in forms)
    assert 0.5 * share * len(forms) <= num_texts <= 1.5 * share * len(forms)


def test_the_same_generator_holds_out_the_same_forms():
    forms = [n % 12 for n in range(100)]
    draws = [held_out_forms(forms, share=0.2, rng=Random(seed)) for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]


@pytest.mark.parametrize(
    "forms",
    [
        pytest.param([], id="no texts"),
        pytest.param([0, 1, 2, 3] * 10, id="few forms"),
        pytest.param(list(range(50)), id="no form repeats"),
        pytest.param([0, 1, 2, 3, 4] * 10, id="each form is too large"),
    ],
)
def test_nothing_is_held_out_where_forms_do_not_help(forms):
    assert held_out_forms(forms, share=0.1, rng=Random(0)) == set()


PROMPT = (
    "Please tell Anna that I cannot  deliver the replacement printer of order A1234 before 5.30 pm "
    "to support@example.com, because 'it is not  packed' and the NASA page "
    'https://example.com/status?x=1 says "do not deliver anything".'
)
KEPT = (
    "Anna", "A1234", "5.30", "support@example.com", "'it is not  packed'", "NASA",
    "https://example.com/status?x=1", '"do not deliver anything".',
)  # fmt: skip


def test_rewording_keeps_numbers_names_addresses_and_quotes():
    for seed in range(100):
        reworded = reword(PROMPT, Random(seed))
        assert reworded != PROMPT
        assert [kept for kept in KEPT if kept not in reworded] == []


def test_the_same_generator_rewords_alike():
    assert reword(PROMPT, Random(7)) == reword(PROMPT, Random(7))
    assert len({reword(PROMPT, Random(seed)) for seed in range(30)}) > 10


@pytest.mark.parametrize(
    ("text", "rewordings"),
    [
        ("Is it far?", {"is it far?", "Is it far", "Is it far? Thanks.", "Hello, Is it far?"}),
        ("It is  so.", {"It is so.", "It's  so."}),
        ("I DO NOT AGREE, do not go", {"I DO NOT AGREE, don't go"}),
        ("Anna bought one.", {"Anna bought one"}),
        ("eine wichtige", {"eine wcihtige", "eine wihctige"}),
    ],
)
def test_each_change_is_drawn(text, rewordings):
    assert rewordings <= {reword(text, Random(seed)) for seed in range(400)}


@pytest.mark.parametrize(
    "text", ["", " ", "12 + 30", '{"order": "A1"}', "IMPORTANT", "'something'", "Anna Winterbourne"]
)
def test_a_text_that_no_change_fits_stays(text):
    assert {reword(text, Random(seed)) for seed in range(50)} == {text}


@pytest.mark.parametrize("text", ["Thanks, please see to it", "Hi, is this it"])
def test_no_second_greeting_or_closing_is_added(text):
    rewordings = {reword(f"{text}. Many thanks.", Random(seed)).lower() for seed in range(100)}
    assert {reworded.count("thank") for reworded in rewordings} == {text.count("Thank") + 1}
    assert max(len(re.findall(r"\b(?:hi|hello|hey|good day)\b", r)) for r in rewordings) == 1


@settings(max_examples=60)
@given(st.text("ab Ã7A.?!'\"`@/\n", max_size=60), st.integers(0, 1000))
def test_any_text_keeps_its_digits(text, seed):
    reworded = reword(text, Random(seed))
    assert re.findall(r"\d", reworded) == re.findall(r"\d", text)
