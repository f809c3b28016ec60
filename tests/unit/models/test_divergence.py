import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Categorical

from stillroom.models import divergence as divergences
from stillroom.models.divergence import (
    differentiable,
    entropy,
    jensen_shannon,
    reverse_kl,
    shared_logprobs,
    with_bucket,
)


def of_logits(form, student, teacher):
    """A divergence of logits, with its gradient, as autograd is given it."""
    logprobs, teacher_logprobs = shared_logprobs(student.detach(), teacher)
    divergence = form(logprobs, teacher_logprobs, logprobs.exp())
    return differentiable(student[:, : logprobs.shape[1]], divergence)


def full_reverse_kl(student, teacher):
    return of_logits(reverse_kl, student, teacher)


def top_k_reverse_kl(student, teacher, *, k):
    return of_logits(partial(divergences.top_k_reverse_kl, k=k), student, teacher)


def test_the_divergence_of_a_coin_is_the_hand_computed_one():
    student = torch.tensor([[0.25, 0.75]]).log()
    teacher = torch.tensor([[0.5, 0.5]]).log()

    # 1/4 ln(1/2) + 3/4 ln(3/2) = 0.130812
    wanted = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    assert full_reverse_kl(student, teacher).item() == pytest.approx(wanted, abs=1e-6)


def test_equal_distributions_have_no_divergence_and_no_gradient():
    student = torch.randn(5, 40, generator=torch.Generator().manual_seed(0)).requires_grad_()

    # Logits say the same distribution whatever is added to all of them.
    divergence = full_reverse_kl(student, student.detach() + 3.0)
    divergence.sum().backward()

    assert divergence.abs().max().item() < 1e-6
    assert student.grad is not None
    assert student.grad.abs().max().item() < 1e-6


def test_columns_that_only_one_model_has_are_left_out():
    student = torch.randn(3, 10, generator=torch.Generator().manual_seed(2))
    teacher = torch.randn(3, 12, generator=torch.Generator().manual_seed(3))

    shared = full_reverse_kl(student, teacher[:, :10])

    assert torch.equal(full_reverse_kl(student, teacher), shared)
    assert torch.equal(full_reverse_kl(teacher, student), full_reverse_kl(teacher[:, :10], student))


def logits(seed, *, scale=3.0, shape=(4, 30)):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * scale


@settings(max_examples=50)
@given(seed=st.integers(0, 10_000), scale=st.floats(0.1, 20), k=st.integers(1, 50))
def test_buckets_hide_some_of_the_divergence_and_never_add_to_it(seed, scale, k):
    student = logits(seed, scale=scale, shape=(3, 50)).double()
    teacher = logits(seed + 1, scale=scale, shape=(3, 50)).double()

    found = top_k_reverse_kl(student, teacher, k=k)

    assert found.min().item() > -1e-9
    assert (found <= full_reverse_kl(student, teacher) + 1e-9).all()
    assert top_k_reverse_kl(teacher, teacher, k=k).abs().max().item() < 1e-9


def test_what_num_teacher_tokens_leave_is_the_rest_and_never_nothing():
    reported = torch.tensor([[0.5, 0.25], [0.75, 0.25]]).log()

    found = with_bucket(reported)

    assert found[0].exp().tolist() == pytest.approx([0.5, 0.25, 0.25])
    # A rounded 1 leaves at least this, so that a student's mass elsewhere costs much, not all.
    assert found[1, 2].exp().item() == pytest.approx(1e-7, rel=1e-3)


def test_the_entropy_is_that_of_the_distribution():
    logprobs = logits(1).log_softmax(-1)
    found = entropy(logprobs, logprobs.exp())

    assert torch.allclose(found.double(), Categorical(logits=logits(1).double()).entropy())
    assert entropy(torch.tensor([[0.0, -math.inf]]), torch.tensor([[1.0, 0.0]])).item() == 0.0


NUM, VOCABULARY = 7, 30


def drawn(seed, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(NUM, VOCABULARY, generator=generator)


def in_closed_form(student, teacher, form):
    student, teacher = student.log_softmax(-1), teacher.log_softmax(-1)
    return form(student, teacher, student.exp())


def kl_by_definition(p, q):
    return (p * (p.log() - q.log())).sum(-1)


def jsd_by_definition(beta):
    def divergence(p, q):
        if beta in {0, 1}:
            return kl_by_definition(p, q) if beta else kl_by_definition(q, p)
        m = beta * q + (1 - beta) * p
        return beta * kl_by_definition(q, m) + (1 - beta) * kl_by_definition(p, m)

    return divergence


def buckets_by_definition(k):
    def divergence(p, q):
        ids = q.topk(k, dim=-1).indices
        is_other = torch.ones_like(q).scatter(1, ids, 0.0)
        both = []
        for x in (p, q):
            others = [(x * is_other).sum(-1, keepdim=True)] if k < VOCABULARY else []
            both.append(torch.cat([x.gather(1, ids), *others], dim=1))
        return kl_by_definition(*both)

    return divergence


FORMS = {
    "reverse KL": (reverse_kl, kl_by_definition),
    **{
        f"JSD {b}": (partial(jensen_shannon, beta=b), jsd_by_definition(b))
        for b in (0, 0.1, 0.5, 1)
    },
    **{
        f"top {k}": (partial(divergences.top_k_reverse_kl, k=k), buckets_by_definition(k))
        for k in (1, 4, VOCABULARY)
    },
}


def exact(student, teacher, name):
    student = student.double().requires_grad_()
    value = FORMS[name][1](student.softmax(-1), teacher.double().softmax(-1))
    return value.detach(), torch.autograd.grad(value.sum(), student)[0]


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("scale", [0.1, 20.0])
def test_value_and_gradient_are_autograds(name, scale):
    student, teacher = drawn(0, scale), drawn(1, scale)
    value, gradient = exact(student, teacher, name)

    found = in_closed_form(student, teacher, FORMS[name][0])

    assert found.value_N.double() == pytest.approx(value, rel=1e-5, abs=1e-5)
    largest = max(1.0, gradient.abs().max().item())
    assert (found.compute_gradient().double() - gradient).abs().max().item() < 1e-5 * largest


@pytest.mark.parametrize("name", ["reverse KL", "JSD 0.5", "top 4"])
def test_tokens_that_neither_can_take_change_nothing(name):
    student, teacher = drawn(2), drawn(3)
    without = in_closed_form(student[:, 1:], teacher[:, 1:], FORMS[name][0])
    student[:, 0] = teacher[:, 0] = -math.inf

    found = in_closed_form(student, teacher, FORMS[name][0])

    assert found.value_N == pytest.approx(without.value_N)
    gradient = found.compute_gradient()
    assert torch.allclose(gradient[:, 1:], without.compute_gradient(), atol=1e-6)
    assert gradient[:, 0].abs().max() == 0


def test_a_divergence_without_end_stays_so():
    student, teacher = drawn(4), drawn(5)
    teacher[2, 7] = -math.inf

    found = in_closed_form(student, teacher, reverse_kl)

    assert torch.isinf(found.value_N[2])
    assert torch.isfinite(found.value_N[[0, 1, 3, 4, 5, 6]]).all()
