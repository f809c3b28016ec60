import pytest
from tokenizers import normalizers, pre_tokenizers

from fakes.mask_families import MASK_FAMILIES, mask_tokenizer
from fakes.token_kinds import KINDS, kind_tokenizer
from stillroom.errors import ModelError
from stillroom.models.reread.token_bytes import PROBE, TokenBytes, encode

TEXTS = [PROBE, "", " ", "a\x00b", "👩‍👩‍👧‍👦", "\r\n\r\n", "e\N{LATIN SMALL LETTER E WITH ACUTE}"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_tokens_are_those_of_the_text(kind):
    tokenizer = kind_tokenizer(kind)
    tokens = TokenBytes.from_tokenizer(tokenizer, kind)

    for text in TEXTS:
        assert tokens.text(encode(tokenizer, text)) == text.encode()
    marks = [tokenizer.decode([i]) for i in sorted(tokens.marker_ids)]
    assert set(KINDS[kind].marks[1:3]) <= set(marks)


def lower(core):
    core.normalizer = normalizers.Lowercase()


def compatible(core):
    core.normalizer = normalizers.NFKC()


def blank_first(core):
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lower, "normalises text before tokenizing"),
        (compatible, "normalises text before tokenizing"),
        (blank_first, "adds a space before every text"),
    ],
)
def test_a_tokenizer_that_changes_texts_is_refused(change, said):
    with pytest.raises(ModelError, match=said):
        TokenBytes.from_tokenizer(kind_tokenizer("llama", change=change), "teacher 'x'")


@pytest.mark.parametrize("family", ["mistral", "gemma"])
def test_sentence_piece_without_bytes_or_with_a_blank_is_refused(family):
    with pytest.raises(ModelError, match=r"adds a space|normalises text|has no token"):
        TokenBytes.from_tokenizer(mask_tokenizer(MASK_FAMILIES[family]), "teacher 'x'")
