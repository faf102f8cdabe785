# SPDX-License-Identifier: Apache-2.0
"""Waiting for the state to change: conditions by topic, looked at once a turn of the event loop.

A waiter costs one call of its condition whenever its topic is touched, and nothing else: a thousand
runners that wait for room do not wake up for every group that is finished. A condition may act when
it comes true (grant a lease): it is called again only if it said no.
"""

import asyncio
from collections.abc import Callable
from enum import Enum, auto


class Topic(Enum):
    """What a waiter waits for."""

    ROOM = auto()  # leases: room in the pool, an evaluation, weights on an engine
    PLANS = auto()  # ready groups, or an engine that lacks the weights
    WEIGHTS = auto()  # publications, what engines hold, evaluations that hold the weights
    VALUES = auto()  # rendezvous


class Changes:
    """The waiters of one event loop."""

    def __init__(self) -> None:
        self._waiting: dict[Topic, dict[asyncio.Future[None], Callable[[], bool]]] = {
            topic: {} for topic in Topic
        }
        self._touched: set[Topic] = set()

    def touch(self, *topics: Topic) -> None:
        """Something about `topics` (all of them if none is named) may have changed."""
        if not self._touched:
            asyncio.get_running_loop().call_soon(self._look)
        self._touched.update(topics or Topic)

    async def until(self, topic: Topic, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until `condition` holds, for at most `timeout_s`; whether it does."""
        if condition():
            return True
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[topic][future] = condition
        try:
            await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            return condition()
        finally:
            self._waiting[topic].pop(future, None)
        return True

    def _look(self) -> None:
        touched, self._touched = self._touched, set()
        for topic in Topic:  # in an order of its own, so that a simulation repeats
            if topic not in touched:
                continue
            for future, condition in list(self._waiting[topic].items()):
                if not future.done() and condition():
                    future.set_result(None)
