# SPDX-License-Identifier: Apache-2.0
"""One start of the command: a launcher, and the roles that it starts again when they die."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from molt import control as c
from molt.coordinator.disk import Disk as CoordinatorDisk
from molt.coordinator.server import Coordinator
from molt.records import Fenced, MoltError, StoreError
from tests.sim.clock import Process, alive
from tests.sim.files import Disk, Journal
from tests.sim.network import Network, Port
from tests.sim.rollout import EngineTask
from tests.sim.training import Trainer

if TYPE_CHECKING:
    from tests.sim.world import World


class CoordinatorRole:
    """One coordinator process."""

    def __init__(self, attempt: "Attempt") -> None:
        self._attempt, self._world = attempt, attempt.world
        self.process = Process(attempt.world.unique("coordinator"))
        self.journal: Journal | None = None
        self.coordinator: Coordinator | None = None
        self.fenced = False
        self._port: Port | None = None

    async def run(self) -> None:
        """Take an epoch and answer, until the journal says no."""
        world = self._world
        try:
            self.journal, state = await Journal.start(
                world.files, world.random, self._attempt.number, world.point
            )
            disk = Disk(world.files, partial(world.checks.deletes, state), world.checks.told)
            made = Coordinator(
                world.config,
                state,
                self.journal.append,
                cast(CoordinatorDisk, disk),
            )
            self.coordinator = made
            world.checks.watch(made)
            async with asyncio.TaskGroup() as group:
                group.create_task(made.work())
                await made.begin()
                self._port = self._attempt.network.port = Port(self.process, made.routes())
        except* Fenced:
            self.fenced = True
        except* StoreError:
            world.trace(f"{self.process.name}: the disk is full")
        except* MoltError as e:
            world.fail(f"the coordinator fails the run: {e.exceptions}")

    def kill(self) -> None:
        """The process dies, its connections break."""
        self.process.kill()
        if self._port:
            self._port.close()


class Attempt:
    """One start of the command: a launcher that starts roles again which died."""

    def __init__(self, world: "World", number: int) -> None:
        self.world, self.number = world, number
        self.alive, self.frozen = True, False
        self.network = Network(world.random, world.schedule.loss, world.fail)
        self.launcher = Process(f"launcher-{number}")
        self.roles: dict[Process, Callable[[], None]] = {}  # and how each is killed
        self.coordinator: CoordinatorRole | None = None
        self.trainer: Trainer | None = None
        self.engines: list[EngineTask] = []

    def begin(self) -> None:
        """Start every role."""
        self.world.trace(f"attempt {self.number}")
        self.launcher.spawn(self._keep_coordinator())
        self.launcher.spawn(self._keep_trainer())
        for index in range(self.world.config.engine.count):
            self.launcher.spawn(self._keep_engine(index))

    async def _keep_coordinator(self) -> None:
        while True:
            role = self.coordinator = CoordinatorRole(self)
            await self._run(role.process, role.kill, role.run())
            self.world.trace(f"{role.process.name} ended")
            if role.fenced:
                self.end()
                self.world.attempt_later()
            await self._before_restart()

    async def _keep_trainer(self) -> None:
        while True:
            role = self.trainer = Trainer(self)
            await self._run(role.process, role.kill, role.run())
            if role.finished:
                self.world.finished(role.weights)
            if role.stopped:
                return
            await self._before_restart()

    async def _keep_engine(self, index: int) -> None:
        while True:
            role = EngineTask(self, index)
            self.engines.append(role)
            await self._run(role.process, role.kill, role.run())
            self.engines.remove(role)
            await self._before_restart()

    async def _run(
        self, process: Process, kill: Callable[[], None], work: Coroutine[Any, Any, None]
    ) -> None:
        self.roles[process] = kill
        await asyncio.wait([process.spawn(work)])
        kill()
        alive()
        del self.roles[process]

    async def _before_restart(self) -> None:
        await asyncio.sleep(self.world.random.uniform(0.2, 2.0))

    # ------------------------------------------------------------ how it ends

    def kill(self, what: str) -> None:
        """Kill a role."""
        match what:
            case "coordinator" if self.coordinator:
                self.coordinator.kill()
            case "trainer" if self.trainer:
                self.trainer.kill()
            case "engine" if self.engines:
                self.world.random.choice(self.engines).kill()
            case _:
                runners = [r for e in self.engines for r in e.runners]
                if runners:
                    self.world.random.choice(runners).process.kill()

    def end(self) -> None:
        """SIGKILL for everything."""
        self.alive = False
        self.launcher.kill()
        for kill in list(self.roles.values()):
            kill()

    def processes(self) -> list[Process]:
        """All there are."""
        runners = [r.process for e in self.engines for r in e.runners]
        return [self.launcher, *self.roles, *runners]

    def freeze(self) -> None:
        """Its node is cut off."""
        self.frozen = True
        for process in self.processes():
            process.freeze()

    def thaw(self) -> None:
        """It is back, and does not know."""
        if self.alive:
            self.world.trace(f"attempt {self.number} is back")
            self.frozen = False
            for process in self.processes():
                process.thaw()
        self.world.attempt_later()

    def stop(self) -> None:
        """SIGTERM: everybody is asked to leave, and then the command is started again."""
        self.launcher.spawn(self._stop())

    async def _stop(self) -> None:
        with suppress(MoltError):  # not reached, or heard later: the launcher ends all the same
            await self.network.call(c.STOP, c.StopRequest(reason="a person"))
        await asyncio.sleep(30.0)  # run.stop_s
        self.end()
        self.world.attempt_later()

    def ended(self, engine: EngineTask, error: MoltError) -> None:
        """An engine task gives up."""
        self.world.trace(f"engine {engine.index} ends: {error}")
        engine.kill()

    def describe(self) -> str:
        """Where it stands."""
        made = self.coordinator and self.coordinator.coordinator
        if not made:
            return f"attempt {self.number} without a coordinator"
        s = made.state
        return (
            f"attempt {self.number} at step {s.step}, version {s.version}, plans {list(s.plans)}, "
            f"ready {list(s.ready)}, leases {list(s.leases)}, returned {list(s.returned)}, "
            f"leased {s.leased}, restored {s.restored}, "
            f"engines {made.publications.engines}, publishing {s.publishing}"
        )
