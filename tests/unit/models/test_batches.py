import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.families import build_family
from stillroom.models.batches import (
    PassRules,
    TokenSequence,
    add_empty_passes,
    collate,
    microbatches,
)
from stillroom.models.lm_head import HeadRunner

CPU = torch.device("cpu")


sequences = st.lists(
    st.lists(st.tuples(st.integers(0, 99), st.booleans()), min_size=1, max_size=12).map(
        lambda pairs: TokenSequence([i for i, _ in pairs], [t for _, t in pairs])
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=50)
@given(sequences)
def test_trained_tokens_keep_the_order_of_the_sequences(given_sequences):
    batch = collate(given_sequences, device=CPU)

    wanted = [
        (row, token)
        for row, sequence in enumerate(given_sequences)
        for token, is_trained in zip(sequence.ids[1:], sequence.trained[1:], strict=True)
        if is_trained
    ]
    assert list(zip(batch.rows_N.tolist(), batch.targets_N.tolist(), strict=True)) == wanted
    assert batch.num_trained == sum(sequence.num_trained for sequence in given_sequences)


@settings(max_examples=100)
@given(given_sequences=sequences, shared=st.lists(st.integers(0, 99), max_size=40))
def test_a_pack_predicts_each_trained_token_from_the_tokens_before_it(given_sequences, shared):
    given_sequences = [
        TokenSequence(shared + s.ids, [True] * len(shared) + s.trained) for s in given_sequences
    ]

    batch = collate(given_sequences, device=CPU, rules=PassRules("packed"))

    padded = collate(given_sequences, device=CPU)
    assert batch.rows_N.tolist() == padded.rows_N.tolist()
    assert batch.targets_N.tolist() == padded.targets_N.tolist()
    for source, sequence_row, place in zip(
        batch.passes[0].sources_N.tolist(), *_rows_and_places(padded), strict=True
    ):
        assert _seen_from(batch.passes[0], source) == given_sequences[sequence_row].ids[: place + 1]


def _rows_and_places(padded):
    width = padded.passes[0].ids_BT.shape[1]
    return padded.rows_N.tolist(), (padded.passes[0].sources_N % width).tolist()


def _seen_from(one, source):
    """The tokens that a position of a pack attends to, in the order of their positions."""
    spans, starts = one.pack.spans, [0]
    for span in spans:
        starts.append(starts[-1] + span.length)
    own = next(i for i in range(len(spans)) if starts[i] <= source < starts[i + 1])
    places = [p for i in spans[own].before for p in range(starts[i], starts[i + 1])]
    places += range(starts[own], source + 1)
    positions = one.positions_BT[0, places].tolist()
    assert positions == list(range(len(places)))
    return one.ids_BT[0, places].tolist()


@given(lengths=st.lists(st.integers(1, 50), max_size=30), max_tokens=st.integers(1, 120))
def test_microbatches_hold_every_sequence_once_within_the_padded_size(lengths, max_tokens):
    groups = list(microbatches(lengths, max_tokens=max_tokens))

    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        padded = len(group) * max(lengths[index] for index in group)
        assert padded <= max_tokens or len(group) == 1


def test_empty_passes_change_no_hidden_state():
    head = HeadRunner(build_family("phi4-mini"))
    rows = [list(range(3, 12)), list(range(5, 40))]
    both = head.collate([TokenSequence(row, [True] * len(row)) for row in rows])
    single = head.collate([TokenSequence(rows[0], [True] * 9)])

    for batch in (both, single):
        longer = add_empty_passes(batch, 2)

        assert len(longer.passes) == len(batch.passes) + 2
        assert torch.equal(head.batch_hidden(longer), head.batch_hidden(batch))
