# SPDX-License-Identifier: Apache-2.0
"""The engine task: one vLLM server, its runners, and the publications that reach it.

It is one srun task (or one local process). It starts the server, then the runners, tells the
coordinator which version its engine holds, and receives the next one. What dies here ends the task,
by name.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path

from molt import control
from molt.config import Config
from molt.records import EngineError
from molt.rollout.engine import Server

STOP_S = 20.0  # runners get this long to publish what they hold


class EngineTask:
    """One engine and everything that belongs to it."""

    def __init__(self, run: Path, config: Config, index: int, logs: Path) -> None:
        self._run, self._config, self._index, self._logs = run, config, index, logs
        self._control = control.Client(run)
        self._server = Server(config, index, logs / f"vllm-{index}.log")
        self._runners: list[asyncio.subprocess.Process] = []

    async def run(self) -> None:
        """Serve until SIGTERM. Whatever ends before that is an error, except a runner told to stop.

        Raises:
            EngineError: the server or a runner died.
        """
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        try:
            await self._server.start()
            for i in range(self._config.engine.runners):
                self._runners.append(await self._start_runner(i))
            async with asyncio.TaskGroup() as group:
                watched = [
                    group.create_task(self._watch_runner(i)) for i in range(len(self._runners))
                ]
                others = [group.create_task(self._server.wait())]
                await self._server.wait_healthy()
                others.append(group.create_task(self._publications()))
                await stop.wait()
                await asyncio.wait(watched, timeout=STOP_S)
                for task in (*watched, *others):
                    task.cancel()
        finally:
            await self._end()

    async def _publications(self) -> None:
        """Receive every version that comes; a failure is the coordinator's to judge."""
        version, seconds, error = 0, 0.0, ""
        while True:
            request = control.EngineRequest(
                engine=self._index, version=version, error=error, seconds=seconds
            )
            reply = await self._control.call(control.ENGINE, request)
            if reply.publication is not None:
                try:
                    timings = await self._server.update(reply.publication)
                    version, seconds = reply.publication.version, timings["pause_s"]
                except EngineError as e:
                    error = str(e)

    async def _start_runner(self, index: int) -> asyncio.subprocess.Process:
        environment = os.environ | {
            "MOLT_ENGINE": str(self._index),
            "MOLT_RUNNER": str(index),
            "MOLT_PARENT": str(os.getpid()),
            "MOLT_SOCKET": str(self._server.socket),
        }
        with (self._logs / f"runner-{self._index}-{index}.log").open("ab") as log:
            return await asyncio.create_subprocess_exec(
                sys.executable, "-m", "molt.cli", "role", "runner", str(self._run),
                env=environment, stdout=log, stderr=log,
            )  # fmt: skip

    async def _watch_runner(self, index: int) -> None:
        code = await self._runners[index].wait()
        if code:
            log = self._logs / f"runner-{self._index}-{index}.log"
            raise EngineError(
                f"runner {index} of engine {self._index} ended with status {code}: see {log}"
            )

    async def _end(self) -> None:
        """Leave no process behind."""
        for process in self._runners:
            if process.returncode is None:
                process.kill()
                await process.wait()
        await self._server.stop()
        await self._control.close()


async def main(run: Path, config: Config) -> None:
    """Entry point of an engine task; its index is its srun rank."""
    index = int(os.environ.get("SLURM_PROCID", "0"))
    await EngineTask(run, config, index, Path(os.environ["MOLT_LOGS"])).run()
