import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stillroom.data.near_duplicates import MIN_JACCARD, MinHasher, NearDuplicates
from stillroom.data.words import jaccard, shingles_of

VOCABULARY = [f"word{number}" for number in range(3000)]


def repeats_of(texts: list[str], quality: list[float] | None = None) -> dict[int, int]:
    near, signer = NearDuplicates(), MinHasher()
    for number, text in enumerate(texts):
        value = quality[number] if quality else 0.0
        near.add(signer.signature(text), quality=value, tie_breaker=text.encode())
    return near.find_repeats(lambda number: shingles_of(texts[number]))


def text_of(chance: random.Random, num_words: int) -> list[str]:
    return chance.choices(VOCABULARY, k=num_words)


def edited(chance: random.Random, words: list[str], num_edits: int) -> list[str]:
    words = list(words)
    for _ in range(num_edits):
        words[chance.randrange(len(words))] = chance.choice(VOCABULARY)
    return words


def test_planted_near_duplicates_are_found_and_nothing_else_is() -> None:
    chance = random.Random(1)
    texts: list[str] = []
    planted: list[tuple[int, int]] = []
    for _ in range(1500):
        words = text_of(chance, chance.randint(30, 200))
        texts.append(" ".join(words))
        if chance.random() < 0.3:
            edits = chance.randint(0, max(1, len(words) // 25))
            texts.append(" ".join(edited(chance, words, edits)))
            planted.append((len(texts) - 2, len(texts) - 1))
    alike = [
        pair for pair in planted
        if jaccard(shingles_of(texts[pair[0]]), shingles_of(texts[pair[1]])) >= MIN_JACCARD
    ]  # fmt: skip

    repeats = repeats_of(texts)

    found = sum(one in repeats or other in repeats for one, other in alike)
    assert found >= 0.98 * len(alike) > 100
    assert all(
        jaccard(shingles_of(texts[row]), shingles_of(texts[kept])) >= MIN_JACCARD
        for row, kept in repeats.items()
    )


def test_what_a_dropped_row_repeats_is_kept() -> None:
    chance = random.Random(2)
    words = text_of(chance, 100)
    # A chain: each is like the one before, the last is not like the first.
    chain = [words]
    for _ in range(30):
        chain.append(edited(chance, chain[-1], 2))
    texts = [" ".join(link) for link in chain]

    repeats = repeats_of(texts)

    kept = set(range(len(texts))) - repeats.keys()
    assert set(repeats.values()) <= kept
    assert 2 <= len(kept) < len(texts)


def test_the_best_of_rows_alike_stays() -> None:
    texts = ["a b c d e f", "A, b c! d e f", "a b c d e f.", "x y z"]

    assert repeats_of(texts, [0.0, 1.0, 0.5, 0.0]) == {0: 1, 2: 1}


@pytest.mark.thorough
@settings(max_examples=50)
@given(st.randoms(use_true_random=False))
def test_what_stays_does_not_depend_on_the_order_of_the_rows(chance: random.Random) -> None:
    base = [text_of(chance, 40) for _ in range(6)]
    texts = list({" ".join(edited(chance, chance.choice(base), 1)) for _ in range(30)})
    quality = {text: chance.choice([0.0, 0.5, 1.0]) for text in texts}
    first = repeats_of(texts, [quality[text] for text in texts])
    shuffled = list(texts)
    chance.shuffle(shuffled)
    second = repeats_of(shuffled, [quality[text] for text in shuffled])

    def dropped(given: list[str], repeats: dict[int, int]) -> set[str]:
        return {given[row] for row in repeats}

    assert dropped(texts, first) == dropped(shuffled, second)


@pytest.mark.parametrize(
    ("one", "other", "are_alike"),
    [
        ("12", "12", True),
        ("12", "13", False),
        ("?", "!", False),
        ("", "", True),
        ("The price is 12 euros.", "the PRICE is\n12 euros", True),
        ("\ufb01ve \uff57\uff4f\uff52\uff44\uff53", "five words", True),
        ("法国的首都是巴黎吗", "法国的首都是柏林吗", False),
    ],
)
def test_short_texts_are_alike_only_if_they_say_the_same(
    one: str, other: str, are_alike: bool
) -> None:
    assert bool(repeats_of([one, other])) == are_alike
