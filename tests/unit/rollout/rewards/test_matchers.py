import string
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillroom.errors import DataError
from stillroom.rollout.rewards.answers import (
    chosen_letter,
    final_answers,
    letter_of,
    marked_answer,
    normalize,
    number_in,
    strip_thinking,
)
from stillroom.rollout.rewards.matchers import (
    MAX_ANSWER_CHARACTERS,
    AnswerKey,
    AnswerMatch,
    Tolerance,
    answer_key,
    is_accepted,
    is_match,
    is_only_answer,
)


def matches(text: str, expected: Any, match: str = "contained", **more: Any) -> bool:
    key = answer_key({"expected_answer": expected, "answer_match": match, **more})
    assert key is not None
    return is_accepted(text, key)


@pytest.mark.parametrize(
    ("expected", "text"),
    [
        ("12", "12"),
        ("12", "It costs 12."),
        ("12", "It costs 12, plus tax"),
        ("12", "(12)"),
        ("12", "$12!"),
        ("12", "**12**"),
        ("12", "Answer:12"),
        ("12", "12%"),
        (12, "that makes 12 coins"),
        (-3, "it is -3 degrees"),
        ("12.5", "costs 12.5."),
        ("1,200", "costs 1,200."),
        ("Red Lamp", "the red  \n lamp"),
        ("straße", "In der STRASSE."),
        ("a+b", "so a+b is it"),
        ("(x)", "f of (x)"),
        (["no", "12"], "so 12"),
    ],
)
def test_an_expected_answer_is_found_as_a_whole_word(expected: Any, text: str) -> None:
    assert matches(text, expected)


@pytest.mark.parametrize(
    ("expected", "text"),
    [
        ("12", "112"),
        ("12", "120"),
        ("12", "12.5"),
        ("12", "1.12"),
        ("12", "12,000"),
        ("12", "-12"),
        ("12", "3-12"),
        ("12", "12-3"),
        ("12", "x12"),
        ("12", "12th"),
        ("12", ""),
        ("12", "twelve"),
        ("lamp", "lamps"),
        ("lamp", "desk-lamp"),
        ("(x)", "f(x)"),
        ("", "anything"),
        ("  ", "anything"),
    ],
)
def test_a_part_of_a_longer_answer_is_no_match(expected: str, text: str) -> None:
    assert not matches(text, expected)


WORDS = st.text(min_size=1).filter(lambda text: bool(text.split()))


@given(WORDS)
def test_an_answer_in_the_very_words_always_matches(text: str) -> None:
    assert matches(text, text)
    assert matches(f"so: {text} .", text)
    assert matches(text, text, "exact")
    assert matches(f"\n{text} ", text, "exact")
    assert matches(text, text, "normalised") == bool(normalize(text))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("the Eiffel Tower!", "Eiffel tower"),
        ("Eiﬀel  Tower", "eiffel tower"),
        ("U.S.A.", "USA"),
        ("It's well-known", "its well known"),
        ("I think so.\nThe answer is **Paris**.", "paris"),
        ("The correct answer is Paris. It is lovely there.", "Paris"),
        ("Final Answer: $x^2$", "x^2"),
        ("so \\boxed{Paris}.", "Paris"),
        ("\u22123", "-3"),
        ("½", "1/2"),
        ("A", "a"),
        ("「東京」", "東京"),
    ],
)
def test_a_normalised_match_sees_through_spelling(text: str, expected: str) -> None:
    assert matches(text, expected, "normalised")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3", "-3"),
        ("15", "1.5"),
        ("C", "C++"),
        ("It is Paris", "Paris"),
        ("the", "a"),
        ("", "the"),
        ("?!", "!"),
        ("Paris and Rome", "Paris"),
    ],
)
def test_a_normalised_match_keeps_what_makes_a_difference(text: str, expected: str) -> None:
    assert not matches(text, expected, "normalised")


NO_ARTICLES = st.text(string.ascii_letters, min_size=1).filter(
    lambda word: word.casefold() not in ("a", "an", "the")
)


@given(NO_ARTICLES, st.sampled_from(["The {}!", "{}.", " {}\n", "({})", "So.\nAnswer: {}"]))
def test_normalising_forgets_case_blanks_and_frames(word: str, frame: str) -> None:
    assert matches(frame.format(word.upper()), word, "normalised")
    assert not matches(frame.format(f"{word}s"), word, "normalised")


