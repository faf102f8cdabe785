# SPDX-License-Identifier: Apache-2.0
"""A simulated trainer, and the transfers between it and the engines.

    restore ─▶ publish ┌▶ plan ─▶ read (or void) ─▶ train ─▶ publish ─▶ checkpoint? ┐▶ checkpoint
                       └──────────────────── until trainer.steps ───────────────────┘

A publication goes on while the next plan is asked for and trained; a checkpoint is written while
training goes on. A publication that fails is repeated with the weights of the moment.
"""

import asyncio
from asyncio import Future, Task
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from molt import control as c
from molt.records import EngineError, MoltError, Plan, Publication, Restore
from tests.sim.clock import Process, alive
from tests.sim.files import Checkpoint, Weights
from tests.sim.network import WIRES

if TYPE_CHECKING:
    from tests.sim.world import Attempt

RETRIES = 5  # trainer.publish_retries


@dataclass
class Flight:
    """One broadcast."""

    communicator: str
    members: frozenset[int]
    done: Future[bool]
    joined: dict[int, str] = field(default_factory=dict)
    sending: bool = False


class Transfers:
    """Broadcasts work if the sender and every member take part, all in one communicator.

    If not, nobody hears of it, as with a collective, but for a connection that happens to break.
    """

    def __init__(self, random: Random) -> None:
        self._random = random
        self._built: dict[str, dict[int, str]] = {}  # communicator → engine → incarnation
        self._flights: dict[int, Flight] = {}

    async def join(self, publication: Publication, engine: int, incarnation: str) -> None:
        """An engine receives.

        Raises:
            ConnectionError: it broke.
        """
        flight = self._flight(publication.version, publication.communicator, publication.members)
        flight.joined[engine] = incarnation
        await self._take_part(flight)

    async def send(self, version: int, communicator: str, members: tuple[int, ...]) -> None:
        """The trainer sends.

        Raises:
            ConnectionError: it broke.
        """
        flight = self._flight(version, communicator, members)
        flight.sending = True
        await self._take_part(flight)

    def server_died(self, engine: int) -> None:
        """What a dead engine was part of hangs, or breaks."""
        for flight in self._flights.values():
            if flight.joined.pop(engine, None) and not flight.done.done():
                flight.sending = False
                if self._random.random() < 0.5:
                    flight.done.set_result(False)

    def _flight(self, version: int, communicator: str, members: tuple[int, ...]) -> Flight:
        if version not in self._flights:
            done = asyncio.get_running_loop().create_future()
            self._flights[version] = Flight(communicator, frozenset(members), done)
        return self._flights[version]

    async def _take_part(self, flight: Flight) -> None:
        if flight.sending and flight.joined.keys() == flight.members and not flight.done.done():
            built = self._built.setdefault(flight.communicator, dict(flight.joined))
            if built == flight.joined:
                asyncio.get_running_loop().call_later(
                    self._random.random(), self._arrive, flight, context=WIRES
                )
        if not await asyncio.shield(flight.done):
            raise ConnectionError

    @staticmethod
    def _arrive(flight: Flight) -> None:
        if flight.sending and not flight.done.done():
            flight.done.set_result(True)


