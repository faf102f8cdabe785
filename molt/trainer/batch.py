# SPDX-License-Identifier: Apache-2.0
"""From the groups of a plan to the tokens a rank trains on: packed and ragged, no padding.

Legend: R rollouts of the whole plan, the same numbering on every rank; S segments and N tokens of
this rank. Row i of an [N] tensor is for token i itself; the shift to next-token prediction happens
once, inside the policy. Groups are spread over ranks whole, as a group is what is read and verified
at once.

A step is cut twice: minibatches (one optimizer update each) by whole rollouts, as a function of the
seed and the step alone, never of the ranks; micro-batches (what fits in memory) by tokens, which
changes no result.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from molt.records import Group, StoreError
from molt.store.shards import ragged, read_group


def _unset() -> Tensor:
    return torch.empty(0)


@dataclass
class Batch:
    """What one rank trains on in one step, on the CPU."""

    tokens: Tensor  # [N] int64
    cu_seqlens: Tensor  # [S + 1] int64, where each segment starts, and N
    action_mask: Tensor  # [N] bool, sampled tokens
    behavior_logprobs: Tensor  # [N] float32, log μ in nats; NaN off the actions
    temperature: Tensor  # [N] float32, the token was sampled at; 1 off the actions
    lag: Tensor  # [N] int64, steps the weights that sampled the token are behind π_old
    rollout: Tensor  # [S] int64, index into the rewards
    group_of_rollout: Tensor  # [R] int64, 0 … G − 1
    rewards: Tensor  # [R] float64, NaN = unscorable
    facts: dict[str, float] = field(default_factory=dict)  # metrics known from the records alone
    # what the step adds
    old_logprobs: Tensor = field(default_factory=_unset)  # [N] float32, log π_old; NaN off actions
    advantages: Tensor = field(default_factory=_unset)  # [N] float32, corrected; 0 if not trained
    weights: Tensor = field(default_factory=_unset)  # [N] float32, 0 if not trained

    # what follows from the above
    lengths: Tensor = field(init=False)  # [S] int64
    segment_of_token: Tensor = field(init=False)  # [N] int64
    rollout_of_token: Tensor = field(init=False)  # [N] int64, index into the rewards

    def __post_init__(self) -> None:
        self.lengths = self.cu_seqlens.diff()
        self.segment_of_token = torch.arange(len(self.lengths)).repeat_interleave(self.lengths)
        self.rollout_of_token = self.rollout[self.segment_of_token]

    def segment_sum(self, values: Tensor) -> Tensor:
        """Sum over each segment's tokens: [N] -> [S]."""
        return values.new_zeros(len(self.lengths)).index_add(0, self.segment_of_token, values)

    def tokens_of(self, segments: Tensor) -> tuple[Tensor, Tensor]:
        """Where some segments' tokens are, index [n] int64, and their own cu_seqlens [s + 1]."""
        lengths = self.lengths[segments]
        cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        shift = self.cu_seqlens[segments] - cu_seqlens[:-1]
        return torch.arange(int(cu_seqlens[-1])) + shift.repeat_interleave(lengths), cu_seqlens


class UnreadableError(StoreError):
    """Groups of a plan whose bytes are gone or damaged: group → reason."""

    def __init__(self, groups: dict[int, str]) -> None:
        super().__init__("; ".join(groups.values()))
        self.groups = groups


def read_plan(
    run_dir: Path,
    groups: tuple[Group, ...],
    lags: dict[int, int],
    rank: int,
    world: int,
    deadline_s: float = 120.0,
) -> Batch:
    """Read this rank's share of a plan.

    Args:
        run_dir: The run.
        groups: The records of the plan's groups, in plan order.
        lags: For each version in them, by how many steps it is older than the weights trained now.
        rank: This rank.
        world: Number of ranks.
        deadline_s: How long an announced shard may stay invisible.

    Raises:
        UnreadableError: shards of this rank's share are gone or damaged.
        StoreError: a sampled token has no usable log-probability.
    """
    num_tokens = [sum(s.tokens for s in g.segments) for g in groups]
    mine = [groups[i] for i in assign(num_tokens, world)[rank]]
    sizes = [len(g.rewards) for g in groups]
    rewards = [np.nan if r is None else r for g in groups for r in g.rewards]
    first_rollout = dict(zip((g.group for g in groups), np.cumsum([0, *sizes[:-1]]), strict=True))
    batches = _read_groups(run_dir, mine, deadline_s)
    arrays = [
        _arrays(rows, g, first_rollout[g.group], lags)
        for rows, g in zip(batches, mine, strict=True)
    ]
    joined = {name: _join([a[name] for a in arrays], dtype) for name, dtype in _DTYPES.items()}
    lengths = joined.pop("lengths")
    return Batch(
        cu_seqlens=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        group_of_rollout=torch.arange(len(groups)).repeat_interleave(torch.tensor(sizes)),
        rewards=torch.tensor(rewards, dtype=torch.float64),
        facts=facts_of(groups),
        **joined,
    )


def _read_groups(run_dir: Path, groups: list[Group], deadline_s: float) -> list[pa.RecordBatch]:
    batches: list[pa.RecordBatch] = []
    unreadable: dict[int, str] = {}
    for group in groups:
        try:
            batches.append(read_group(run_dir, group.where, deadline_s))
        except StoreError as error:
            unreadable[group.group] = str(error)
    if unreadable:
        raise UnreadableError(unreadable)
    return batches


