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
from heapq import heappop
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
    """An event loop without files, sockets, threads or waiting."""

    _ready: Any
    _scheduled: Any

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    def _run_once(self) -> None:
        ready, scheduled = self._ready, self._scheduled
        while scheduled and scheduled[0]._cancelled:
            heappop(scheduled)._scheduled = False
        if not ready:
            if not scheduled:
                raise Idle
            self._now = max(self._now, scheduled[0]._when)
        while scheduled and scheduled[0]._when <= self._now:
            handle = heappop(scheduled)
            handle._scheduled = False
            ready.append(handle)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            process = handle._context.get(CURRENT)
            if process is not None and process.frozen:
                process.hold(handle)
            else:
                handle._run()
