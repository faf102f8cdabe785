# SPDX-License-Identifier: Apache-2.0
"""One training step: from the batch of a plan to `optimizer.step()`.

    batch ─ minibatches ─ micro-batches           whole rollouts; as many on every rank
      │ 1. π_old    without gradient, over the micro-batches that will train   → old_logprobs
      │ 2. targets  rewards, μ and π_old                                       → advantages, weights
      │ 3. update   for each minibatch: weighted sums added over micro-batches, divided once by the
      ▼             weight sum of all ranks, clipped, applied                  → metrics

Losses return sums and nothing averages before the end of a minibatch, so the gradient is that of
the whole minibatch however it was split. FSDP averages over ranks: hence `world / weight sum`.
"""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from molt.algo.corrections import CORRECTIONS
from molt.algo.estimators import ESTIMATORS
from molt.algo.losses import AGGREGATIONS, LOSSES, LossInputs
from molt.config import Algo, Config, Optim
from molt.records import MoltError
from molt.trainer.batch import Batch, microbatches, minibatches
from molt.trainer.policy import Policy

MAX_NAN_FRACTION = 0.01  # of a plan's rollouts; more than that is not bad luck


def train_step(policy: Policy, batch: Batch, config: Config, step: int) -> dict[str, float]:
    """Train the plan of `step` (1, 2, …); the batch gets its π_old and targets. Collective.

    Returns:
        The metrics of the step, equal on every rank.

    Raises:
        MoltError: too many log-probabilities, or a gradient, are not finite.
    """
    lr = lr_at(step, config.optim, config.trainer.steps)
    for group in policy.optimizer.param_groups:
        group["lr"] = lr
    parts = split(policy, batch, config, step)
    entropy = old_logprobs(policy, batch, [m for minibatch in parts for m in minibatch])
    trained, num_nan = trained_tokens(batch, config)
    agreement = _compare(policy, batch, trained, entropy, num_nan)
    if agreement["nan_rollouts"] > MAX_NAN_FRACTION * len(batch.rewards):
        raise MoltError(
            f"step {step}: {agreement['nan_rollouts']:.0f} of {len(batch.rewards)} rollouts have "
            "log-probabilities that are not finite: lower optim.lr, go back to an older checkpoint"
        )
    set_targets(batch, trained, config.algo)
    updates = []
    for minibatch in parts:
        updates.append(_update(policy, batch, minibatch, config))
        if not math.isfinite(updates[-1]["grad_norm"]):
            raise MoltError(f"step {step}: the gradient is not finite: lower optim.lr")
    return batch.facts | agreement | _averages(updates) | {"lr": lr}


def lr_at(step: int, optim: Optim, total: int) -> float:
    """The learning rate of step 1 … total: linear warm-up, then the schedule down to `lr_final`."""
    if step < optim.warmup:
        return optim.lr * step / optim.warmup
    done = min((step - optim.warmup) / max(total - optim.warmup, 1), 1.0)
    left = {
        "constant": 1.0,
        "linear": 1.0 - done,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * done)),
    }[optim.schedule]
    return optim.lr * (optim.lr_final + (1.0 - optim.lr_final) * left)


def split(policy: Policy, batch: Batch, config: Config, step: int) -> list[list[Tensor]]:
    """Minibatches of micro-batches of segments, equally many of both on every rank. Collective."""
    count = config.trainer.minibatches
    number = minibatches(batch.group_of_rollout, count, (config.run.seed, step))[batch.rollout]
    members = [(number == i).nonzero().squeeze(1) for i in range(count)]
    return as_many(policy, [microbatches(batch, config.trainer.tokens, m) for m in members])


def as_many(policy: Policy, parts: list[list[Tensor]]) -> list[list[Tensor]]:
    """Lists of micro-batches, each as long as on the rank with most, by empty ones. Collective."""
    most = all_reduce(policy, [len(p) for p in parts], dist.ReduceOp.MAX)
    nothing = torch.empty(0, dtype=torch.int64)
    return [p + [nothing] * (int(n) - len(p)) for p, n in zip(parts, most, strict=True)]


@torch.no_grad()
def old_logprobs(policy: Policy, batch: Batch, parts: Iterable[Tensor]) -> Tensor:
    """Fill `batch.old_logprobs` at the actions of these segments, NaN elsewhere. Collective.

    Returns:
        [N] float32, the entropy of π_old at the same tokens.
    """
    batch.old_logprobs = torch.full_like(batch.behavior_logprobs, torch.nan)
    entropy = batch.old_logprobs.clone()
    for segments in parts:
        logprobs, entropies, rows = forward(policy, batch, segments, batch.action_mask)
        batch.old_logprobs[rows] = logprobs.cpu()
        entropy[rows] = entropies.cpu()
    return entropy


