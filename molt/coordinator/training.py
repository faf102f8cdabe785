# SPDX-License-Identifier: Apache-2.0
"""The coordinator towards trainer and engines: plans out, weights back.

    trainer  /trainer ─▶ Restore           /plan ─▶ pool.cut_plan ─▶ Plan        /void ─▶ Void
             /publish ─▶ PublishBegin      /published ─▶ PublishEnd
             /checkpoint ─▶ Checkpoint, Retire                                   /step ─▶ metrics
    engine   /engine  ─▶ what it holds, and the publication to join

A message of a trainer that has been replaced carries an old lineage and is refused.
"""

import asyncio
import logging
import time

from molt import control as c
from molt.config import Config
from molt.coordinator import pool
from molt.coordinator.changes import Changes, Topic
from molt.coordinator.commits import Commits
from molt.coordinator.disk import Disk
from molt.coordinator.evals import Evaluations
from molt.coordinator.leases import Leases
from molt.coordinator.publication import Publications
from molt.records import (
    Checkpoint,
    Fenced,
    MoltError,
    Plan,
    PublishBegin,
    PublishEnd,
    Restore,
    Retire,
    Void,
)

log = logging.getLogger("molt.coordinator")


class Training:
    """Plans, publications, checkpoints and metrics."""

    def __init__(
        self,
        config: Config,
        commits: Commits,
        changes: Changes,
        disk: Disk,
        evals: Evaluations,
        publications: Publications,
        leases: Leases,
    ) -> None:
        self._config, self._commits, self._changes, self._disk = config, commits, changes, disk
        self._evals, self._publications, self._leases = evals, publications, leases
        self.state = commits.state
        self._trainer = ""  # incarnation
        self._beginning = asyncio.Lock()  # of a publication: its number is durable first
        self._told = (0, 0)  # lineage and step of the newest line of metrics
        self._tokens, self._tokens_since = 0, _now()

    # ------------------------------------------------------------ trainer

    async def trainer(self, q: c.TrainerStart) -> c.TrainerReply:
        """A trainer starts from the weights after `step`, on a lineage of its own."""
        if q.incarnation == self._trainer:  # the answer was lost
            await self._commits.commit()
            return c.TrainerReply(lineage=self.state.lineage)
        if q.step > self.state.last_plan:
            raise MoltError(
                f"the checkpoint is of step {q.step}, the journal knows {self.state.last_plan} "
                "plans: checkpoint and journal are not of one run"
            )
        if q.step < self.state.oldest:
            raise MoltError(
                f"no checkpoint since step {self.state.oldest} can be restored, and what was "
                f"trained after step {q.step} cannot be repeated: mend a checkpoint (molt verify)"
            )
        self._trainer = q.incarnation
        self._end("the trainer started again")
        lineage = self.state.lineage + 1
        await self._commits.commit(
            Restore(step=q.step, lineage=lineage, version=self.state.version)
        )
        return c.TrainerReply(lineage=lineage)

    async def plan(self, q: c.PlanRequest) -> c.PlanReply:
        """The plan of a step: the journalled one, or a new one when its groups are ready."""
        self._check(q.lineage)
        state = self.state

        def lacking() -> bool:
            behind = self._publications.current is None and state.step < q.step - 1
            return behind or self._publications.lacking(state.version)

        def answerable() -> bool:
            return self._leases.stopping or lacking() or self._plan(q.step) is not None

        await self._changes.until(Topic.PLANS, answerable, c.POLL_S)
        self._check(q.lineage)
        if self._leases.stopping or lacking():
            return c.PlanReply(stop=self._leases.stopping, publish=not self._leases.stopping)
        plan = self._plan(q.step)
        if plan is None:
            return c.PlanReply()
        groups = pool.groups_of(state, plan)  # now: once it is durable it may be forgotten
        await self._commits.commit(*([] if plan.step in state.plans else [plan]))
        return c.PlanReply(plan=plan, groups=groups)

    async def void(self, q: c.VoidRequest) -> c.Empty:
        """Take a plan back whose groups the trainer cannot read."""
        self._check(q.lineage)
        plan, planned = self.state.plans.get(q.step), self.state.planned
        held = [planned[g].lease for g in q.groups if plan is not None and g in plan.groups]
        if held == [*q.leases] and held:
            log.warning("plan %d is void: %s", q.step, q.reason)
            await self._commits.commit(Void(step=q.step, groups=q.groups, reason=q.reason))
        return c.Empty()

    async def checkpoint(self, q: c.CheckpointRequest) -> c.Empty:
        """A checkpoint is complete: what no kept one can need is forgotten, or deleted."""
        self._check(q.lineage)
        await self._commits.commit(
            Checkpoint(step=q.step, path=q.path, version=q.version, oldest=q.oldest)
        )
        await self.retire()
        return c.Empty()

    async def retire(self) -> None:
        """Delete shards that nobody can need, once the journal says so; also those of a crash."""
        if self._config.checkpoint.shards == "none" and self.state.spent:
            await self._commits.commit(Retire(paths=self.state.spent))
        if self.state.retired:
            await self._commits.confirm()
            await self._disk.delete(self.state.retired)

    async def step(self, q: c.StepRequest) -> c.StepReply:
        """Write the metrics of a step; those of the last one wait for its evaluations."""
        self._check(q.lineage)
        if (q.lineage, q.step) == self._told:
            return c.StepReply()
        state, publications = self.state, self._publications

        def evaluated() -> bool:
            last = q.step >= self._config.trainer.steps
            return not (last and self._evals.running) or self._leases.stopping

        await self._changes.until(
            Topic.WEIGHTS, lambda: evaluated() or publications.lacking(state.version), c.POLL_S
        )
        if not evaluated():
            return c.StepReply(done=False, publish=publications.lacking(state.version))
        self._told = (q.lineage, q.step)
        await self._disk.append_metrics(
            {
                "step": q.step,
                "version": q.version,
                "time": time.time(),
                "pool/in_flight": self.state.in_flight,
                "throughput/rollout_tokens_per_s": self._token_rate(),
                "failures/engine_restarts": self._sum("restarts"),
                "failures/runner_restarts": self._sum("runner_restarts"),
                "failures/publications": self._publications.failures,
                "failures/lost_runners": self._leases.lapsed,
                **q.metrics,
                **self._evals.take_metrics(),
            }
        )
        return c.StepReply()

    # ------------------------------------------------------------ publication

    async def publish(self, q: c.PublishRequest) -> c.PublishReply:
        """Begin a publication, once engines are there and no evaluation holds the weights."""
        self._check(q.lineage)
        publications, evals = self._publications, self._evals

        def answerable() -> bool:
            held = evals.holding and self._can_generate
            return q.fresh in publications.asked or (publications.ready(_now()) and not held)

        def hopeless() -> bool:
            return self._leases.stopping and not publications.up

        await self._changes.until(Topic.WEIGHTS, lambda: answerable() or hopeless(), c.POLL_S)
        self._check(q.lineage)
        if not answerable():
            return c.PublishReply()
        async with self._beginning:
            if publications.current is None and q.fresh not in publications.asked:
                await self._begin(q)
        newest = publications.newest
        assert newest is not None
        return c.PublishReply(
            version=newest.version, communicator=newest.communicator, members=newest.members
        )

    async def _begin(self, q: c.PublishRequest) -> None:
        """Use a number up, and only then let engines hear of it."""
        version = self.state.next_version
        await self._commits.commit(
            PublishBegin(version=version, step=q.step, lineage=self.state.lineage)
        )
        self._check(q.lineage)
        self._publications.begin(version, q, _now())
        self._changes.touch(Topic.WEIGHTS)

    async def published(self, q: c.PublishWait) -> c.PublishDone:
        """Wait until every member holds the version, or engine, trainer or clock fail it."""
        publications = self._publications
        if self.state.version == q.version:
            await self._commits.commit()
            return c.PublishDone(done=True, pause_s=publications.pause_s)
        if q.error:
            publications.fail(q.version, q.error)
            self._changes.touch(Topic.WEIGHTS)
        await self._changes.until(
            Topic.WEIGHTS, lambda: publications.outcome(q.version, _now()) is not None, c.POLL_S
        )
        error = publications.outcome(q.version, _now())
        if error is None:
            return c.PublishDone()
        if publications.current and publications.current.version == q.version:
            self._end(error)
            if not error:
                self._evals.start_due(self.state.step, q.version)
                self._changes.touch(Topic.ROOM)
        await self._commits.commit()
        return c.PublishDone(done=True, error=error, pause_s=publications.pause_s)

    def _end(self, error: str) -> None:
        """End what is on its way: whoever still receives it hears that it failed."""
        current = self._publications.current
        if current is None:
            return
        if error:
            self._publications.fail(current.version, error)
        self._publications.end()
        if self.state.publishing is not None:
            self._commits.fold(PublishEnd(version=current.version, ok=not error, reason=error))

    # ------------------------------------------------------------ engines

    async def engine(self, q: c.EngineRequest) -> c.EngineReply:
        """What an engine holds and does; the publication it is to join, or to give up."""
        publications = self._publications
        publications.report(q, _now())
        if q.runners is not None:
            await self._leases.bury_others(q.engine, q.runners)
        self._changes.touch(Topic.ROOM, Topic.PLANS, Topic.WEIGHTS)

        def news() -> bool:
            given_up = q.receiving and publications.failed >= q.receiving
            return bool(given_up) or publications.offer(q) is not None

        await self._changes.until(Topic.WEIGHTS, news, min(c.POLL_S, self._config.pool.lease_s / 4))
        return c.EngineReply(publication=publications.offer(q), failed=publications.failed)

    # ------------------------------------------------------------ inside

    def _check(self, lineage: int) -> None:
        if lineage != self.state.lineage:
            raise Fenced(
                f"a message of lineage {lineage}, the trainer that was restored last is "
                f"lineage {self.state.lineage}: another trainer has taken over"
            )

    @property
    def _can_generate(self) -> bool:
        """Whether what an evaluation still lacks can be made with the weights that are out."""
        lacking = self._publications.lacking(self.state.version)
        return not (self._leases.stopping or self.state.restored or lacking)

    def _plan(self, step: int) -> Plan | None:
        plan = self.state.plans.get(step)
        if plan is None and step == pool.next_step(self.state):
            plan = pool.cut_plan(self.state, self._leases.rules)
        return plan

    def _token_rate(self) -> float:
        """Sampled tokens a second that were announced since the last call."""
        now, tokens = _now(), self._leases.tokens
        rate = (tokens - self._tokens) / max(now - self._tokens_since, 1e-9)
        self._tokens, self._tokens_since = tokens, now
        return rate

    def _sum(self, counter: str) -> int:
        return sum(getattr(e, counter) for e in self._publications.engines.values())


def _now() -> float:
    return asyncio.get_running_loop().time()
