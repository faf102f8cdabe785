# SPDX-License-Identifier: Apache-2.0
"""The engine task: one vLLM server, its runners, and the publications that reach it.

It is one srun task (or one local process). Three things go on beside each other:

    serve    a server starts, takes publications, generates ─▶ it failed: kill it, start another
    report   what is the case here ─▶ /engine ─▶ the publication to take, or to give up
    keep     a runner works ─▶ it died: /gone, start another

Runners reach the server through a link that is there only while the server holds published
weights: what they ask for in between waits. A server or a runner that died or hung is named,
counted and started again, within a budget (`run.restarts`). An update that failed takes the server
with it as well, but whoever failed it, the trainer repeats it and bounds that.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec

from molt import control
from molt.config import Config
from molt.records import ConfigError, EngineError, Publication
from molt.rollout.engine import STOP_S, Server, make_home

log = logging.getLogger("molt.engine")

RUNNER = (sys.executable, "-m", "molt.cli", "role", "runner")
TAIL_BYTES = 1 << 12  # of the log of a process that failed
TAIL_LINES = 10
BLAME_S = 2.0  # after an update broke off: a server that died is found dead within it
BAD_INPUT = 2  # exit status of a role that refuses its input: starting it again does not help


class UpdateFailed(EngineError):
    """A publication failed and left a server with undefined weights."""


class EngineTask:
    """One engine and everything that belongs to it. Make it inside a running event loop."""

    def __init__(self, run: Path, config: Config, index: int, logs: Path) -> None:
        self._run, self._config, self._index, self._logs = run, config, index, logs
        self._control = control.Client(run)
        self._home = make_home()
        self._link = self._home / "vllm.sock"
        self._stop = asyncio.Event()
        self._restarts = self._runner_restarts = 0
        self._names: dict[int, str] = {}  # of the runners that live, by their place
        self._said = control.EngineRequest(engine=index, incarnation="", version=0, runners=())
        self._news = asyncio.Event()  # there is something else to say
        self._offers: asyncio.Queue[Publication] = asyncio.Queue()
        self._failed = 0  # newest version that the coordinator knows to have failed
        self._heard = asyncio.Event()

    async def run(self) -> None:
        """Serve until SIGTERM. Whatever ends before that is an error, except a runner told to stop.

        Raises:
            EngineError: the server or a runner failed once too often.
            ConfigError: a runner refuses its input.
        """
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._stop.set)
        try:
            async with asyncio.TaskGroup() as group:
                others = [group.create_task(work()) for work in (self._serve, self._report)]
                runners = [
                    group.create_task(self._keep(i)) for i in range(self._config.engine.runners)
                ]
                await self._stop.wait()
                await asyncio.wait(runners)
                for task in others:
                    task.cancel()
        finally:
            shutil.rmtree(self._home, ignore_errors=True)
            await self._control.close()

    # ------------------------------------------------------------ coordinator

    async def _report(self) -> None:
        """Tell the coordinator at once what is the case, and hear what is to be done."""
        while True:
            self._news.clear()
            said = self._said
            reply = await _race(self._control.call(control.ENGINE, said), self._news.wait())
            if not isinstance(reply, control.EngineReply) or said is not self._said:
                continue
            self._failed = reply.failed
            if reply.publication:
                # Another one while one is under way: a new coordinator does not know that one.
                self._failed = max(self._failed, said.receiving)
                self._offers.put_nowait(reply.publication)
                self._say(receiving=reply.publication.version)
            self._heard.set()

    def _say(self, **changes: Any) -> None:
        """Change what the coordinator is told."""
        self._said = msgspec.structs.replace(
            self._said,
            restarts=self._restarts,
            runner_restarts=self._runner_restarts,
            runners=tuple(self._names.values()),
            **changes,
        )
        self._news.set()

    # ------------------------------------------------------------ server

    async def _serve(self) -> None:
        """Let there be a server, whatever becomes of it, within the budget."""
        budget, failures = self._config.run.restarts.engine, 0
        log_path = self._logs / f"vllm-{self._index}.log"
        while True:
            server = Server(self._config, self._index, self._home, log_path)
            within_s = min(STOP_S, self._config.run.stop_s / 5)
            try:
                await self._live(server)
            except EngineError as error:
                within_s = 0.0
                self._lose(error)
                log.warning("%s\n%s", error, tail(log_path))
                failures += not isinstance(error, UpdateFailed)
                if failures > budget:
                    raise EngineError(f"{error}; {budget} restarts were not enough") from error
            finally:
                await server.stop(within_s)
            self._restarts += 1

    async def _live(self, server: Server) -> None:
        """The life of one server, which ends with an error."""
        await server.start()
        await _race(server.wait(), server.wait_healthy())
        self._offers = asyncio.Queue()
        self._say(incarnation=server.incarnation, error="")
        await _race(server.wait(), server.watch(), self._publications(server))

    async def _publications(self, server: Server) -> None:
        """Take every version that comes.

        Raises:
            UpdateFailed: one did not come whole.
        """
        while True:
            publication = await self._offers.get()
            version = publication.version
            try:
                timings = await _race(server.update(publication), self._elsewhere(version))
            except UpdateFailed:
                raise
            except EngineError as error:
                self._lose(error)
                await asyncio.sleep(BLAME_S)
                raise UpdateFailed(str(error)) from error
            self._open(server)
            self._say(version=version, receiving=0, seconds=timings["pause_s"])

    async def _elsewhere(self, version: int) -> dict[str, float]:
        """Wait until a publication has failed for another's fault; then raise."""
        while self._failed < version:
            self._heard.clear()
            await self._heard.wait()
        raise UpdateFailed(f"engine {self._index} gives version {version} up: it failed elsewhere")

    def _open(self, server: Server) -> None:
        """Let runners reach the server."""
        link = self._link.with_suffix(".new")
        link.symlink_to(server.socket)
        link.replace(self._link)

    def _lose(self, error: EngineError) -> None:
        """Let nobody reach the server any more, and say why."""
        self._link.unlink(missing_ok=True)
        self._say(error=str(error), incarnation="", version=0, receiving=0, seconds=0.0)

    # ------------------------------------------------------------ runners

    async def _keep(self, index: int) -> None:
        """Let there be a runner until one is told to stop, within the budget of all of them."""
        budget = self._config.run.restarts.runner
        log_path = self._logs / f"runner-{self._index}-{index}.log"
        while True:
            name = f"runner-{self._index}-{index}-{secrets.token_hex(4)}"
            self._names[index] = name
            self._say()
            code = await self._end_of(await self._start_runner(name, log_path))
            if not code:
                return
            reason = f"{name} ended with status {128 - code if code < 0 else code}"
            log.warning("%s\n%s", reason, tail(log_path))
            if self._stop.is_set():
                return
            await self._control.call(control.GONE, control.Gone(runner=name, reason=reason))
            if code == BAD_INPUT:
                raise ConfigError(f"{reason}: see {log_path}")
            self._runner_restarts += 1
            if self._runner_restarts > budget:
                raise EngineError(f"{reason}; {budget} restarts were not enough: see {log_path}")

    async def _start_runner(self, name: str, log_path: Path) -> asyncio.subprocess.Process:
        environment = os.environ | {
            "MOLT_ENGINE": str(self._index),
            "MOLT_RUNNER_NAME": name,
            "MOLT_PARENT": str(os.getpid()),
            "MOLT_SOCKET": str(self._link),
        }
        with log_path.open("ab") as output:
            return await asyncio.create_subprocess_exec(
                *RUNNER, str(self._run), env=environment, stdout=output, stderr=output
            )

    async def _end_of(self, process: asyncio.subprocess.Process) -> int:
        """The exit status of a runner, which is asked to end when we are."""
        try:
            await _race(process.wait(), self._stop.wait())
            if process.returncode is None:
                process.terminate()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), 0.7 * self._config.run.stop_s)
        finally:
            if process.returncode is None:
                process.kill()
            code = await process.wait()
        return code


async def _race(*works: Coroutine[Any, Any, Any]) -> Any:
    """The result or the error of whichever ends first, the others are cancelled."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task.done()).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def tail(path: Path) -> str:
    """The last lines of a log."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join(lines[-TAIL_LINES:])


async def main(run: Path, config: Config) -> None:
    """Entry point of an engine task; its index is its srun rank."""
    index = int(os.environ.get("SLURM_PROCID", "0"))
    await EngineTask(run, config, index, Path(os.environ["MOLT_LOGS"])).run()
