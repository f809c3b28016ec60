import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stillroom.models.divergence import full_reverse_kl


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


def test_the_gradient_is_that_of_the_definition_in_float64():
    generator = torch.Generator().manual_seed(1)
    student = torch.randn(4, 30, generator=generator) * 3
    teacher = torch.randn(4, 30, generator=generator) * 3

    ours = student.clone().requires_grad_()
    full_reverse_kl(ours, teacher).sum().backward()

    # d KL / d z_j = p_j (log p_j - log q_j - KL), from the softmax's derivative.
    log_p, log_q = student.double().log_softmax(-1), teacher.double().log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1, keepdim=True)
    wanted = log_p.exp() * (log_p - log_q - kl)
    assert ours.grad is not None
    assert torch.allclose(ours.grad.double(), wanted, atol=1e-5)


def test_columns_that_only_one_model_has_are_left_out():
    student = torch.randn(3, 10, generator=torch.Generator().manual_seed(2))
    teacher = torch.randn(3, 12, generator=torch.Generator().manual_seed(3))

    shared = full_reverse_kl(student, teacher[:, :10])

    assert torch.equal(full_reverse_kl(student, teacher), shared)
    assert torch.equal(full_reverse_kl(teacher, student), full_reverse_kl(teacher[:, :10], student))


def test_tokens_the_student_never_takes_add_nothing():
    student = torch.tensor([[0.0, -1e30]])
    teacher = torch.tensor([[0.0, -1e30]])

    assert full_reverse_kl(student, teacher).item() == 0.0


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10_000), scale=st.floats(0.1, 30))
def test_the_divergence_is_never_negative_and_agrees_with_float64(seed, scale):
    generator = torch.Generator().manual_seed(seed)
    student = torch.randn(3, 50, generator=generator) * scale
    teacher = torch.randn(3, 50, generator=generator) * scale

    found = full_reverse_kl(student, teacher).double()

    log_p, log_q = student.double().log_softmax(-1), teacher.double().log_softmax(-1)
    wanted = (log_p.exp() * (log_p - log_q)).sum(-1)
    assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-5)
    assert found.min().item() > -1e-6