def test_exact_is_exact() -> None:
    assert matches(" Paris\n", "Paris", "exact")
    for text in ("paris", "Paris.", "It is Paris", ""):
        assert not matches(text, "Paris", "exact")
    assert not matches("", "", "exact")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", "12"),
        ("1,200.50", "1200.5"),
        ("100,000,000", "100000000"),
        ("1\u202f200", "1200"),
        ("1'200", "1200"),
        ("1{,}200", "1200"),
        ("3/4", "3/4"),
        ("7 1/2 cups", "15/2"),
        ("1½", "3/2"),
        ("-\\dfrac{1}{2}", "-1/2"),
        ("1\\frac{3}{4}", "7/4"),
        ("\\frac34", "3/4"),
        ("-3", "-3"),
        ("\u22123", "-3"),
        ("-$3", "-3"),
        (".5", "1/2"),
        ("1e-3", "1/1000"),
        ("1.2 × 10^5", "120000"),
        ("1.2\\times 10^{5}", "120000"),
        ("3×10⁵", "300000"),
        ("10⁵", "100000"),
        ("12kg", "12"),
        ("5-3", "3"),
        ("\uff11\uff12", "12"),
        ("first 3, then 4.", "4"),
        ("The answer is 12 because 3 plus 9", "12"),
        ("Answer: 3 + 4 = 7.\nThat took 2 days", "7"),
        ("\\boxed{x = \\frac{1}{2}}", "1/2"),
        ("so\n**Final Answer**\n\n7", "7"),
        ("so\n#### 72", "72"),
        ("US$12", "12"),
    ],
)
def test_a_number_is_read_as_people_write_it(text: str, value: str) -> None:
    found = number_in(text)

    assert found is not None
    assert found.value == Fraction(value)


@pytest.mark.parametrize(
    "text",
    [
        *("", "none", "x12", "v1.2", "1.2.3", "3/4/2024", "1,5", "12,34,567", "1/0", "1e999"),
        *("12 people, but the answer is unknown", "10.0.0.1", "2^10x", "[1,2,3]", "9" * 500),
    ],
)
def test_what_is_no_clear_number_is_none(text: str) -> None:
    assert number_in(text) is None


@pytest.mark.parametrize(
    ("text", "expected", "tolerance", "is_same"),
    [
        ("50%", 50, None, True),
        ("50 %", 0.5, None, True),
        ("50 percent", "50%", None, True),
        ("0.5", "50%", None, True),
        ("0.5%", "50%", None, False),
        ("0.5", 50, None, False),
        ("1234567890123", 1234567890124, None, False),
        ("0.3", 0.1 + 0.2, None, True),
        ("0.333", "1/3", None, False),
        ("0.333", "1/3", 0.001, True),
        ("103", 100, {"rel": 0.05}, True),
        ("106", 100, {"rel": 0.05}, False),
        ("106", 100, {"rel": 0.05, "abs": 6}, True),
        ("-12", 12, 23, False),
        ("1,200", 1200.0, None, True),
        ("nothing", 0, None, False),
    ],
)
def test_numbers_agree_within_the_tolerance(
    text: str, expected: Any, tolerance: Any, is_same: bool
) -> None:
    assert matches(text, expected, "numeric", answer_tolerance=tolerance) == is_same


@given(st.integers(-(10**12), 10**12), st.integers(0, 6))
def test_a_number_is_the_same_however_it_is_written(units: int, places: int) -> None:
    value = Fraction(units, 10**places)
    sign, digits = "-" if units < 0 else "", f"{abs(units):0{places + 1}d}"
    whole, part = digits[: len(digits) - places], digits[len(digits) - places :]
    point = f".{part}" if part else ""
    spellings = [
        f"{sign}{whole}{point}",
        f"{sign}{int(whole):,}{point}",
        f"So it is {sign}{int(whole):,}{point}.",
        f"{units}e-{places}",
        f"{units} × 10^{{-{places}}}",
        f"\\boxed{{{sign}{whole}{point}}}",
        f"{value.numerator}/{value.denominator}",
        f"{sign}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}",
    ]
    for spelling in spellings:
        found = number_in(spelling)
        assert found is not None, spelling
        assert found.value == value, spelling


