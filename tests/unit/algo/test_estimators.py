# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from molt.algo.estimators import ESTIMATORS

NAN = float("nan")


@dataclass
class Rollouts:
    group_of_rollout: Tensor
    rollout_of_token: Tensor


def advantages(name: str, *groups: list[float]) -> list[float]:
    """One token a rollout."""
    rewards = torch.tensor([r for g in groups for r in g], dtype=torch.float64)
    sizes = torch.tensor([len(g) for g in groups])
    group = torch.arange(len(groups)).repeat_interleave(sizes)
    return ESTIMATORS[name](rewards, Rollouts(group, torch.arange(len(rewards)))).tolist()


def test_grpo_divides_by_the_sample_deviation_of_the_group() -> None:
    # mean of 0, 0, 0, 4 is 1; squares 1 + 1 + 1 + 9 = 12; std = √(12/3) = 2; (r − 1)/2
    assert advantages("grpo", [0, 0, 0, 4]) == pytest.approx([-0.5, -0.5, -0.5, 1.5], abs=1e-5)


def test_dr_grpo_only_subtracts_the_mean() -> None:
    assert advantages("dr_grpo", [0, 0, 0, 4], [1, 2]) == [-1, -1, -1, 3, -0.5, 0.5]


def test_rloo_compares_with_the_mean_of_the_others() -> None:
    # 4 − mean(0, 0, 0) = 4; 0 − mean(0, 0, 4) = −4/3
    assert advantages("rloo", [0, 0, 0, 4]) == pytest.approx([-4 / 3, -4 / 3, -4 / 3, 4])


def test_reinforce_compares_with_the_whole_plan() -> None:
    # mean(0, 2, 4, 6) = 3
    assert advantages("reinforce", [0, 2], [4, 6]) == [-3, -1, 1, 3]


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("value", [0.95, 0.1, 1 / 3, -7.3])
def test_equal_rewards_teach_exactly_nothing(name: str, value: float) -> None:
    assert advantages(name, [value] * 8) == [0.0] * 8


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_a_single_loser_is_not_filtered_as_noise(name: str) -> None:
    found = advantages(name, [0.0] + [0.95] * 7)
    assert found[0] < -0.5 and all(a > 0.1 for a in found[1:])


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_difference_of_rounding_size_makes_no_spike(name: str) -> None:
    assert max(map(abs, advantages(name, [1, 1, 1 + 1e-9]))) < 1e-2


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "reinforce"])
def test_a_group_of_one_has_no_baseline_and_teaches_nothing(name: str) -> None:
    assert advantages(name, [0.7]) == [0.0]


def test_rloo_refuses_groups_of_one_and_names_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"at least 2 .* got 1: raise sampling\.num_samples"):
        advantages("rloo", [0.0, 1.0], [0.7])


def test_an_unscorable_rollout_is_outside_the_baseline_and_gets_zero() -> None:
    # scorable: 0.5 and −0.8, mean −0.15, deviations ±0.65
    found = advantages("dr_grpo", [0.5, -0.8, NAN], [0, 1])
    assert found == pytest.approx([0.65, -0.65, 0.0, -0.5, 0.5])
    # others of 0.5 are −0.8 alone: 0.5 + 0.8 = 1.3
    assert advantages("rloo", [0.5, -0.8, NAN]) == pytest.approx([1.3, -1.3, 0.0])
    # std of ±0.65 with n − 1 = 1: √(2 · 0.65²) = 0.919; 0.65 / 0.919 = 1/√2
    assert advantages("grpo", [0.5, -0.8, NAN]) == pytest.approx([0.7071, -0.7071, 0.0], abs=1e-4)


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("group", [[NAN, NAN], [NAN, 0.3]])
def test_too_few_scorable_rollouts_give_zero_and_never_nan(name: str, group: list[float]) -> None:
    assert advantages(name, group) == [0.0, 0.0]


def test_a_rollout_counts_once_whatever_its_segments() -> None:
    # four rollouts, rewards 1, 0, 0, 0, mean 0.25; the first has five tokens in three segments
    batch = Rollouts(torch.zeros(4, dtype=torch.int64), torch.tensor([0, 0, 0, 0, 0, 1, 2, 3]))
    rewards = torch.tensor([1.0, 0, 0, 0], dtype=torch.float64)
    assert ESTIMATORS["dr_grpo"](rewards, batch).tolist() == [0.75] * 5 + [-0.25] * 3
