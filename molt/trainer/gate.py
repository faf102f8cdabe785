# SPDX-License-Identifier: Apache-2.0
"""The start-up gate: no run starts whose trainer and engine disagree on log-probabilities.

Two checks on the first fresh groups. `check_layouts` compares the policy with itself, many
sequences in one forward pass against one at a time: padding, positions or masks that leak.
`check_agreement` compares μ, which the engine reported, with π_old, which the trainer computes from
the same weights. Beyond tolerance the error says where they part and tries the usual causes: an
agreement that appears one token aside, or at another temperature, names its cause. To add a cause:
a line in `_cause`.

Tolerance: in bfloat16 the mean |Δ log p| must stay within `trainer.gate_tolerance`, in float32 the
largest one within a twentieth of it.
"""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from molt.config import Config
from molt.records import MoltError
from molt.trainer.batch import Batch, microbatches
from molt.trainer.policy import Policy
from molt.trainer.step import all_reduce, as_many, forward

NUM_SEGMENTS = 64  # of a rank, for μ against π_old; a few tokens can miss a stale output layer
NUM_ALONE = 8  # of them, run one at a time
EXPLAINS = 0.1  # a cause that leaves less than this share of the difference is named


@dataclass(frozen=True)
class Gap:
    """How far two sets of log-probabilities are apart, over all ranks."""

    mean: float  # of |Δ|, nats
    max: float
    count: int
    text: str  # where, for the error message

    def refused(self, config: Config) -> str:
        """Why this is too much, or an empty string."""
        tolerance = config.trainer.gate_tolerance
        if config.model.dtype == "float32":
            limit, value, name = tolerance / 20, self.max, "largest"
        else:
            limit, value, name = tolerance, self.mean, "mean"
        if value <= limit:  # False for NaN, which is refused too
            return ""
        return (
            f"log-probabilities of {self.count} tokens differ, mean |Δ| {self.mean:.2g}, largest "
            f"{self.max:.2g} ({name} allowed: {limit:.2g}); {self.text}"
        )


