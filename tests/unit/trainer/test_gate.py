# SPDX-License-Identifier: Apache-2.0
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from molt.records import MoltError
from molt.store.schema import SegmentRow
from molt.trainer import gate
from molt.trainer.batch import Batch, read_plan
from tests.unit.trainer.toy import ToyPolicy, config, on_ranks, row, write_plan


def rollouts(temperature: float = 1.0) -> list[SegmentRow]:
    """Twenty rollouts of two turns, 5 to 24 tokens each."""
    random = np.random.default_rng(2)
    return [
        row(
            i // 5, i % 5, random.integers(0, 11, 5 + i).tolist(), [(1, 3), (4, 5 + i)],
            temperatures=[temperature, temperature],
        )
        for i in range(20)
    ]  # fmt: skip


def batch(path: Path, rows: list[SegmentRow], lag: int = 0, rank: int = 0, world: int = 1) -> Batch:
    groups = write_plan(path, rows, {g: [1.0] * 5 for g in range(4)}, f"w{rank}")
    return read_plan(path, groups, {1: lag}, rank, world)


def confident() -> ToyPolicy:
    """A policy whose temperature shows."""
    policy = ToyPolicy()
    with torch.no_grad():
        policy.model.head.weight.mul_(3)
    return policy


def sampled_by(policy: ToyPolicy, data: Batch, **changes: Any) -> Batch:
    """What an engine with `policy`'s weights would have recorded at some temperature."""
    at = changes.get("temperature", data.temperature)
    found = policy.logprobs(data.tokens, data.cu_seqlens, at)[0].detach()
    data.behavior_logprobs = torch.where(data.action_mask, found, torch.nan)
    return data


def test_agreement_passes(tmp_path: Path) -> None:
    assert gate.check(ToyPolicy(), batch(tmp_path, rollouts(0.7)), config())


def test_a_batch_without_fresh_tokens_says_nothing(tmp_path: Path) -> None:
    policy = ToyPolicy()
    policy.model.offset = 3
    assert not gate.check(policy, batch(tmp_path, rollouts(), lag=1), config())


@pytest.mark.parametrize("factor", [0.6, 1.5])
def test_a_wrong_temperature_is_refused_by_its_factor(tmp_path: Path, factor: float) -> None:
    policy, data = confident(), batch(tmp_path, rollouts(0.8))
    sampled_by(policy, data, temperature=data.temperature * factor)
    with pytest.raises(MoltError, match=r"agreement .* temperature is multiplied by ") as refused:
        gate.check(policy, data, config())
    found = float(str(refused.value).split("multiplied by ")[1].split(":")[0])
    assert found == pytest.approx(factor, rel=0.02)


def test_raw_log_probabilities_are_refused_as_a_temperature(tmp_path: Path) -> None:
    # recorded at T = 0.5, but the engine returned log softmax of the bare logits: a factor of 2
    policy, data = confident(), batch(tmp_path, rollouts(0.5))
    sampled_by(policy, data, temperature=torch.ones_like(data.temperature))
    with pytest.raises(MoltError, match=r"multiplied by 2\.0.*raw instead of processed"):
        gate.check(policy, data, config())


@pytest.mark.parametrize("shift", [1, -1])
def test_a_shifted_mask_is_refused_as_one(tmp_path: Path, shift: int) -> None:
    policy, data = ToyPolicy(), batch(tmp_path, rollouts())
    data.action_mask = data.action_mask.roll(shift)
    data.behavior_logprobs = data.behavior_logprobs.roll(shift)
    with pytest.raises(MoltError, match=r"agreement .* action mask .* is off by one"):
        gate.check(policy, data, config())


def test_a_position_offset_is_refused_as_the_likely_rest(tmp_path: Path) -> None:
    policy = ToyPolicy()
    policy.model.offset = 1
    with pytest.raises(MoltError, match=r"agreement .* neither .* position offset"):
        gate.check(policy, batch(tmp_path, rollouts()), config())


def test_sequences_that_see_each_other_are_refused_by_the_layouts(tmp_path: Path) -> None:
    policy = ToyPolicy()
    policy.model.leaks = True
    with pytest.raises(MoltError, match=r"layouts .* do not restart at each segment"):
        gate.check(policy, batch(tmp_path, rollouts()), config())


def test_the_error_says_where_they_part(tmp_path: Path) -> None:
    # only the first token of the second turns, token 4, is off, by 0.5; half the turns' starts
    policy, data = ToyPolicy(), batch(tmp_path, rollouts())
    data.behavior_logprobs[data.cu_seqlens[:-1] + 4] += 0.5
    expected = r"largest 0\.5 .* first tokens of turns 0\.25, at others .*; first large at token 4 "
    with pytest.raises(MoltError, match=expected):
        gate.check(policy, data, config())


def test_bfloat16_is_judged_by_the_mean(tmp_path: Path) -> None:
    data = batch(tmp_path, rollouts())
    at = data.action_mask.nonzero().squeeze(1)
    data.behavior_logprobs[at[::2]] += 0.03  # mean 0.015 of 0.02 allowed; in float32 0.001 is
    assert gate.check(ToyPolicy(), data, config(model={"dtype": "bfloat16"}))
    with pytest.raises(MoltError, match=r"largest allowed: 0\.001"):
        gate.check(ToyPolicy(), data, config())


def refused_on(rank: int, world: int, path: Path) -> str:
    """All groups but one are on rank 0's side; the temperature is wrong on both."""
    policy, data = ToyPolicy(), batch(path, rollouts(0.8), rank=rank, world=world)
    data.temperature[data.action_mask] *= 2
    if rank == 1:
        data.action_mask[:] = False  # this rank has nothing to compare
    try:
        gate.check(policy, data, config(trainer={"tokens": 40}))
    except MoltError as error:
        return str(error)
    return ""


def test_all_ranks_refuse_with_the_same_words(tmp_path: Path) -> None:
    texts = on_ranks(2, refused_on, tmp_path, tmp_path)
    assert texts[0] == texts[1]
    assert "multiplied by 0.5" in texts[0]
