# SPDX-License-Identifier: Apache-2.0
"""The coordinator process: answers the control routes, journals every effect before it answers.

    runners  ─▶ leases.py          trainer, engines ─▶ training.py          anyone ─▶ here
                    └────────── commits.py: fold, journal ──────────┘

Handlers run on one event loop, so the state needs no lock. Every route may be called twice: what a
repeated message asks for has happened already.
"""

import asyncio
import logging
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from molt import control as c
from molt.config import Config
from molt.coordinator.changes import Changes, Topic
from molt.coordinator.commits import Commits
from molt.coordinator.disk import Disk
from molt.coordinator.evals import Evaluations
from molt.coordinator.leases import Leases
from molt.coordinator.publication import GRACE_S, Publications
from molt.coordinator.training import Training
from molt.records import MoltError, Record, StoreError
from molt.store.journal import Journal
from molt.store.run import RunDir
from molt.store.state import State

log = logging.getLogger("molt.coordinator")


class Coordinator:
    """The routes, and the tasks behind them.

    Args:
        config: of this attempt.
        state: the fold of the journal.
        append: makes records durable.
        disk: what else lies in the run directory.
    """

    def __init__(
        self,
        config: Config,
        state: State,
        append: Callable[[list[Record]], Awaitable[None]],
        disk: Disk,
    ) -> None:
        self.state = state
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.changes = Changes()
        self.commits = Commits(state, append, self.changes)
        engine = config.engine
        patience = GRACE_S if state.version else engine.start_s
        self.publications = Publications(
            engine.count, engine.update_s, asyncio.get_running_loop().time() + patience
        )
        self.evals = Evaluations(config)
        parts = (config, self.commits, self.changes, disk, self.evals, self.publications)
        self.leases = Leases(*parts, self._fail)
        self.training = Training(*parts, self.leases)
        self._values: dict[str, str] = {}

    async def begin(self) -> None:
        """Take over what earlier processes left, before anybody is answered."""
        await self.leases.bury_orphans()
        await self.leases.learn()
        await self.training.retire()

    async def work(self) -> None:
        """Write the journal and watch over runners and engines, until cancelled or failed.

        Raises:
            MoltError: the run cannot go on, and why.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self.commits.write())
            group.create_task(self.leases.watch())
            raise MoltError(await self.failed)

    async def stop(self, q: c.StopRequest) -> c.Empty:
        """Ask every role to finish what it must and to leave."""
        self.leases.stopping = True
        self.changes.touch()
        return c.Empty()

    async def put(self, q: c.Put) -> c.Empty:
        """Keep a value for the ranks of a group to find."""
        self._values[q.key] = q.value
        self.changes.touch(Topic.VALUES)
        return c.Empty()

    async def get(self, q: c.Get) -> c.Value:
        """A value that another rank has put."""
        await self.changes.until(
            Topic.VALUES, lambda: q.key in self._values or self.leases.stopping, c.POLL_S
        )
        return c.Value(value=self._values.get(q.key, ""))

    async def status(self, q: c.Empty) -> c.Status:
        """What a person wants to know."""
        return c.Status(
            step=self.state.step,
            version=self.state.version,
            ready=len(self.state.ready),
            leased=len(self.state.leases),
            engines=len(self.publications.up),
            stopping=self.leases.stopping,
        )

    def _fail(self, reason: str) -> None:
        if not self.failed.done():
            self.failed.set_result(reason)

    def routes(self) -> dict[c.Route[Any, Any], c.Handler]:
        """Every route and its handler."""
        return {
            c.LEASE: self.leases.lease,
            c.LEASE_END: self.leases.lease_end,
            c.HEARTBEAT: self.leases.heartbeat,
            c.GONE: self.leases.gone,
            c.ANNOUNCE: self.leases.announce,
            c.ENGINE: self.training.engine,
            c.TRAINER: self.training.trainer,
            c.PLAN: self.training.plan,
            c.VOID: self.training.void,
            c.PUBLISH: self.training.publish,
            c.PUBLISHED: self.training.published,
            c.CHECKPOINT: self.training.checkpoint,
            c.STEP: self.training.step,
            c.STOP: self.stop,
            c.PUT: self.put,
            c.GET: self.get,
            c.STATUS: self.status,
        }


async def main(run: Path, config: Config) -> None:
    """Entry point of the coordinator process: a new epoch, the fold of the journal, then serve.

    Raises:
        MoltError: the run cannot go on, and why.
    """
    directory = RunDir.open(run)
    attempt = int(os.environ.get("MOLT_ATTEMPT", "0"))
    journal, state = Journal.start(run, config.run.name, attempt, directory.changes(attempt))
    loop = asyncio.get_running_loop()

    async def append(records: list[Record]) -> None:
        await loop.run_in_executor(None, journal.append, records)

    coordinator = Coordinator(config, state, append, Disk(directory))
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    tasks = [
        asyncio.create_task(work)
        for work in (coordinator.work(), _serve(coordinator, directory), stop.wait())
    ]
    compressing = asyncio.create_task(_compress(journal))
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, compressing, return_exceptions=True)
        journal.close()


async def _compress(journal: Journal) -> None:
    """Compress the file that this epoch sealed. Without it the run goes on as well."""
    try:
        await asyncio.get_running_loop().run_in_executor(None, journal.compress_previous)
    except (StoreError, OSError) as error:
        log.warning("the epoch before is not compressed: %s", error)


async def _serve(coordinator: Coordinator, run: RunDir) -> None:
    """Answer the routes, until cancelled."""
    await coordinator.begin()
    host, _, port = os.environ["MOLT_COORDINATOR"].rpartition(":")
    token = run.token.read_text(encoding="utf-8").strip()
    server = web.AppRunner(
        c.serve(coordinator.routes(), token), access_log=None, shutdown_timeout=1.0
    )
    await server.setup()
    try:
        await web.TCPSite(server, host, int(port)).start()
        state = coordinator.state
        log.info("epoch %d listens on %s:%s, plan %d", state.epoch, host, port, state.last_plan)
        await asyncio.Event().wait()
    finally:
        await server.cleanup()
