# SPDX-License-Identifier: Apache-2.0
"""The coordinator over HTTP: what each role is told, and what is in the journal before that."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from molt import control as c
from molt.config import Agent, Config, Data, Eval, Run, SamplingSection, Trainer, dump
from molt.coordinator.server import Coordinator
from molt.coordinator.state import State
from molt.records import Fenced, Group, GroupStatus, Lease, MoltError, PublishEnd, Where
from molt.store.journal import Journal, read_journal
from molt.store.run import RunDir, read_metrics

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

    async def lease(self, free: int = 100, holding: tuple[int, ...] = ()) -> tuple[Lease, ...]:
        q = c.LeaseRequest(runner="r", engine=0, free=free, holding=holding)
        return (await self.client.call(c.LEASE, q)).leases

    async def announce(self, *groups: Group) -> None:
        await self.client.call(c.ANNOUNCE, c.Announce(runner="r", groups=groups))

    async def publish(self, step: int) -> int:
        """The trainer publishes, the one engine acknowledges."""
        begin = c.PublishRequest(
            step=step,
            address="127.0.0.1",
            port=1,
            world=2,
            communicator="c",
            tensors=(),
            bucket_bytes=1,
        )
        version = (await self.client.call(c.PUBLISH, begin)).version
        got = (
            await self.client.call(c.ENGINE, c.EngineRequest(engine=0, version=version - 1))
        ).publication
        assert got is not None and got.version == version
        ack = asyncio.create_task(
            self.client.call(c.ENGINE, c.EngineRequest(engine=0, version=version))
        )
        assert (await self.client.call(c.PUBLISHED, c.PublishWait(version=version))).done
        ack.cancel()
        return version


@asynccontextmanager
async def coordinator_of(run: Path, config: Config) -> AsyncIterator[Peers]:
    journal = Journal.start(run, "t")
    state = State()
    for record in read_journal(run):
        state.apply(record)
    coordinator = Coordinator(RunDir(run), config, state, journal)
    coordinator.publications.acknowledge(c.EngineRequest(engine=0, version=0))
    server = web.AppRunner(
        c.serve(coordinator.routes(), (run / "token").read_text()), shutdown_timeout=0.1
    )
    await server.setup()
    site = web.TCPSite(server, "127.0.0.1", 0)
    await site.start()
    host, port = server.addresses[0][:2]
    client = c.Client(run, f"{host}:{port}")
    writing = asyncio.create_task(coordinator.write_journal())
    try:
        yield Peers(coordinator, client)
    finally:
        writing.cancel()
        await client.close()
        await server.cleanup()
        journal.close()


def with_coordinator(
    run: Path, work: Callable[[Peers], Awaitable[None]], config: Config = CONFIG
) -> None:
    async def main() -> None:
        async with coordinator_of(run, config) as peers:
            await asyncio.wait_for(work(peers), 20)

    asyncio.run(main())


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return RunDir.create(tmp_path / "run", dump(CONFIG)).path


def test_a_run_goes_from_lease_to_metrics(run: Path) -> None:
    async def work(peers: Peers) -> None:
        call = peers.client.call
        assert (await call(c.TRAINER, c.TrainerStart(step=0))).lineage == 1
        assert await peers.publish(0) == 1
        leases = await peers.lease()
        assert [x.group for x in leases] == [0, 1, 2, 3]  # B · (max_lag + 1)
        await peers.announce(*map(group_of, leases[1:]))
        reply = await call(c.PLAN, c.PlanRequest(step=1))
        assert reply.plan is not None and reply.plan.groups == (1, 2)
        assert [g.group for g in reply.groups] == [1, 2] and dict(reply.steps) == {1: 0}
        assert await peers.publish(1) == 2
        await call(c.STEP, c.StepRequest(step=1, version=2, metrics={"reward/mean": 0.5}))

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
        await peers.client.call(c.TRAINER, c.TrainerStart(step=0))
        assert not asking.done()
        await peers.publish(0)
        assert [x.version for x in await asking] == [1, 1, 1, 1]

    with_coordinator(run, work)


def test_repeating_a_message_changes_nothing(run: Path) -> None:
    async def work(peers: Peers) -> None:
        await peers.client.call(c.TRAINER, c.TrainerStart(step=0))
        await peers.publish(0)
        leases = await peers.lease()
        assert await peers.lease() == leases  # the runner does not say that it holds them
        groups = (group_of(leases[0]), group_of(leases[1]), group_of(leases[3], "filtered"))
        await peers.announce(*groups)
        await peers.announce(*groups)
        with pytest.raises(Fenced):
            await peers.announce(group_of(Lease(lease=99, group=2, prompt=0)))
        plan = c.PlanRequest(step=1)
        assert await peers.client.call(c.PLAN, plan) == await peers.client.call(c.PLAN, plan)

    with_coordinator(run, work)
    records = list(read_journal(run))
    assert sum(type(r).__name__ == "Group" for r in records) == 3
    assert sum(type(r).__name__ == "Plan" for r in records) == 1


def test_a_fenced_group_does_not_keep_the_others_of_its_message_from_the_journal(
    run: Path,
) -> None:
    async def work(peers: Peers) -> None:
        await peers.client.call(c.TRAINER, c.TrainerStart(step=0))
        await peers.publish(0)
        leases = await peers.lease()
        stale = Lease(lease=99, group=leases[1].group, prompt=0)
        with pytest.raises(Fenced, match="lease 99 of group 1 is not current"):
            await peers.announce(*map(group_of, (leases[0], stale, leases[2])))
        reply = await peers.client.call(c.PLAN, c.PlanRequest(step=1))
        assert reply.plan is not None and reply.plan.groups == (0, 2)

    with_coordinator(run, work)
    assert [r.group for r in read_journal(run) if isinstance(r, Group)] == [0, 2]


def test_a_restarted_run_leases_what_was_in_flight_again_and_keeps_its_plans(run: Path) -> None:
    async def before(peers: Peers) -> None:
        await peers.client.call(c.TRAINER, c.TrainerStart(step=0))
        await peers.publish(0)
        leases = await peers.lease()
        await peers.announce(group_of(leases[1]), group_of(leases[3]))
        await peers.client.call(c.PLAN, c.PlanRequest(step=1))

    async def after(peers: Peers) -> None:
        await peers.client.call(c.TRAINER, c.TrainerStart(step=0))
        assert await peers.publish(0) == 2  # version 1 is never used again
        plan = (await peers.client.call(c.PLAN, c.PlanRequest(step=1))).plan
        assert plan is not None and plan.groups == (1, 3)
        assert [x.group for x in await peers.lease()] == [0, 2]

    with_coordinator(run, before)
    with_coordinator(run, after)


def test_groups_that_keep_failing_stop_the_run_with_the_last_error(run: Path) -> None:
    config = CONFIG.model_copy(update={"agent": Agent(max_failures=2)})

    async def work(peers: Peers) -> None:
        await peers.client.call(c.TRAINER, c.TrainerStart(step=0))
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
        await call(c.TRAINER, c.TrainerStart(step=0))
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
        await call(c.STEP, c.StepRequest(step=1, version=2, metrics={}))

    with_coordinator(run, work, config)
    (row,) = read_metrics(run / "metrics.jsonl")
    assert row["eval/greedy/reward"] == pytest.approx(1 / 6)  # one of six rollouts
    assert row["eval/greedy/version"] == 1 and row["eval/greedy/step"] == 0


def test_an_engine_that_cannot_load_weights_fails_the_publication_by_name(run: Path) -> None:
    async def work(peers: Peers) -> None:
        call = peers.client.call
        begin = c.PublishRequest(
            step=0, address="h", port=1, world=2, communicator="c", tensors=(), bucket_bytes=1
        )
        version = (await call(c.PUBLISH, begin)).version
        report = c.EngineRequest(engine=0, version=0, error="update_weights answered 500")
        reporting = asyncio.create_task(call(c.ENGINE, report))
        done = await call(c.PUBLISHED, c.PublishWait(version=version))
        assert done.error == "engine 0: update_weights answered 500"
        reporting.cancel()

    with_coordinator(run, work)
    end = list(read_journal(run))[-1]
    assert isinstance(end, PublishEnd) and not end.ok and "engine 0" in end.reason


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
