# SPDX-License-Identifier: Apache-2.0
"""Virtual time, and processes that share one event loop and can be stopped or killed apart.

The loop never sleeps: when nothing is ready it jumps to the next timer. Whatever a process runs
carries the process in its context: the loop holds back what belongs to a stopped one (its timers
too, as SIGSTOP would), and what a dead one does on its way out has no effect.
"""

import asyncio
from asyncio import Handle, Task
from collections.abc import Coroutine
from contextvars import ContextVar, copy_context
from heapq import heappop, heappush
from typing import Any


class Idle(Exception):
    """Nothing will ever happen again: everybody waits for somebody else."""


class Process:
    """Tasks that live and die together.

    Args:
        name: as it stands in a trace.
    """

    def __init__(self, name: str) -> None:
        self.name, self.alive, self.frozen = name, True, False
        self._context = copy_context()
        self._context.run(CURRENT.set, self)
        self._tasks: set[Task[Any]] = set()
        self._held: list[Handle] = []

    def spawn(self, work: Coroutine[Any, Any, Any]) -> Task[Any]:
        """Run `work` as part of this process."""
        task = asyncio.get_running_loop().create_task(work, context=self._context)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            context = {"message": f"a task of {self.name} failed", "exception": error}
            task.get_loop().call_exception_handler(context)

    def freeze(self) -> None:
        """SIGSTOP."""
        self.frozen = self.alive

    def thaw(self) -> None:
        """SIGCONT: what was due meanwhile happens now."""
        self.frozen = False
        held, self._held = self._held, []
        asyncio.get_running_loop()._ready.extend(held)  # pyright: ignore[reportAttributeAccessIssue]

    def kill(self) -> None:
        """SIGKILL: its tasks end, and nothing that they do on their way out has an effect."""
        self.alive = False
        self.thaw()
        for task in self._tasks:
            task.cancel()

    def hold(self, handle: Handle) -> None:
        """Keep for `thaw` what a stopped process cannot do now."""
        self._held.append(handle)


CURRENT: ContextVar[Process | None] = ContextVar("process", default=None)


def alive() -> Process:
    """The process that runs; whatever has an effect asks first.

    Raises:
        CancelledError: it was killed.
    """
    process = CURRENT.get()
    assert process is not None, "only processes have effects"
    if not process.alive:
        raise asyncio.CancelledError
    return process


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop without files, sockets, threads or waiting.

    Most of what a schedule costs is spent here: a timer is a tuple, which heapq compares in C.
    """

    _ready: Any

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._timers: list[tuple[float, int, Handle]] = []  # when, in which order they were set
        self._num_timers = 0

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    def call_at(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> Handle:
        handle = Handle(callback, args, self, context)
        self._num_timers += 1
        heappush(self._timers, (when, self._num_timers, handle))
        return handle

    def call_later(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, delay: float, callback: Any, *args: Any, context: Any = None
    ) -> Handle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Handle:
        handle = Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def _run_once(self) -> None:
        ready, timers = self._ready, self._timers
        while timers and timers[0][2]._cancelled:
            heappop(timers)
        if not ready:
            if not timers:
                raise Idle
            self._now = max(self._now, timers[0][0])
        while timers and timers[0][0] <= self._now:
            ready.append(heappop(timers)[2])
        while ready:
            handle = ready.popleft()
            if handle._cancelled:
                continue
            process = handle._context.get(CURRENT)
            if process is not None and process.frozen:
                process.hold(handle)
            else:
                handle._run()
