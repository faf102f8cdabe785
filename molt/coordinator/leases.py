# SPDX-License-Identifier: Apache-2.0
"""The coordinator towards runners: who works on what, and what becomes of it.

    /lease ─▶ evals.leases, pool.train_leases ─▶ Lease      /announce ─▶ Group
    /heartbeat, silence ┐
    /gone, /lease_end   ┴▶ bury: adopt what it published, index its partials ─▶ LeaseEnd

A runner is buried when its engine task saw it die, when it leaves, or when it is silent for
`pool.lease_s` on this process's clock. Its groups are leased again, with the files that their
sessions are resumed from.
"""

import asyncio
import logging
from collections.abc import Callable, Collection

from molt import control as c
from molt.config import Config
from molt.coordinator import pool
from molt.coordinator.changes import Changes, Topic
from molt.coordinator.commits import Commits
from molt.coordinator.disk import Disk
from molt.coordinator.evals import Evaluations
from molt.coordinator.partials import Partials
from molt.coordinator.publication import Publications
from molt.data import load_prompts
from molt.records import TRAIN, Fenced, Group, Lease, LeaseEnd

log = logging.getLogger("molt.coordinator")
TICKS = 10  # looks for silent runners within the time that makes one silent


class Leases:
    """Leases, their ends, and the groups they lead to."""

    def __init__(
        self,
        config: Config,
        commits: Commits,
        changes: Changes,
        disk: Disk,
        evals: Evaluations,
        publications: Publications,
        fail: Callable[[str], None],
    ) -> None:
        self._config, self._commits, self._changes, self._disk = config, commits, changes, disk
        self._evals, self._publications, self._fail = evals, publications, fail
        self.state = commits.state
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
        self.tokens = 0  # sampled, in all groups announced so far
        self.lapsed = 0  # runners that were buried with leases
        self._partials, self._useless = Partials(), []
        self._announced: dict[str, frozenset[int]] = {}  # runner → leases of its last announcement
        self._gone: set[str] = set()  # runners that have left: their names do not come again
        self._seen: dict[str, float] = {}  # runner → when it last spoke, on the loop's clock

    # ------------------------------------------------------------ routes

    async def lease(self, q: c.LeaseRequest) -> c.LeaseReply:
        """Leases for a runner whose engine holds published weights; evaluations come first."""
        self._hear(q.runner)
        num = q.free // self._config.sampling.num_samples
        held = (self.state.leases[g] for g in self.state.holders.get(q.runner, ()))
        leases = [x for x in held if x.lease not in q.holding]
        if not leases:  # else the answer that granted them was lost

            def grant() -> bool:
                if q.runner in self._gone:  # nobody hears the answer
                    return True
                leases.extend(self._grant(num, q))
                self._commits.fold(*leases)
                return bool(leases) or self.stopping

            await self._changes.until(Topic.ROOM, grant, c.POLL_S)
            self._hear(q.runner)
        await self._commits.commit()
        partials = {
            x.group: self._partials.of(x.group) for x in leases if x.group in self._partials
        }
        return c.LeaseReply(leases=tuple(leases), partials=partials, stop=self.stopping)

    async def announce(self, q: c.Announce) -> c.Empty:
        """Journal finished groups. One that was announced before is not journalled again.

        Raises:
            Fenced: some belong to leases that are not current; the others are journalled.
        """
        self._hear(q.runner)
        repeated = self._announced.get(q.runner, frozenset())
        fresh = [g for g in q.groups if g.lease not in repeated and not self._known(g)]
        fenced = self._take(fresh)
        self._announced[q.runner] = frozenset(g.lease for g in q.groups)
        await self._commits.commit()
        if self.state.failures >= self._config.agent.max_failures:
            self._fail(
                f"{self.state.failures} groups failed in a row, "
                f"the last with: {self.state.last_failure}"
            )
        if fenced:
            raise Fenced("; ".join(fenced))
        return c.Empty()

    async def heartbeat(self, q: c.Heartbeat) -> c.HeartbeatReply:
        """A runner lives; it learns which of its leases are not current any more."""
        self._hear(q.runner)
        held = {self.state.leases[g].lease for g in self.state.holders.get(q.runner, ())}
        await self._commits.commit()
        return c.HeartbeatReply(lost=tuple(x for x in q.holding if x not in held))

    async def lease_end(self, q: c.LeaseEndRequest) -> c.Empty:
        """A runner leaves."""
        self._gone.add(q.runner)
        await self.bury(q.runner, q.reason)
        return c.Empty()

    async def gone(self, q: c.Gone) -> c.Empty:
        """A runner's process has ended."""
        self._gone.add(q.runner)
        await self.bury(q.runner, q.reason)
        return c.Empty()

    # ------------------------------------------------------------ granting

    def _grant(self, num: int, q: c.LeaseRequest) -> list[Lease]:
        state, engine, held = self.state, self._config.engine, self._publications.held(q.engine)
        if self.stopping or state.restored or not held >= state.version > 0:
            return []
        first = self._evals.leases(num, state.next_lease, state.eval_cursor, held, q.runner)
        if first:
            return first
        free = pool.room(state, self.rules)
        share = -(-free // (engine.count * engine.runners))
        return pool.train_leases(state, self.rules, min(num, share), q.runner, held, self._partials)

    def _known(self, group: Group) -> bool:
        known = self.state.ready.get(group.group) or self.state.planned.get(group.group)
        return known is not None and known.lease == group.lease

    def _take(self, groups: list[Group]) -> list[str]:
        """Fold finished groups; returns why some were refused."""
        fenced: list[str] = []
        for group in groups:
            try:
                self._commits.fold(group)
            except Fenced as e:
                fenced.append(str(e))
                continue
            self.tokens += sum(s.actions for s in group.segments)
            self._useless += self._partials.finished(group.group)
            if group.task != TRAIN:
                self._evals.finished(group)
                self._changes.touch(Topic.WEIGHTS)
        return fenced

    # ------------------------------------------------------------ runners that are gone

    async def learn(self) -> None:
        """Once, at a start: which partials files there are, and which of them are useless."""
        self._partials.add(await self._disk.partials())
        for group in self._partials.groups - {*self.state.returned, *self.state.leases}:
            self._useless += self._partials.finished(group)

    async def bury_orphans(self) -> None:
        """Once, at a start: runners of earlier attempts are gone."""
        for runner in sorted(self.state.orphans):
            await self.bury(runner, "its attempt ended")

    async def bury(self, runner: str, reason: str) -> None:
        """End the leases of a runner, after taking over what it has published."""
        self._seen.pop(runner, None)
        if runner not in self.state.holders:
            return
        found = await self._disk.unannounced(runner, self.state.announced.get(runner, -1))
        self._take(found)  # what belongs to an earlier lease of this runner is refused
        self._partials.add(await self._disk.partials(runner))
        left = [self.state.leases[g] for g in sorted(self.state.holders.get(runner, ()))]
        if left:
            log.warning("%d leases of %s end: %s", len(left), runner, reason)
        for lease in left:
            self._commits.fold(LeaseEnd(lease=lease.lease, group=lease.group, reason=reason))
            self._evals.returned(lease)
        self.lapsed += bool(left)
        await self._commits.commit()

    async def bury_others(self, engine: int, runners: Collection[str]) -> None:
        """Bury the runners of an engine but those that its task knows to live."""
        for runner in list(self.state.holders):
            if runner.startswith(f"runner-{engine}-") and runner not in runners:
                await self.bury(runner, f"engine {engine} knows no such runner")

    async def watch(self) -> None:
        """Bury runners that are silent, and forget engines that are, until cancelled."""
        loop = asyncio.get_running_loop()
        limit = self._config.pool.lease_s
        before = loop.time()
        while True:
            await asyncio.sleep(limit / TICKS)
            now = loop.time()
            if now - before > 3 * limit / TICKS:  # it was this process that slept
                self._forgive(now - before)
            before = now
            for runner in list(self.state.holders):
                if now - self._seen.setdefault(runner, now) > limit:
                    await self.bury(runner, f"silent for {limit:g} s")
            for engine, said in list(self._publications.engines.items()):
                if now - said.seen > limit:
                    self._publications.lose(engine, f"silent for {limit:g} s")
                    self._changes.touch(Topic.WEIGHTS)
            useless, self._useless = self._useless, []
            if useless:  # their groups must be durable first, under this epoch
                await self._commits.confirm()
                await self._disk.delete(useless)

    def _forgive(self, seconds: float) -> None:
        self._seen = {runner: at + seconds for runner, at in self._seen.items()}
        for said in self._publications.engines.values():
            said.seen += seconds

    def _hear(self, runner: str) -> None:
        self._seen[runner] = asyncio.get_running_loop().time()
