"""Next bytes from the few tokens that a server lists, beside those of whole distributions."""

import math

import pytest
import torch

from stillroom.models.reread.byte_chain import (
    ListedTokens,
    SortedSums,
    SummedSymbols,
    point_kl,
    trie_nodes,
)
from stillroom.models.reread.comparison_points import Symbol, SymbolSet
from stillroom.models.reread.token_bytes import ByteTrie, TokenBytes

CPU = torch.device("cpu")
END = 9
WORDS = [b"a", b"b", b"c", b"bc", b"bca", b"\n", b"\nc", b"\xff", b"abcab", b"<end>", b"bd"]
TRIE = ByteTrie(TokenBytes(WORDS, frozenset([END])))
OTHERS = 256
CHOICES = {
    "text": SymbolSet((Symbol((END,), (END,)),)),
    "a blank that may be text": SymbolSet((Symbol((END,), (END,), (10,), (10,)),)),
    "marks only": SymbolSet((Symbol((END,), (END,)),), has_bytes=False),
    "bytes only": SymbolSet((), is_conditional=True),
}
# The position, the bytes of the token that are fixed, and the token before if it might go on.
PLACES = [
    (0, b"", b""),
    (1, b"b", b""),
    (2, b"", b"b"),
    (2, b"a", b""),
    (1, b"", b"a"),
    (1, b"bc", b""),
]


def rows(num=3, seed=0):
    torch.manual_seed(seed)
    return (torch.randn(num, len(WORDS), dtype=torch.float64) * 2).softmax(-1)


def listed(rows_kV, k, own):
    """Returns what a server lists of the rows: the k likeliest tokens, and the text's own."""
    top = rows_kV.log().topk(k, -1)
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    own_pairs = [(token, math.log(row[token])) for token, row in zip(own, rows_kV, strict=True)]
    return ListedTokens.from_logprobs(list(pairs), own_pairs, TRIE, CPU)


def at(symbols, places, symbol_set):
    """Returns the symbols at places; the first row is never that of a token before."""
    prefixes, words = [p for _, p, _ in places], [w for _, _, w in places]
    return symbols.probabilities_at(
        torch.tensor([row for row, _, _ in places]),
        trie_nodes(TRIE, prefixes, CPU),
        trie_nodes(TRIE, words, CPU),
        symbol_set,
    )


@pytest.mark.parametrize("name", CHOICES)
def test_all_tokens_listed_say_what_the_whole_distribution_says(name):
    table, symbol_set = rows(), CHOICES[name]
    whole = SummedSymbols(SortedSums(table, torch.from_numpy(TRIE.order)))

    exact = at(whole, PLACES, symbol_set)
    found = at(listed(table, len(WORDS), [0, 0, 3]), PLACES, symbol_set)

    shown = exact.is_known_mS & found.is_known_mS
    assert torch.allclose(found.probabilities_mS[shown], exact.probabilities_mS[shown], atol=1e-9)
    # Nothing is known of a byte that no token begins with.
    assert not (exact.is_known_mS & ~found.is_known_mS & (exact.probabilities_mS > 0)).any()
    student = at(
        SummedSymbols(SortedSums(rows(seed=1), torch.from_numpy(TRIE.order))), PLACES, symbol_set
    )
    assert torch.allclose(
        point_kl(student, exact).value_m, point_kl(student, found).value_m, atol=1e-9
    )


def test_a_byte_that_no_listed_token_has_gets_nothing_and_the_tail_counts_to_all_others():
    table = rows()
    found = at(listed(table, 2, [0, 0, 0]), [(0, b"", b"")], CHOICES["text"])

    top = table[0].topk(2).indices.tolist()
    kept = {*top, 0}
    for letter in range(256):
        begun = [i for i in kept if i != END and WORDS[i][0] == letter]
        assert found.probabilities_mS[0, letter].item() == pytest.approx(
            sum(table[0, i].item() for i in begun)
        )
        assert found.is_known_mS[0, letter].item() == bool(begun)
    kl = point_kl(found, found)
    assert kl.value_m.item() == 0
    # What a student sees as the probability of all others is the tail.
    tail = 1 - sum(table[0, i].item() for i in kept)
    assert 1 - found.probabilities_mS[0].sum().item() == pytest.approx(tail)


def test_within_a_token_the_tail_is_the_share_of_unlisted_tokens_that_begin_as_it_does():
    table = rows()
    own = WORDS.index(b"bc")
    row = listed(table, 1, [own, own, own])
    likeliest = table[1].argmax().item()

    found = at(row, [(1, b"b", b"")], CHOICES["text"])

    kept = {likeliest, own}
    tail = 1 - sum(table[1, i].item() for i in kept)
    inside = [i for i, word in enumerate(WORDS) if word.startswith(b"b")]
    unlisted = [i for i in range(len(WORDS)) if i != END and i not in kept]
    share = tail * sum(i in inside for i in unlisted) / len(unlisted)
    total = sum(table[1, i].item() for i in inside if i in kept) + share
    assert found.probabilities_mS[0, ord("c")].item() == pytest.approx(
        sum(table[1, i].item() for i in kept if WORDS[i].startswith(b"bc")) / total
    )
    assert not found.is_known_mS[0, ord("d")]


def test_a_server_that_lists_more_tokens_than_the_tokenizer_has_is_understood():
    beyond = ListedTokens.from_logprobs([([500, 1], [-1.0, -2.0])], [(1, -2.0)], TRIE, CPU)

    found = at(beyond, [(0, b"", b"")], CHOICES["text"])

    assert found.probabilities_mS[0, ord("b")].item() == pytest.approx(math.exp(-2))
    assert found.probabilities_mS.sum().item() == pytest.approx(math.exp(-2))
