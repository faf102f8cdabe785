# SPDX-License-Identifier: Apache-2.0
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from molt.config import Config, Optim
from molt.records import Group, MoltError
from molt.store.schema import SegmentRow
from molt.trainer.batch import Batch, read_plan
from molt.trainer.step import lr_at, train_step
from tests.unit.trainer.toy import Toy, ToyPolicy, config, on_ranks, row, write_plan

REWARDS: dict[int, list[float | None]] = {0: [0, 1, 1, 0], 1: [None, 2, 0.5, 1], 2: [1, 1, 1, 1]}


def rollouts() -> list[SegmentRow]:
    """Three groups of four rollouts of two turns, one in two segments; μ is off by a factor."""
    random, rows = np.random.default_rng(1), []
    for group, rollout in [(g, r) for g in range(3) for r in range(4)]:
        for segment in range(2 if (group, rollout) == (1, 2) else 1):
            length = int(random.integers(9, 20))
            tokens = random.integers(0, 11, length).tolist()
            made = row(
                group, rollout, tokens, [(2, 5), (7, length)], temperatures=[0.7, 1.5],
                segment=segment, num_segments=2 if (group, rollout) == (1, 2) else 1,
            )  # fmt: skip
            made.behavior_logprobs[:] += random.normal(0, 0.6, length)
            rows.append(made)
    return rows


def run(
    path: Path, groups: tuple[Group, ...], settings: Config, rank: int = 0, world: int = 1
) -> Any:
    """Two steps over the same plan: metrics of both, parameters after each, passes and updates."""
    policy = ToyPolicy()
    found, parameters = [], []
    for step in (1, 2):
        batch = read_plan(path, groups, {1: 0}, rank, world)
        found.append(train_step(policy, batch, settings, step))
        parameters.append(policy.parameters())
    return found, parameters, policy.num_passes, policy.num_updates


CASES = [
    (aggregation, count, tokens)
    for aggregation in ("token_mean", "sequence_mean")
    for count in (1, 3)
    for tokens in (19, 50, 10_000)
]


def case(aggregation: str, count: int, tokens: int) -> Config:
    return config(
        algo={"aggregation": aggregation, "advantage_scale": 2.0},
        trainer={"minibatches": count, "tokens": tokens},
    )


def every_case(rank: int, world: int, path: Path, groups: tuple[Group, ...]) -> list[Any]:
    one_group, large = groups[:1], case("token_mean", 1, 10_000)
    runs = [run(path, groups, case(*c), rank, world) for c in CASES]
    return [*runs, run(path, one_group, large, rank, world)]  # rank 1 has nothing


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[Group, ...]]:
    path = tmp_path_factory.mktemp("run")
    return path, write_plan(path, rollouts(), REWARDS)


@pytest.fixture(scope="module")
def one_rank(shards: tuple[Path, tuple[Group, ...]]) -> list[Any]:
    return every_case(0, 1, *shards)


@pytest.fixture(scope="module")
def two_ranks(
    shards: tuple[Path, tuple[Group, ...]], tmp_path_factory: pytest.TempPathFactory
) -> list[list[Any]]:
    return on_ranks(2, every_case, tmp_path_factory.mktemp("ranks"), *shards)


