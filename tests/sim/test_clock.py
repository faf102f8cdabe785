# SPDX-License-Identifier: Apache-2.0
"""The simulation's own ground: virtual time, and processes that stop and die apart."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from tests.sim.clock import Idle, Process, VirtualLoop, alive


def play(work: Coroutine[Any, Any, Any]) -> Any:
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(work)
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


async def _ticks(seen: list[float]) -> None:
    for _ in range(3):
        await asyncio.sleep(1.0)
        alive()
        seen.append(asyncio.get_running_loop().time())


def test_an_hour_takes_no_time():
    async def main() -> float:
        await asyncio.sleep(3600.0)
        return asyncio.get_running_loop().time()

    assert play(main()) == 3600.0


def test_a_stopped_process_does_late_what_was_due():
    async def main() -> list[float]:
        process, seen = Process("p"), list[float]()
        done = process.spawn(_ticks(seen))
        await asyncio.sleep(1.5)
        process.freeze()
        await asyncio.sleep(10.0)
        process.thaw()
        await done
        return seen

    # Due at 1, 2 and 3, but stopped from 1.5 to 11.5: the second is late, the third 1 s after it.
    assert play(main()) == [1.0, 11.5, 12.5]


def test_a_killed_process_has_no_more_effects():
    async def main() -> list[float]:
        process, seen = Process("p"), list[float]()
        process.spawn(_ticks(seen))
        await asyncio.sleep(1.5)
        process.kill()
        await asyncio.sleep(10.0)
        return seen

    assert play(main()) == [1.0]


def test_waiting_for_nothing_is_an_error():
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Idle):
        play(main())
