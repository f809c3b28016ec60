import math

import pytest
import torch

from stillroom.train.methods.losses import (
    importance_sampling_losses,
    ppo_losses,
    preference_loss,
    reverse_kl_advantages,
    subtract_expected_advantage,
    zero_rounding,
)


def tensors(*values):
    return [torch.tensor(value) for value in values]


def test_the_preference_loss_is_the_hand_computed_one():
    # Log-ratios +1 (chosen) and -1 (rejected), so the margin is 0.5 × 2 = 1.
    result = preference_loss(*tensors([-4.0], [-7.0], [-5.0], [-6.0]), beta=0.5)

    # -ln sigmoid(1) = ln(1 + e^-1) = 0.313262
    assert result.losses_P.item() == pytest.approx(0.313262, abs=1e-6)
    assert result.margins_P.item() == pytest.approx(1.0)


def test_the_ipo_loss_is_the_squared_distance_to_its_target():
    result = preference_loss(*tensors([-1.0], [-1.5], [-1.2], [-1.1]), beta=0.25, kind="ipo")

    # Log-ratio 0.2 - (-0.4) = 0.6; target 1 / (2 × 0.25) = 2.
    assert result.losses_P.item() == pytest.approx((0.6 - 2) ** 2, abs=1e-6)
    assert result.margins_P.item() == pytest.approx(0.15)


def test_huge_margins_stay_finite():
    result = preference_loss(*tensors([0.0, -1e4], [-1e4, 0.0], [0.0, 0.0], [0.0, 0.0]), beta=1.0)

    assert result.losses_P.tolist() == pytest.approx([0.0, 1e4])


def test_the_importance_loss_is_minus_the_ratio_times_the_advantage():
    now, sampler, advantages = tensors([-1.0, -2.0], [-1.0, -2.5], [0.3, -0.2])

    found = importance_sampling_losses(now, sampler, advantages)

    # Ratios 1 and e^0.5 = 1.648721.
    assert found.tolist() == pytest.approx([-0.3, 0.329744], abs=1e-6)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "loss", "gradient"),
    [
        # ratio 1.5 and a gain: clipped at 1.2, so nothing more is to be won.
        (math.log(1.5), 2.0, -2.4, 0.0),
        # ratio 1.5 and a loss: not clipped, so that it is pushed back.
        (math.log(1.5), -2.0, 3.0, 3.0),
        (math.log(0.5), 2.0, -1.0, -1.0),
        (math.log(0.5), -2.0, 1.6, 0.0),
        (0.0, 2.0, -2.0, -2.0),
    ],
)
def test_the_ppo_loss_is_clipped_on_the_side_that_would_be_overdone(
    log_ratio, advantage, loss, gradient
):
    now = torch.tensor([-1.0 + log_ratio], requires_grad=True)
    sampler, advantages = tensors([-1.0], [advantage])

    found = ppo_losses(now, sampler, advantages, clip_ratio=0.2)
    found.sum().backward()

    assert found.item() == pytest.approx(loss, abs=1e-6)
    assert now.grad is not None
    assert now.grad.item() == pytest.approx(gradient, abs=1e-6)


def test_differences_within_rounding_are_no_advantage():
    student, teacher = tensors([-1.0, -1.0, -1.0], [-1.00005, -1.001, math.nan])

    found = reverse_kl_advantages(student, teacher, coef=1.0)

    assert found[:2].tolist() == pytest.approx([0.0, -0.001], abs=1e-6)
    assert found[2].isnan()


def test_divergences_within_rounding_have_no_gradient_and_broken_ones_stay_broken():
    divergence = torch.tensor([5e-7, -5e-7, 1e-3, math.nan], requires_grad=True)

    found = zero_rounding(divergence)
    found[:3].sum().backward()

    assert found[:3].tolist() == pytest.approx([0.0, 0.0, 1e-3])
    assert found[3].isnan()
    assert divergence.grad is not None
    assert divergence.grad[:3].tolist() == [0.0, 0.0, 1.0]


def sampled_gradients(student, teacher, *, has_baseline):
    """The gradient in the logits for each token that might have been sampled, [V, V]."""
    leaf = student.clone().requires_grad_()
    p, q = leaf.log_softmax(-1), teacher.log_softmax(-1)
    now = p.detach()
    divergence = (now.exp() * (now - q)).sum()
    rows = []
    for token in range(len(student)):
        advantage = reverse_kl_advantages(now[token : token + 1], q[token : token + 1], coef=0.3)
        if has_baseline:
            advantage = subtract_expected_advantage(advantage, divergence[None], coef=0.3)
        loss = importance_sampling_losses(p[token : token + 1], now[token : token + 1], advantage)
        (row,) = torch.autograd.grad(loss.sum(), leaf, retain_graph=True)
        rows.append(row)
    return torch.stack(rows)


def test_the_exact_baseline_keeps_the_expected_gradient_and_lowers_its_variance():
    """Every token of small vocabularies is tried, weighted by its probability."""
    spreads = torch.zeros(20, 2, dtype=torch.float64)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        student, noise = torch.randn(2, 20, generator=generator, dtype=torch.float64) * 2
        teacher = student + noise
        p = student.softmax(-1)
        # d KL / d z_j = p_j (log p_j - log q_j - KL), times β.
        log_ratio = student.log_softmax(-1) - teacher.log_softmax(-1)
        whole = 0.3 * p * (log_ratio - (p * log_ratio).sum())
        for place, has_baseline in enumerate((False, True)):
            found = sampled_gradients(student, teacher, has_baseline=has_baseline)
            assert torch.allclose((p[:, None] * found).sum(0), whole, atol=1e-5)
            spreads[seed, place] = (p * (found - whole).square().sum(-1)).sum()

    # In most vocabularies; not in all, as the best baseline weighs tokens by their gradients.
    assert (spreads[:, 1] < spreads[:, 0]).sum() >= 15
    assert spreads[:, 1].sum() < 0.7 * spreads[:, 0].sum()
