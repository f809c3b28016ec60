import json

import pytest

from stillroom.recipe.answers import (
    LabelAnswers,
    ObjectAnswers,
    PatternAnswers,
    form_of,
    has_same_value,
    label_set,
    named_answer,
    object_in,
    usual_spellings,
)

QUEUES = ["billing", "returns", "refund", "refund status"]


@pytest.mark.parametrize(
    "text",
    [
        "billing",
        " Billing.\n",
        "**billing**",
        "Category: billing.",
        "This looks like **billing** to me.",
        "billing\n\nThe customer asks whether returns cost money.",
    ],
)
def test_an_answer_is_found_in_what_a_chatty_teacher_says(text: str) -> None:
    assert named_answer(text, QUEUES) == "billing"


@pytest.mark.parametrize(
    "text", ["", "unclear", "billing or returns", "rebilling", "Not billing but returns"]
)
def test_no_answer_and_several_answers_are_none(text: str) -> None:
    assert named_answer(text, QUEUES) is None


def test_an_answer_within_a_longer_one_does_not_count() -> None:
    assert named_answer("It asks for the refund status of an order", QUEUES) == "refund status"
    assert named_answer("It asks for a refund", QUEUES) == "refund"


def test_spellings_of_a_label_are_one_label() -> None:
    answers = ["queen_order", "queen_order", "QUEEN_ORDER", "Queen order ", "bees", "bees"]
    assert usual_spellings(answers) == {"QUEEN_ORDER": "queen_order", "Queen order ": "queen_order"}
    assert named_answer("Queen Order", ["queen_order", "bees"]) == "queen_order"


@pytest.mark.parametrize(
    "answers",
    [["A", "A-", "B", "B+"] * 3, ["C", "C++", "C#"] * 3, ["Yes, it is.", "yes it is", "no"]],
)
def test_answers_that_are_not_the_same_keep_their_spellings(answers: list[str]) -> None:
    assert usual_spellings(answers) == {}


def test_answers_that_repeat_are_a_set_and_others_are_not() -> None:
    assert label_set(["b", "a", "b ", "a", "b"]) == ["b", "a"]
    assert label_set(["1", "2", "3", "4"]) is None
    assert label_set(["same"] * 5) is None
    assert label_set([]) is None
    assert label_set([str(n % 42) for n in range(110)]) is None
    assert label_set([str(n % 5) for n in range(110)]) is not None
    assert label_set(["a", "", "a", ""]) is None


ORDERS = [
    (
        f"Where is order {n}?" if n % 3 else "Where is it?",
        json.dumps({"action": ("track", "refund")[n % 2], "order": str(n) if n % 3 else None}),
    )
    for n in range(100, 160)
]


def order_form() -> ObjectAnswers:
    form = form_of(ORDERS)
    assert isinstance(form, ObjectAnswers)
    return form


def test_objects_with_the_same_fields_are_a_form_of_answers() -> None:
    form = order_form()
    assert form.fields == ("action", "order")
    assert form.known == {"action": ('"track"', '"refund"')}
    assert (form.texts, form.copied) == (("order",), ("order",))
    # A teacher that says more gives objects too.
    chatty = [(text, f"Here you are:\n```json\n{answer}\n```") for text, answer in ORDERS]
    assert form_of(chatty) == form
    assert form_of([("a", "yes"), ("b", "no")] * 5) == LabelAnswers(("yes", "no"))
    said = [(text, f"{text} {answer[1:-1]}") for text, answer in ORDERS]
    assert form_of(said, are_bare=False) is None
    mixed = [(text, answer if n % 5 else '{"other": 1}') for n, (text, answer) in enumerate(ORDERS)]
    assert form_of(mixed, are_bare=False) is None


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"action": "track", "order": "7"}', '{"action": "track", "order": "7"}'),
        (
            'Sure!\n{"order":7,\n"action":"TRACK"} Anything else?',
            '{"action": "track", "order": "7"}',
        ),
        ('{"action": "refund", "order": null}', '{"action": "refund", "order": null}'),
        ('{"action": "sing", "order": "7"}', None),
        ('{"action": "track"}', None),
        ('{"action": "track", "order": "7", "more": 1}', None),
        ('{"action": "track", "order": ["7"]}', None),
        ('{"action": "track", "order": "7"} or {"action": "refund", "order": "7"}', None),
        ("track", None),
        ('{"action": "track", "order": "7"', None),
    ],
)
def test_the_one_object_of_the_form_is_found_in_a_text(text: str, named: str | None) -> None:
    assert order_form().named(text) == named


