"""The loss against references written by hand."""

from __future__ import annotations

import math

import pytest
import torch

from headrace.consumers.trainer.loss import (
    LossInputs,
    LossStats,
    log_ratio,
    policy_loss,
    token_statistics,
)


def inputs(
    logprobs: list[float],
    behaviour: list[float],
    advantages: list[float],
    mask: list[bool] | None = None,
    entropy: list[float] | None = None,
) -> LossInputs:
    n = len(logprobs)
    return LossInputs(
        logprobs=torch.tensor(logprobs, requires_grad=True),
        entropy=torch.tensor(entropy or [0.0] * n, requires_grad=True),
        behaviour=torch.tensor(behaviour),
        advantages=torch.tensor(advantages),
        mask=torch.tensor(mask or [True] * n),
    )


def test_log_probability_and_entropy_of_a_known_row() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)]], dtype=torch.bfloat16)
    logprobs, entropy = token_statistics(logits.float(), torch.tensor([1]))
    p = math.exp(logits[0, 1].item()) / (1 + math.exp(logits[0, 1].item()))
    assert logprobs.dtype == torch.float32
    assert logprobs.item() == pytest.approx(math.log(p), abs=1e-6)
    assert entropy.item() == pytest.approx(-(p * math.log(p) + (1 - p) * math.log(1 - p)), abs=1e-6)


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("behaviour", [-91.0, 0.0, -math.inf, math.nan])
def test_any_behaviour_log_probability_gives_a_finite_loss_and_gradient(kept: bool, behaviour: float) -> None:
    given = inputs([-2.0, -1.0], [behaviour, -1.0], [1.0, 1.0], [kept, True])
    loss, stats = policy_loss(given, cap=2.0, entropy_coef=0.01, normaliser=2.0)
    loss.backward()
    assert math.isfinite(loss.item())
    assert given.logprobs.grad is not None and torch.isfinite(given.logprobs.grad).all()
    assert all(math.isfinite(v) for v in stats.metrics().values())


def test_a_masked_token_adds_exactly_nothing() -> None:
    with_it = inputs([-2.0, -1.0], [-91.0, -1.2], [5.0, 0.5], [False, True], [3.0, 0.7])
    without = inputs([-1.0], [-1.2], [0.5], [True], [0.7])
    loss, stats = policy_loss(with_it, cap=2.0, entropy_coef=0.1, normaliser=1.0)
    expected, expected_stats = policy_loss(without, cap=2.0, entropy_coef=0.1, normaliser=1.0)
    loss.backward()
    assert loss.item() == expected.item()
    assert stats == expected_stats
    assert with_it.logprobs.grad is not None and with_it.entropy.grad is not None
    assert with_it.logprobs.grad[0].item() == 0.0 and with_it.entropy.grad[0].item() == 0.0


def test_on_policy_the_gradient_is_that_of_reinforce() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 5, dtype=torch.float64).float().requires_grad_()
    targets = torch.tensor([0, 1, 2, 3, 4, 0])
    advantages = torch.tensor([1.0, -0.5, 0.0, 2.0, -1.0, 0.25])
    logprobs, entropy = token_statistics(logits, targets)
    given = LossInputs(
        logprobs=logprobs,
        entropy=entropy,
        behaviour=logprobs.detach(),
        advantages=advantages,
        mask=torch.ones(6, dtype=torch.bool),
    )
    loss, stats = policy_loss(given, cap=2.0, entropy_coef=0.0, normaliser=6.0)
    (gradient,) = torch.autograd.grad(loss, logits)

    onehot = torch.nn.functional.one_hot(targets, 5)
    expected = -(advantages[:, None] * (onehot - torch.softmax(logits.detach(), -1))) / 6
    assert torch.allclose(gradient, expected, atol=1e-8)
    assert stats.metrics()["ess"] == pytest.approx(1.0)
    assert stats.metrics()["mismatch_kl"] == pytest.approx(0.0, abs=1e-12)


def test_the_weight_is_truncated_from_above_only_and_carries_no_gradient() -> None:
    given = inputs([-1.0, -3.0], [-3.0, -1.0], [1.0, 1.0])
    loss, stats = policy_loss(given, cap=2.0, entropy_coef=0.0, normaliser=2.0)
    loss.backward()
    assert given.logprobs.grad is not None
    assert given.logprobs.grad.tolist() == pytest.approx([-2.0 / 2, -math.exp(-2.0) / 2])
    assert stats.metrics()["importance_weight_max"] == pytest.approx(math.exp(2.0), rel=1e-6)
    assert stats.metrics()["importance_weight_clipped"] == 0.5


def test_the_entropy_bonus_is_paid_on_every_kept_token() -> None:
    given = inputs([-1.0, -1.0], [-1.0, -1.0], [0.0, 0.0], entropy=[0.5, 1.5])
    loss, stats = policy_loss(given, cap=2.0, entropy_coef=0.1, normaliser=2.0)
    assert loss.item() == pytest.approx(-0.1)
    assert stats.metrics()["entropy"] == pytest.approx(1.0)


def test_statistics_of_known_ratios() -> None:
    d = torch.tensor([0.0, 1.0, -1.0])
    given = inputs([-2.0, -1.0, -3.0], [-2.0, -2.0, -2.0], [0.0] * 3)
    _, stats = policy_loss(given, cap=2.0, entropy_coef=0.0, normaliser=3.0)
    rho = d.double().exp()
    assert torch.allclose(log_ratio(given.logprobs, given.behaviour), d)
    assert stats.metrics()["mismatch_kl"] == pytest.approx((torch.expm1(d.double()) - d).mean().item())
    assert stats.metrics()["ess"] == pytest.approx((rho.sum() ** 2 / (3 * (rho**2).sum())).item())


def test_micro_batches_add_up_to_the_whole() -> None:
    whole = inputs([-1.0, -2.0, -3.0], [-1.5, -1.0, -3.0], [1.0, -1.0, 0.5], entropy=[0.1, 0.2, 0.3])
    loss, stats = policy_loss(whole, cap=2.0, entropy_coef=0.05, normaliser=3.0)
    parts = [
        inputs([-1.0], [-1.5], [1.0], entropy=[0.1]),
        inputs([-2.0, -3.0], [-1.0, -3.0], [-1.0, 0.5], entropy=[0.2, 0.3]),
    ]
    outputs = [policy_loss(p, cap=2.0, entropy_coef=0.05, normaliser=3.0) for p in parts]
    assert sum(o[0].item() for o in outputs) == pytest.approx(loss.item(), rel=1e-6)
    together = sum((o[1] for o in outputs), LossStats())
    assert together.metrics() == pytest.approx(stats.metrics(), rel=1e-6)


def test_a_batch_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="normaliser"):
        policy_loss(inputs([-1.0], [-1.0], [1.0]), cap=2.0, entropy_coef=0.0, normaliser=0.0)
