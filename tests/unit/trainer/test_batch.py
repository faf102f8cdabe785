# SPDX-License-Identifier: Apache-2.0
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from molt.records import Group, StoreError
from molt.trainer.batch import Batch, assign, facts_of, microbatches, minibatches, read_plan
from tests.unit.trainer.toy import row, write_plan

EOS, EOS2, NL = 8, 9, 7
TURNS = [1, 2, 5, 6, EOS, NL, 3, 4, 7, EOS2]  # prompt, sampled, template, observation, sampled


def test_a_row_becomes_tokens_with_mask_temperature_and_lag_at_the_token_itself(
    tmp_path: Path,
) -> None:
    # the mask holds the sampled tokens, their end tokens included, never the template's NL
    one = row(5, 0, TURNS, [(2, 5), (8, 10)], temperatures=[0.5, 2.0], versions=[[4, 3], [10, 4]])
    two = row(5, 1, [1, 6, EOS], [(1, 3)], versions=[[3, 4]])
    groups = write_plan(tmp_path, [one, two], {5: [1.0, None]})
    batch = read_plan(tmp_path, groups, {3: 2, 4: 1}, 0, 1)
    assert batch.tokens.tolist() == [*TURNS, 1, 6, EOS]
    assert batch.cu_seqlens.tolist() == [0, 10, 13]
    assert batch.action_mask.int().tolist() == [0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 0, 1, 1]
    assert batch.temperature.tolist() == [1, 1, 0.5, 0.5, 0.5, 1, 1, 1, 2, 2, 1, 1, 1]
    assert batch.lag.tolist() == [2] * 4 + [1] * 9
    assert torch.equal(batch.behavior_logprobs.isfinite(), batch.action_mask)
    assert batch.behavior_logprobs[:10].tolist() == pytest.approx(
        one.behavior_logprobs.tolist(), nan_ok=True
    )
    assert batch.rewards.tolist() == pytest.approx([1.0, np.nan], nan_ok=True)
    assert batch.rollout_of_token.tolist() == [0] * 10 + [1] * 3


def test_a_sampled_token_without_log_probability_is_refused(tmp_path: Path) -> None:
    made = row(3, 0, TURNS, [(2, 5), (8, 10)])
    made.behavior_logprobs[3] = np.nan
    with pytest.raises(StoreError, match=r"group 3 .* mask has 5 tokens, 4 have .*--group 3"):
        read_plan(tmp_path, write_plan(tmp_path, [made], {3: [1.0]}), {1: 0}, 0, 1)


def test_a_log_probability_of_zero_is_legal(tmp_path: Path) -> None:
    made = row(0, 0, TURNS, [(2, 5), (8, 10)])
    made.behavior_logprobs[3] = 0.0
    batch = read_plan(tmp_path, write_plan(tmp_path, [made], {0: [1.0]}), {1: 0}, 0, 1)
    assert batch.behavior_logprobs[3] == 0.0


def plan(tmp_path: Path) -> tuple[Group, ...]:
    """Three groups of two rollouts. One has two segments, and one no tokens."""
    rows = [
        row(10, 0, [1, 2, 3, 4], [(1, 4)]),
        row(10, 1, [1, 2], [(1, 2)]),
        row(11, 0, [1, 2, 3, 4, 5, 6, 7, 8], [(2, 8)]),
        row(11, 1, [1, 2, 3], [(1, 3)], num_segments=2),
        row(11, 1, [1, 5, 3], [(2, 3)], segment=1, num_segments=2),
        row(12, 0, [], []),
        row(12, 1, [4, 4, 4], [(1, 3)]),
    ]
    return write_plan(tmp_path, rows, {10: [0.0, 1.0], 11: [None, 1.0], 12: [0.5, 0.5]})


def test_ranks_share_the_groups_and_number_the_rollouts_alike(tmp_path: Path) -> None:
    groups = plan(tmp_path)
    whole = read_plan(tmp_path, groups, {1: 0}, 0, 1)
    parts = [read_plan(tmp_path, groups, {1: 0}, rank, 2) for rank in range(2)]
    # tokens a group: 6, 14, 3: the second alone, the others together
    assert [p.rollout.tolist() for p in parts] == [[2, 3, 3], [0, 1, 4, 5]]
    for part in parts:
        assert part.group_of_rollout.tolist() == [0, 0, 1, 1, 2, 2]
        torch.testing.assert_close(part.rewards, whole.rewards, equal_nan=True)
        assert part.facts == whole.facts
    assert sum(map(tokens_of_rollouts, parts), Counter()) == tokens_of_rollouts(whole)


