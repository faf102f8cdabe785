# SPDX-License-Identifier: Apache-2.0
"""The runner: leases groups, plays them against its engine, writes and announces what comes of it.

    /lease ─▶ group.Player ─┬─ finished ─▶ ShardWriter ─▶ publish (fsync) ─▶ /announce
                            └─ so far ───▶ PartialWriter ─▶ publish (fsync)

Many groups run at once on one event loop. A shard is published when it is old or big enough, or
when no group is running; the groups in it are announced after that, in one message. What open
sessions gained is published every `session.flush_s`, so that a kill loses no more than that, and a
stop, which lets the engine hand out what it has, loses nothing. A filesystem that refuses is asked
again until it does not: nothing is dropped for it.
"""

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from molt import control
from molt.config import Config
from molt.records import Fenced, Group, Lease, StoreError
from molt.rollout.client import Client
from molt.rollout.group import Player
from molt.rollout.session import Stopped
from molt.store.partials import PartialWriter
from molt.store.shards import ShardWriter

log = logging.getLogger("molt.runner")

T = TypeVar("T")

BEATS = 6  # heartbeats within the time that makes a runner silent
GRACE_S = 1.0  # when it is stopped: for agents that are between two completions
REFUSED_S = 5.0  # longest pause before a filesystem that refuses is asked again


