"""Divergences' values and gradients formed by hand are autograd's in float64."""

import math

import pytest
import torch

from stillroom.models.cpu.divergence_gradients import (
    buckets_gradient,
    jensen_shannon_gradient,
    reverse_kl_gradient,
)
from stillroom.models.divergence import (
    bucket_logprobs,
    full_reverse_kl,
    jensen_shannon_of,
    shared_logprobs,
    top_k_reverse_kl,
)

NUM, VOCABULARY = 7, 30


def drawn(seed, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(NUM, VOCABULARY, generator=generator)


def by_hand(student, teacher, form):
    student, teacher = student.log_softmax(-1), teacher.log_softmax(-1)
    return form(student, teacher, student.exp())


def buckets(k):
    def form(student, teacher, shares):
        ids = teacher.topk(k, dim=-1).indices
        return buckets_gradient(student, shares, ids, bucket_logprobs(teacher, ids))

    return form


def jensen_shannon(beta):
    return lambda *given: jensen_shannon_gradient(*given, beta=beta)


def exact_jensen_shannon(beta):
    return lambda student, teacher: jensen_shannon_of(*shared_logprobs(student, teacher), beta=beta)


def exact_buckets(k):
    return lambda student, teacher: top_k_reverse_kl(student, teacher, k=k)


FORMS = {
    "reverse KL": (reverse_kl_gradient, full_reverse_kl),
    **{f"JSD {b}": (jensen_shannon(b), exact_jensen_shannon(b)) for b in (0, 0.1, 0.5, 1)},
    **{f"top {k}": (buckets(k), exact_buckets(k)) for k in (1, 4, VOCABULARY)},
}


def exact(student, teacher, name):
    student = student.double().requires_grad_()
    value = FORMS[name][1](student, teacher.double())
    return value.detach(), torch.autograd.grad(value.sum(), student)[0]


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("scale", [0.1, 3.0, 20.0])
def test_value_and_gradient_are_autograds(name, scale):
    student, teacher = drawn(0, scale), drawn(1, scale)
    value, gradient = exact(student, teacher, name)

    found = by_hand(student, teacher, FORMS[name][0])

    assert found.value_n.double() == pytest.approx(value, rel=1e-5, abs=1e-5)
    largest = max(1.0, gradient.abs().max().item())
    assert (found.gradient_nV.double() - gradient).abs().max().item() < 1e-5 * largest


@pytest.mark.parametrize("name", ["reverse KL", "JSD 0.5", "top 4"])
def test_tokens_that_neither_can_take_change_nothing(name):
    student, teacher = drawn(2), drawn(3)
    without = by_hand(student[:, 1:], teacher[:, 1:], FORMS[name][0])
    student[:, 0] = teacher[:, 0] = -math.inf

    found = by_hand(student, teacher, FORMS[name][0])

    assert found.value_n == pytest.approx(without.value_n)
    assert torch.allclose(found.gradient_nV[:, 1:], without.gradient_nV, atol=1e-6)
    assert found.gradient_nV[:, 0].abs().max() == 0


def test_a_divergence_without_end_stays_so():
    student, teacher = drawn(4), drawn(5)
    teacher[2, 7] = -math.inf

    found = by_hand(student, teacher, reverse_kl_gradient)

    assert torch.isinf(found.value_n[2])
    assert torch.isfinite(found.value_n[[0, 1, 3, 4, 5, 6]]).all()
