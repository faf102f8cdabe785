# SPDX-License-Identifier: Apache-2.0
"""Policy losses, and how the tokens of a batch are weighed against each other.

Contract: `loss(inputs) -> (weighted sum, weight sum, metrics)`. A loss sees trained tokens only,
[T] of them, in any number and order, and returns sums: the step adds them over micro-batches and
ranks and divides once, by the weight sum of the whole minibatch. Metrics are weighted sums too.
Nothing here can depend on how a batch was split.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossInputs:
    """The trained tokens of a micro-batch, [T] float32 each, and the loss's hyper-parameters."""

    logprobs: Tensor  # log π, nats, differentiable
    old_logprobs: Tensor  # log π_old
    advantages: Tensor  # times the correction π_old/μ
    weights: Tensor  # > 0
    clip_low: float
    clip_high: float


LossOutput = tuple[Tensor, Tensor, dict[str, Tensor]]
Loss = Callable[[LossInputs], LossOutput]


def ppo(x: LossInputs) -> LossOutput:
    """Σ w · −min(ρ A, clip(ρ, 1 − low, 1 + high) A), ρ = π/π_old (arXiv 1707.06347, 2503.14476).

    `clip_fraction` is the weight of the tokens whose gradient the clip removed.
    """
    ratio = (x.logprobs - x.old_logprobs).exp()
    free = ratio * x.advantages
    clipped = ratio.clamp(1 - x.clip_low, 1 + x.clip_high) * x.advantages
    loss = -(x.weights * torch.minimum(free, clipped)).sum()
    return loss, x.weights.sum(), {"clip_fraction": (x.weights * (clipped < free)).sum().detach()}


LOSSES: dict[str, Loss] = {"ppo": ppo}


def token_mean(trained: Tensor, rollout_of_token: Tensor) -> Tensor:
    """Every trained token weighs the same (DAPO, arXiv 2503.14476): [N] bool -> [N] float32."""
    return trained.float()


def sequence_mean(trained: Tensor, rollout_of_token: Tensor) -> Tensor:
    """Every rollout weighs the same, its trained tokens share it (GRPO, arXiv 2402.03300).

    A rollout's segments are one sequence. They are all on one rank, so the count is the whole one.
    """
    count = torch.bincount(rollout_of_token, trained)
    return (trained / count[rollout_of_token].clamp(min=1)).float()


AGGREGATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
}
