# SPDX-License-Identifier: Apache-2.0
"""A runner against a real coordinator: what becomes of good, constant, failing and flaky groups."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from molt import control as c
from molt.agents import Env, Result
from molt.config import (
    Agent,
    Config,
    Data,
    Engine,
    Model,
    Pool,
    Run,
    SamplingSection,
    Session,
    Trainer,
)
from molt.records import Group, Sampling
from molt.rollout import runner as module
from molt.rollout.client import Completion
from molt.rollout.runner import Runner
from molt.store.journal import read_journal
from molt.store.run import RunDir
from molt.store.shards import read_group, to_rows
from molt.store.verify import verify
from tests.unit.coordinator.test_server import Peers, coordinator_of
from tests.unit.rollout.test_episode import Letters

HERE = "tests.unit.rollout.test_runner"
LETTERS = iter(range(10**9))


def prompts() -> list[dict[str, Any]]:
    return [{"prompt": "p", "label": i} for i in range(4)]


class Alternating(Env):
    """Rollouts of a group earn 1 and 0 in turn."""

    count = 0

    def step(self, action: str) -> Result:
        Alternating.count += 1
        return Result(reward=float(Alternating.count % 2))


class Constant(Env):
    def step(self, action: str) -> Result:
        return Result(reward=0.95)


class Unscored(Env):
    def step(self, action: str) -> Result:
        return Result()


class Failing(Env):
    attempts = 0

    def step(self, action: str) -> Result:
        Failing.attempts += 1
        raise RuntimeError("the tool is gone")


class Flaky(Env):
    """Fails the first time each rollout is tried."""

    made = 0

    def __init__(self) -> None:
        Flaky.made += 1
        self.fails = Flaky.made <= 4

    def step(self, action: str) -> Result:
        if self.fails:
            raise RuntimeError("not yet")
        return Result(reward=float(next(LETTERS) % 2))


class Fixed:
    """An engine that always answers the same two tokens, under version 1."""

    def __init__(self, socket: Path, config: Engine) -> None:
        pass

    async def generate(self, ids: np.ndarray, sampling: Sampling, request_id: str) -> Completion:
        spans = np.array([[2, 1]], np.int64)
        return Completion(np.array([65, 0], np.int32), np.full(2, -0.5, np.float32), spans, "stop")

    async def close(self) -> None:
        pass


def config_of(agent: str, **pool: Any) -> Config:
    return Config(
        run=Run(name="t"),
        data=Data(source=f"{HERE}:prompts"),
        model=Model(path="m", max_len=64),
        agent=Agent(name=f"{HERE}:{agent}", retries=1, max_failures=99),
        sampling=SamplingSection(num_samples=4),
        pool=Pool(**pool),
        session=Session(shard_age_s=0.01),
        trainer=Trainer(groups=1, steps=1),
    )


def groups_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: Config) -> list[Group]:
    """Let a runner work until its first group is announced; every group that is in the journal."""
    run = RunDir.create(tmp_path / "run", b"{}").path
    monkeypatch.setattr(module, "Client", Fixed)
    monkeypatch.setattr(module, "Renderer", lambda path: Letters())

    async def work(peers: Peers, address: str) -> None:
        await peers.client.call(c.TRAINER, c.TrainerStart(step=0))
        await peers.publish(0)
        monkeypatch.setenv("MOLT_COORDINATOR", address)
        running = asyncio.create_task(Runner(run, config, 0, 0, Path("s")).run())
        while not any(isinstance(r, Group) for r in read_journal(run)):
            assert not running.done() or running.result() is None
            await asyncio.sleep(0.02)
        await peers.client.call(c.STOP, c.StopRequest(reason="test"))
        await running

    async def main() -> None:
        async with coordinator_of(run, config) as peers:
            address = peers.client._base.removeprefix("http://")
            await asyncio.wait_for(work(peers, address), 20)

    asyncio.run(main())
    assert list(verify(run)) == []
    return [r for r in read_journal(run) if isinstance(r, Group)]


def rows_of(tmp_path: Path, group: Group) -> list:
    return to_rows(read_group(tmp_path / "run", group.where))


def test_a_group_is_on_disk_whole_before_it_is_in_the_journal(tmp_path, monkeypatch):
    group = groups_of(tmp_path, monkeypatch, config_of("Alternating"))[0]
    assert group.status == "ready" and None not in group.rewards
    assert sorted(r or 0.0 for r in group.rewards) == [0.0, 0.0, 1.0, 1.0]
    assert (group.version_min, group.version_max) == (1, 1)
    rows = rows_of(tmp_path, group)
    assert [r.rollout for r in rows] == [0, 1, 2, 3]
    assert [r.reward for r in rows] == list(group.rewards)
    assert rows[0].token_ids.tolist() == [1, 2, 3, 65, 0]
    assert rows[0].action_mask.tolist() == [False] * 3 + [True] * 2


def test_a_constant_group_is_filtered_by_exact_equality_when_asked(tmp_path, monkeypatch):
    config = config_of("Constant", filter_constant=True)
    group = groups_of(tmp_path, monkeypatch, config)[0]
    assert (group.status, group.reason) == ("filtered", "all rewards equal 0.95")
    assert {r.status for r in rows_of(tmp_path, group)} == {"filtered"}


def test_a_constant_group_is_trained_when_not_asked(tmp_path, monkeypatch):
    assert groups_of(tmp_path, monkeypatch, config_of("Constant"))[0].status == "ready"


def test_a_group_that_nothing_scored_is_dropped_and_never_zero(tmp_path, monkeypatch):
    group = groups_of(tmp_path, monkeypatch, config_of("Unscored"))[0]
    assert (group.status, group.rewards) == ("filtered", (None,) * 4)


def test_a_failing_rollout_is_tried_again_a_bounded_number_of_times(tmp_path, monkeypatch):
    Failing.attempts = 0
    groups = groups_of(tmp_path, monkeypatch, config_of("Failing"))
    assert groups[0].status == "failed" and "the tool is gone" in groups[0].reason
    assert "\n" not in groups[0].reason and groups[0].rewards == (None,) * 4
    row = rows_of(tmp_path, groups[0])[0]
    assert row.status == "error" and "Traceback" in row.reason
    assert Failing.attempts % 4 == 0 and Failing.attempts >= 8  # four rollouts, two tries each


def test_a_rollout_that_fails_once_is_whole_the_second_time(tmp_path, monkeypatch):
    Flaky.made = 0
    group = groups_of(tmp_path, monkeypatch, config_of("Flaky"))[0]
    assert group.status == "ready" and None not in group.rewards