def forward(
    policy: Policy, batch: Batch, segments: Tensor, needed: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities and entropies of the `needed` [N] bool tokens of some segments. Collective.

    Returns:
        [T] float32 twice, on the policy's device, and [T] int64, those tokens' places in the batch.
    """
    index, cu_seqlens = batch.tokens_of(segments)
    mask = needed[index]
    logprobs, entropy = policy.logprobs(
        batch.tokens[index], cu_seqlens, batch.temperature[index], mask
    )
    kept = mask.nonzero().squeeze(1)
    on_device = kept.to(policy.device)
    return logprobs[on_device], entropy[on_device], index[kept]


def trained_tokens(batch: Batch, config: Config) -> tuple[Tensor, int]:
    """Which tokens train: sampled, of a rollout that has a reward and no NaN, and not too stale.

    Returns:
        [N] bool, and how many of this rank's rollouts a log-probability that is not finite drops.
    """
    broken = batch.action_mask & ~batch.old_logprobs.isfinite()
    dropped = batch.rewards.isnan()
    lost = torch.zeros_like(dropped).index_fill(0, batch.rollout_of_token[broken], True)
    trained = batch.action_mask & ~(dropped | lost)[batch.rollout_of_token]
    if config.pool.stale == "mask":
        trained &= batch.lag <= config.pool.max_lag
    return trained, int(lost.sum())


def set_targets(batch: Batch, trained: Tensor, algo: Algo) -> None:
    """Fill `batch.weights` and `batch.advantages`, the correction for μ included."""
    log_ratio = (batch.old_logprobs - batch.behavior_logprobs)[trained]
    correction = CORRECTIONS[algo.correction](log_ratio, algo.correction_max)
    advantages = ESTIMATORS[algo.estimator](batch.rewards, batch) * algo.advantage_scale
    batch.advantages = torch.zeros_like(advantages)
    batch.advantages[trained] = advantages[trained] * correction
    batch.weights = AGGREGATIONS[algo.aggregation](trained, batch.rollout_of_token)


def _compare(
    policy: Policy, batch: Batch, trained: Tensor, entropy: Tensor, num_nan: int
) -> dict[str, float]:
    """μ against π_old, entropy and lag over the trained tokens of all ranks."""
    gap = (batch.behavior_logprobs - batch.old_logprobs)[trained]
    lag = batch.lag[trained].double()
    sums = [len(gap), gap.double().sum(), entropy[trained].double().sum(), lag.sum(), num_nan]
    count, kl, entropy_sum, lag_sum, nan = all_reduce(policy, sums)
    largest = [t.max() if len(t) else 0.0 for t in (gap.abs(), lag)]
    gap_max, lag_max = all_reduce(policy, largest, dist.ReduceOp.MAX)
    count = max(count, 1.0)
    return {
        "mismatch/kl": kl / count,
        "mismatch/ratio_max": math.exp(min(gap_max, 700.0)),
        "entropy": entropy_sum / count,
        "lag/mean": lag_sum / count,
        "lag/max": lag_max,
        "nan_rollouts": nan,
    }


def _update(policy: Policy, batch: Batch, parts: list[Tensor], config: Config) -> dict[str, float]:
    """One optimizer step on one minibatch, unless none of its tokens trains. Collective.

    Returns:
        Sums over all ranks: the loss, the weight it is to be divided by and the loss's own metrics;
        and the gradient's norm before clipping.
    """
    useful = batch.segment_sum(batch.weights) > 0  # a NaN times a weight of 0 is still a NaN
    sums = {}
    for i, segments in enumerate(parts):
        policy.accumulate(last=i == len(parts) - 1)
        part = _backward(policy, batch, segments[useful[segments]], config.algo)
        sums = {name: sums.get(name, 0.0) + value for name, value in part.items()}
    totals = dict(zip(sums, all_reduce(policy, list(sums.values())), strict=True))
    totals["grad_norm"] = 0.0
    if totals["weight"]:
        world = dist.get_world_size() if dist.is_initialized() else 1
        totals["grad_norm"] = policy.clip(config.optim.clip_norm, world / totals["weight"])
        if math.isfinite(totals["grad_norm"]):
            policy.optimizer.step()
    policy.optimizer.zero_grad()
    return totals


def _backward(policy: Policy, batch: Batch, segments: Tensor, algo: Algo) -> dict[str, Tensor]:
    """Add the gradient of a micro-batch's weighted sum: zero if it is empty. Collective."""
    logprobs, _, rows = forward(policy, batch, segments, batch.weights > 0)
    old, advantages, weights = (
        t[rows].to(policy.device) for t in (batch.old_logprobs, batch.advantages, batch.weights)
    )
    loss, weight, metrics = LOSSES[algo.loss](
        LossInputs(logprobs, old, advantages, weights, algo.clip_low, algo.clip_high)
    )
    loss.backward()
    return {"loss": loss.detach(), "weight": weight, **metrics}


def _averages(updates: list[dict[str, float]]) -> dict[str, float]:
    """The step's loss metrics: sums over its minibatches divided by their weights."""
    taken = [u for u in updates if u["weight"]]
    weight = sum(u["weight"] for u in taken) or 1.0
    return {
        "loss/policy": sum(u["loss"] for u in taken) / weight,
        "loss/clip_fraction": sum(u["clip_fraction"] for u in taken) / weight,
        "grad_norm": sum(u["grad_norm"] for u in taken) / max(len(taken), 1),
        "skipped_updates": float(len(updates) - len(taken)),
    }


def all_reduce(
    policy: Policy, values: list, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> list[float]:
    """Reduce numbers over ranks, in float64. Collective."""
    vector = torch.stack([torch.as_tensor(v, dtype=torch.float64) for v in values])
    vector = vector.to(policy.device)
    if dist.is_initialized():
        dist.all_reduce(vector, op)
    return vector.tolist()