def check(policy: Policy, batch: Batch, config: Config) -> bool:
    """Run both checks on tokens that the current weights sampled. Collective.

    Returns:
        False when the batch has no such token on any rank: ask again with the next one.

    Raises:
        MoltError: the run must not start; names the check, the place and the likely cause.
    """
    fresh = batch.action_mask & (batch.lag == 0)
    segments = (batch.segment_sum(fresh.long()) > 0).nonzero().squeeze(1)
    segments = segments[:: max(len(segments) // NUM_SEGMENTS, 1)][:NUM_SEGMENTS]
    if not all_reduce(policy, [len(segments)])[0]:
        return False
    check_layouts(policy, batch, segments, config)
    check_agreement(policy, batch, segments, config)
    return True


@torch.no_grad()
def check_layouts(policy: Policy, batch: Batch, segments: Tensor, config: Config) -> None:
    """Sequences that share a forward pass must not see each other. Collective."""
    some = segments[batch.lengths[segments].argsort()][:: max(len(segments) // NUM_ALONE, 1)]
    fits = batch.lengths[some].cumsum(0) <= config.trainer.tokens
    some = some[fits][:NUM_ALONE].flip(0)
    everything = torch.ones_like(batch.action_mask)
    together, _, rows = forward(policy, batch, some, everything)
    alone = [forward(policy, batch, some[i : i + 1], everything)[0] for i in range(NUM_ALONE)]
    gap = _measure(policy, batch, rows, together.cpu(), torch.cat(alone).cpu())
    if refused := gap.refused(config):
        raise MoltError(
            f"start-up gate, check of layouts (many segments in one forward pass, or each alone): "
            f"{refused}; likely the position ids or the attention mask do not restart at each "
            "segment: try the other trainer.layout"
        )


def check_agreement(policy: Policy, batch: Batch, segments: Tensor, config: Config) -> None:
    """The policy must give the sampled tokens the log-probabilities of the engine. Collective."""
    parts = as_many(policy, [microbatches(batch, config.trainer.tokens, segments)])[0]
    old = _logprobs(policy, batch, parts)
    sampled = (batch.action_mask & (batch.lag == 0) & ~old.isnan()).nonzero().squeeze(1)
    gap = _measure(policy, batch, sampled, old[sampled], batch.behavior_logprobs[sampled])
    if refused := gap.refused(config):
        cause = _shift(policy, batch, sampled, old, gap.mean)
        cause = cause or _temperature(policy, batch, parts, sampled, gap.mean)
        raise MoltError(
            f"start-up gate, check of agreement between μ and π_old: {refused}; "
            + (
                cause
                or "neither a shifted action mask nor another temperature explains it: look for a "
                "position offset or other rotary settings, then for weights that differ"
            )
        )


def _shift(policy: Policy, batch: Batch, sampled: Tensor, old: Tensor, mean: float) -> str:
    """Do μ and π_old agree one token aside? Collective."""
    for shift in (-1, 1):
        other = (sampled - shift).clamp(0, len(old) - 1)
        inside = batch.segment_of_token[other] == batch.segment_of_token[sampled]
        if _mean_gap(policy, batch, sampled[inside], old[other[inside]]) < EXPLAINS * mean:
            return (
                f"they agree when μ is moved by {-shift:+d} token: the action mask or the shift to "
                "next-token prediction is off by one"
            )
    return ""


def _temperature(
    policy: Policy, batch: Batch, parts: list[Tensor], sampled: Tensor, mean: float
) -> str:
    """Is there a factor on all temperatures with which they agree? Collective."""
    centre, best, span = 0.0, mean, 2.0  # log2 of the factor: a bracket that halves
    while span > 0.02:
        for exponent in [centre + span * i for i in (-1.0, -0.5, 0.5, 1.0)]:
            other = replace(batch, temperature=batch.temperature * 2.0**exponent)
            gap = _mean_gap(policy, batch, sampled, _logprobs(policy, other, parts)[sampled])
            if gap < best:
                centre, best = exponent, gap
        span /= 2
    if best >= EXPLAINS * mean:
        return ""
    return (
        f"they agree when the recorded temperature is multiplied by {2.0**centre:.2f}: the engine "
        "sampled at another one, or reports raw instead of processed log-probabilities"
    )


@torch.no_grad()
def _logprobs(policy: Policy, batch: Batch, parts: list[Tensor]) -> Tensor:
    """[N] log π_old of every token of some segments, NaN elsewhere. Collective."""
    logprobs = torch.full_like(batch.behavior_logprobs, torch.nan)
    everything = torch.ones_like(batch.action_mask)
    for segments in parts:
        values, _, rows = forward(policy, batch, segments, everything)
        logprobs[rows] = values.cpu()
    return logprobs


def _mean_gap(policy: Policy, batch: Batch, rows: Tensor, logprobs: Tensor) -> float:
    """Mean |log μ − `logprobs`| at `rows`, over all ranks. Collective."""
    gap = (batch.behavior_logprobs[rows] - logprobs).abs().double()
    total, count = all_reduce(policy, [gap.sum(), len(gap)])
    return total / max(count, 1.0)


def _measure(policy: Policy, batch: Batch, rows: Tensor, a: Tensor, b: Tensor) -> Gap:
    """Compare two values of the tokens at `rows`. Collective."""
    gap = (a - b).abs().double().nan_to_num(torch.inf)
    turn_start = batch.action_mask[rows] & ~batch.action_mask[rows - 1]
    first, later = gap[turn_start], gap[~turn_start]
    sums = all_reduce(policy, [first.sum(), len(first), later.sum(), len(later)])
    position = rows - batch.cu_seqlens[batch.segment_of_token[rows]]
    worst = [gap.max(), -position[gap >= gap.max() / 2].min()] if len(gap) else [0.0, -torch.inf]
    largest, earliest = all_reduce(policy, worst, dist.ReduceOp.MAX)
    return Gap(
        mean=(sums[0] + sums[2]) / max(sums[1] + sums[3], 1.0),
        max=largest,
        count=int(sums[1] + sums[3]),
        text=(
            f"mean at the first tokens of turns {sums[0] / max(sums[1], 1.0):.2g}, at others "
            f"{sums[2] / max(sums[3], 1.0):.2g}; first large at token {abs(earliest):.0f} of "
            "a segment"
        ),
    )
