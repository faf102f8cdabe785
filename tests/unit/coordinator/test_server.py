# SPDX-License-Identifier: Apache-2.0
"""The coordinator over HTTP: what each role is told, and what is in the journal before that."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from molt import control as c
from molt.config import (
    Agent,
    CheckpointSection,
    Config,
    Data,
    Eval,
    Pool,
    Run,
    SamplingSection,
    Trainer,
    dump,
)
from molt.coordinator.disk import Disk
from molt.coordinator.server import Coordinator
from molt.records import (
    Fenced,
    Group,
    GroupStatus,
    Lease,
    LeaseEnd,
    MoltError,
    PublishEnd,
    Record,
    Retire,
    Void,
    Where,
)
from molt.store.journal import Journal, read_journal
from molt.store.run import RunDir, read_metrics
from molt.store.shards import ShardWriter, read_group, to_batch
from tests.unit.trainer import toy

CONFIG = Config(
    run=Run(name="t"),
    data=Data(source="molt.agents.guess:prompts"),
    sampling=SamplingSection(num_samples=2),
    trainer=Trainer(groups=2, steps=2),
)


def group_of(lease: Lease, status: GroupStatus = "ready", reward: float = 1.0) -> Group:
    return Group(
        lease=lease.lease, group=lease.group, prompt=lease.prompt, task=lease.task, status=status,
        reason="because" if status == "failed" else "", rewards=(reward, 0.0),
        version_min=lease.version, where=Where(path="shards/w/00000001.arrow", offset=0, length=1,
        hash="0" * 32),
    )  # fmt: skip


class Peers:
    """The other roles, as far as the coordinator sees them."""

    def __init__(self, coordinator: Coordinator, client: c.Client) -> None:
        self.coordinator, self.client = coordinator, client
        self.lineage, self.requests, self.starts = 0, 0, 0

    async def start(self, step: int = 0) -> int:
        """The trainer starts from a checkpoint."""
        self.starts += 1
        q = c.TrainerStart(step=step, incarnation=f"{id(self)}-{self.starts}")
        self.lineage = (await self.client.call(c.TRAINER, q)).lineage
        return self.lineage

    async def lease(
        self, free: int = 100, holding: tuple[int, ...] = (), runner: str = "r"
    ) -> tuple[Lease, ...]:
        q = c.LeaseRequest(runner=runner, engine=0, free=free, holding=holding)
        return (await self.client.call(c.LEASE, q)).leases

    async def announce(self, *groups: Group, runner: str = "r") -> None:
        await self.client.call(c.ANNOUNCE, c.Announce(runner=runner, groups=groups))

    async def plan(self, step: int) -> c.PlanReply:
        return await self.client.call(c.PLAN, c.PlanRequest(step=step, lineage=self.lineage))

    async def begin(self, step: int, communicator: str = "") -> c.PublishReply:
        """The trainer offers weights."""
        self.requests += 1
        q = c.PublishRequest(
            step=step, lineage=self.lineage, address="127.0.0.1", port=1, workers=1,
            communicator=communicator, fresh=f"c{self.requests}", tensors=(), bucket_bytes=1,
        )  # fmt: skip
        return await self.client.call(c.PUBLISH, q)

    def engine(
        self, version: int, incarnation: str = "a", **fields: Any
    ) -> "asyncio.Task[c.EngineReply]":
        q = c.EngineRequest(engine=0, incarnation=incarnation, version=version, **fields)
        return asyncio.create_task(self.client.call(c.ENGINE, q))

    async def publish(self, step: int, incarnation: str = "a") -> int:
        """The trainer publishes, the one engine acknowledges."""
        version = (await self.begin(step)).version
        got = (await self.engine(version - 1, incarnation)).publication
        assert got is not None and got.version == version
        ack = self.engine(version, incarnation)
        assert (await self.client.call(c.PUBLISHED, c.PublishWait(version=version))).done
        ack.cancel()
        return version


@asynccontextmanager
async def coordinator_of(run: Path, config: Config, attempt: int = 1) -> AsyncIterator[Peers]:
    journal, state = Journal.start(run, "t", attempt)

    async def append(records: list[Record]) -> None:
        journal.append(records)

    coordinator = Coordinator(config, state, append, Disk(RunDir(run)))
    now = asyncio.get_running_loop().time()
    coordinator.publications.report(c.EngineRequest(engine=0, incarnation="a", version=0), now)
    working = asyncio.create_task(coordinator.work())
    await coordinator.begin()
    server = web.AppRunner(
        c.serve(coordinator.routes(), (run / "token").read_text()), shutdown_timeout=0.1
    )
    await server.setup()
    site = web.TCPSite(server, "127.0.0.1", 0)
    await site.start()
    host, port = server.addresses[0][:2]
    client = c.Client(run, f"{host}:{port}")
    try:
        yield Peers(coordinator, client)
    finally:
        working.cancel()
        await client.close()
        await server.cleanup()
        journal.close()


def with_coordinator(
    run: Path, work: Callable[[Peers], Awaitable[None]], config: Config = CONFIG, attempt: int = 1
) -> None:
    async def main() -> None:
        async with coordinator_of(run, config, attempt) as peers:
            await asyncio.wait_for(work(peers), 20)

    asyncio.run(main())


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return RunDir.create(tmp_path / "run", dump(CONFIG)).path


def test_a_run_goes_from_lease_to_metrics(run: Path) -> None:
    async def work(peers: Peers) -> None:
        call = peers.client.call
        assert await peers.start() == 1
        assert await peers.publish(0) == 1
        leases = await peers.lease()
        assert [x.group for x in leases] == [0, 1, 2, 3]  # B · (max_lag + 1)
        await peers.announce(*map(group_of, leases[1:]))
        reply = await peers.plan(1)
        assert reply.plan is not None and reply.plan.groups == (1, 2)
        assert [g.group for g in reply.groups] == [1, 2] and reply.plan.steps == ((1, 0),)
        assert await peers.publish(1) == 2
        told = c.StepRequest(step=1, lineage=1, version=2, metrics={"reward/mean": 0.5})
        await call(c.STEP, told)
        await call(c.STEP, told)

    with_coordinator(run, work)
    names = [type(r).__name__ for r in read_journal(run)]
    assert names == [
        "Epoch", "Restore", "PublishBegin", "PublishEnd", *["Lease"] * 4, *["Group"] * 3, "Plan",
        "PublishBegin", "PublishEnd",
    ]  # fmt: skip
    (row,) = read_metrics(run / "metrics.jsonl")
    assert row["step"] == 1 and row["version"] == 2 and row["reward/mean"] == 0.5
    assert row["pool/in_flight"] == 2  # group 0 leased, group 3 ready


def test_nothing_is_leased_before_the_engine_holds_published_weights(run: Path) -> None:
    async def work(peers: Peers) -> None:
        asking = asyncio.create_task(peers.lease())
        await peers.start()
        assert not asking.done()
        await peers.publish(0)
        assert [x.version for x in await asking] == [1, 1, 1, 1]

    with_coordinator(run, work)


def test_repeating_a_message_changes_nothing(run: Path) -> None:
    async def work(peers: Peers) -> None:
        await peers.start()
        await peers.publish(0)
        leases = await peers.lease()
        assert await peers.lease() == leases  # the runner does not say that it holds them
        groups = (group_of(leases[0]), group_of(leases[1]), group_of(leases[3], "filtered"))
        await peers.announce(*groups)
        await peers.announce(*groups)
        with pytest.raises(Fenced):
            await peers.announce(group_of(Lease(lease=99, group=2, prompt=0)))
        assert await peers.plan(1) == await peers.plan(1)

    with_coordinator(run, work)
    records = list(read_journal(run))
    assert sum(type(r).__name__ == "Group" for r in records) == 3
    assert sum(type(r).__name__ == "Plan" for r in records) == 1


def test_a_fenced_group_does_not_keep_the_others_of_its_message_from_the_journal(
    run: Path,
) -> None:
    async def work(peers: Peers) -> None:
        await peers.start()
        await peers.publish(0)
        leases = await peers.lease()
        stale = Lease(lease=99, group=leases[1].group, prompt=0)
        with pytest.raises(Fenced, match="lease 99 of group 1 is not current"):
            await peers.announce(*map(group_of, (leases[0], stale, leases[2])))
        reply = await peers.plan(1)
        assert reply.plan is not None and reply.plan.groups == (0, 2)

    with_coordinator(run, work)
    assert [r.group for r in read_journal(run) if isinstance(r, Group)] == [0, 2]


def test_a_restarted_run_leases_what_was_in_flight_again_and_keeps_its_plans(run: Path) -> None:
    async def before(peers: Peers) -> None:
        await peers.start()
        await peers.publish(0)
        leases = await peers.lease()
        await peers.announce(group_of(leases[1]), group_of(leases[3]))
        await peers.plan(1)

    async def after(peers: Peers) -> None:
        await peers.start()
        assert await peers.publish(0) == 2  # version 1 is never used again
        plan = (await peers.plan(1)).plan
        assert plan is not None and plan.groups == (1, 3)
        assert [x.group for x in await peers.lease()] == [0, 2]

    with_coordinator(run, before)
    with_coordinator(run, after, attempt=2)
    ends = [r for r in read_journal(run) if isinstance(r, LeaseEnd)]
    assert [(e.group, e.reason) for e in ends] == [
        (0, "its attempt ended"),
        (2, "its attempt ended"),
    ]


def test_groups_that_keep_failing_stop_the_run_with_the_last_error(run: Path) -> None:
    config = CONFIG.model_copy(update={"agent": Agent(max_failures=2)})

    async def work(peers: Peers) -> None:
        await peers.start()
        await peers.publish(0)
        leases = await peers.lease()
        await peers.announce(group_of(leases[0], "failed"), group_of(leases[1], "failed"))
        assert await peers.coordinator.failed == "2 groups failed in a row, the last with: because"

    with_coordinator(run, work, config)


def test_an_evaluation_is_scored_under_the_version_it_was_made_with_and_never_planned(
    run: Path,
) -> None:
    config = CONFIG.model_copy(update={"eval": {"greedy": Eval(num_prompts=3, hold=True)}})

    async def work(peers: Peers) -> None:
        call = peers.client.call
        await peers.start()
        await peers.publish(0)
        evals = await peers.lease()
        assert [(x.task, x.group, x.prompt) for x in evals] == [
            ("greedy", -1, 0), ("greedy", -2, 1), ("greedy", -3, 2),
        ]  # fmt: skip
        training = await peers.lease(holding=tuple(x.lease for x in evals))
        assert {x.task for x in training} == {"train"}
        assert peers.coordinator.evals.holding
        await peers.announce(*(group_of(x, reward=float(x.prompt == 0)) for x in evals))
        assert not peers.coordinator.evals.holding
        await call(c.STEP, c.StepRequest(step=1, lineage=1, version=2, metrics={}))

    with_coordinator(run, work, config)
    (row,) = read_metrics(run / "metrics.jsonl")
    assert row["eval/greedy/reward"] == pytest.approx(1 / 6)  # one of six rollouts
    assert row["eval/greedy/version"] == 1 and row["eval/greedy/step"] == 0


def test_an_engine_that_cannot_load_weights_fails_the_publication_by_name(run: Path) -> None:
    async def work(peers: Peers) -> None:
        version = (await peers.begin(0)).version
        reporting = peers.engine(0, error="update_weights answered 500")
        done = await peers.client.call(c.PUBLISHED, c.PublishWait(version=version))
        assert done.error == "engine 0: update_weights answered 500"
        reporting.cancel()

    with_coordinator(run, work)
    end = list(read_journal(run))[-1]
    assert isinstance(end, PublishEnd) and not end.ok and "engine 0" in end.reason


def test_whoever_still_receives_a_failed_version_hears_of_it(run: Path) -> None:
    async def work(peers: Peers) -> None:
        version = (await peers.begin(0)).version
        receiving = peers.engine(0, receiving=version)
        wait = c.PublishWait(version=version, error="trainer: connection reset")
        assert (await peers.client.call(c.PUBLISHED, wait)).error == "trainer: connection reset"
        assert (await receiving).failed == version
        again = await peers.begin(0)
        assert again.version == version + 1  # a number is never used again

    with_coordinator(run, work)


def test_a_communicator_is_kept_while_its_members_stay_and_built_anew_when_one_restarts(
    run: Path,
) -> None:
    async def work(peers: Peers) -> None:
        async def publish(incarnation: str, built: str) -> str:
            reply = await peers.begin(0, built)
            ack = peers.engine(reply.version, incarnation)
            done = await peers.client.call(c.PUBLISHED, c.PublishWait(version=reply.version))
            assert done.done and not done.error
            ack.cancel()
            return reply.communicator

        first = await publish("a", "")
        assert await publish("a", first) == first
        joined = peers.engine(0, "b")
        plan = await peers.plan(1)
        assert plan.publish  # it lacks the weights
        assert await publish("b", first) not in ("", first)
        joined.cancel()

    with_coordinator(run, work)


def test_a_message_of_a_trainer_that_was_replaced_is_fenced(run: Path) -> None:
    async def work(peers: Peers) -> None:
        await peers.start()
        await peers.publish(0)
        old = peers.lineage
        await peers.start()
        with pytest.raises(Fenced, match="lineage 1"):
            await peers.client.call(c.PLAN, c.PlanRequest(step=1, lineage=old))

    with_coordinator(run, work)


def test_leases_outlive_a_coordinator_but_not_their_attempt(run: Path) -> None:
    taken: list[Lease] = []

    async def before(peers: Peers) -> None:
        await peers.start()
        await peers.publish(0)
        taken.extend(await peers.lease())

    async def same_attempt(peers: Peers) -> None:
        await peers.announce(group_of(taken[0]))
        assert {g.group for g in peers.coordinator.state.ready.values()} == {0}

    async def next_attempt(peers: Peers) -> None:
        with pytest.raises(Fenced):
            await peers.announce(group_of(taken[1]))

    with_coordinator(run, before)
    with_coordinator(run, same_attempt)
    with_coordinator(run, next_attempt, attempt=2)


def test_a_silent_runner_loses_its_leases_and_hears_of_it_when_it_is_back(run: Path) -> None:
    config = CONFIG.model_copy(update={"pool": Pool(lease_s=0.3)})

    async def work(peers: Peers) -> None:
        await peers.start()
        await peers.publish(0)
        leases = await peers.lease(free=4, runner="silent")
        beating = tuple(x.lease for x in await peers.lease(free=4, runner="living"))
        peers.coordinator.publications.engines[0].seen = float("inf")  # the engine never is
        held = peers.coordinator.state.holders
        while "silent" in held:
            beat = c.Heartbeat(runner="living", holding=beating)
            assert (await peers.client.call(c.HEARTBEAT, beat)).lost == ()
        numbers = tuple(x.lease for x in leases)
        beat = c.Heartbeat(runner="silent", holding=numbers)
        assert (await peers.client.call(c.HEARTBEAT, beat)).lost == numbers
        assert [x.group for x in await peers.lease(runner="third")] == [x.group for x in leases]

    with_coordinator(run, work, config)


def test_what_a_dead_runner_published_and_did_not_announce_is_adopted(run: Path) -> None:
    async def work(peers: Peers) -> None:
        await peers.start()
        await peers.publish(0)
        leases = await peers.lease()
        shards = ShardWriter(run, "r")
        for lease in leases[:2]:
            shards.add(to_batch([toy.row(lease.group, 0, [1, 2], [(1, 2)])]), group_of(lease))
        shards.publish()
        await peers.client.call(c.GONE, c.Gone(runner="r", reason="SIGKILL"))
        state = peers.coordinator.state
        assert set(state.ready) == {0, 1}
        assert set(state.returned) == {2, 3}
        read_group(run, state.ready[1].where)

    with_coordinator(run, work)


def test_a_plan_with_an_unreadable_group_is_void_and_its_prompt_comes_back(run: Path) -> None:
    async def work(peers: Peers) -> None:
        await peers.start()
        await peers.publish(0)
        leases = await peers.lease()
        await peers.announce(*map(group_of, leases[:2]))
        assert (await peers.plan(1)).plan is not None
        void = c.VoidRequest(
            step=1, lineage=1, groups=(0,), leases=(leases[0].lease,), reason="its shard is gone"
        )
        await peers.client.call(c.VOID, void)
        await peers.client.call(c.VOID, void)
        (again,) = await peers.lease(holding=tuple(x.lease for x in leases[2:]))
        assert again.group == 0
        await peers.announce(group_of(again))
        reply = await peers.plan(1)
        assert reply.plan is not None and reply.plan.groups == (1, 0)
        await peers.client.call(c.VOID, void)  # late
        assert (await peers.plan(1)).plan == reply.plan

    with_coordinator(run, work)
    assert sum(isinstance(r, Void) for r in read_journal(run)) == 1


def test_useless_shards_are_deleted_after_the_journal_says_so(run: Path) -> None:
    section = CheckpointSection(shards="none")
    config = CONFIG.model_copy(update={"checkpoint": section})
    shard = run / "shards/w/00000001.arrow"
    shard.parent.mkdir()
    shard.touch()

    async def work(peers: Peers) -> None:
        await peers.start()
        await peers.publish(0)
        leases = await peers.lease(free=4)
        await peers.announce(*map(group_of, leases))
        await peers.plan(1)
        await peers.publish(1)
        for oldest in (0, 1):
            assert shard.exists()
            q = c.CheckpointRequest(step=1, lineage=1, oldest=oldest, path="", version=2)
            await peers.client.call(c.CHECKPOINT, q)
        assert not shard.exists()

    with_coordinator(run, work, config)
    (retired,) = [r for r in read_journal(run) if isinstance(r, Retire)]
    assert retired.paths == ("shards/w/00000001.arrow",)


def test_a_checkpoint_older_than_what_is_remembered_is_refused(run: Path) -> None:
    async def work(peers: Peers) -> None:
        await peers.start()
        await peers.publish(0)
        leases = await peers.lease(free=4)
        await peers.announce(*map(group_of, leases))
        await peers.plan(1)
        await peers.publish(1)
        q = c.CheckpointRequest(step=1, lineage=1, oldest=1, path="", version=2)
        await peers.client.call(c.CHECKPOINT, q)
        with pytest.raises(MoltError, match="no checkpoint since step 1 can be restored"):
            await peers.start(0)

    with_coordinator(run, work)


def test_a_stranger_is_refused(run: Path, tmp_path: Path) -> None:
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    (stranger / "token").write_text("guess")

    async def work(peers: Peers) -> None:
        client = c.Client(stranger, peers.client._base.removeprefix("http://"))
        with pytest.raises(MoltError, match="token"):
            await client.call(c.STATUS, c.Empty())
        await client.close()

    with_coordinator(run, work)
