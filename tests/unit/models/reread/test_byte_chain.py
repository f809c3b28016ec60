import random

import pytest
import torch

from stillroom.models.reread.byte_chain import (
    GradientSums,
    SortedSums,
    TokenRanges,
    point_kl,
    sums_of_sorted,
    sums_row_by_row,
    symbol_probabilities,
    trie_nodes,
    with_longer_tokens,
)
from stillroom.models.reread.comparison_points import Symbol, SymbolSet
from stillroom.models.reread.token_bytes import ByteTrie, TokenBytes

CPU = torch.device("cpu")
END_STUDENT, END_TEACHER = 12, 9
STUDENT = [*b"a b c ab abc ac ba c \xff \xffa".split(), b"", b"\n", b"</s>"]
TEACHER = [b"a", b"b", b"c", b"bc", b"bca", b"\n", b"\nc", b"\xff", b"abcab", b"<end>"]
CHOICES = {
    "text": SymbolSet((Symbol((END_STUDENT,), (END_TEACHER,)),)),
    "a mark of one side": SymbolSet((Symbol((END_STUDENT,), (), (), (10,)),)),
    "a blank that may be text": SymbolSet((Symbol((END_STUDENT,), (END_TEACHER,), (10,), (10,)),)),
    "marks only": SymbolSet((Symbol((END_STUDENT,), (END_TEACHER,)),), has_bytes=False),
    "bytes only": SymbolSet((), is_conditional=True),
    "arguments": SymbolSet(()),
}


def tokens_of(words, mark):
    return TokenBytes(words, frozenset([mark]))


def brute_force(words, own, other_mark, row, prefix, symbol_set):
    """Returns the probabilities of symbols, and which the side can tell apart, one by one."""
    inside = [i for i, w in enumerate(words) if w.startswith(prefix) and w and i != other_mark]
    total = 1.0 if not prefix and not symbol_set.is_conditional else sum(row[i] for i in inside)
    of_byte = {}
    for i in inside:
        if len(words[i]) > len(prefix):
            letter = words[i][len(prefix)]
            of_byte[letter] = of_byte.get(letter, 0.0) + row[i]
    symbols = []
    hidden = set()
    for symbol, (ids, letters) in zip(symbol_set.symbols, own, strict=True):
        is_known = all(letter in of_byte for letter in letters) and not (ids and prefix)
        mass = sum(of_byte.get(letter, 0.0) for letter in letters) + sum(row[i] for i in ids)
        symbols.append(mass / total if is_known else None)
        hidden |= {*symbol.student_bytes, *symbol.teacher_bytes}
    has_bytes = symbol_set.has_bytes or symbol_set.is_conditional
    letters = [
        of_byte[b] / total if has_bytes and b in of_byte and b not in hidden else None
        for b in range(256)
    ]
    return letters + symbols


def brute_force_kl(student_row, teacher_row, prefixes, symbol_set):
    mine = [(s.student_ids, s.student_bytes) for s in symbol_set.symbols]
    teachers = [(s.teacher_ids, s.teacher_bytes) for s in symbol_set.symbols]
    ours = brute_force(STUDENT, mine, END_STUDENT, student_row, prefixes[0], symbol_set)
    others = brute_force(TEACHER, teachers, END_TEACHER, teacher_row, prefixes[1], symbol_set)
    both = [(p, q) for p, q in zip(ours, others, strict=True) if p is not None and q is not None]
    both.append((1 - sum(p for p, _ in both), 1 - sum(q for _, q in both)))
    sides = ([torch.as_tensor(x, dtype=torch.float64) for x in s] for s in zip(*both, strict=True))
    p, q = (torch.stack(side).clamp_min(1e-7) for side in sides)
    return (p * (p.log() - q.log())).sum()


def sums_of(probabilities, trie, *places):
    order = torch.from_numpy(trie.order)
    return SortedSums(probabilities, order, places)


def kl_and_gradient(logits, teacher_logits, rows, prefixes, symbol_set):
    """Returns the divergences of points of one symbol set, and the gradient of their sum."""
    tries = ByteTrie(tokens_of(STUDENT, END_STUDENT)), ByteTrie(tokens_of(TEACHER, END_TEACHER))
    orders = [torch.from_numpy(trie.order) for trie in tries]
    places = [trie_nodes(t, [p[i] for p in prefixes], CPU) for i, t in enumerate(tries)]
    probabilities, others = logits.softmax(-1), teacher_logits.softmax(-1)
    sums = [
        SortedSums(given, order, [place])
        for given, order, place in zip((probabilities, others), orders, places, strict=True)
    ]
    student = symbol_probabilities(sums[0], rows, places[0], symbol_set, is_student=True)
    teacher = symbol_probabilities(sums[1], rows, places[1], symbol_set, is_student=False)
    kl = point_kl(student, teacher)
    slopes = GradientSums(sums[0].ranges, len(logits))
    slopes.add(rows, places[0], symbol_set, kl, student)
    return kl.value_m, slopes.gradient(probabilities, torch.empty_like(logits))


