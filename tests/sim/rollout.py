# SPDX-License-Identifier: Apache-2.0
"""Simulated engines and runners: they speak the control routes as the real ones do.

An engine task polls /engine, also while its server takes an update, and starts its server and its
runners again. A runner leases, samples tokens that carry the engine's version, flushes partials,
publishes shards and announces them, and resumes what others left.
"""

import asyncio
from asyncio import Event, Task
from typing import TYPE_CHECKING, Any

from molt import control as c
from molt.records import (
    TRAIN,
    Fenced,
    Group,
    Lease,
    MoltError,
    Publication,
    PublishBegin,
    Segment,
    Where,
)
from tests.sim.clock import Process, alive
from tests.sim.files import Partial, Shard, Token, resume

if TYPE_CHECKING:
    from tests.sim.world import Attempt

UPDATE_S = 20.0  # engine.update_s


class Server:
    """What vLLM is to its engine task."""

    def __init__(self) -> None:
        self.incarnation, self.version = "", 0
        self.serving = Event()  # published weights, and no update under way


class EngineTask:
    """One engine task."""

    def __init__(self, attempt: "Attempt", index: int) -> None:
        self._attempt, self._world, self.index = attempt, attempt.world, index
        self.process = Process(f"engine-{index}")
        self.server = Server()
        self.runners: list[Runner] = []
        self._error, self._seconds, self._receiving = "", 0.0, 0
        self._update: Task[None] | None = None
        self._asking: Task[Any] | None = None

    async def run(self) -> None:
        """Serve until killed, or until the runners were told to stop."""
        self.process.spawn(self._start_server())
        watches = [
            self.process.spawn(self._keep_runner(i))
            for i in range(self._world.config.engine.runners)
        ]
        self.process.spawn(self._poll())
        await asyncio.gather(*watches)
        self.kill()

    def kill(self) -> None:
        """The task dies, and its children with it."""
        self.process.kill()
        self.server.incarnation = ""
        self._world.transfers.server_died(self.index)
        for runner in self.runners:
            runner.process.kill()

    def lose_server(self, error: str) -> None:
        """The server dies or is killed; the task starts it again."""
        self._world.trace(f"engine {self.index}: server ends, {error}")
        update, self._update = self._update, None
        if update:
            update.cancel()
        self._receiving, self._error = 0, error
        self.server.incarnation, self.server.version = "", 0
        self.server.serving.clear()
        self._world.transfers.server_died(self.index)
        self._ask_again()
        self.process.spawn(self._start_server())

    async def _start_server(self) -> None:
        await asyncio.sleep(self._world.random.uniform(0.5, 4.0))
        alive()
        if self.server.incarnation:
            return
        self._error = ""
        self.server.incarnation = self._world.unique(f"server-{self.index}")
        self._ask_again()

    # ------------------------------------------------------------ publications

    async def _poll(self) -> None:
        while True:
            q = c.EngineRequest(
                engine=self.index,
                incarnation=self.server.incarnation,
                version=self.server.version,
                receiving=self._receiving,
                error=self._error,
                seconds=self._seconds,
                runners=tuple(runner.name for runner in self.runners),
            )
            self._asking = self.process.spawn(self._attempt.network.call(c.ENGINE, q))
            try:
                reply = await self._asking
            except asyncio.CancelledError:
                alive()
                continue
            except MoltError as e:
                self._attempt.ended(self, e)
                return
            self._heed(reply)

    def _heed(self, reply: c.EngineReply) -> None:
        another = reply.publication and self._receiving  # of a coordinator that started since
        if self._receiving and (another or reply.failed >= self._receiving):
            self.lose_server(f"update to {self._receiving} given up")
        elif reply.publication and self.server.incarnation:
            self._world.checks.relied(PublishBegin, reply.publication.version)
            self._receiving = reply.publication.version
            self._update = self.process.spawn(self._receive(reply.publication))

    async def _receive(self, publication: Publication) -> None:
        self.server.serving.clear()
        point = self._world.point
        try:
            async with asyncio.timeout(UPDATE_S):
                await point("receive.begin")
                await self._world.transfers.join(publication, self.index, self.server.incarnation)
                await point("receive.middle")
                await asyncio.sleep(self._world.random.random() * 0.5)
        except (TimeoutError, ConnectionError) as e:
            self._update = None
            self.lose_server(f"update to {publication.version}: {type(e).__name__}")
            return
        alive()
        self.server.version, self._receiving, self._seconds = publication.version, 0, 0.5
        self._update = None
        self.server.serving.set()
        await point("receive.end")
        self._ask_again()

    def _ask_again(self) -> None:
        """Something changed that the coordinator should hear of now."""
        if self._asking:
            self._asking.cancel()

    # ------------------------------------------------------------ runners

    async def _keep_runner(self, place: int) -> None:
        """A runner that dies is started again under another name."""
        while True:
            name = self._world.unique(f"runner-{self.index}-{place}")
            runner = Runner(self._attempt, self, name)
            self.runners.append(runner)
            done = runner.process.spawn(runner.run())
            await asyncio.wait([done])
            alive()
            self.runners.remove(runner)
            if runner.stopped:
                return
            runner.process.kill()
            self.process.spawn(self._tell(c.Gone(runner=runner.name, reason="it died")))
            await asyncio.sleep(self._world.random.random())

    async def _tell(self, q: c.Gone) -> None:
        try:
            await self._attempt.network.call(c.GONE, q)
        except MoltError:
            return  # silence tells the same, later