class Runner:
    """One runner process's work.

    Args:
        run: the run directory.
        config: of the run.
        engine: index of its engine.
        name: no other process ever had it.
        socket: of its engine's server.
    """

    def __init__(self, run: Path, config: Config, engine: int, name: str, socket: Path) -> None:
        self._config, self._engine, self._name = config, engine, name
        self._client = Client(socket, config.engine)
        self._control = control.Client(run)
        self._shards = ShardWriter(run, name, config.session.compression)
        self._partials = PartialWriter(run, name)
        self._player = Player(run, config, str(engine), self._client, self._partials.add)
        self._leases: dict[int, Lease] = {}  # by number: worked on, or not announced yet
        self._playing: dict[int, asyncio.Task[None]] = {}  # by lease number
        self._finished: list[Group] = []  # in the open shard, without their place in it
        self._news = asyncio.Event()  # a group has ended, or everything has
        self._stop = asyncio.Event()  # told to stop
        self._ended = asyncio.Event()  # no group is played any more: write the rest
        self._deadline = float("inf")  # of the rest, on the loop's clock

    async def run(self) -> None:
        """Work until the coordinator or SIGTERM says stop, then give back what is unfinished.

        Raises:
            MoltError: the coordinator or the engine did not come back, or what was unfinished
                could not be written.
        """
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._stop.set)
        try:
            async with asyncio.TaskGroup() as group:
                for work in (self._publish, self._flush, self._beat, self._watch):
                    group.create_task(work())
                leasing = group.create_task(self._lease(group))
                await self._stop.wait()
                leasing.cancel()
                await self._end_groups()
                self._ended.set()
                self._news.set()
            unfinished = control.LeaseEndRequest(
                runner=self._name, leases=tuple(self._leases.values()), reason="stopped"
            )
            await self._control.call(control.LEASE_END, unfinished, self._config.run.stop_s / 8)
        finally:
            await self._client.close()
            await self._control.close()

    # ------------------------------------------------------------ groups

    async def _lease(self, group: asyncio.TaskGroup) -> None:
        """Ask for work until told to stop; without room for a group, only hear whether to stop."""
        num_samples = self._config.sampling.num_samples
        while not self._stop.is_set():
            free = self._config.engine.rollouts - num_samples * len(self._playing)
            request = control.LeaseRequest(
                runner=self._name,
                engine=self._engine,
                free=free if free >= num_samples else 0,
                holding=tuple(self._leases),
            )
            call = asyncio.ensure_future(self._control.call(control.LEASE, request))
            full = self._playing.values() if not request.free else ()
            try:
                await asyncio.wait([call, *full], return_when=asyncio.FIRST_COMPLETED)
                if not call.done():
                    continue  # there is room now
                reply = call.result()
            finally:
                call.cancel()
            for lease in reply.leases:
                self._begin(lease, reply.partials.get(lease.group, ()), group)
            if reply.stop:
                self._stop.set()

    def _begin(self, lease: Lease, partials: tuple[str, ...], group: asyncio.TaskGroup) -> None:
        for older in [x for x in self._leases.values() if x.group == lease.group]:
            self._drop(older.lease)  # it lapsed unnoticed and came back
        self._leases[lease.lease] = lease
        task = group.create_task(self._play(lease, partials))
        self._playing[lease.lease] = task
        task.add_done_callback(lambda _: self._over(lease))

    async def _play(self, lease: Lease, partials: tuple[str, ...]) -> None:
        try:
            batch, record = await self._player.play(lease, partials)
        except Stopped:
            return
        self._partials.drop(lease.group)
        self._shards.add(batch, record)
        self._finished.append(record)

    def _over(self, lease: Lease) -> None:
        del self._playing[lease.lease]
        self._news.set()

    def _drop(self, number: int) -> None:
        """A lease is not ours any more. What is finished under it is announced, and refused."""
        if number in self._playing and number in self._leases:
            self._playing[number].cancel()
            self._partials.drop(self._leases.pop(number).group)

    async def _end_groups(self) -> None:
        """End every group, having logged whatever the engine has sampled for it."""
        stop_s = self._config.run.stop_s
        self._deadline = asyncio.get_running_loop().time() + stop_s / 2
        await self._client.stop(stop_s / 4)
        for _ in range(2):  # by themselves, and cancelled
            if self._playing:
                await asyncio.wait(self._playing.values(), timeout=min(GRACE_S, stop_s / 8))
            for task in self._playing.values():
                task.cancel()

    # ------------------------------------------------------------ files

    async def _publish(self) -> None:
        """Close the shard when it is old or big enough, or when nothing else is running."""
        section = self._config.session
        while not self._ended.is_set():
            await self._news.wait()
            self._news.clear()
            while self._finished:
                due = section.shard_age_s - self._shards.age_s
                if due <= 0 or self._shards.bytes >= section.shard_bytes or not self._playing:
                    await self._close_shard()
                    continue
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), due)
                self._news.clear()

    async def _close_shard(self) -> None:
        places = await self._write(self._shards.publish)
        groups, self._finished = self._finished[: len(places)], self._finished[len(places) :]
        await self._announce(
            [msgspec.structs.replace(g, where=w) for g, w in zip(groups, places, strict=True)]
        )

    async def _announce(self, groups: Sequence[Group]) -> None:
        """Tell of groups on disk. If some are refused, one by one, to learn which."""
        message = control.Announce(runner=self._name, groups=tuple(groups))
        try:
            await self._control.call(control.ANNOUNCE, message)
        except Fenced as error:
            for group in groups if len(groups) > 1 else ():
                await self._announce([group])
            if len(groups) == 1:
                log.warning("not accepted: %s", error)
                self._leases.pop(groups[0].lease, None)
        else:
            for group in groups:
                self._leases.pop(group.lease, None)
                self._partials.forget(group.group)

    async def _flush(self) -> None:
        """Write down what open sessions gained, once in a while and at the end."""
        ended = False
        while not ended:
            await self._pause(self._config.session.flush_s)
            ended = self._ended.is_set()  # then nothing comes any more
            await self._write(self._partials.flush)

    async def _write(self, publish: Callable[[], T]) -> T:
        """Publish something, in a thread, as soon as the filesystem lets us.

        Raises:
            StoreError: it did not before the deadline of a stop.
        """
        loop, pause = asyncio.get_running_loop(), REFUSED_S / 16
        while True:
            try:
                return await loop.run_in_executor(None, publish)
            except StoreError as error:
                if loop.time() > self._deadline:
                    raise
                log.warning("%s; nothing is lost, it is tried again", error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, REFUSED_S)

    # ------------------------------------------------------------ life

    async def _beat(self) -> None:
        """Say that we live, and drop what has been given to others because we did not."""
        while not self._ended.is_set():
            message = control.Heartbeat(runner=self._name, holding=tuple(self._playing))
            reply = await self._control.call(control.HEARTBEAT, message)
            for number in reply.lost:
                self._drop(number)
            await self._pause(self._config.pool.lease_s / BEATS)

    async def _watch(self) -> None:
        """End the process, with the line in its log, if an agent does not let the loop run."""
        limit = self._config.agent.block_s
        try:
            while not self._ended.is_set():
                faulthandler.dump_traceback_later(limit, exit=True)
                await self._pause(min(1.0, limit / 4))
        finally:
            faulthandler.cancel_dump_traceback_later()

    async def _pause(self, seconds: float) -> None:
        """Wait, unless everything has ended."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), seconds)


async def main(run: Path, config: Config) -> None:
    """Entry point of a runner process, whose place is in its environment."""
    engine, name = int(os.environ["MOLT_ENGINE"]), os.environ["MOLT_RUNNER_NAME"]
    await Runner(run, config, engine, name, Path(os.environ["MOLT_SOCKET"])).run()
