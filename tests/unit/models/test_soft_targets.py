from functools import partial

import pytest
import torch

from stillroom.models.divergence import (
    at_temperature,
    differentiable,
    jensen_shannon,
    reverse_kl,
    top_k_forward_kl,
    top_tokens,
)

forward_kl = partial(jensen_shannon, beta=0.0)


def drawn(num=6, vocab=30, seed=0):
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (
        3 * torch.randn(num, vocab, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    return student.requires_grad_(), teacher


def whole(student, teacher, temperature, form=forward_kl):
    """The divergence of logits at a temperature, as autograd is given it."""
    logprobs = torch.log_softmax(student.detach(), -1)
    teacher = torch.log_softmax(teacher, -1)
    divergence = at_temperature(form, logprobs, teacher, logprobs.exp(), temperature=temperature)
    return differentiable(student, divergence)


def of_top(student, teacher, temperature, k):
    logprobs = torch.log_softmax(student.detach(), -1)
    top = top_tokens(teacher, k)
    divergence = top_k_forward_kl(logprobs, top, logprobs.exp(), temperature=temperature)
    return differentiable(student, divergence)


def naive_kl(p_logits, q_logits):
    p, q = torch.log_softmax(p_logits, -1), torch.log_softmax(q_logits, -1)
    return (p.exp() * (p - q)).sum(-1)


def naive_top(student, teacher, temperature, k):
    """The two parts written as they are defined, for autograd."""
    ids = teacher.topk(k, -1).indices
    t, s = torch.log_softmax(teacher, -1).gather(1, ids), torch.log_softmax(student, -1)
    s = s.gather(1, ids)
    mass, own = t.exp().sum(-1), s.exp().sum(-1)
    within = naive_kl(t / temperature, s / temperature)
    parts = temperature**2 * mass * within + mass * (mass / own).log()
    if k == teacher.shape[1]:
        return parts
    return parts + (1 - mass) * ((1 - mass) / (1 - own)).log()


def same_with_gradient(ours, reference, student, *, tolerance=1e-10):
    torch.testing.assert_close(ours.detach(), reference.detach(), rtol=tolerance, atol=tolerance)
    weights = torch.arange(1.0, len(ours) + 1, dtype=torch.float64)
    [own] = torch.autograd.grad((ours * weights).sum(), student, retain_graph=True)
    [theirs] = torch.autograd.grad((reference * weights).sum(), student)
    torch.testing.assert_close(own, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
def test_a_divergence_at_a_temperature_is_the_definition_times_its_square(temperature):
    student, teacher = drawn()

    reference = temperature**2 * naive_kl(teacher / temperature, student / temperature)
    same_with_gradient(whole(student, teacher, temperature), reference, student)

    reversed_kl = temperature**2 * naive_kl(student / temperature, teacher / temperature)
    ours = whole(student, teacher, temperature, form=reverse_kl)
    same_with_gradient(ours, reversed_kl, student)


@pytest.mark.parametrize("k", [1, 5, 29, 30])
@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_the_likeliest_tokens_and_the_rest_are_compared_as_defined(k, temperature):
    student, teacher = drawn(seed=1)

    ours = of_top(student, teacher, temperature, k)

    same_with_gradient(ours, naive_top(student, teacher, temperature, k), student)


def test_tokens_of_probability_zero_cost_nothing_and_stay_finite():
    student, teacher = drawn(vocab=12, seed=5)
    teacher[:, 3:] = -torch.inf
    for loss in (whole(student, teacher, 4.0), of_top(student, teacher, 4.0, 5)):
        [gradient] = torch.autograd.grad(loss.sum(), student, retain_graph=True)
        assert torch.isfinite(loss).all()
        assert torch.isfinite(gradient).all()


def test_fewer_of_the_likeliest_tokens_are_those_that_would_have_been_taken():
    _, teacher = drawn(seed=6)

    few, direct = top_tokens(teacher, 20).first(4), top_tokens(teacher, 4)

    assert few.ids_NK.equal(direct.ids_NK)
    torch.testing.assert_close(few.logprobs_NK, direct.logprobs_NK)
    torch.testing.assert_close(few.rest_N, direct.rest_N)