class Runner:
    """One runner process."""

    def __init__(self, attempt: "Attempt", engine: EngineTask, name: str) -> None:
        self._attempt, self._engine, self.name = attempt, engine, name
        self._world, self._network = attempt.world, attempt.network
        self._config = attempt.world.config
        self.process = Process(name)
        self.stopped = False
        self._leases: dict[int, Lease] = {}  # group → lease it works on, or has not announced yet
        self._work: dict[int, Task[None]] = {}
        self._tokens: dict[int, list[Token]] = {}  # group → its session
        self._unflushed: dict[int, list[Token]] = {}
        self._finished: list[tuple[Group, list[Token]]] = []
        self._shards, self._partials = 0, 0
        self._written: dict[str, set[int]] = {}  # own partials → groups in them not announced yet
        self._changed = Event()  # there may be room
        self._gained = Event()  # a session has a token that is not flushed
        self._ended = Event()  # a group is finished

    async def run(self) -> None:
        """Work until told to stop, or until the coordinator is gone for good."""
        try:
            async with asyncio.TaskGroup() as group:
                background = [
                    group.create_task(work())
                    for work in (self._heartbeats, self._flushes, self._publishes)
                ]
                await self._lease()
                for task in [*background, *self._work.values()]:
                    task.cancel()
            await self._leave()
            self.stopped = True
        except* MoltError as e:
            self._world.trace(f"{self.name} ends: {e.exceptions[0]}")

    async def _leave(self) -> None:
        await self._flush()
        await self._publish()
        q = c.LeaseEndRequest(
            runner=self.name, leases=tuple(self._leases.values()), reason="stopped"
        )
        await self._network.call(c.LEASE_END, q)

    # ------------------------------------------------------------ leases

    async def _lease(self) -> None:
        samples = self._config.sampling.num_samples
        while True:
            free = self._config.engine.rollouts - samples * len(self._work)
            if free < samples:
                self._changed.clear()
                await self._changed.wait()
                continue
            q = c.LeaseRequest(
                runner=self.name,
                engine=self._engine.index,
                free=free,
                holding=tuple(lease.lease for lease in self._leases.values()),
            )
            reply = await self._network.call(c.LEASE, q)
            for lease in reply.leases:
                self._begin(lease, reply.partials.get(lease.group, ()))
            await self._world.point("leased")
            if reply.stop:
                return

    def _begin(self, lease: Lease, partials: tuple[str, ...]) -> None:
        self._drop(lease.group)
        self._leases[lease.group] = lease
        kept = self._world.files.partials
        tokens = resume([kept[p] for p in partials if p in kept], lease.group, lease.version)
        self._world.checks.resumed(lease, len(tokens))
        self._tokens[lease.group] = tokens
        task = self.process.spawn(self._play(lease))
        self._work[lease.group] = task

    def _drop(self, group: int) -> None:
        """Forget a group; work on it is of no use."""
        self._leases.pop(group, None)
        self._tokens.pop(group, None)
        self._unflushed.pop(group, None)
        self._finished = [x for x in self._finished if x[0].group != group]
        if task := self._work.pop(group, None):
            task.cancel()
        self._changed.set()

    async def _heartbeats(self) -> None:
        while True:
            await asyncio.sleep(self._config.pool.lease_s / 6)
            holding = {lease.lease: g for g, lease in self._leases.items()}
            q = c.Heartbeat(runner=self.name, holding=tuple(holding))
            for number in (await self._network.call(c.HEARTBEAT, q)).lost:
                group = holding[number]
                if group in self._leases and self._leases[group].lease == number:
                    self._drop(group)

    # ------------------------------------------------------------ tokens

    async def _play(self, lease: Lease) -> None:
        tokens, group = self._tokens[lease.group], lease.group
        pace = self._world.pace(group)
        server = self._engine.server
        while len(tokens) < self._world.length(group):
            await asyncio.sleep(self._world.random.random() * pace)
            while not server.serving.is_set():  # it may have died again since it woke us
                await server.serving.wait()
            before = tokens[-1] if tokens else None
            tokens.append(Token(server.version, lease.lease, len(tokens), before))
            self._unflushed.setdefault(group, []).append(tokens[-1])
            self._gained.set()
        status, reason = self._world.verdict(lease)
        versions = [token.version for token in tokens]
        record = Group(
            lease=lease.lease,
            group=group,
            prompt=lease.prompt,
            task=lease.task,
            where=Where(path="", offset=0, length=0, hash=""),
            status=status,
            reason=reason,
            rewards=(float(lease.prompt),),
            segments=(Segment(rollout=0, tokens=len(tokens), actions=len(tokens)),),
            version_min=min(versions),
            version_max=max(versions),
        )
        self._finished.append((record, tokens))
        self._ended.set()
        self._unflushed.pop(group, None)
        self._work.pop(group)
        self._changed.set()

    # ------------------------------------------------------------ files

    async def _flushes(self) -> None:
        while True:
            await self._gained.wait()
            await asyncio.sleep(self._config.session.flush_s)
            self._gained.clear()
            await self._flush()

    async def _flush(self) -> None:
        parts = {g: x for g, x in self._unflushed.items() if x and self._leases[g].task == TRAIN}
        self._unflushed = {}
        if not parts:
            return
        await self._world.files.pause()
        alive()
        path = f"partials/{self.name}/{self._partials:08d}.arrow"
        self._partials += 1
        self._world.files.partials[path] = Partial(parts, self._world.files.visible())
        self._written[path] = set(parts)
        await self._world.point("flushed")

    async def _publishes(self) -> None:
        while True:
            await self._ended.wait()
            await asyncio.sleep(self._config.session.shard_age_s)
            self._ended.clear()
            await self._publish()

    async def _publish(self) -> None:
        """Publish a shard of what is finished, then announce it."""
        if not self._finished:
            return
        await self._world.point("shard.begin")
        await self._world.files.pause()
        alive()
        finished, self._finished = self._finished, []
        if not finished:
            return
        path = f"shards/{self.name}/{self._shards:08d}.arrow"
        self._shards += 1
        groups = tuple(_placed(record, path, i) for i, (record, _) in enumerate(finished))
        self._world.files.shards[path] = Shard(
            groups,
            {record.group: tokens for record, tokens in finished},
            self._world.files.visible(),
        )
        await self._world.point("shard.published")
        try:
            await self._network.call(c.ANNOUNCE, c.Announce(runner=self.name, groups=groups))
        except Fenced:
            self._world.trace(f"{self.name}: fenced at {path}")
        await self._world.point("announced")
        for record in groups:
            held = self._leases.get(record.group)
            if held is not None and held.lease == record.lease:
                self._drop(record.group)
        self._forget({record.group for record in groups})

    def _forget(self, done: set[int]) -> None:
        """Remove own partials whose groups are all announced."""
        for path, groups in list(self._written.items()):
            groups -= done
            if not groups:
                del self._written[path]
                self._world.files.partials.pop(path, None)


def _placed(record: Group, path: str, index: int) -> Group:
    fields = {f: getattr(record, f) for f in record.__struct_fields__ if f != "where"}
    return Group(**fields, where=Where(path=path, offset=index, length=1, hash=f"{index}"))