def test_values_from_fixed_sets_can_be_replaced_and_copied_values_are_in_the_text() -> None:
    form, answer = order_form(), '{"action": "track", "order": "7"}'
    assert form.closed_fields(answer) == {"action": '"track"'}
    replaced = form.with_closed_field(answer, "action", '"refund"')
    assert replaced == '{"action": "refund", "order": "7"}'
    assert form.is_grounded(answer, "Where is 7?")
    assert form.is_grounded(answer, "Where is #7, please")
    assert not form.is_grounded(answer, "Where is 8?")
    # A number that has lost a digit is another one.
    assert not form.is_grounded(answer, "Where is 78?")
    assert form.is_grounded('{"action": "track", "order": null}', "Where is 8?")


def test_braces_without_an_object_do_not_take_long() -> None:
    assert object_in("{" * 20_000) is None
    assert object_in("{}") is None


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ('{"order": null, "kind": "a"}', True),
        ('Sure: {"kind": "b", "order": ""}', True),
        ('{"order": "7"}', False),
        ('{"kind": "a"}', False),
        ("I do not know.", False),
    ],
)
def test_only_an_object_with_the_field_has_its_value(text: str, *, right: bool) -> None:
    assert has_same_value(text, "order", expected='{"order": null, "kind": "a"}') is right
    assert has_same_value('{"order": 7}', "order", expected='{"order": "7"}')


CODES = [f"reserved: r{number}" for number in range(100, 140)]


def desk_form(*, are_copied: bool = False) -> PatternAnswers:
    answers = [*CODES, *["not free"] * 20, *[f"free: {number} copies" for number in range(20)]]
    form = form_of([(answer if are_copied else "Text", answer) for answer in answers])
    assert isinstance(form, PatternAnswers)
    return form


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("reserved: r815", "reserved: r815"),
        (" Reserved: R815\nIs that all?", "reserved: R815"),
        ("Sure! I looked that up for you: reserved: r815. Anything else?", "reserved: r815"),
        ("It is **not free**.", "not free"),
        ("It is not free, but free: 2 copies tomorrow", None),
        ("reserved: r1 or reserved: r2", None),
        ("reserved: soon", None),
        ("unreserved: r815", None),
    ],
)
def test_an_answer_of_a_pattern_is_found_in_what_a_teacher_says(
    text: str, answer: str | None
) -> None:
    assert desk_form().named(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("It weighs 3.5 kg.", "3.5 kg"),
        ("1,250 kg", "1,250 kg"),
        ("It weighs -3 kg", None),
        ("3 kg or 3 KG", "3 kg"),
        ("between 3 kg and 4 kg", None),
    ],
)
def test_no_part_of_a_number_is_an_answer(text: str, answer: str | None) -> None:
    form = form_of([("Text", f"{number} kg") for number in range(40)])
    assert form == PatternAnswers(("… kg",), are_copied=False, num_bytes=5)
    assert form.named(text) == answer


def test_no_part_of_a_code_is_an_answer() -> None:
    form = form_of([(f"Order B{number}", f"order=B{number}") for number in range(40)])
    assert form is not None
    assert form.named("order=B7791-2") == "order=B7791-2"
    assert not form.is_grounded("order=B7791", "Order B7791-2")
    assert not form.is_grounded("order=5", "Order 3.5")
    assert form.is_grounded("order=B7791", "Where is order:B7791?")


def test_words_with_digits_that_are_copied_must_be_in_the_text() -> None:
    form = desk_form(are_copied=True)
    assert form.is_grounded("reserved: r815", "Book R815, please")
    assert not form.is_grounded("reserved: r815", "Book r81 and r8155")
    assert desk_form().is_grounded("reserved: r815", "Book it")


@pytest.mark.parametrize(
    "answers",
    [
        [str(number) for number in range(40)],
        [
            f"It was {number} when I called {name}"
            for number, name in enumerate(map(chr, range(200, 240)))
        ],
        CODES[:9],
        [f"{code} …" for code in CODES],
        [f"{code} {'for you ' * 20}" for code in CODES],
    ],
)
def test_numbers_sentences_and_few_answers_have_no_pattern(answers: list[str]) -> None:
    assert form_of([("Text", answer) for answer in answers]) is None


def test_answers_that_may_say_more_have_no_pattern() -> None:
    assert form_of([("Text", code) for code in CODES], are_bare=False) is None
    assert form_of([("Text", code) for code in CODES]) == PatternAnswers(
        ("reserved: …",), False, 14
    )
