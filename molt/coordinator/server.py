# SPDX-License-Identifier: Apache-2.0
"""The coordinator process: answers the control routes, journals every effect before it answers.

    runner   /lease     ─▶ evals.leases, pool.train_leases ─▶ Lease
             /announce  ─▶ Group
    engine   /engine    ─▶ what it holds, and the publication to join
    trainer  /plan      ─▶ pool.cut_plan ─▶ Plan
             /publish   ─▶ PublishBegin, /published ─▶ PublishEnd
             /step, /checkpoint, /trainer

Handlers run on one event loop, so the state needs no lock. `commit` folds a record at once and
resolves when a batch holding it is fsynced; nothing is answered before that.
"""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from molt import control as c
from molt.config import Config
from molt.coordinator import pool
from molt.coordinator.evals import Evaluations
from molt.coordinator.publication import Publications
from molt.coordinator.state import State
from molt.data import load_prompts
from molt.records import (
    TRAIN,
    Checkpoint,
    Fenced,
    Group,
    Lease,
    LeaseEnd,
    MoltError,
    PublishBegin,
    PublishEnd,
    Record,
    Restore,
)
from molt.store.journal import Journal, read_journal
from molt.store.run import RunDir, append_metrics

log = logging.getLogger("molt.coordinator")


class Coordinator:
    """State, journal and the routes over them."""

    def __init__(self, run: RunDir, config: Config, state: State, journal: Journal) -> None:
        self.run, self.config, self.state = run, config, state
        self.evals = Evaluations(config)
        self.publications = Publications(config.engine.count, config.engine.update_s)
        self.rules = pool.Rules(
            groups=config.trainer.groups,
            max_lag=config.pool.max_lag,
            cap=config.pool.groups,
            wait=config.pool.stale == "wait",
            steps=config.trainer.steps,
            seed=config.run.seed,
            num_prompts=len(load_prompts(config.data)),
            shuffle=config.data.shuffle,
        )
        self.stopping = False
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._journal = journal
        self._changed = asyncio.Event()
        self._pending: list[Record] = []
        self._durable: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._durable.set_result(None)  # of the newest batch; nothing is pending yet
        self._values: dict[str, str] = {}
        self._announced: dict[str, frozenset[int]] = {}  # runner → leases of its last announcement
        self._rollout_tokens, self._tokens_since = 0, time.monotonic()

    # ------------------------------------------------------------ journal

    async def commit(self, *records: Record) -> None:
        """Fold `records`, and wait until all that was folded is durable."""
        for record in records:
            self._fold(record)
        await asyncio.shield(self._durable)

    def _fold(self, record: Record) -> None:
        """Change the state and queue the record for the journal; a fenced one raises instead."""
        self.state.apply(record)
        if not self._pending:
            self._durable = asyncio.get_running_loop().create_future()
        self._pending.append(record)
        self._notify()

    async def write_journal(self) -> None:
        """Write what was folded, one fsync for all that gathered meanwhile, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await self._until(lambda: bool(self._pending), c.POLL_S)
            if not self._pending:
                continue
            batch, self._pending, durable = self._pending, [], self._durable
            await loop.run_in_executor(None, self._journal.append, batch)
            durable.set_result(None)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until `condition` holds; it is looked at whenever anything changes."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return False
            try:
                await asyncio.wait_for(self._changed.wait(), remaining)
            except TimeoutError:
                return condition()
        return True

    # ------------------------------------------------------------ runners

    async def lease(self, q: c.LeaseRequest) -> c.LeaseReply:
        """Leases for a runner whose engine holds published weights; evaluations come first."""
        num = q.free // self.config.sampling.num_samples
        leases = [
            x
            for x in self.state.leases.values()
            if x.runner == q.runner and x.lease not in q.holding
        ]
        if leases:  # the answer that granted them was lost
            return c.LeaseReply(leases=tuple(leases))

        def grant() -> bool:
            held = self.publications.held.get(q.engine, 0)
            if not self.stopping and held >= self.state.version > 0:
                leases.extend(self._grant(num, held, q.runner))
            return bool(leases) or self.stopping

        await self._until(grant, c.POLL_S)
        await self.commit(*leases)
        return c.LeaseReply(leases=tuple(leases), stop=self.stopping)

    def _grant(self, num: int, held: int, runner: str) -> list[Lease]:
        state, engine = self.state, self.config.engine
        first = self.evals.leases(num, state.next_lease, state.eval_cursor, held, runner)
        if first:
            return first
        share = -(-pool.room(state, self.rules) // (engine.count * engine.runners))
        return pool.train_leases(state, self.rules, min(num, share), runner, held)

    async def announce(self, q: c.Announce) -> c.Empty:
        """Journal finished groups. One that was announced before is not journalled again.

        Raises:
            Fenced: some belong to leases that are not current; the others are journalled.
        """
        fresh: list[Group] = []
        fenced: list[str] = []
        repeated = self._announced.get(q.runner, frozenset())
        for group in q.groups:
            if group.lease in repeated or self._known(group):
                continue
            try:
                self._fold(group)
            except Fenced as e:
                fenced.append(str(e))
            else:
                fresh.append(group)
        self._announced[q.runner] = frozenset(g.lease for g in q.groups)
        await self.commit()
        for group in fresh:
            self._rollout_tokens += sum(s.actions for s in group.segments)
            if group.task != TRAIN:
                self.evals.finished(group)
        if self.state.failures >= self.config.agent.max_failures:
            self._fail(
                f"{self.state.failures} groups failed in a row, "
                f"the last with: {self.state.last_failure}"
            )
        self._notify()
        if fenced:
            raise Fenced("; ".join(fenced))
        return c.Empty()

    def _known(self, group: Group) -> bool:
        known = self.state.ready.get(group.group) or self.state.planned.get(group.group)
        return known is not None and known.lease == group.lease

    async def lease_end(self, q: c.LeaseEndRequest) -> c.Empty:
        """Take back leases that will produce nothing."""
        held = [x for x in q.leases if self.state.leases.get(x.group) == x]
        await self.commit(*(LeaseEnd(lease=x.lease, group=x.group, reason=q.reason) for x in held))
        for lease in held:
            self.evals.returned(lease)
        return c.Empty()

    # ------------------------------------------------------------ engines

    async def engine(self, q: c.EngineRequest) -> c.EngineReply:
        """An engine's acknowledgement, and the next publication for it."""
        self.publications.acknowledge(q)
        self._notify()
        await self._until(lambda: self.publications.offer(q.version) is not None, c.POLL_S)
        return c.EngineReply(publication=self.publications.offer(q.version))

    # ------------------------------------------------------------ trainer

    async def trainer(self, q: c.TrainerStart) -> c.TrainerReply:
        """A trainer starts from the weights after `step`, on a lineage of its own."""
        lineage = self.state.lineage + 1
        if q.step > self.state.last_plan:
            raise MoltError(
                f"the checkpoint is of step {q.step}, the journal knows {self.state.last_plan} "
                "plans: checkpoint and journal are not of one run"
            )
        await self.commit(Restore(step=q.step, lineage=lineage, version=self.state.version))
        return c.TrainerReply(lineage=lineage)

    async def plan(self, q: c.PlanRequest) -> c.PlanReply:
        """The plan of a step: the journalled one, or a new one when its groups are ready."""
        state = self.state
        if q.step <= state.last_plan and q.step not in state.plans:
            raise MoltError(
                f"plan {q.step} lies behind the newest checkpoints: restore a newer one"
            )

        def cut() -> bool:
            return q.step in state.plans or pool.cut_plan(state, self.rules) is not None

        await self._until(lambda: self.stopping or cut(), c.POLL_S)
        if self.stopping or not cut():
            return c.PlanReply(stop=self.stopping)
        plan = state.plans.get(q.step) or pool.cut_plan(state, self.rules)
        assert plan is not None and plan.step == q.step
        if q.step not in state.plans:
            await self.commit(plan)
        groups = pool.groups_of(state, plan)
        oldest = min((g.version_min for g in groups), default=0)
        steps = tuple((v, s) for v, s in state.steps.items() if v >= oldest)
        return c.PlanReply(plan=plan, groups=groups, steps=steps)

    async def publish(self, q: c.PublishRequest) -> c.PublishReply:
        """Begin a publication, once every engine is there and no evaluation holds the weights."""
        free = await self._until(
            lambda: self.publications.complete and (self.stopping or not self.evals.holding),
            c.POLL_S,
        )
        if not free:
            return c.PublishReply()
        begun = self.state.publishing
        if begun is None or self.publications.current is None:
            begun = PublishBegin(
                version=self.state.next_version, step=q.step, lineage=self.state.lineage
            )
            await self.commit(begun)
            self.publications.begin(begun.version, q)
            self._notify()
        return c.PublishReply(version=begun.version)

    async def published(self, q: c.PublishWait) -> c.PublishDone:
        """Wait until every engine holds the version, or engine, trainer or clock fail it."""
        publications = self.publications
        if self.state.version == q.version:
            return c.PublishDone(done=True, pause_s=publications.pause_s)
        if q.error:
            publications.fail(q.error)
        await self._until(lambda: publications.outcome(q.version) is not None, c.POLL_S)
        error = publications.outcome(q.version)
        if error is None:
            return c.PublishDone()
        if publications.current and publications.current.version == q.version:
            publications.end()
            await self.commit(PublishEnd(version=q.version, ok=not error, reason=error))
            if not error:
                self.evals.start_due(self.state.step, q.version)
            self._notify()
        return c.PublishDone(done=True, error=error, pause_s=publications.pause_s)

    async def checkpoint(self, q: c.CheckpointRequest) -> c.Empty:
        """A checkpoint is complete."""
        await self.commit(Checkpoint(step=q.step, path=q.path, version=q.version))
        return c.Empty()

    async def step(self, q: c.StepRequest) -> c.StepReply:
        """Write the metrics of a step; those of the last one wait for its evaluations."""
        last = q.step >= self.config.trainer.steps
        if last and not await self._until(
            lambda: not self.evals.running or self.stopping, c.POLL_S
        ):
            return c.StepReply(done=False)
        now = time.monotonic()
        seconds, tokens = now - self._tokens_since, self._rollout_tokens
        self._tokens_since, self._rollout_tokens = now, 0
        line = {
            "step": q.step,
            "version": q.version,
            "time": time.time(),
            "pool/in_flight": self.state.in_flight,
            "throughput/rollout_tokens_per_s": tokens / max(seconds, 1e-9),
            **q.metrics,
            **self.evals.take_metrics(),
        }
        append_metrics(self.run.metrics, line)
        return c.StepReply()

    # ------------------------------------------------------------ everyone

    async def stop(self, q: c.StopRequest) -> c.Empty:
        """Ask every role to finish what it must and to leave."""
        self.stopping = True
        self._notify()
        return c.Empty()

    async def put(self, q: c.Put) -> c.Empty:
        """Keep a value for the ranks of a group to find."""
        self._values[q.key] = q.value
        self._notify()
        return c.Empty()

    async def get(self, q: c.Get) -> c.Value:
        """A value that another rank has put."""
        await self._until(lambda: q.key in self._values or self.stopping, c.POLL_S)
        return c.Value(value=self._values.get(q.key, ""))

    async def status(self, q: c.Empty) -> c.Status:
        """What a person wants to know."""
        return c.Status(
            step=self.state.step,
            version=self.state.version,
            ready=len(self.state.ready),
            leased=len(self.state.leases),
            engines=len(self.publications.held),
            stopping=self.stopping,
        )

    def _fail(self, reason: str) -> None:
        if not self.failed.done():
            self.failed.set_result(reason)

    def routes(self) -> dict[c.Route, Callable]:
        """Every route and its handler."""
        return {
            c.LEASE: self.lease,
            c.LEASE_END: self.lease_end,
            c.ANNOUNCE: self.announce,
            c.ENGINE: self.engine,
            c.TRAINER: self.trainer,
            c.PLAN: self.plan,
            c.PUBLISH: self.publish,
            c.PUBLISHED: self.published,
            c.CHECKPOINT: self.checkpoint,
            c.STEP: self.step,
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
    host, _, port = os.environ["MOLT_COORDINATOR"].rpartition(":")
    directory = RunDir.open(run)
    journal = Journal.start(run, config.run.name)
    state = State()
    for record in read_journal(run, torn=lambda tail: log.warning("cut a torn tail: %s", tail)):
        state.apply(record)
    coordinator = Coordinator(directory, config, state, journal)
    token = directory.token.read_text(encoding="utf-8").strip()
    server = web.AppRunner(
        c.serve(coordinator.routes(), token), access_log=None, shutdown_timeout=1.0
    )
    await server.setup()
    await web.TCPSite(server, host, int(port)).start()
    log.info("epoch %d listens on %s:%s, %d plans so far", state.epoch, host, port, state.last_plan)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    writing = asyncio.create_task(coordinator.write_journal())
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait(
            {writing, stopped, coordinator.failed}, return_when=asyncio.FIRST_COMPLETED
        )
        if writing.done():
            writing.result()
        if coordinator.failed.done():
            raise MoltError(coordinator.failed.result())
    finally:
        writing.cancel()
        stopped.cancel()
        await server.cleanup()
        journal.close()
