# SPDX-License-Identifier: Apache-2.0
"""One schedule, played: a run from its start to its last step, and all that goes wrong on the way.

Whatever the `Schedule` does not say is drawn from its seed, in an order that depends on nothing
else, so a failing schedule fails again. After the last fault the run has to come to its end within
a bounded virtual time. `run` plays one and raises `Violation`.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

from molt.records import TRAIN, GroupStatus, Lease, MoltError
from tests.sim.attempt import Attempt
from tests.sim.checks import Checks, Violation
from tests.sim.clock import Idle, Process, VirtualLoop, alive
from tests.sim.faults import ACTIONS, Fault
from tests.sim.files import Files, Weights
from tests.sim.network import WIRES, Refused
from tests.sim.schedule import Schedule, config_of
from tests.sim.training import Transfers

STUCK_S = 900.0  # virtual seconds without a new step or a fault: longer than every deadline


class World:
    """Everything that exists while a schedule runs."""

    def __init__(self, schedule: Schedule, tell: Callable[[str], None] | None) -> None:
        self.schedule, self.config = schedule, config_of(schedule)
        self._tell = tell
        self.random = Random(f"world {schedule.seed}")
        self.files = Files(self.random, schedule.delay_s)
        self.transfers = Transfers(self.random)
        self.initial = Weights(0)
        self.checks = Checks(
            self.files,
            self.initial,
            self.config,
            schedule.gentle,
            self.progressed,
            self.trace,
        )
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.attempts: list[Attempt] = []
        self._passed: Counter[str] = Counter()
        self._faults = {(f.point, f.nth): f for f in schedule.faults if f.point != "clock"}
        self._names = 0
        self._progress = 0.0
        self._paces: dict[int, tuple[float, int]] = {}

    async def play(self) -> None:
        """Run to the end.

        Raises:
            Violation: an invariant does not hold.
        """
        for fault in self.schedule.faults:
            if fault.point == "clock":
                self.later(fault.nth, self._strike_any, fault)
        self._watch()
        self.attempt()
        await self.over

    def attempt(self) -> None:
        """Somebody starts the same command."""
        attempt = Attempt(self, len(self.attempts) + 1)
        self.attempts.append(attempt)
        attempt.begin()

    def attempt_later(self) -> None:
        """Unless another one is there by then."""
        self.later(self.random.uniform(0.5, 10.0), self._attempt_if_none)

    def _attempt_if_none(self) -> None:
        if not any(a.alive and not a.frozen for a in self.attempts):
            self.attempt()

    def later(self, seconds: float, work: Callable[..., None], *args: Any) -> None:
        """Let something happen that no process does."""
        asyncio.get_running_loop().call_later(seconds, work, *args, context=WIRES)

    # ------------------------------------------------------------ faults

    async def point(self, name: str) -> None:
        """A place where something may hit the process that runs."""
        self._passed[name] += 1
        fault = self._faults.get((name, self._passed[name]))
        if fault is not None:
            self._strike(fault, alive())
            alive()
            await asyncio.sleep(0)  # a stopped process stops here

    def _strike_any(self, fault: Fault) -> None:
        living = [p for a in self.attempts if a.alive for p in a.processes() if p.alive]
        if living and not self.over.done():
            self._strike(fault, self.random.choice(living))

    def _strike(self, fault: Fault, process: Process) -> None:
        self.trace(f"fault at {process.name}: {fault}")
        self.progressed()
        attempt = next(a for a in self.attempts if process in a.processes())
        ACTIONS[fault.action](attempt, process, fault.seconds)

    # ------------------------------------------------------------ what is drawn

    def unique(self, name: str) -> str:
        """A name that nobody had."""
        self._names += 1
        return f"{name}-{self._names:04d}"

    def pace(self, group: int) -> float:
        """Seconds a token of a group takes: some are much slower than others."""
        return self._drawn(group)[0]

    def length(self, group: int) -> int:
        """Tokens of a group."""
        return self._drawn(group)[1]

    def _drawn(self, group: int) -> tuple[float, int]:
        if group not in self._paces:
            pace = 8.0 if self.random.random() < 0.1 else 1.0
            self._paces[group] = (pace, self.random.randint(1, 5))
        return self._paces[group]

    def verdict(self, lease: Lease) -> tuple[GroupStatus, str]:
        """What becomes of a group."""
        if lease.task == TRAIN and self.random.random() < self.schedule.drop:
            return self.random.choice((("failed", "a tool raised"), ("filtered", "all equal")))
        return "ready", ""

    # ------------------------------------------------------------ the end

    def trace(self, what: str) -> None:
        """For whoever looks at one schedule."""
        if self._tell:
            self._tell(f"{asyncio.get_running_loop().time():9.3f}  {what}")

    def fail(self, what: str | BaseException) -> None:
        """An invariant does not hold."""
        if not self.over.done():
            self.trace(f"violation: {what}")
            self.over.set_exception(Violation(what) if isinstance(what, str) else what)

    def unexpected(self, context: dict[str, Any]) -> None:
        """A task ended with an error."""
        error = context.get("exception")
        if isinstance(error, BaseExceptionGroup):
            error = _first(error)
        if isinstance(error, Refused) or not isinstance(error, MoltError | ConnectionError | None):
            self.fail(error)

    def finished(self, weights: Weights) -> None:
        """A trainer has trained the last step, and somebody was told."""
        try:
            self.checks.ended(weights)
        except Violation as violation:
            self.fail(violation)
        if not self.over.done():
            self.over.set_result(None)

    def progressed(self) -> None:
        """Something happened after which it may take a while to the next step."""
        self._progress = asyncio.get_running_loop().time()

    def _watch(self) -> None:
        if asyncio.get_running_loop().time() - self._progress > STUCK_S:
            self.fail("no progress: " + "; ".join(a.describe() for a in self.attempts if a.alive))
        else:
            self.later(STUCK_S / 10, self._watch)


def run(schedule: Schedule, tell: Callable[[str], None] | None = None) -> float:
    """Play a schedule; returns the virtual seconds that it took.

    Raises:
        Violation: an invariant does not hold.
    """
    loop, log = VirtualLoop(), logging.getLogger("molt")
    level = log.level
    log.setLevel(logging.CRITICAL)
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(_play(schedule, tell))
    except Idle:
        raise Violation("everybody waits for somebody else") from None
    finally:
        _end(loop)
        log.setLevel(level)


def failure(schedule: Schedule) -> str:
    """What goes wrong in a schedule; "" if nothing does."""
    try:
        run(schedule)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is reported with its seed
        return f"{type(error).__name__}: {error}"
    return ""


def _first(error: BaseException) -> BaseException:
    """The first single error of a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _play(schedule: Schedule, tell: Callable[[str], None] | None) -> float:
    loop = asyncio.get_running_loop()
    world = World(schedule, tell)
    loop.set_exception_handler(lambda _, context: world.unexpected(context))
    try:
        await world.play()
    finally:
        for attempt in world.attempts:
            attempt.end()
    return loop.time()


def _end(loop: VirtualLoop) -> None:
    """Let every task end, so that none is collected while it waits."""
    loop.set_exception_handler(lambda _, context: None)
    while tasks := asyncio.all_tasks(loop):
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.wait(tasks, timeout=0))
    asyncio.set_event_loop(None)
    loop.close()
