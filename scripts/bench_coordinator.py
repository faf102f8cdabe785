# SPDX-License-Identifier: Apache-2.0
"""The coordinator alone: many simulated runners, real handlers, fold and journal.

Each runner leases and announces groups of 16 rollouts; a simulated trainer takes plans, publishes
and checkpoints. `in process` calls the handlers directly, `over HTTP` goes through the client and
the server of the control routes in the same process. The cost of a group must not grow with the
groups before it: the last fifth of them is compared with the first.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web
from bench_rig import Row

from molt import control as c
from molt.config import Config, dump
from molt.coordinator.disk import Disk
from molt.coordinator.server import Coordinator
from molt.records import Group, Lease, Record, Segment, Where
from molt.store.journal import Journal, read_state
from molt.store.run import RunDir

RUNNERS, GROUPS, PLAN, SAMPLES = 1000, 100_000, 500, 16
HTTP_GROUPS = 20_000

Call = Callable[[c.Route[Any, Any], Any], Coroutine[Any, Any, Any]]


def coordinator(where: Path, repeats: int) -> list[Row]:
    """Groups a second, and the time to read the journal back."""
    rows = []
    for name, groups, connect in (
        ("in process", GROUPS, _direct),
        ("over HTTP", HTTP_GROUPS, _http),
    ):
        path = where / f"coordinator-{connect.__name__}"
        marks = asyncio.run(_measure(path, groups, connect))
        rate = groups / (marks[-1] - marks[0])
        part = len(marks) // 5
        growth = (marks[-1] - marks[-1 - part]) / (marks[part] - marks[0])
        aim = "≥ 2000" if connect is _direct else ""
        detail = f"groups/s, {RUNNERS} runners, {groups} groups; last fifth ÷ first {growth:.2f}"
        rows.append(Row(f"coordinator {name}", rate, aim, detail))
        if connect is _direct:
            began = time.monotonic()
            state = read_state(path)
            seconds = time.monotonic() - began
            size = sum(f.stat().st_size for f in (path / "journal").iterdir()) / 2**20
            rows.append(
                Row("fold of the newest epoch file, s", seconds, "≤ 2",
                    f"{groups} groups, {size:.0f} MiB, plan {state.last_plan}")
            )  # fmt: skip
    return rows


async def _measure(
    path: Path, groups: int, connect: Callable[[RunDir, Coordinator], Any]
) -> list[float]:
    """When each plan was published."""
    config = Config.model_validate(
        {
            "run": {"name": "bench"},
            "data": {"source": "molt.agents.guess:prompts"},
            "sampling": {"num_samples": SAMPLES},
            "pool": {"max_lag": 3},
            "trainer": {"groups": PLAN, "steps": groups // PLAN},
        }
    )
    run = RunDir.create(path, dump(config))
    journal, state = Journal.start(run.path, "bench", 1)
    loop = asyncio.get_running_loop()

    async def append(records: list[Record]) -> None:
        await loop.run_in_executor(None, journal.append, records)

    made = Coordinator(config, state, append, Disk(run))
    working = asyncio.create_task(made.work())
    await made.begin()
    async with connect(run, made) as calls:
        call = calls[0]
        runners = [
            asyncio.create_task(_runner(calls[1 + i % (len(calls) - 1)], i)) for i in range(RUNNERS)
        ]
        marks = await _trainer(call, groups // PLAN)
        await call(c.STOP, c.StopRequest(reason="done"))
        await asyncio.gather(*runners)
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    journal.close()
    return marks


@asynccontextmanager
async def _direct(run: RunDir, made: Coordinator) -> AsyncIterator[list[Call]]:
    routes = made.routes()
    call: Any = lambda route, message: routes[route](message)  # noqa: E731
    yield [call] * 2


@asynccontextmanager
async def _http(run: RunDir, made: Coordinator) -> AsyncIterator[list[Call]]:
    server = web.AppRunner(c.serve(made.routes(), run.token.read_text()), shutdown_timeout=1)
    await server.setup()
    await web.TCPSite(server, "127.0.0.1", 0).start()
    host, port = server.addresses[0][:2]
    # One for the trainer and its engine, the others for 50 runners each: a client has 100 sockets.
    clients = [c.Client(run.path, f"{host}:{port}") for _ in range(1 + -(-RUNNERS // 50))]
    try:
        yield [client.call for client in clients]
    finally:
        for client in clients:
            await client.close()
        await server.cleanup()


async def _runner(call: Call, index: int) -> None:
    """Lease, and announce what was leased in one message."""
    name, number = f"runner-{index}", 0
    while True:
        q = c.LeaseRequest(runner=name, engine=0, free=8 * SAMPLES)
        reply = await call(c.LEASE, q)
        if reply.stop:
            return
        if reply.leases:
            path = f"shards/{name}/{number:08d}.arrow"
            groups = tuple(_group(lease, path) for lease in reply.leases)
            await call(c.ANNOUNCE, c.Announce(runner=name, groups=groups))
            number += 1


def _group(lease: Lease, path: str) -> Group:
    return Group(
        lease=lease.lease,
        group=lease.group,
        prompt=lease.prompt,
        where=Where(path=path, offset=1 << 20, length=1 << 16, hash="0123456789abcdef" * 2),
        rewards=(0.5,) * SAMPLES,
        segments=tuple(Segment(rollout=i, tokens=700, actions=512) for i in range(SAMPLES)),
        version_min=lease.version,
        version_max=lease.version,
        seconds=12.5,
    )


async def _trainer(call: Call, steps: int) -> list[float]:
    """Take every plan, publish to the one engine there is, checkpoint every tenth step."""
    lineage = (await call(c.TRAINER, c.TrainerStart(step=0, incarnation="t"))).lineage
    marks = []
    for step in range(steps + 1):
        if step:
            while True:
                reply = await call(c.PLAN, c.PlanRequest(step=step, lineage=lineage))
                if reply.plan:
                    break
        version = await _publish(call, step, lineage)
        marks.append(time.monotonic())
        if step and step % 10 == 0:
            q = c.CheckpointRequest(
                step=step, lineage=lineage, oldest=step - 10, path="", version=version
            )
            await call(c.CHECKPOINT, q)
    return marks


async def _publish(call: Call, step: int, lineage: int) -> int:
    """One publication, acknowledged at once."""

    def engine(version: int) -> "asyncio.Task[Any]":
        q = c.EngineRequest(engine=0, incarnation="e", version=version)
        return asyncio.create_task(call(c.ENGINE, q))

    asking = engine(0)
    q = c.PublishRequest(
        step=step, lineage=lineage, address="", port=0, workers=1, communicator="",
        fresh=f"c{step}", tensors=(), bucket_bytes=1,
    )  # fmt: skip
    version = 0
    while not version:
        version = (await call(c.PUBLISH, q)).version
    await asking
    acknowledging = engine(version)
    while not (await call(c.PUBLISHED, c.PublishWait(version=version))).done:
        pass
    acknowledging.cancel()
    return version