_DTYPES = {
    "tokens": np.int64,
    "lengths": np.int64,
    "action_mask": np.bool_,
    "behavior_logprobs": np.float32,
    "temperature": np.float32,
    "lag": np.int64,
    "rollout": np.int64,
}


def _join(arrays: list[np.ndarray], dtype: type[np.generic]) -> Tensor:
    return torch.from_numpy(np.concatenate([np.empty(0, dtype), *arrays], dtype=dtype))


def _arrays(
    rows: pa.RecordBatch, group: Group, first_rollout: int, lags: dict[int, int]
) -> dict[str, np.ndarray]:
    """One group as flat arrays, named as in `_DTYPES`. Spans in the file count within a row."""
    tokens, offsets = ragged(rows, "token_ids")
    logprobs, _ = ragged(rows, "behavior_logprobs")
    spans, spans_of_row = ragged(rows, "action_spans")
    sampling, _ = ragged(rows, "sampling")
    versions, versions_of_row = ragged(rows, "version_spans")
    starts, action_mask = offsets[:-1], np.zeros(len(tokens) + 1, np.int64)
    shift = np.repeat(starts, np.diff(spans_of_row))
    np.add.at(action_mask, spans["start"] + shift, 1)
    np.add.at(action_mask, spans["end"] + shift, -1)
    action_mask = action_mask.cumsum()[:-1] > 0
    if not np.array_equal(action_mask, np.isfinite(logprobs)):
        raise StoreError(
            f"group {group.group} in {group.where.path}: the action mask has {action_mask.sum()} "
            f"tokens, {np.isfinite(logprobs).sum()} have a log-probability, not the same ones: the "
            f"mask is shifted or a value is missing; see molt inspect --group {group.group}"
        )
    temperature = np.ones(len(tokens), np.float32)
    temperature[action_mask] = np.repeat(sampling["temperature"], spans["end"] - spans["start"])
    version_ends = versions["end"] + np.repeat(starts, np.diff(versions_of_row))
    lag = [lags[v] if v >= 0 else 0 for v in versions["version"].tolist()]  # one a span; −1 = never
    return {
        "tokens": tokens,
        "lengths": np.diff(offsets),
        "action_mask": action_mask,
        "behavior_logprobs": logprobs,
        "temperature": temperature,
        "lag": np.repeat(np.array(lag, np.int64), np.diff(version_ends, prepend=0)),
        "rollout": rows.column("rollout").to_numpy() + first_rollout,
    }


def assign(sizes: list[int], ranks: int) -> list[list[int]]:
    """The items of each rank, in order: the largest is dealt first, to the rank with the least."""
    load, parts = [0] * ranks, [[] for _ in range(ranks)]
    for item in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        rank = load.index(min(load))
        load[rank] += sizes[item]
        parts[rank].append(item)
    return [sorted(part) for part in parts]


def facts_of(groups: tuple[Group, ...]) -> dict[str, float]:
    """The metrics of a plan that its records hold."""
    rewards = np.array([r for g in groups for r in g.rewards if r is not None])
    rollouts = max(sum(len(g.rewards) for g in groups), 1)
    segments = [s for g in groups for s in g.segments]
    facts = {
        "rollout/tokens": sum(s.actions for s in segments) / rollouts,
        "rollout/segments": len(segments) / rollouts,
        "rollout/truncated_fraction": sum(g.truncated for g in groups) / rollouts,
        "rollout/replay_miss": float(sum(g.replay_miss for g in groups)),
        "rollout/resumed_tokens": float(sum(g.resumed for g in groups)),
        "rollout/dead_tokens": float(sum(g.dead for g in groups)),
        "rollout/retries": float(sum(g.retries for g in groups)),
    }
    if len(rewards):
        facts |= {"reward/mean": float(rewards.mean()), "reward/std": float(rewards.std())}
    return facts


def minibatches(group_of_rollout: Tensor, count: int, seed: tuple[int, int]) -> Tensor:
    """The minibatch of each rollout: [R] int64, 0 … count − 1, equally many in each, to one.

    The rollouts of a group are dealt out in random order: each minibatch sees every group, and each
    rank, which holds whole groups, has its share of every minibatch.
    """
    group = group_of_rollout.numpy()
    order = np.lexsort((np.random.default_rng(seed).random(len(group)), group))
    number = np.empty(len(group), np.int64)
    number[order] = np.arange(len(group)) % count
    return torch.from_numpy(number)


def microbatches(batch: Batch, num_tokens: int, segments: Tensor) -> list[Tensor]:
    """Cut segments into parts of at most `num_tokens` tokens, long ones first, like with like.

    A segment longer than the budget is a part of its own; one without a sampled token is left out.
    """
    sampled = batch.segment_sum(batch.action_mask.long())
    segments = segments[sampled[segments] > 0]
    segments = segments[batch.lengths[segments].argsort(descending=True, stable=True)]
    ends = batch.lengths[segments].cumsum(0)
    parts, start, done = [], 0, 0
    while start < len(segments):
        end = max(int(torch.searchsorted(ends, done + num_tokens, right=True)), start + 1)
        parts.append(segments[start:end])
        start, done = end, int(ends[end - 1])
    return parts
