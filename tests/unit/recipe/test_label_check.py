from random import Random

import pytest

from stillroom.recipe.label_check import doubtful_labels

FORMS = {
    "billing": ("I was charged twice for order {}.", "The invoice of order {} is wrong."),
    "delivery": ("The parcel of order {} has not arrived.", "Where is the package of order {}?"),
    "account": ("My password for order {} is refused.", "I cannot log in to see order {}."),
}
CLOSINGS = ("Thanks.", "It is urgent.", "Have a nice day.", "")


def tickets(num_texts: int = 90) -> tuple[list[str], list[str]]:
    rng = Random(0)
    labels = [list(FORMS)[row % len(FORMS)] for row in range(num_texts)]
    texts = [
        f"{rng.choice(FORMS[label]).format(rng.randint(1000, 9999))} {rng.choice(CLOSINGS)}"
        for label in labels
    ]
    return texts, labels


def test_right_labels_are_not_doubted():
    assert doubtful_labels(*tickets()) == []


def test_wrong_labels_are_found_with_the_likely_one():
    texts, labels = tickets()
    true_labels = {row: labels[row] for row in (4, 18, 41, 62)}
    for row, label in true_labels.items():
        labels[row] = "account" if label != "account" else "billing"
    doubts = doubtful_labels(texts, labels)
    assert {doubt.index: doubt.likely for doubt in doubts} == true_labels
    assert all(doubt.label == labels[doubt.index] != doubt.likely for doubt in doubts)
    confidences = [doubt.confidence for doubt in doubts]
    assert confidences == sorted(confidences, reverse=True)
    assert 0.6 <= min(confidences) <= max(confidences) <= 1
    assert doubtful_labels(texts, labels) == doubts


def test_copies_of_a_text_do_not_confirm_one_another():
    texts, labels = tickets()
    copies = ["The parcel of order 77, a parcel, has not arrived, I say."] * 4
    doubts = doubtful_labels([*texts, *copies], [*labels, *["billing"] * 4])
    assert {doubt.index: doubt.likely for doubt in doubts} == dict.fromkeys(
        range(90, 94), "delivery"
    )


@pytest.mark.parametrize("num_labels", [2, 5])
def test_labels_that_do_not_depend_on_the_words_are_not_doubted(num_labels):
    texts, _ = tickets()
    rng = Random(1)
    assert doubtful_labels(texts, [str(rng.randrange(num_labels)) for _ in texts]) == []


def test_a_rare_label_that_words_do_not_predict_is_not_doubted():
    texts, _ = tickets()
    rng = Random(1)
    labels = ["rare" if rng.random() < 0.15 else "usual" for _ in texts]
    assert doubtful_labels(texts, labels) == []


def test_a_label_of_one_text_is_neither_doubted_nor_suggested():
    texts, labels = tickets()
    labels[7] = "sales"
    assert doubtful_labels(texts, labels) == []


def test_a_label_with_fewer_texts_than_folds_is_left_out():
    texts, labels = tickets()
    labels[7] = labels[10] = labels[13] = "sales"
    assert doubtful_labels(texts, labels) == []


@pytest.mark.parametrize(
    ("texts", "labels"),
    [
        ([], []),
        (["One.", "Two."], ["a", "b"]),
        (tickets()[0], ["one"] * 90),
        ([""] * 40, ["a", "b"] * 20),
        (["Same text."] * 40, ["a"] * 30 + ["b"] * 10),
    ],
    ids=["none", "two", "one label", "empty texts", "copies only"],
)
def test_nothing_is_doubted_without_evidence(texts, labels):
    assert doubtful_labels(texts, labels) == []


def test_an_empty_text_is_not_doubted():
    texts, labels = tickets()
    texts[5] = texts[6] = ""
    assert doubtful_labels(texts, labels) == []
