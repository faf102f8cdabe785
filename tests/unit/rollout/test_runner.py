# SPDX-License-Identifier: Apache-2.0
"""A runner against a real coordinator: what becomes of groups, of what is unfinished, and of it."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
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
from molt.records import EngineError, Group, Lease, LeaseEnd, Record, Sampling, StoreError
from molt.rollout import group as playing
from molt.rollout import runner as module
from molt.rollout.client import Completion
from molt.rollout.group import Player
from molt.rollout.runner import Runner
from molt.store.journal import read_journal
from molt.store.partials import Origin
from molt.store.run import RunDir
from molt.store.shards import read_group, to_rows
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


class Once(Alternating):
    """An agent whose tools must not run twice."""

    resumable = False


class Fixed:
    """An engine that always answers the same two tokens, under version 1."""

    def __init__(self, socket: Path, config: Engine) -> None:
        self.stopped = asyncio.Event()

    async def generate(self, ids: np.ndarray, sampling: Sampling, request_id: str) -> Completion:
        await asyncio.sleep(0)
        return completion([65, 0], "stop")

    async def recovered(self) -> None:
        raise AssertionError("this engine is never lost")

    async def stop(self, within_s: float) -> None:
        self.stopped.set()
        await asyncio.sleep(0.05)

    async def close(self) -> None:
        pass


class Slow(Fixed):
    """An engine that needs for ever, and has one more token when it is stopped."""

    async def generate(self, ids: np.ndarray, sampling: Sampling, request_id: str) -> Completion:
        if request_id.endswith("-1"):
            return completion([66, 67], "length")  # a chunk
        await self.stopped.wait()
        # Not all at once: whoever comes first must not end the others.
        await asyncio.sleep(0.01 * int(request_id.split("-")[1]))
        return completion([68], "abort")


class Refusing(Fixed):
    async def generate(self, ids: np.ndarray, sampling: Sampling, request_id: str) -> Completion:
        raise EngineError(f"request {request_id} was refused with 400: too long")


def completion(ids: list[int], finish_reason: str) -> Completion:
    n = len(ids)
    spans = np.array([[n, 1]], np.int64)
    return Completion(np.array(ids, np.int32), np.full(n, -0.5, np.float32), spans, finish_reason)


def config_of(agent: str, **pool: Any) -> Config:
    return Config(
        run=Run(name="t", stop_s=8.0),
        data=Data(source=f"{HERE}:prompts"),
        model=Model(path="m", max_len=64),
        agent=Agent(name=f"{HERE}:{agent}", retries=1, max_failures=99),
        sampling=SamplingSection(num_samples=4, max_tokens=8),
        pool=Pool(**pool),
        session=Session(shard_age_s=0.01, flush_s=0.02, chunk_tokens=2),
        trainer=Trainer(groups=1, steps=4),
    )


class Stage:
    """A run with a coordinator, and the runners that a test starts."""

    def __init__(self, run: Path, config: Config, peers: Peers, patch: pytest.MonkeyPatch) -> None:
        self.run, self.config, self.peers, self.patch = run, config, peers, patch
        self.runner: Runner

    def start(self, name: str = "r1", engine: type = Fixed) -> "asyncio.Task[None]":
        self.patch.setattr(module, "Client", engine)
        self.runner = Runner(self.run, self.config, 0, name, Path("s"))
        return asyncio.create_task(self.runner.run())

    def records(self, kind: type[Record]) -> list[Any]:
        return [r for r in read_journal(self.run) if isinstance(r, kind)]

    async def until(self, condition: Callable[[], Any], *working: "asyncio.Task[None]") -> Any:
        """What `condition` gives, once it is true; runners must not fail meanwhile."""
        deadline = time.monotonic() + 15
        while not (got := condition()):
            for task in working:
                assert not task.done() or task.result() is None
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        return got

    async def stop(self, *working: "asyncio.Task[None]") -> None:
        await self.peers.client.call(c.STOP, c.StopRequest(reason="test"))
        await asyncio.gather(*working)

    def partials(self) -> list[Path]:
        return sorted((self.run / "partials").glob("*/*.arrow"))


async def alive(peers: Peers) -> None:
    """The engine goes on saying what it holds."""
    while True:
        await peers.engine(1)


def on_stage(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: Config,
    work: Callable[[Stage], Awaitable[None]],
) -> None:
    """Run `work` beside a coordinator whose engine holds version 1; then all must verify."""
    run = RunDir.create(tmp_path / "run", b"{}").path
    monkeypatch.setattr(playing, "Renderer", lambda path: Letters())

    async def main() -> None:
        async with coordinator_of(run, config) as peers:
            await peers.start()
            await peers.publish(0)
            monkeypatch.setenv("MOLT_COORDINATOR", peers.client._base.removeprefix("http://"))
            engine = asyncio.create_task(alive(peers))
            await asyncio.wait_for(work(Stage(run, config, peers, monkeypatch)), 40)
            engine.cancel()

    asyncio.run(main())
    for group in (r for r in read_journal(run) if isinstance(r, Group)):
        assert {row.lease for row in to_rows(read_group(run, group.where))} == {group.lease}


def groups_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: Config, engine: type = Fixed
) -> list[Group]:
    """Let a runner work until its first group is announced; every group that is in the journal."""
    groups: list[Group] = []

    async def work(stage: Stage) -> None:
        running = stage.start(engine=engine)
        await stage.until(lambda: stage.records(Group), running)
        await stage.stop(running)
        groups.extend(stage.records(Group))

    on_stage(tmp_path, monkeypatch, config, work)
    return groups


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
    assert groups[0].retries == 4


def test_a_rollout_that_fails_once_is_whole_the_second_time(tmp_path, monkeypatch):
    Flaky.made = 0
    group = groups_of(tmp_path, monkeypatch, config_of("Flaky"))[0]
    assert group.status == "ready" and None not in group.rewards


def test_a_request_that_the_engine_refuses_fails_its_group_and_not_the_runner(
    tmp_path, monkeypatch
):
    group = groups_of(tmp_path, monkeypatch, config_of("Alternating"), Refusing)[0]
    assert group.status == "failed" and "refused with 400" in group.reason


# ---------------------------------------------------------------- what is unfinished


def test_a_stop_loses_no_token_and_the_next_runner_goes_on_from_each(tmp_path, monkeypatch):
    async def work(stage: Stage) -> None:
        first = stage.start("r1", Slow)
        await stage.until(lambda: stage.runner._playing, first)
        os.kill(os.getpid(), signal.SIGTERM)
        await first
        ends = stage.records(LeaseEnd)
        assert ends and {e.reason for e in ends} == {"stopped"}
        second = stage.start("r2", Fixed)
        groups = await stage.until(lambda: stage.records(Group), second)
        await stage.stop(second)
        group = min(groups, key=lambda g: g.lease)
        # Of each of four rollouts a chunk of two tokens and the one of the stop.
        assert (group.resumed, group.dead, group.replay_miss) == (12, 0, 0)
        for row in to_rows(read_group(stage.run, group.where)):
            assert row.token_ids.tolist() == [1, 2, 3, 66, 67, 68, 65, 0]
            assert row.action_spans.tolist() == [[3, 8]] and row.resumed_tokens == 3

    on_stage(tmp_path, monkeypatch, config_of("Alternating", lease_s=1.0), work)


def test_a_runner_without_room_for_more_is_told_to_stop_as_well(tmp_path, monkeypatch):
    async def work(stage: Stage) -> None:
        running = stage.start("r1", Slow)
        await stage.until(lambda: stage.runner._playing, running)
        began = time.monotonic()
        await stage.stop(running)
        assert time.monotonic() - began < 5
        assert len(stage.records(LeaseEnd)) == 1

    full = config_of("Alternating").model_copy(update={"engine": Engine(rollouts=4)})
    on_stage(tmp_path, monkeypatch, full, work)


@pytest.mark.parametrize(
    ("agent", "version", "resumed"),
    [
        ("Alternating", 1, 12),
        ("Alternating", 2, 0),  # no token of the group may be older than its lease says
        ("Once", 1, 0),
    ],
)
def test_what_must_not_be_resumed_starts_over_and_is_counted(
    tmp_path, monkeypatch, agent: str, version: int, resumed: int
):
    async def work(stage: Stage) -> None:
        first = stage.start("r1", Slow)
        await stage.until(lambda: stage.runner._playing, first)
        os.kill(os.getpid(), signal.SIGTERM)
        await first
        again: list[Origin] = []
        player = Player(
            stage.run, stage.config, "0", Fixed(Path(), Engine()), lambda o, _: again.append(o)
        )
        lease = Lease(lease=9, group=0, prompt=0, version=version)
        files = tuple(str(p.relative_to(stage.run)) for p in stage.partials())
        batch, group = await player.play(lease, files)
        assert (group.resumed, group.dead) == (resumed, 12 - resumed)
        kept = [66, 67, 68] if resumed else []
        for row in to_rows(batch):
            assert row.token_ids.tolist() == [1, 2, 3, *kept, 65, 0]
        # What starts over is another attempt: it replaces what is on disk.
        assert {o.attempt for o in again} == {0 if resumed else 1}

    on_stage(tmp_path, monkeypatch, config_of(agent), work)


def test_open_sessions_are_on_disk_while_they_go_on_and_no_longer_than_needed(
    tmp_path, monkeypatch
):
    async def work(stage: Stage) -> None:
        running = stage.start("r1", Slow)
        files = await stage.until(stage.partials, running)  # nobody has stopped it
        assert {f.parent.name for f in files} == {"r1"}
        os.kill(os.getpid(), signal.SIGTERM)
        await running
        second = stage.start("r2", Fixed)
        await stage.until(lambda: len(stage.records(Group)) >= 2, second)
        await stage.stop(second)
        assert not list((stage.run / "partials/r2").glob("*")), "they finished: nobody needs these"

    on_stage(tmp_path, monkeypatch, config_of("Alternating", lease_s=1.0), work)


def test_work_that_was_given_to_others_is_dropped_and_what_comes_back_goes_on(
    tmp_path, monkeypatch
):
    async def work(stage: Stage) -> None:
        running = stage.start("r1", Slow)
        await stage.until(stage.partials, running)
        held = await stage.until(lambda: dict(stage.runner._playing), running)
        await stage.peers.coordinator.leases.bury("r1", "silent")
        await stage.until(lambda: all(task.cancelled() for task in held.values()), running)
        # It is alive after all, and asks for more: the same groups under other numbers.
        await stage.until(lambda: stage.runner._playing.keys() - held.keys(), running)
        await stage.until(lambda: not stage.runner._playing.keys() & held.keys(), running)
        os.kill(os.getpid(), signal.SIGTERM)
        await running

    on_stage(tmp_path, monkeypatch, config_of("Alternating", lease_s=0.5), work)


def test_a_group_that_is_not_accepted_does_not_take_the_others_along(tmp_path, monkeypatch):
    async def work(stage: Stage) -> None:
        refused = 0
        announce = stage.peers.coordinator.leases._take

        def refuse_first(groups: list[Group]) -> list[str]:
            nonlocal refused
            bad = [g for g in groups if g.group == 0]
            refused += len(bad)
            return announce([g for g in groups if g.group != 0]) + ["no more"] * len(bad)

        stage.patch.setattr(stage.peers.coordinator.leases, "_take", refuse_first)
        running = stage.start()
        await stage.until(lambda: stage.records(Group), running)
        await stage.until(lambda: refused, running)
        await stage.stop(running)
        assert 0 not in {g.group for g in stage.records(Group)}

    on_stage(tmp_path, monkeypatch, config_of("Alternating", max_lag=3), work)


def test_a_full_disk_costs_time_and_nothing_else(tmp_path, monkeypatch, caplog):
    failures = [errno.ENOSPC, errno.EDQUOT]
    link = os.link

    def full(source: Any, target: Any) -> None:
        if "shards" in str(target) and failures:
            raise OSError(code := failures.pop(), os.strerror(code))
        link(source, target)

    monkeypatch.setattr("molt.store.files.os.link", full)
    groups = groups_of(tmp_path, monkeypatch, config_of("Alternating"))
    assert not failures and groups[0].status == "ready"
    assert "Disk quota exceeded" in caplog.text and "No space left" in caplog.text


def test_what_cannot_be_written_before_the_end_of_a_stop_is_an_error(tmp_path, monkeypatch):
    async def work(stage: Stage) -> None:
        def broken(path: Path) -> None:
            raise StoreError(f"cannot publish {path}: the disk is full")

        running = stage.start("r1", Slow)
        await stage.until(lambda: stage.runner._playing, running)
        with stage.patch.context() as patch:
            patch.setattr("molt.store.partials.publishing", broken)
            os.kill(os.getpid(), signal.SIGTERM)
            with pytest.raises(BaseExceptionGroup) as caught:
                await running
        assert caught.group_contains(StoreError, match="full")

    config = config_of("Alternating")
    short = config.model_copy(update={"run": Run(name="t", stop_s=1.0)})
    on_stage(tmp_path, monkeypatch, short, work)


def test_an_agent_that_blocks_the_loop_ends_the_process_with_its_line_in_the_log():
    program = """
import asyncio, time
from molt.config import Agent, Config
from molt.rollout.runner import Runner

async def main():
    runner = Runner.__new__(Runner)
    runner._config, runner._ended = Config(agent=Agent(block_s=0.5)), asyncio.Event()
    watching = asyncio.create_task(runner._watch())
    await asyncio.sleep(1.2)  # it does not mind who lets the loop run
    print("well so far", flush=True)
    blocking()

def blocking():
    time.sleep(60)

asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 1
    assert done.stdout == "well so far\n"
    assert "Timeout" in done.stderr and "in blocking" in done.stderr