def reference(aggregation: str) -> Tensor:
    """Parameters after one update with lr 1, written from the definition, a rollout at a time.

    On-policy the PPO gradient is Σ w A c ∇log π / Σ w, with A = 2 (r − mean of the scorable) and
    c = min(π_old/μ, 2); w is 1, or 1 / trained tokens of the rollout.
    """
    model, total, objective = Toy(), 0.0, torch.zeros(())
    for g, rewards in REWARDS.items():
        scored = [r for r in rewards if r is not None]
        for index, reward in enumerate(rewards):
            segments = [r for r in rollouts() if (r.group, r.rollout) == (g, index)]
            if reward is None:
                continue
            advantage = 2 * (reward - sum(scored) / len(scored))
            count = sum(int(s.action_mask.sum()) for s in segments)
            weight = 1.0 if aggregation == "token_mean" else 1.0 / count
            total += weight * count
            for s in segments:
                temperature = torch.ones(len(s.token_ids))
                temperature[2:5], temperature[7:] = 0.7, 1.5
                logprobs = model(
                    torch.from_numpy(s.token_ids).long(),
                    torch.tensor([0, len(s.token_ids)]),
                    temperature,
                )[0][torch.from_numpy(s.action_mask)]
                mu = torch.from_numpy(s.behavior_logprobs[s.action_mask])
                correction = (logprobs.detach() - mu).exp().clamp(max=2)
                objective = objective + (weight * advantage * correction * logprobs).sum()
    (objective / total).backward()
    flat = [(p + p.grad).flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat(flat).detach()


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_the_update_is_the_one_of_the_definition(one_rank: list[Any], aggregation: str) -> None:
    found = one_rank[CASES.index((aggregation, 1, 10_000))][1][0]
    torch.testing.assert_close(found, reference(aggregation), atol=1e-6, rtol=0)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_no_split_changes_loss_gradient_or_metrics(
    one_rank: list[Any], two_ranks: list[list[Any]], number: int
) -> None:
    aggregation, count, _ = CASES[number]
    whole = one_rank[CASES.index((aggregation, count, 10_000))]
    for found in (one_rank[number], two_ranks[0][number], two_ranks[1][number]):
        for step in range(2):
            torch.testing.assert_close(found[1][step], whole[1][step], atol=1e-6, rtol=0)
            assert found[0][step] == pytest.approx(whole[0][step], rel=1e-5, abs=1e-6)


def test_ranks_run_the_same_passes_even_when_one_has_nothing(two_ranks: list[list[Any]]) -> None:
    passes = [[r[2] for r in rank] for rank in two_ranks]
    assert passes[0] == passes[1] and passes[0][-1] == 4  # π_old and training, two steps
    torch.testing.assert_close(two_ranks[0][-1][1], two_ranks[1][-1][1], atol=0, rtol=0)


def test_an_idle_rank_contributes_nothing(one_rank: list[Any], two_ranks: list[list[Any]]) -> None:
    torch.testing.assert_close(two_ranks[1][-1][1], one_rank[-1][1], atol=1e-6, rtol=0)


def test_the_first_update_is_exactly_on_policy(one_rank: list[Any]) -> None:
    # ρ = 1 bit for bit in the micro-batches that π_old ran in: nothing is clipped
    for number, (_, count, _) in enumerate(CASES):
        fraction = one_rank[number][0][0]["loss/clip_fraction"]
        assert (fraction == 0) == (count == 1)


def one_batch(
    path: Path, rows: list[SegmentRow], rewards: list[float | None], **lags: int
) -> Batch:
    groups = write_plan(path, rows, {0: rewards})
    return read_plan(path, groups, {1: 0, 5: 0} | {int(k[1:]): v for k, v in lags.items()}, 0, 1)


def test_every_token_weighs_the_same_however_they_are_spread(tmp_path: Path) -> None:
    # 7 + 3 + 1 + 1 trained tokens, each segment a micro-batch: with A = ±1 for 8 and 4 of them the
    # on-policy loss is −(7 + 1 − 3 − 1)/12 = −1/3, where a mean of means would be 0
    rows = [row(0, i, [1] * (n + 1), [(1, n + 1)]) for i, n in enumerate((7, 3, 1, 1))]
    batch = one_batch(tmp_path, rows, [1.0, -1.0, 1.0, -1.0])
    metrics = train_step(ToyPolicy(), batch, config(trainer={"tokens": 1}), 1)
    assert metrics["loss/policy"] == pytest.approx(-1 / 3, abs=1e-6)


def test_mismatch_compares_behavior_with_old_policy_on_trained_tokens(tmp_path: Path) -> None:
    rows = [row(0, i, [1, 2, 3], [(1, 3)]) for i in range(3)]
    # log μ − log π_old: 0.1 and −0.3 in the first, 0 in the second, unscorable in the third
    rows[0].behavior_logprobs[1:] += np.array([0.1, -0.3], np.float32)
    rows[2].behavior_logprobs[1:] += 5
    metrics = train_step(ToyPolicy(), one_batch(tmp_path, rows, [1, 0, None]), config(), 1)
    assert metrics["mismatch/kl"] == pytest.approx((0.1 - 0.3) / 4, abs=1e-6)
    assert metrics["mismatch/ratio_max"] == pytest.approx(math.exp(0.3), rel=1e-5)


def test_temperature_belongs_to_the_token(tmp_path: Path) -> None:
    # logits 2, 1, 0, −1 whatever comes before; log softmax of l/T of tokens 0, 1, 3 at T = ½, ½, 1:
    # T = ½: logits 4 2 0 −2, log Σ = 4.1450; T = 1: log Σ = 2.4402
    policy = ToyPolicy()
    with torch.no_grad():
        policy.model.head.weight.zero_()
        policy.model.head.bias.fill_(-torch.inf)
        policy.model.head.bias[:4] = torch.tensor([2.0, 1.0, 0.0, -1.0])
    rows = [row(0, 0, [2, 0, 1, 2, 3], [(1, 3), (4, 5)], temperatures=[0.5, 1.0])]
    batch = one_batch(tmp_path, rows, [1.0])
    train_step(policy, batch, config(optim={"lr": 1e-9}), 1)
    expected = [4 - 4.1450, 2 - 4.1450, -1 - 2.4402]
    assert batch.old_logprobs[batch.action_mask].tolist() == pytest.approx(expected, abs=1e-4)


def test_stale_tokens_are_masked_and_leave_the_denominator(tmp_path: Path) -> None:
    # 40 tokens three steps old and 10 fresh ones a rollout, max_lag 2
    rows = [row(0, i, [1] * 51, [(1, 51)], versions=[[41, 1], [51, 5]]) for i in range(2)]
    batch = one_batch(tmp_path, rows, [1.0, 0.0], v1=3)
    settings = config(pool={"stale": "mask", "max_lag": 2}, algo={"aggregation": "sequence_mean"})
    metrics = train_step(ToyPolicy(), batch, settings, 1)
    assert batch.weights.count_nonzero() == 20
    assert batch.weights.sum().item() == pytest.approx(2)
    assert (metrics["lag/mean"], metrics["lag/max"]) == (0.0, 0.0)


def test_stale_tokens_train_when_the_pool_says_so_and_their_lag_is_shown(tmp_path: Path) -> None:
    rows = [row(0, i, [1] * 51, [(1, 51)], versions=[[41, 1], [51, 5]]) for i in range(2)]
    batch = one_batch(tmp_path, rows, [1.0, 0.0], v1=3)
    metrics = train_step(ToyPolicy(), batch, config(pool={"stale": "train"}), 1)
    assert (metrics["lag/mean"], metrics["lag/max"]) == (pytest.approx(2.4), 3.0)  # 3 · 40/50


@pytest.mark.parametrize("rewards", [[None, None], [None]])
def test_nothing_to_train_means_no_update_and_is_counted(
    tmp_path: Path, rewards: list[float | None]
) -> None:
    policy = ToyPolicy()
    before = policy.parameters()
    rows = [row(0, i, [1, 2], [(1, 2)]) for i in range(len(rewards))]
    metrics = train_step(policy, one_batch(tmp_path, rows, rewards), config(), 1)
    assert (policy.num_updates, metrics["skipped_updates"]) == (0, 1)
    assert torch.equal(policy.parameters(), before)
    assert all(math.isfinite(v) for v in metrics.values())


def test_a_micro_batch_without_a_trained_token_adds_a_zero_gradient(tmp_path: Path) -> None:
    rows = [row(0, i, [1, 2, 3], [(1, 3)]) for i in range(3)]
    policy, alone = ToyPolicy(), ToyPolicy()
    settings = config(trainer={"tokens": 3})  # one segment each
    train_step(policy, one_batch(tmp_path / "a", rows, [1, 0, None]), settings, 1)
    train_step(alone, one_batch(tmp_path / "b", rows[:2], [1, 0]), settings, 1)
    torch.testing.assert_close(policy.parameters(), alone.parameters())


def broken(policy: ToyPolicy) -> ToyPolicy:
    """Token 10 makes every log-probability after it NaN."""
    with torch.no_grad():
        policy.model.embedding.weight[10] = torch.nan
    return policy


def test_a_nan_drops_its_rollout_and_no_other(tmp_path: Path) -> None:
    rows = [row(0, i, [1, 2, 3], [(1, 3)]) for i in range(150)]
    rows[7] = row(0, 7, [1, 10, 3], [(1, 3)])
    rewards: list[float | None] = [float(i % 2) for i in range(150)]
    policy, without = broken(ToyPolicy()), broken(ToyPolicy())
    metrics = train_step(policy, one_batch(tmp_path / "a", rows, rewards), config(), 1)
    assert metrics["nan_rollouts"] == 1 and math.isfinite(metrics["grad_norm"])
    rows[7] = row(0, 7, [1, 2, 3], [(1, 3)])
    batch = one_batch(tmp_path / "b", rows, rewards)
    batch.action_mask[batch.rollout_of_token == 7] = False
    train_step(without, batch, config(), 1)
    torch.testing.assert_close(policy.parameters(), without.parameters(), equal_nan=True)


def test_more_than_a_hundredth_of_nan_rollouts_stops_the_run(tmp_path: Path) -> None:
    rows = [row(0, i, [1, 10 if i == 0 else 2, 3], [(1, 3)]) for i in range(50)]
    policy = broken(ToyPolicy())
    with pytest.raises(MoltError, match="step 4: 1 of 50 rollouts"):
        train_step(policy, one_batch(tmp_path, rows, [0.0, 1.0] * 25), config(), 4)
    assert policy.num_updates == 0


def test_a_gradient_that_is_not_finite_is_never_applied(tmp_path: Path) -> None:
    rows = [row(0, i, [1, 2, 3], [(1, 3)]) for i in range(2)]
    policy = ToyPolicy()
    policy.model.head.weight.register_hook(lambda g: g * torch.nan)
    with pytest.raises(MoltError, match="step 3: the gradient is not finite"):
        train_step(policy, one_batch(tmp_path, rows, [1.0, 0.0]), config(), 3)
    assert policy.num_updates == 0


def test_minibatches_are_as_many_updates_and_clipping_bounds_each(tmp_path: Path) -> None:
    batch = one_batch(tmp_path, [r for r in rollouts() if r.group == 0], [0, 1, 1, 0])
    policy = ToyPolicy()
    before = policy.parameters()
    settings = config(trainer={"minibatches": 2}, optim={"lr": 1.0, "clip_norm": 1e-3})
    metrics = train_step(policy, batch, settings, 1)
    assert policy.num_updates == 2
    assert (policy.parameters() - before).norm() <= 2e-3  # two steps of lr · clip_norm
    assert metrics["grad_norm"] > 1e-2  # before clipping


def test_the_learning_rate_warms_up_and_decays() -> None:
    def at(step: int, **options: Any) -> float:
        return lr_at(step, Optim(lr=2.0, lr_final=0.1, **options), 110)

    assert [at(s, warmup=10) for s in (1, 5, 10, 110)] == [0.2, 1.0, 2.0, 2.0]
    # halfway between 10 and 110: 0.1 + 0.9/2 = 0.55 of lr, for either shape
    for schedule in ("linear", "cosine"):
        found = [at(s, warmup=10, schedule=schedule) for s in (5, 10, 60, 110, 200)]
        assert found == pytest.approx([1.0, 2.0, 1.1, 0.2, 0.2])
    # a quarter of the way a cosine has fallen to (1 + cos 45°)/2 = 0.854: 0.1 + 0.9 · 0.854
    assert at(35, warmup=10, schedule="cosine") == pytest.approx(2 * 0.8682, abs=1e-4)


def test_the_step_sets_the_rate_and_reports_it(tmp_path: Path) -> None:
    batch = one_batch(tmp_path, [row(0, i, [1, 2], [(1, 2)]) for i in range(2)], [0, 1])
    policy = ToyPolicy()
    metrics = train_step(policy, batch, config(optim={"lr": 0.5, "warmup": 4}), 2)
    assert metrics["lr"] == policy.optimizer.param_groups[0]["lr"] == 0.25
