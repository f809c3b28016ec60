from hypothesis import given
from hypothesis import strategies as st

from stillroom.data.words import words_of

ANY_ASCII = "".join(map(chr, range(128)))


def test_words_are_folded_and_nothing_else_is_left_of_a_text() -> None:
    assert words_of("It's 5 o_clock,\tNOW!\x1f\x00x") == ["it", "s", "5", "o_clock", "now", "x"]
    assert words_of("Straße ﬁnal 東京 x") == ["strasse", "final", "東", "京", "x"]


@given(st.text(st.sampled_from(ANY_ASCII)) | st.just(ANY_ASCII))
def test_a_text_has_the_same_words_beside_another_script(text: str) -> None:
    assert words_of(text) == words_of(f"{text} 東")[:-1]
