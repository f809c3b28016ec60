import numpy as np
import pytest
import torch

from stillroom.errors import DataError
from stillroom.models.batches import TokenSequence
from stillroom.models.divergence import TopTokens
from stillroom.train.soft_targets.store import (
    StoreHeader,
    find_store,
    open_store,
    open_writer,
    sequence_key,
    store_name,
)

CPU = torch.device("cpu")
MASK = [False, True, True, False, True, True]
SEQUENCES = [TokenSequence(list(range(i, i + 6)), MASK) for i in range(5)]


def header(k=4, vocab_size=100_000):
    return StoreHeader(teacher={"content": "abc"}, k=k, vocab_size=vocab_size)


def drawn(sequence, of):
    generator = torch.Generator().manual_seed(sequence.ids[0])
    num = sequence.num_trained
    logits = torch.randn(num, of.k + 1, generator=generator)
    ids = torch.randint(of.vocab_size, (num, of.k), generator=generator)
    ids[0, 0] = of.vocab_size - 1
    logprobs = torch.log_softmax(logits, -1).sort(descending=True).values
    return TopTokens(ids, logprobs[:, :-1], logprobs[:, -1])


def write(path, of, sequences=SEQUENCES):
    with open_writer(path, of) as writer:
        for sequence in sequences:
            if (key := sequence_key(sequence)) not in writer.done:
                writer.add(key, drawn(sequence, of))


@pytest.mark.parametrize("vocab_size", [569, 65_536, 65_537, 200_000])
def test_what_is_read_is_what_was_written(tmp_path, vocab_size):
    of = header(vocab_size=vocab_size)
    write(tmp_path / "a.top", of)

    read = open_store(tmp_path / "a.top").read(SEQUENCES[::-1], k=4, device=CPU)

    wanted = [drawn(sequence, of) for sequence in SEQUENCES[::-1]]
    assert read.ids_NK.equal(torch.cat([one.ids_NK for one in wanted]))
    for name in ("logprobs_NK", "rest_N"):
        exact = torch.cat([getattr(one, name) for one in wanted])
        torch.testing.assert_close(getattr(read, name), exact, rtol=1e-3, atol=1e-6)


def test_a_store_that_was_cut_anywhere_keeps_its_complete_records(tmp_path):
    """Cut at each byte, as a kill or a full disk may."""
    write(tmp_path / "whole.top", header(k=2))
    data, begin = (tmp_path / "whole.top").read_bytes(), len(header(k=2).encoded)
    for size in range(0, len(data), 7):
        partial = tmp_path / ".cut.top.partial"
        partial.write_bytes(data[:size])
        with open_writer(tmp_path / "cut.top", header(k=2)) as writer:
            num_kept = len(writer.done)
            for sequence in SEQUENCES[num_kept:]:
                writer.add(sequence_key(sequence), drawn(sequence, header(k=2)))
        assert num_kept == max(0, (size - begin) * 5 // (len(data) - begin))
        assert (tmp_path / "cut.top").read_bytes() == data


def test_a_changed_byte_is_noticed_wherever_it_is(tmp_path):
    write(tmp_path / "a.top", header())
    data = bytearray((tmp_path / "a.top").read_bytes())
    for place in range(len(header().encoded), len(data), 11):
        changed = bytearray(data)
        changed[place] ^= 1
        (tmp_path / "a.top").write_bytes(changed)
        with pytest.raises(DataError, match="delete it"):
            open_store(tmp_path / "a.top")


def test_a_store_serves_the_same_teacher_with_as_many_tokens_and_sequences(tmp_path):
    write(tmp_path / "a.top", header(k=4))
    keys = {sequence_key(one) for one in SEQUENCES}

    found = find_store(tmp_path, header(k=3), set(list(keys)[:2]))

    assert found is not None
    assert found.read(SEQUENCES, k=3, device=CPU).ids_NK.shape == (20, 3)
    assert find_store(tmp_path, header(k=5), keys) is None
    other = StoreHeader(teacher={"content": "other"}, k=4, vocab_size=100_000)
    assert find_store(tmp_path, other, keys) is None
    longer = TokenSequence([*SEQUENCES[0].ids, 1], [*SEQUENCES[0].trained, True])
    assert find_store(tmp_path, header(), keys | {sequence_key(longer)}) is None


def test_the_mask_is_part_of_a_sequences_key_and_the_name_is_of_the_content():
    first = SEQUENCES[0]
    masked = TokenSequence(first.ids, [False] * 5 + [True])
    assert sequence_key(first) != sequence_key(masked)
    keys = [sequence_key(one) for one in SEQUENCES]
    assert store_name(header(), keys) == store_name(header(), keys[::-1])
    assert store_name(header(), keys) != store_name(header(k=5), keys)
    assert store_name(header(), keys) != store_name(header(), keys[1:])


def test_a_probability_that_sixteen_bits_cannot_tell_from_zero_stays_a_number(tmp_path):
    of = header(k=2)
    top = TopTokens(
        torch.tensor([[1, 2]]), torch.tensor([[-1e-9, -90.0]]), torch.tensor([-torch.inf])
    )
    with open_writer(tmp_path / "a.top", of) as writer:
        writer.add(b"k" * 16, top)
    store = open_store(tmp_path / "a.top")
    assert np.frombuffer(store.record(b"k" * 16)[-2:], "<f2")[0] == -np.inf
