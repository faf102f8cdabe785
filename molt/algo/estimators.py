# SPDX-License-Identifier: Apache-2.0
"""Advantage estimators: the rewards of a plan in, one advantage a token out.

Contract: `estimator(rewards [R], batch) -> advantages [N]`. Rewards are those of all rollouts of
the plan, the same on every rank; tokens are this rank's. A NaN reward is unscorable: it is left out
of every baseline and its advantage is 0. A rollout counts once, whatever the number of its
segments.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class Rollouts(Protocol):
    """What an estimator may know of the batch."""

    group_of_rollout: Tensor  # [R] int64
    rollout_of_token: Tensor  # [N] int64, index into the rewards


Estimator = Callable[[Tensor, Rollouts], Tensor]


def grpo(rewards: Tensor, batch: Rollouts) -> Tensor:
    """A = (r − mean) / std over the group, std with n − 1 (GRPO, arXiv 2402.03300)."""
    centered, count = _centered(rewards, batch.group_of_rollout)
    squares = _sum(centered.square(), batch.group_of_rollout)
    std = (squares / (count - 1).clamp(min=1)).sqrt()
    return _per_token(centered / (std + 1e-6), batch)


def dr_grpo(rewards: Tensor, batch: Rollouts) -> Tensor:
    """A = r − mean over the group: no division by the deviation (Dr. GRPO, arXiv 2503.20783)."""
    return _per_token(_centered(rewards, batch.group_of_rollout)[0], batch)


def rloo(rewards: Tensor, batch: Rollouts) -> Tensor:
    """A = r − mean of the group's others = n/(n − 1) · (r − mean) (RLOO, arXiv 2402.14740)."""
    centered, count = _centered(rewards, batch.group_of_rollout)
    if len(rewards) and int(torch.bincount(batch.group_of_rollout).min()) < 2:
        raise ValueError(
            "rloo needs at least 2 rollouts per group, got 1: raise sampling.num_samples"
        )
    return _per_token(centered * count / (count - 1).clamp(min=1), batch)


def reinforce(rewards: Tensor, batch: Rollouts) -> Tensor:
    """A = r − mean over all rollouts of the plan (REINFORCE with a baseline, Williams 1992)."""
    centered, _ = _centered(rewards, torch.zeros_like(batch.group_of_rollout))
    return _per_token(centered, batch)


def _centered(rewards: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """Reward minus its group's mean, and the group's number of scorable rollouts.

    Rewards that are all equal give exactly 0, which a rounded mean would not: constancy is equality
    of the largest and the smallest reward, never a small deviation.

    Returns:
        [R] float64 each; unscorable rollouts are 0 in the first.
    """
    scorable = ~rewards.isnan()
    r = rewards.double().nan_to_num(0.0)
    count = _sum(scorable.double(), group)
    mean = _sum(r, group) / count.clamp(min=1)
    low = rewards.new_full((len(rewards),), torch.inf, dtype=torch.float64)
    high = low.neg().scatter_reduce(0, group[scorable], r[scorable], "amax")
    low = low.scatter_reduce(0, group[scorable], r[scorable], "amin")
    differs = scorable & (high > low)[group]
    return torch.where(differs, r - mean, 0.0), count


def _sum(values: Tensor, group: Tensor) -> Tensor:
    """Each rollout's sum over its group: [R] -> [R]. There are never more groups than rollouts."""
    return torch.zeros_like(values).index_add(0, group, values)[group]


def _per_token(advantages: Tensor, batch: Rollouts) -> Tensor:
    """[R] float64 -> [N] float32."""
    return advantages.float()[batch.rollout_of_token]


ESTIMATORS: dict[str, Estimator] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce": reinforce,
}