class Trainer:
    """All ranks of a trainer."""

    def __init__(self, attempt: "Attempt") -> None:
        self._attempt, self._world, self._network = attempt, attempt.world, attempt.network
        self._config = attempt.world.config
        self.name = self._world.unique(f"trainer-{attempt.number}")
        self.process = Process(self.name)
        self.finished = self.stopped = False
        self.weights = self._world.initial
        self._lineage, self._saved = 0, -1
        self._version = 0
        self._requests, self._communicator = 0, ""
        self._outcome: Task[str] | None = None  # of the newest publication: "" or what failed
        self._failures = 0
        self._saving: Task[None] | None = None

    def kill(self) -> None:
        """All ranks die."""
        self.process.kill()

    async def run(self) -> None:
        """Train until the last step, or until told to stop."""
        try:
            await self._restore()
            await self._publish()
            await self._loop()
            await self._settle()
            await self._end_save()
            if self._saved != self.weights.step:
                self._save()
                await self._end_save()
        except MoltError as e:
            self._world.trace(f"{self.name} ends: {e}")
            return
        self.stopped = True
        self.finished = self.weights.step >= self._config.trainer.steps

    async def _loop(self) -> None:
        every = self._config.checkpoint.every
        while self.weights.step < self._config.trainer.steps:
            reply = await self._plan()
            if reply.plan is None:
                return
            if not await self._train(reply, reply.plan):
                continue
            if self._outcome and await self._outcome:
                self._failures += 1  # repeated with the newer weights
            await self._publish()
            if every and self.weights.step % every == 0:
                await self._end_save()
                if not self._world.schedule.eager_save:
                    await self._settle()
                self._save()

    async def _restore(self) -> None:
        await self._world.files.pause()
        await self._world.point("restore")
        whole = {s: x for s, x in self._world.files.checkpoints.items() if not x.damaged}
        if whole:
            self.weights = whole[max(whole)].weights
            self._saved = self.weights.step
        q = c.TrainerStart(step=self.weights.step, incarnation=self.name)
        self._lineage = (await self._network.call(c.TRAINER, q)).lineage
        self._world.checks.relied(Restore, self._lineage)
        self._world.trace(f"{self.name} starts from {self.weights.step}, lineage {self._lineage}")

    # ------------------------------------------------------------ steps

    async def _plan(self) -> c.PlanReply:
        q = c.PlanRequest(step=self.weights.step + 1, lineage=self._lineage)
        while True:
            if self._outcome and self._outcome.done():
                await self._settle()
            reply = await self._network.call(c.PLAN, q)
            await self._world.point("plan")
            if reply.stop or reply.plan is not None:
                return reply
            if reply.publish:
                await self._settle()
                await self._publish()

    async def _train(self, reply: c.PlanReply, plan: Plan) -> bool:
        """Whether the plan could be read, and is trained."""
        await self._world.point("read")
        current = self._attempt is self._world.attempts[-1]
        unreadable = [g for g in reply.groups if not self._world.checks.readable(g, current)]
        if unreadable:
            q = c.VoidRequest(
                step=plan.step,
                lineage=self._lineage,
                groups=tuple(g.group for g in unreadable),
                leases=tuple(g.lease for g in unreadable),
                reason="unreadable",
            )
            await self._network.call(c.VOID, q)
            return False
        await asyncio.sleep(self._world.random.random() * self._world.schedule.train_s)
        alive()
        self.weights = self._world.checks.trained(self.weights, plan, reply.groups)
        await self._world.point("trained")
        return True

    # ------------------------------------------------------------ publications

    async def _settle(self) -> None:
        """Repeat the newest publication until it succeeds."""
        while self._outcome and (error := await self._outcome):
            self._failures += 1
            if self._failures > RETRIES:
                raise EngineError(f"publication failed {self._failures} times: {error}")
            await self._publish()
        self._failures = 0

    async def _publish(self) -> None:
        self._requests += 1
        q = c.PublishRequest(
            step=self.weights.step,
            lineage=self._lineage,
            address="",
            port=0,
            workers=1,
            communicator=self._communicator,
            fresh=f"{self.name}-{self._requests}",
            tensors=(),
            bucket_bytes=1,
        )
        while not (reply := await self._network.call(c.PUBLISH, q)).version:
            pass
        alive()
        self._version = reply.version
        self._world.checks.offered(reply.version, self.weights)
        self._communicator = reply.communicator
        await self._world.point("publish.begun")
        self._outcome = self.process.spawn(self._deliver(reply))

    async def _deliver(self, reply: c.PublishReply) -> str:
        sending = self.process.spawn(
            self._world.transfers.send(reply.version, reply.communicator, reply.members)
        )
        step, error = self.weights.step, ""
        while True:
            if sending.done() and sending.exception():
                error = "sending failed"
            q = c.PublishWait(version=reply.version, error=error)
            try:
                done = await self._network.call(c.PUBLISHED, q)
            except MoltError as e:
                self._world.trace(f"{self.name}: {e}")
                self.process.kill()
                raise asyncio.CancelledError from e
            if done.done:
                break
        await self._world.point("published")
        if done.error:
            self._world.trace(f"version {reply.version} failed: {done.error}")
            self._communicator = ""
            sending.cancel()
            return done.error
        await sending
        await self._report(step, reply.version)
        return ""

    async def _report(self, step: int, version: int) -> None:
        q = c.StepRequest(step=step, lineage=self._lineage, version=version, metrics={})
        try:
            while not (reply := await self._network.call(c.STEP, q)).done:
                if getattr(reply, "publish", False):
                    await self._publish()
        except MoltError:
            self.process.kill()

    # ------------------------------------------------------------ checkpoints

    async def _end_save(self) -> None:
        if self._saving:
            await self._saving
        self._saving = None

    def _save(self) -> None:
        self._saved = self.weights.step
        self._saving = self.process.spawn(self._write(self.weights, self._version))

    async def _write(self, weights: Weights, version: int) -> None:
        kept = self._world.files.checkpoints
        await asyncio.sleep(self._world.random.random() * self._world.schedule.save_s)
        alive()
        await self._world.point("save.data")
        kept[weights.step] = Checkpoint(weights, version)
        await self._world.point("save.marker")
        whole = sorted(step for step, saved in kept.items() if not saved.damaged)
        oldest = whole[-self._config.checkpoint.keep :][0]
        for step in [s for s in kept if s < oldest]:
            del kept[step]
        await self._world.point("saved")
        q = c.CheckpointRequest(
            step=weights.step, lineage=self._lineage, oldest=oldest, path="", version=version
        )
        await self._network.call(c.CHECKPOINT, q)
        await self._world.point("checkpoint")
