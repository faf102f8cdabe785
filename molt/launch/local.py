# SPDX-License-Identifier: Apache-2.0
"""The local launcher: every role as a process of this host, with the environment srun would give.

    coordinator ─┬─ engine 0 … n−1 (each with its vLLM server and its runners)
                 └─ trainer 0 … ranks−1

Who ends before the trainer is done is started again, `run.restarts` times: the coordinator at the
same address, an engine alone, the trainer ranks all together, since those that live on wait for the
dead one in a collective. An exit status of 2 or 3 is an error that Molt has named: it would come
back, so a person reads it instead. When the budget is spent, an engine of several is lost and the
run goes on; otherwise all are ended, and what the user sees is the culprit's name, its last lines
and its exit code.

When the trainer is done it ends the others. The first Ctrl-C asks everyone to finish their step and
to leave within `run.stop_s`, the second one kills. Each role dies with this process, whatever
happens.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from molt.config import Config
from molt.launch.child import Child, culprit
from molt.records import MoltError

SETTLE_S = 2.0  # after a rank's failure: who caused it may take longer to end than who suffered it
KILL_S = 5.0  # an engine that has to go at once gets this long to end its server
INTERRUPTED = 130


@dataclass(frozen=True)
class Outcome:
    """How a run ended: exit status, and what to tell the user about a failure."""

    status: int
    message: str = ""


class Local:
    """One attempt at a run on this machine.

    Args:
        run: the run directory, created and with its config.json.
        logs: this attempt's log directory, attempt-N.
        stop: asks the coordinator at an address to let everyone leave (given by the caller:
            launchers know no routes).
    """

    def __init__(
        self, run: Path, config: Config, logs: Path, stop: Callable[[str], object]
    ) -> None:
        self._run, self._config, self._logs = run, config, logs
        self._port = hold_port()
        self.address = f"127.0.0.1:{self._port.getsockname()[1]}"
        self._ask_to_stop = stop
        self._counts = {
            "coordinator": 1, "engine": config.engine.count, "trainer": config.trainer.ranks
        }  # fmt: skip
        self._children: list[Child] = []
        self._restarts: Counter[str] = Counter()
        self._signals = 0
        self._interrupted = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> Outcome:
        """Start all roles, wait for the end, and leave no process behind."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signal)
        try:
            for kind, count in self._counts.items():
                await self._start(kind, range(count))
            outcome = await self._watch()
            if outcome.status == 0:
                outcome = await self._leave()
            return Outcome(INTERRUPTED) if self._signals and not outcome.message else outcome
        finally:
            await self._end_all()
            self._port.close()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    # ------------------------------------------------------------ while it runs

    async def _start(self, kind: str, ranks: Iterable[int]) -> None:
        """Start some of the processes of a kind; all of them when there was one before them."""
        world = self._counts[kind]
        for rank in ranks:
            environment = {"OMP_NUM_THREADS": "1"} | os.environ | {
                "MOLT_COORDINATOR": self.address,
                "MOLT_LOGS": str(self._logs),
                "MOLT_ATTEMPT": self._logs.name.rpartition("-")[2],
                "MOLT_PARENT": str(os.getpid()),
                "SLURM_PROCID": str(rank),
                "SLURM_NTASKS": str(world),
                "SLURM_STEP_ID": str(self._restarts.total()),  # ranks that met before meet anew
            }  # fmt: skip
            self._children.append(
                await Child.start(kind, rank, world, self._run, self._logs, environment)
            )

    async def _watch(self) -> Outcome:
        """Until all trainer ranks have ended well, an end cannot be mended, or the user insists."""
        interrupted = asyncio.create_task(self._interrupted.wait())
        try:
            while self._living("trainer"):
                waits = [c.ended for c in self._children]
                await asyncio.wait([*waits, interrupted], return_when=asyncio.FIRST_COMPLETED)
                if interrupted.done():
                    return Outcome(INTERRUPTED)
                ended = [c for c in self._children if c.ended.done()]
                if outcome := await self._mend(ended):
                    return outcome
            return Outcome(0)
        finally:
            interrupted.cancel()

    async def _mend(self, ended: list[Child]) -> Outcome | None:
        """Start again what has ended; an outcome when that is no use."""
        mend = {"coordinator": self._mend_coordinator, "engine": self._mend_engine}
        failed: list[Child] = []
        for child in sorted(ended, key=lambda c: [*self._counts].index(c.kind)):
            self._children.remove(child)
            child.kill()  # what it left behind
            if child.kind == "trainer":
                failed += [child] if child.code else []
            elif outcome := await mend[child.kind](child):
                return outcome
        return await self._mend_trainer(failed) if failed else None

    async def _mend_coordinator(self, child: Child) -> Outcome | None:
        """Also while the run stops: the trainer tells it about the last checkpoint."""
        if outcome := self._spend(child, child.kind):
            return outcome
        await self._start(child.kind, [child.rank])
        if self._signals:  # the one before may have been told, this one was not
            self._tasks.append(asyncio.create_task(self._request_stop()))
        return None

    async def _mend_engine(self, child: Child) -> Outcome | None:
        """The run needs one of them, and while it stops none."""
        if self._signals:
            if child.code:
                tell(child, "while the run stops")
            return None
        outcome = self._spend(child, child.name)
        left = len(self._living("engine"))
        if outcome and left:
            tell(child, f"and is lost, {left} left")
            return None
        if not outcome:
            await self._start(child.kind, [child.rank])
        return outcome

    async def _mend_trainer(self, failed: list[Child]) -> Outcome | None:
        """All ranks again. Those that live on can only be killed: they wait for a dead one."""
        others = self._living("trainer")
        if others and not any(c.struck for c in failed):
            await asyncio.wait([c.ended for c in others], timeout=SETTLE_S)
        failed += [c for c in others if c.ended.done() and c.code]
        for child in others:
            child.kill()
            await child.ended
        self._children = [c for c in self._children if c not in others]
        child = culprit(failed)
        if self._signals:
            return Outcome(child.status, obituary(child))
        if outcome := self._spend(child, child.kind):
            return outcome
        await self._start(child.kind, range(self._counts[child.kind]))
        return None

    def _spend(self, child: Child, key: str) -> Outcome | None:
        """Take one restart from the budget; an outcome when there is none, or it would not help."""
        budget = getattr(self._config.run.restarts, child.kind)
        used = self._restarts[key]
        if child.named_error or used >= budget:
            return Outcome(child.status, obituary(child, used))
        self._restarts[key] += 1
        tell(child, f"and is started again ({used + 1} of {budget})")
        return None

    def _living(self, kind: str) -> list[Child]:
        return [c for c in self._children if c.kind == kind]

    # ------------------------------------------------------------ the end

    def _signal(self) -> None:
        """First signal: ask everyone to leave. Second: stop waiting for them."""
        self._signals += 1
        if self._signals == 1:
            say("stopping after this step; Ctrl-C again to kill")
            self._tasks.append(asyncio.create_task(self._request_stop()))
            self._tasks.append(asyncio.create_task(self._lose_patience()))
        else:
            self._interrupted.set()

    async def _request_stop(self) -> None:
        """Nobody can finish anything without a coordinator."""
        try:
            await self._stop_call()
        except (OSError, MoltError):
            self._interrupted.set()

    async def _lose_patience(self) -> None:
        await asyncio.sleep(self._config.run.stop_s)
        self._interrupted.set()

    async def _stop_call(self) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self._ask_to_stop, self.address)

    async def _leave(self) -> Outcome:
        """The trainer is done: runners and engines leave, and at last the coordinator."""
        deadline = asyncio.get_running_loop().time() + self._config.run.stop_s
        with contextlib.suppress(OSError, MoltError):
            await self._stop_call()
        for kind in ("engine", "coordinator"):
            leaving = self._living(kind)
            for child in leaving:
                child.terminate()
            left = max(0.0, deadline - asyncio.get_running_loop().time())
            if leaving:
                await asyncio.wait([c.ended for c in leaving], timeout=left)
            if failed := [c for c in leaving if c.ended.done() and c.code]:
                return Outcome(failed[0].status, obituary(failed[0]))
        return Outcome(0)

    async def _end_all(self) -> None:
        """End what still runs."""
        for task in self._tasks:
            task.cancel()
        for child in self._children:
            child.terminate()
        if self._children:
            await asyncio.wait([c.ended for c in self._children], timeout=KILL_S)
        for child in self._children:
            child.kill()
            await child.ended


def say(line: str) -> None:
    """Tell the user."""
    print(line, file=sys.stderr, flush=True)


def tell(child: Child, outcome: str) -> None:
    """Tell the user, and its log, how a process ended and what comes of it."""
    what = f"{child.name} ended with {child.how} {outcome}"
    last = child.last_lines[-1:] if child.code > 0 else []
    child.note(what)
    say("; ".join([what, *last, f"see {child.log}"]))


def obituary(child: Child, restarts: int = 0) -> str:
    """Name, exit status and last lines of a process that should not have ended."""
    after = f" after {restarts} restart{'s' * (restarts > 1)}" if restarts else ""
    first = f"{child.name} ended with {child.how}{after}; the last lines of {child.log}:"
    return "\n".join([first, *child.last_lines])


def hold_port() -> socket.socket:
    """A socket that keeps a TCP port of the loopback interface.

    Nobody gets that port by chance, also while the coordinator is started again; who asks for it,
    with SO_REUSEADDR as servers do, can listen on it.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held
