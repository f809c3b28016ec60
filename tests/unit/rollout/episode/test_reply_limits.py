import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.mask_families import MASK_FAMILIES, mask_tokenizer
from stillroom.rollout.episode.loop import cut_at_characters, cut_at_tokens

TOKENIZERS = {name: mask_tokenizer(MASK_FAMILIES[name]) for name in ("qwen", "gemma", "mistral")}


def test_characters_are_counted():
    assert cut_at_characters(3)("abc") == "abc"
    assert cut_at_characters(3)("abcd") == "abc\n[cut: 3 of 4 characters are shown]"


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60)
@given(text=st.text(max_size=60), most=st.integers(1, 12))
def test_what_is_cut_is_the_end_and_is_told(name, text, most):
    def num_tokens(shown):
        return len(TOKENIZERS[name].encode(shown, add_special_tokens=False))

    cut = cut_at_tokens(TOKENIZERS[name], most)(text)

    if num_tokens(text) <= most:
        assert cut == text
    else:
        shown, mark = cut.rsplit("\n", 1)
        assert text.startswith(shown)
        assert mark == f"[cut: {most} of {num_tokens(text)} tokens are shown]"


def test_words_are_kept_up_to_the_limit():
    tokenizer = TOKENIZERS["qwen"]
    text = "The lamp costs 12. The chair costs 30."
    kept = tokenizer.decode(tokenizer.encode(text)[:5])

    assert cut_at_tokens(tokenizer, 5)(text).split("\n")[0] == kept