PLACES = [
    (0, (b"", b"")),
    (1, (b"a", b"")),
    (2, (b"ab", b"b")),
    (0, (b"", b"bc")),
    (1, (b"\xff", b"\n")),
    (2, (b"a", b"abca")),
]


@pytest.mark.parametrize("name", CHOICES)
def test_next_bytes_and_their_divergence_are_those_of_brute_force(name):
    torch.manual_seed(0)
    logits = torch.randn(3, len(STUDENT), dtype=torch.float64) * 2
    others = torch.randn(3, len(TEACHER), dtype=torch.float64) * 2
    rows = torch.tensor([row for row, _ in PLACES])
    prefixes = [prefix for _, prefix in PLACES]

    values, gradient = kl_and_gradient(logits, others, rows, prefixes, CHOICES[name])

    given = logits.clone().requires_grad_()
    expected = [
        brute_force_kl(given.softmax(-1)[row], others.softmax(-1)[row], prefix, CHOICES[name])
        for row, prefix in PLACES
    ]
    sum(expected).backward()
    assert torch.allclose(values, torch.stack(expected), atol=1e-12)
    assert torch.allclose(gradient, given.grad, atol=1e-12)
    assert (values >= -1e-12).all()


def test_a_tile_keeps_only_the_sums_that_its_units_need_whichever_way_they_are_added_up():
    draws = random.Random(0)
    words = {bytes(draws.choices(b"abcdefgh ", k=draws.randint(1, 7))) for _ in range(20_000)}
    words = [*sorted(words, key=lambda _: draws.random()), b"</s>", b""]
    trie = ByteTrie(TokenBytes(words, frozenset([len(words) - 2])))
    prefixes = [b"", b"a", b"ab", b"h ", b"", b"c"]
    places = trie_nodes(trie, prefixes, CPU)
    ranges = TokenRanges(torch.from_numpy(trie.order), len(words), [places])
    probabilities = torch.rand(3, len(words)).softmax(-1)

    row_by_row, of_sorted = (
        add(probabilities, ranges) for add in (sums_row_by_row, sums_of_sorted)
    )

    assert len(ranges) <= 1 + 11 * len(set(prefixes))
    assert row_by_row.shape == (3, len(ranges) + 1)
    assert torch.allclose(row_by_row, of_sorted, rtol=0, atol=1e-14)
    sums = SortedSums(probabilities, ranges.order_P, [places])
    for prefix, low, high in zip(prefixes, places.low_M, places.high_M, strict=True):
        begun = [i for i in trie.order if words[i].startswith(prefix)]
        expected = probabilities[1, begun].double().sum()
        rows = torch.tensor([1])
        inside = sums.mass_before(rows, high[None]) - sums.mass_before(rows, low[None])
        assert inside.item() == pytest.approx(expected.item(), abs=1e-12)


def test_where_a_longer_token_was_nearly_sure_what_follows_the_shorter_one_hardly_counts():
    torch.manual_seed(0)
    trie = ByteTrie(tokens_of(TEACHER, END_TEACHER))
    rows = torch.randn(2, len(TEACHER), dtype=torch.float64).softmax(-1)
    rows[0] *= 0.001
    rows[0, TEACHER.index(b"bc")] += 0.999
    symbol_set = SymbolSet((Symbol((END_STUDENT,), (END_TEACHER,)),))
    # The student wrote b and then something else: the teacher has read the token b.
    place, before = trie_nodes(trie, [b""], CPU), trie_nodes(trie, [b"b"], CPU)
    sums = sums_of(rows, trie, place, before)
    after = symbol_probabilities(sums, torch.tensor([1]), place, symbol_set, is_student=False)

    mixed = with_longer_tokens(after, sums, torch.tensor([0]), before, symbol_set)

    begun = {i: w for i, w in enumerate(TEACHER) if w.startswith(b"b")}
    total = sum(rows[0, i] for i in begun)
    share = rows[0, TEACHER.index(b"b")] / total
    expected = share * after.probabilities_mS[0]
    expected[ord("c")] += sum(rows[0, i] for i, w in begun.items() if len(w) > 1) / total
    assert torch.allclose(mixed.probabilities_mS[0], expected, atol=1e-12)
    assert mixed.probabilities_mS[0, ord("c")] > 0.99