CHOICES = {"A": "Paris", "B": "New York", "C": "York"}


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"),
        ("(B)", "B"),
        ("b)", "B"),
        ("**B**", "B"),
        ("B. New York", "B"),
        ("The answer is (C).", "C"),
        ("Option A", "A"),
        ("B is right", "B"),
        ("\\boxed{\\text{C}}", "C"),
        ("I think so.\nAnswer: C", "C"),
        ("The correct option is **B**", "B"),
        ("Answer: B, because A is wrong", "B"),
        ("Paris", "A"),
        ("It is New York.", "B"),
        ("It is York", "C"),
        ("B) New York\nIt is the largest of them.", "B"),
        ("A cat is nice", None),
        ("A or B", None),
        ("(A) and (B)", None),
        ("Paris and York", None),
        ("D", None),
        ("", None),
    ],
)
def test_a_choice_is_made_by_letter_or_by_text(text: str, letter: str | None) -> None:
    assert chosen_letter(text, CHOICES) == letter


def test_the_expected_choice_too_is_a_letter_or_a_text() -> None:
    assert [letter_of(given, CHOICES) for given in ("B", "(b)", "new york", "D", "Rome")] == [
        *("B", "B", "B"),
        *(None, None),
    ]
    assert letter_of("D", None) == "D"
    assert matches("(B)", "New York", "choice", choices=["Paris", "New York"])
    assert matches("new york!", "B", "choice", choices={"a": "Paris", "b": "New York"})
    assert matches("The answer is Rome.", "Rome", "choice")
    assert not matches("(A)", "New York", "choice", choices=["Paris", "New York"])


def test_the_answer_is_what_the_text_marks_last() -> None:
    assert marked_answer("\\boxed{1} or \\boxed{\\frac{1}{2}}") == "\\frac{1}{2}"
    assert marked_answer("Answer: 1\nFinal answer: 2") == "2"
    assert marked_answer("**Answer:** 12 **") == "12"
    assert marked_answer("no mark") is None
    assert marked_answer("\\boxed{never closed") is None
    assert marked_answer("I wonder what the answer is.") is None
    assert final_answers("It is so. The answer is Paris. Yes.")[1:] == ["Paris. Yes", "Paris"]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("<think>7</think>12", "12"),
        ("7</think>\n\n12", "12"),
        ("<think>7", ""),
        ("a <think> b", "a <think> b"),
        ("<think>a</think>b</think>c", "c"),
    ],
)
def test_thinking_is_no_answer(text: str, kept: str) -> None:
    assert strip_thinking(text) == kept


@pytest.mark.parametrize(
    "metadata",
    [
        {"expected_answer": "1", "answer_match": "fuzzy"},
        {"expected_answer": "1", "answer_match": ["exact"]},
        {"expected_answer": "one", "answer_match": "numeric"},
        {"expected_answer": []},
        {"expected_answer": [["1"]]},
        {"expected_answer": {}},
        {"expected_answer": {"a": {"b": "1"}}},
        {"expected_answer": {"a": "1", "b": "one"}, "answer_match": "numeric"},
        {"expected_answer": "x" * 10_001},
        {"expected_answer": "1", "answer_tolerance": "much"},
        {"expected_answer": "1", "answer_tolerance": -1},
        {"expected_answer": "1", "answer_tolerance": True},
        {"expected_answer": "1", "answer_tolerance": {"rel": None}},
        {"expected_answer": "1", "answer_tolerance": {"relative": 1}},
        {"expected_answer": "1", "answer_tolerance": {}},
        {"expected_answer": "1", "choices": []},
        {"expected_answer": "1", "choices": {"AB": "x"}},
        {"expected_answer": "1", "choices": ["x"] * 27},
        {"expected_answer": "1", "choices": [1]},
    ],
)
def test_what_cannot_be_compared_is_refused_with_a_fix(metadata: dict) -> None:
    with pytest.raises(DataError) as caught:
        answer_key(metadata)

    assert caught.value.fix


