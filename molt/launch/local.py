# SPDX-License-Identifier: Apache-2.0
"""The local launcher: every role as a process of this host, with the environment srun would give.

    coordinator ─┬─ engine 0 … n−1 (each with its vLLM server and its runners)
                 └─ trainer 0 … ranks−1

It watches all of them. When the trainer is done it ends the others; when one fails it ends all, and
what the user sees is the culprit's name, its last lines and its exit code. The first Ctrl-C asks
everyone to finish their step and to leave, the second one kills. Each role dies with this process,
whatever happens.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from molt.config import Config

TAIL_LINES = 15  # of the culprit's log
BLAME_S = 3.0  # after a failure: whoever caused it may take longer to end than who suffered it
INTERRUPTED = 130


@dataclass
class Role:
    """One process of the run."""

    name: str
    process: asyncio.subprocess.Process
    log: Path


@dataclass(frozen=True)
class Outcome:
    """How a run ended: exit status, and what to tell the user about a failure."""

    status: int
    message: str = ""


class Local:
    """One attempt at a run on this machine.

    Args:
        run: the run directory, created and with its config.json.
        logs: this attempt's log directory.
        stop: asks the coordinator to let everyone leave (given by the caller: launchers know no
        routes).
    """

    def __init__(
        self, run: Path, config: Config, logs: Path, stop: Callable[[str], object]
    ) -> None:
        self._run, self._config, self._logs = run, config, logs
        self.address = f"127.0.0.1:{free_port()}"
        self._ask_to_stop = stop
        self._roles: list[Role] = []
        self._signals = 0
        self._interrupted = asyncio.Event()
        self._stopper: asyncio.Task[None] | None = None

    async def run(self) -> Outcome:
        """Start all roles, wait for the end, and leave no process behind."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signal)
        try:
            await self._start("coordinator", 0, 1)
            for i in range(self._config.engine.count):
                await self._start("engine", i, self._config.engine.count)
            for i in range(self._config.trainer.ranks):
                await self._start("trainer", i, self._config.trainer.ranks)
            outcome = await self._watch()
            if outcome.status == 0:
                outcome = await self._leave() or outcome
            return Outcome(INTERRUPTED) if self._signals and not outcome.message else outcome
        finally:
            await self._kill()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def _signal(self) -> None:
        """First signal: ask everyone to leave. Second: stop waiting for them."""
        self._signals += 1
        if self._signals == 1:
            print("stopping after this step; Ctrl-C again to kill", file=sys.stderr)
            self._stopper = asyncio.ensure_future(self._request_stop())
        else:
            self._interrupted.set()

    async def _request_stop(self) -> None:
        try:
            await asyncio.wait_for(asyncio.shield(self._stop_call()), self._config.run.stop_s)
            await asyncio.sleep(self._config.run.stop_s)
        except (OSError, TimeoutError, RuntimeError):
            pass
        self._interrupted.set()

    async def _stop_call(self) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self._ask_to_stop, self.address)

    async def _start(self, name: str, rank: int, world: int) -> None:
        log = self._logs / (f"{name}.log" if world == 1 else f"{name}-{rank}.log")
        environment = {"OMP_NUM_THREADS": "1"} | os.environ | {
            "MOLT_COORDINATOR": self.address,
            "MOLT_LOGS": str(self._logs),
            "MOLT_PARENT": str(os.getpid()),
            "SLURM_PROCID": str(rank),
            "SLURM_NTASKS": str(world),
        }  # fmt: skip
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *command(name, self._run),
                env=environment, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
        self._roles.append(Role(f"{name} {rank}" if world > 1 else name, process, log))

    async def _watch(self) -> Outcome:
        """Until all trainer ranks have ended well, one role has not, or the user insists."""
        waits = {asyncio.create_task(r.process.wait(), name=r.name): r for r in self._roles}
        interrupted = asyncio.create_task(self._interrupted.wait())
        running = set(waits)
        try:
            while any(waits[t].name.startswith("trainer") for t in running):
                done, _ = await asyncio.wait(
                    {*running, interrupted}, return_when=asyncio.FIRST_COMPLETED
                )
                if interrupted in done:
                    return Outcome(INTERRUPTED)
                running -= done
                if failed := [waits[t] for t in done if is_failure(waits[t])]:
                    later, _ = await asyncio.wait(running, timeout=BLAME_S)
                    failed += [waits[t] for t in later if is_failure(waits[t])]
                    role = min(failed, key=blame)
                    return Outcome(exit_status(role.process.returncode or 0), obituary(role))
            return Outcome(0)
        finally:
            for task in (*running, interrupted):
                task.cancel()

    async def _leave(self) -> Outcome | None:
        """The trainer is done: runners, engines, and at last the coordinator leave."""
        with contextlib.suppress(OSError, RuntimeError):
            await self._stop_call()
        for name in ("engine", "coordinator"):
            for role in [r for r in self._roles if r.name.startswith(name)]:
                if role.process.returncode is None:
                    role.process.terminate()
                try:
                    await asyncio.wait_for(role.process.wait(), self._config.run.stop_s)
                except TimeoutError:
                    continue
                if role.process.returncode:
                    return Outcome(exit_status(role.process.returncode), obituary(role))
        return None

    async def _kill(self) -> None:
        """End what still runs; an engine gets the time to end its server."""
        left = [r.process for r in self._roles if r.process.returncode is None]
        for process in left:
            process.terminate()
        if left:
            waits = [asyncio.ensure_future(p.wait()) for p in left]
            await asyncio.wait(waits, timeout=5.0)
        for process in left:  # with the children that one of them may have left behind
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if self._stopper:
            self._stopper.cancel()


def command(name: str, run: Path) -> list[str]:
    """What starts a role; its place among its equals is in the environment."""
    return [sys.executable, "-m", "molt.cli", "role", name, str(run)]


def is_failure(role: Role) -> bool:
    """Whether an ended role should not have ended, or not so."""
    return bool(role.process.returncode) or not role.name.startswith("trainer")


def blame(role: Role) -> tuple[bool, bool]:
    """Smallest for the culprit among roles that failed together.

    A trainer fails with the engine it sends to, and a rank fails, or aborts inside gloo, with the
    rank that was killed.
    """
    code = role.process.returncode or 0
    return role.name.startswith("trainer"), code >= 0 or code == -signal.SIGABRT


def exit_status(returncode: int) -> int:
    """A shell's view of a return code: 128 + n for signal n, 3 when the process has none itself."""
    return 128 - returncode if returncode < 0 else returncode or 3


def obituary(role: Role) -> str:
    """Name, exit status and last lines of a role that should not have ended."""
    lines = role.log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
    code = role.process.returncode or 0
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"status {code}"
    return "\n".join([f"{role.name} ended with {how}; the last lines of {role.log}:", *lines])


def free_port() -> int:
    """A TCP port of the loopback interface that nothing listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