def tokens_of_rollouts(batch: Batch) -> Counter[tuple[int, int]]:
    return Counter(zip(batch.rollout_of_token.tolist(), batch.tokens.tolist(), strict=True))


def test_a_rank_without_groups_gets_an_empty_batch(tmp_path: Path) -> None:
    batch = read_plan(tmp_path, plan(tmp_path)[:1], {1: 0}, 1, 2)
    assert (len(batch.tokens), batch.cu_seqlens.tolist(), len(batch.rewards)) == (0, [0], 2)
    assert microbatches(batch, 10, torch.empty(0, dtype=torch.int64)) == []


def test_facts_come_from_the_records_and_leave_out_unscorable_rewards(tmp_path: Path) -> None:
    groups = plan(tmp_path)
    groups = (msgspec.structs.replace(groups[0], truncated=3), *groups[1:])
    facts = facts_of(groups)
    # rewards 0, 1, 1, ½, ½: mean 0.6, variance (0.36 + 2·0.16 + 2·0.01)/5 = 0.14
    assert facts["reward/mean"] == pytest.approx(0.6)
    assert facts["reward/std"] == pytest.approx(0.14**0.5)
    assert facts["rollout/tokens"] == (3 + 1 + 6 + 2 + 1 + 0 + 2) / 6
    assert facts["rollout/segments"] == 7 / 6
    assert facts["rollout/truncated_fraction"] == 3 / 6


def test_assign_deals_the_largest_first_to_the_least_loaded() -> None:
    # 9 → rank 0, 5 → 1, 4 → 1 (5 < 9), 3 → 0 (9 = 9, the lower rank)
    assert assign([3, 9, 4, 5], 2) == [[0, 1], [2, 3]]


def test_minibatches_are_even_whole_deterministic_and_see_every_group() -> None:
    group = torch.arange(6).repeat_interleave(8)
    number = minibatches(group, 4, (0, 7))
    assert torch.bincount(number).tolist() == [12] * 4
    assert {tuple(torch.bincount(number[group == g]).tolist()) for g in range(6)} == {(2, 2, 2, 2)}
    assert torch.equal(number, minibatches(group, 4, (0, 7)))
    assert not torch.equal(number, minibatches(group, 4, (0, 8)))
    assert not torch.equal(number, minibatches(group, 4, (1, 7)))


def test_uneven_minibatches_differ_by_one() -> None:
    number = minibatches(torch.tensor([0, 0, 0, 1, 1, 1, 2]), 3, (0, 0))
    assert sorted(torch.bincount(number).tolist()) == [2, 2, 3]


def test_microbatches_keep_to_the_budget_and_leave_nothing_out(tmp_path: Path) -> None:
    batch = read_plan(tmp_path, plan(tmp_path), {1: 0}, 0, 1)
    parts = microbatches(batch, 6, torch.arange(len(batch.lengths)))
    # lengths 4 2 8 3 3 0 3, longest first: 8 alone over budget, 4, 3 + 3, 3 + 2; 0 trains nothing
    assert [batch.lengths[p].tolist() for p in parts] == [[8], [4], [3, 3], [3, 2]]
    assert sorted(torch.cat(parts).tolist()) == [0, 1, 2, 3, 4, 6]


def test_tokens_of_gathers_segments_in_the_order_asked_for(tmp_path: Path) -> None:
    batch = read_plan(tmp_path, plan(tmp_path), {1: 0}, 0, 1)
    index, cu_seqlens = batch.tokens_of(torch.tensor([4, 1]))
    assert batch.tokens[index].tolist() == [1, 5, 3, 1, 2]
    assert cu_seqlens.tolist() == [0, 3, 5]
    assert [t.tolist() for t in batch.tokens_of(torch.empty(0, dtype=torch.int64))] == [[], [0]]