PLACE = {"city": "Paris", "year": 1889, "open": True, "note": None}


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        ('{"city": "Paris", "year": 1889, "open": true, "note": ""}', True),
        ('Here:\n```json\n{"year": "1889", "open": true, "city": "paris"}\n```', True),
        ("It stands in Paris since 1889, and open is true.", True),
        ("Paris", False),
        ('{"city": "Paris", "year": 1890, "open": true}', False),
        ('{"city": "Paris since 1889", "open": true}', False),
        ('{"city": "1889", "year": "Paris", "open": true}', False),
        ('{"city": "Paris", "year": 1889, "open": true, "note": "none"}', False),
        ("[" * 100_000 + "{" * 100_000 + "}", False),
    ],
)
def test_of_an_answer_in_several_parts_each_must_be_right(text: str, is_right: bool) -> None:
    assert matches(text, PLACE) is is_right


def test_each_part_is_compared_as_the_row_says() -> None:
    assert matches('{"a": "B) Rome", "b": "(A)"}', {"a": "B", "b": "A"}, "choice")
    assert not matches('{"a": "It is Rome", "b": "x"}', {"a": "Rome", "b": "x"}, "exact")
    assert matches('{"a": "x", "b": 7}', {"a": ["y", "x"], "b": 7}, "exact")
    assert not matches("1 and 2", {"a": 1, "b": 2}, "numeric")


@pytest.mark.parametrize(
    ("expected", "text", "is_only"),
    [
        ("Paris", "Paris", True),
        ("Paris", "**paris.**", True),
        ("Paris", "It is Paris.", False),
        (["Paris", "Lutetia"], "Lutetia", True),
        ({"city": "Rome", "price": 42}, '{"price": 42, "city": "rome"}', True),
        ({"city": "Rome", "price": 42}, 'Here: {"price": 42, "city": "Rome"}', False),
        ({"city": "Rome"}, '{"city": "Rome", "why": "It is old."}', False),
        ({"city": "Rome"}, "", False),
    ],
)
def test_an_answer_is_only_the_expected_one_if_it_says_nothing_else(
    expected: Any, text: str, is_only: bool
) -> None:
    key = answer_key({"expected_answer": expected})
    assert key is not None
    assert is_only_answer(text, key) is is_only


def test_a_row_without_an_answer_has_no_key() -> None:
    assert answer_key({}) is None
    assert answer_key({"expected_answer": None, "answer_match": "nonsense"}) is None
    assert answer_key({"expected_answer": 0}) == AnswerKey(("0",))
    key = answer_key({"expected_answer": "x"}, default=AnswerMatch.EXACT)
    assert key == AnswerKey(("x",), AnswerMatch.EXACT)


def test_only_the_end_of_an_endless_answer_is_read() -> None:
    long = "x" * MAX_ANSWER_CHARACTERS
    assert matches(f"{long} 12", "12")
    assert not matches(f"12 {long}", "12")


HOSTILE = [
    "9" * 50_000,
    "1," * 25_000,
    "1,111" * 10_000,
    "1/" * 25_000,
    "1 " * 25_000,
    "\\frac{" * 7_000,
    "\\boxed{" * 7_000,
    "{" * 50_000,
    "answer: " * 6_000,
    "answer" + "*" * 50_000,
    "A " * 25_000,
    "(" * 50_000,
    " " * 50_000 + "x",
    "a+" * 25_000,
    "⁵" * 50_000,
    "½" * 25_000,
    "1e" * 25_000,
    "10^" * 15_000,
    "\n" * 50_000,
    "<think>" * 5_000,
]


@pytest.mark.thorough
@pytest.mark.parametrize("index", range(len(HOSTILE)))
def test_a_hostile_answer_is_read_to_its_end(index: int) -> None:
    text = HOSTILE[index]
    # A pattern that backtracks over these would not come to an end.
    for match in AnswerMatch:
        key = AnswerKey(("12", "a+a+a+b", "New York"), match, Tolerance(), CHOICES)
        for answer in {text, strip_thinking(text)}:
            is_accepted(answer, key)


@given(
    st.text(
        alphabet=st.sampled_from("0123456789.,/-+eE%$ {}()\\fracboxedABC^×⁵½\n*#:="), max_size=80
    )
    | st.text(max_size=60),
    st.sampled_from(["12", "1/2", "B", "New York", "-3.5%"]),
    st.sampled_from(AnswerMatch),
    st.sampled_from([None, CHOICES]),
)
def test_every_text_is_either_a_match_or_not(
    text: str, expected: str, match: AnswerMatch, choices: dict | None
) -> None:
    key = AnswerKey((expected,), match, Tolerance(), choices)

    assert is_match(text, expected, key) in (True, False)
