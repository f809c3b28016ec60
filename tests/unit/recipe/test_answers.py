import pytest

from stillroom.recipe.answers import known_answers, named_answer, usual_spellings

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
    assert known_answers(["b", "a", "b ", "a", "b"]) == ["b", "a"]
    assert known_answers(["1", "2", "3", "4"]) is None
    assert known_answers(["same"] * 5) is None
    assert known_answers([]) is None
    assert known_answers([str(n % 42) for n in range(110)]) is None
    assert known_answers([str(n % 5) for n in range(110)]) is not None
    assert known_answers(["a", "", "a", ""]) is None
