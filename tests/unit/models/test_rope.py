"""Sequences whose rotary frequencies differ never share a pass."""

import pytest
import torch

from fakes.families import ORIGINAL_CONTEXT, build_family
from stillroom.models.batches import PassRules, TokenSequence
from stillroom.models.lm_head import HeadRunner, token_logprobs
from stillroom.models.probe import choose_passes
from stillroom.models.rope import RopeBoundary, rope_boundaries

LENGTHS = (5, ORIGINAL_CONTEXT + 1, ORIGINAL_CONTEXT, ORIGINAL_CONTEXT + 20, 30, 30)


def sequences():
    draw = torch.Generator().manual_seed(0)
    start = torch.randint(3, 350, (10,), generator=draw).tolist()
    rows = [
        (start + torch.randint(3, 350, (length,), generator=draw).tolist())[:length]
        for length in LENGTHS
    ]
    return [TokenSequence(row, [i % 4 != 1 for i in range(len(row))]) for row in rows]


def gradients_of(model, loss):
    loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("family", ["phi4-mini", "llama-dynamic", "phimoe"])
def test_a_batch_across_the_original_context_is_as_exact_as_single_passes(family):
    torch.set_num_threads(1)
    model, plain = build_family(family), build_family(family)
    head = HeadRunner(model)
    choose_passes(head)
    batch = head.collate(sequences())
    logprobs_N = head.batch_logprobs(batch)
    ours = gradients_of(model, logprobs_N.sum())

    parts = []
    for sequence in sequences():
        # A model of its own, since transformers keeps the frequencies of longer passes.
        if family == "llama-dynamic":
            plain.model.rotary_emb = build_family(family).model.rotary_emb
        logits = plain(torch.tensor([sequence.ids]), use_cache=False).logits[0, :-1]
        every = token_logprobs(logits, torch.tensor(sequence.ids[1:]))
        parts.append(every[torch.tensor(sequence.trained[1:])])
    expected_N = torch.cat(parts)

    assert len(batch.passes) == (4 if family == "llama-dynamic" else 2)
    assert torch.allclose(logprobs_N, expected_N, atol=1e-4)
    for name, gradient in gradients_of(plain, expected_N.sum()).items():
        assert torch.allclose(
            ours[name], gradient, rtol=1e-3, atol=1e-4 * gradient.abs().max().item()
        )


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("phi4-mini", (RopeBoundary(ORIGINAL_CONTEXT),)),
        ("llama-dynamic", (RopeBoundary(ORIGINAL_CONTEXT, is_per_length=True),)),
        ("llama3", ()),
        ("gpt-oss", ()),
        ("gemma3", ()),
    ],
)
def test_boundaries_are_read_from_the_configuration(family, expected):
    assert rope_boundaries(build_family(family).config) == expected


def test_lengths_of_one_class_share_a_pass():
    lengths = [5, 30, 24, 40, 30]

    assert PassRules(boundaries=(RopeBoundary(24),)).groups(lengths) == [[0, 2], [1, 3, 4]]
    exact = PassRules(boundaries=(RopeBoundary(24, is_per_length=True),))
    assert exact.groups(lengths) == [[0, 2], [1, 4], [3]]
    assert PassRules("alone").groups(lengths) == [[0], [1], [2], [3], [4]]
