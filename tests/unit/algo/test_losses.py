# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch
from torch import Tensor

from molt.algo.losses import AGGREGATIONS, LOSSES, LossInputs, LossOutput


def ppo(
    ratios: list[float], advantages: list[float], weights: list[float]
) -> tuple[LossOutput, Tensor]:
    """The loss at given π/π_old, clip 0.2 and 0.28, and its gradient with respect to log π."""
    old = torch.full((len(ratios),), -1.0)
    logprobs = (old + torch.tensor(ratios).log()).requires_grad_()
    inputs = LossInputs(
        logprobs, old, torch.tensor(advantages), torch.tensor(weights), clip_low=0.2, clip_high=0.28
    )
    out = LOSSES["ppo"](inputs)
    out[0].backward()
    assert logprobs.grad is not None
    return out, logprobs.grad


def test_on_policy_the_gradient_is_minus_the_advantage() -> None:
    (loss, weight, metrics), grad = ppo([1.0, 1.0, 1.0], [2.0, -3.0, 0.5], [1.0, 1.0, 1.0])
    assert grad.tolist() == [-2.0, 3.0, -0.5]
    assert (loss.item(), weight.item(), metrics["clip_fraction"].item()) == (0.5, 3.0, 0.0)


def test_ppo_clips_on_the_side_where_the_advantage_pushes() -> None:
    # A = 1:  ρ 1.5 > 1.28 clipped, −1.28, no gradient;  ρ 0.5 free, −0.5, gradient −ρA = −0.5
    # A = −1: ρ 1.5 free, 1.5, gradient 1.5;             ρ 0.5 < 0.8 clipped, 0.8, no gradient
    (loss, _, metrics), grad = ppo([1.5, 0.5, 1.5, 0.5], [1.0, 1.0, -1.0, -1.0], [1.0] * 4)
    assert loss.item() == pytest.approx(-1.28 - 0.5 + 1.5 + 0.8)
    assert grad.tolist() == pytest.approx([0.0, -0.5, 1.5, 0.0])
    assert metrics["clip_fraction"].item() == 2.0


def test_ppo_bounds_are_asymmetric() -> None:
    # 1.25 is inside 1 + 0.28 and outside 1 + 0.2
    assert ppo([1.25], [1.0], [1.0])[1].tolist() == pytest.approx([-1.25])


def test_weights_scale_loss_gradient_and_metrics_and_are_summed() -> None:
    # −(0.5 · 1 · 2 + 0.25 · 1.28 · 1)
    (loss, weight, metrics), grad = ppo([1.0, 2.0], [2.0, 1.0], [0.5, 0.25])
    assert loss.item() == pytest.approx(-(1.0 + 0.32))
    assert (weight.item(), metrics["clip_fraction"].item()) == (0.75, 0.25)
    assert grad.tolist() == pytest.approx([-1.0, 0.0])


def test_no_tokens_give_a_zero_that_still_has_a_graph() -> None:
    (loss, weight, _), grad = ppo([], [], [])
    assert (loss.item(), weight.item(), len(grad)) == (0.0, 0.0, 0)
    assert math.isfinite(loss.item())


TRAINED = torch.tensor([False, True, True, False, True, True, True])
ROLLOUT = torch.tensor([0, 0, 0, 1, 1, 2, 2])


def test_token_mean_weighs_trained_tokens_alike() -> None:
    assert AGGREGATIONS["token_mean"](TRAINED, ROLLOUT).tolist() == [0, 1, 1, 0, 1, 1, 1]


def test_sequence_mean_gives_every_rollout_a_weight_of_one() -> None:
    # rollout 0 trains two tokens, 1 one, 2 two
    weights = AGGREGATIONS["sequence_mean"](TRAINED, ROLLOUT)
    assert weights.tolist() == [0, 0.5, 0.5, 0, 1, 0.5, 0.5]


def test_sequence_mean_of_an_untrained_rollout_is_zero() -> None:
    none = torch.zeros(3, dtype=torch.bool)
    assert AGGREGATIONS["sequence_mean"](none, torch.tensor([0, 0, 2])).tolist() == [0, 0, 0]
