# SPDX-License-Identifier: Apache-2.0
"""The coordinator process: answers the control routes, journals every effect before it answers.

    runner   /lease  ──▶ pool.room, train_leases ──▶ Lease        trainer  /plan      ──▶ cut_plan
    ──▶ Plan
             /announce ─▶ Group                                            /publish   ──▶ PublishBegin
    engine   /engine ──▶ the publication to join, its ack                  /published ──▶ PublishEnd
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
from molt.coordinator.state import State
from molt.data import load_prompts
from molt.records import (
    TRAIN,
    Checkpoint,
    Group,
    Lease,
    LeaseEnd,
    MoltError,
    Publication,
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
        self._publication: Publication | None = None
        self._publish_error = ""
        self._publish_deadline = 0.0
        self._held: dict[int, int] = {}  # engine → version it has acknowledged
        self._pauses: dict[int, float] = {}  # engine → seconds of its last pause
        self._rollout_tokens, self._tokens_since = 0, time.monotonic()

    # ------------------------------------------------------------ journal

    async def commit(self, *records: Record) -> None:
        """Fold `records`, and wait until they are durable. A fenced one raises and is not journalled."""
        for record in records:
            self.state.apply(record)
            if not self._pending:
                self._durable = asyncio.get_running_loop().create_future()
            self._pending.append(record)
        if records:
            self._notify()
        await asyncio.shield(self._durable)

    async def write_journal(self) -> None:
        """Write what was committed, one fsync for all that gathered meanwhile; runs until cancelled."""
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
        """Leases for a runner whose engine holds published weights: evaluations first, then the pool."""
        num = q.free // self.config.sampling.num_samples
        leases = [
            x
            for x in self.state.leases.values()
            if x.runner == q.runner and x.lease not in q.holding
        ]
        if leases:  # the answer that granted them was lost
            return c.LeaseReply(leases=tuple(leases))

        def grant() -> bool:
            held = self._held.get(q.engine, 0)
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
        """Journal finished groups. One that was announced before is not journalled again."""
        fresh = [g for g in q.groups if not self._known(g)]
        await self.commit(*fresh)
        for group in fresh:
            self._rollout_tokens += sum(s.tokens for s in group.segments)
            if group.task != TRAIN:
                self.evals.finished(group)
        if self.state.failures >= self.config.agent.max_failures:
            self._fail(
                f"{self.state.failures} groups failed in a row, the last with: {self.state.last_failure}"
            )
        self._notify()
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
        if q.error:
            self._publish_error = f"engine {q.engine}: {q.error}"
        self._held[q.engine], self._pauses[q.engine] = q.version, q.seconds
        self._notify()

        def waiting() -> bool:
            return self._publication is not None and self._publication.version > q.version

        await self._until(waiting, c.POLL_S)
        return c.EngineReply(publication=self._publication if waiting() else None)

    # ------------------------------------------------------------ trainer

    async def trainer(self, q: c.TrainerStart) -> c.TrainerReply:
        """A trainer starts from the weights after `step`, on a lineage of its own."""
        lineage = self.state.lineage + 1
        if q.step > self.state.last_plan:
            raise MoltError(
                f"the checkpoint is of step {q.step}, the journal knows {self.state.last_plan} plans: "
                "checkpoint and journal are not of one run"
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
        """Begin a publication, once no evaluation holds the weights."""
        engines = self.config.engine
        free = await self._until(
            lambda: len(self._held) >= engines.count and not self.evals.holding, c.POLL_S
        )
        if not free:
            return c.PublishReply()
        begun = self.state.publishing
        if begun is None or self._publication is None:
            begun = PublishBegin(
                version=self.state.next_version, step=q.step, lineage=self.state.lineage
            )
            await self.commit(begun)
            self._publish_error, self._publish_deadline = "", time.monotonic() + engines.update_s
            self._publication = Publication(
                version=begun.version,
                step=q.step,
                address=q.address,
                port=q.port,
                world=q.world,
                communicator=q.communicator,
                tensors=q.tensors,
                bucket_bytes=q.bucket_bytes,
            )
            self._notify()
        return c.PublishReply(version=begun.version)

    async def published(self, q: c.PublishWait) -> c.PublishDone:
        """Wait until every engine has acknowledged, or one of them, the trainer or the clock has not."""

        def missing() -> list[int]:
            return [i for i, version in self._held.items() if version < q.version]

        if self.state.version != q.version:
            self._publish_error = q.error or self._publish_error
            await self._until(lambda: not missing() or bool(self._publish_error), c.POLL_S)
            if missing() and time.monotonic() > self._publish_deadline:
                self._publish_error = (
                    f"engines {missing()} did not acknowledge version {q.version} in time"
                )
            if missing() and not self._publish_error:
                return c.PublishDone()
            await self._end_publication(q.version, self._publish_error)
        return c.PublishDone(
            done=True, error=self._publish_error, pause_s=max(self._pauses.values(), default=0.0)
        )

    async def _end_publication(self, version: int, error: str) -> None:
        await self.commit(PublishEnd(version=version, ok=not error, reason=error))
        self._publication = None
        if not error:
            self.evals.start_due(self.state.step, version)
        self._notify()

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
            engines=len(self._held),
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
