# SPDX-License-Identifier: Apache-2.0
"""The way from a role to the coordinator: late, in another order, twice, or not at all.

`Network.call` behaves like `molt.control.Client.call`: it repeats a message while the coordinator
is not reached, and a handler whose caller went away runs on. What a message meets is drawn once:
it arrives, it is lost, its answer is lost, or it arrives long after its caller sent it again.
"""

import asyncio
from collections.abc import Callable
from contextvars import Context
from random import Random
from typing import Any, TypeVar

from molt import control as c
from molt.records import Fenced, MoltError, Struct
from tests.sim.clock import Process, alive

R = TypeVar("R", bound=Struct)
WIRES = Context()  # what belongs to no process
TIMEOUT_S = 3 * c.POLL_S  # of one try
LATE_S = 8.0


class Refused(MoltError):
    """The coordinator answered with an error that no schedule may cause."""


class Port:
    """Where one coordinator process listens."""

    def __init__(self, process: Process, routes: dict[Any, Any]) -> None:
        self.process, self.routes = process, routes
        self.open: dict[asyncio.Future[Any], None] = {}  # calls under way, in order

    def close(self) -> None:
        """Its process is gone: whoever waits for an answer sees the connection break."""
        for future in self.open:
            _fail(future, ConnectionError())


class Network:
    """Between the roles of one attempt and its coordinator.

    Args:
        random: decides what happens to messages.
        loss: how often something does.
        broken: told about an exception that is none of Molt's.
    """

    def __init__(self, random: Random, loss: float, broken: Callable[[str], None]) -> None:
        self._random, self._loss, self._broken = random, loss, broken
        self.port: Port | None = None

    async def call(self, route: c.Route[Any, R], message: Struct, retry_s: float = c.RETRY_S) -> R:
        """Send until answered.

        Raises:
            Fenced, MoltError: as of `Client.call`.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + retry_s
        while True:
            alive()
            try:
                return await self._try(route, message)
            except ConnectionError:
                if loop.time() > deadline:
                    raise MoltError("coordinator not reached") from None
                await asyncio.sleep(0.2)

    async def _try(self, route: c.Route[Any, Any], message: Struct) -> Any:
        port, random, loop = self.port, self._random, asyncio.get_running_loop()
        if port is None or not port.process.alive:
            raise ConnectionError
        future = loop.create_future()
        port.open[future] = None
        delay, fate = self._delay(), random.random() / self._loss if self._loss else 1.0
        if fate < 0.3:  # lost
            loop.call_later(delay, _fail, future, ConnectionError(), context=WIRES)
        elif fate < 0.6:  # arrives, but its answer does not
            self._send(port, route, message, None, delay)
            loop.call_later(delay * 2, _fail, future, ConnectionError(), context=WIRES)
        elif fate < 1.0:  # arrives when it was sent again
            self._send(port, route, message, None, random.uniform(0, LATE_S))
            loop.call_later(delay, _fail, future, ConnectionError(), context=WIRES)
        else:
            self._send(port, route, message, future, delay)
        timer = loop.call_later(TIMEOUT_S, _fail, future, ConnectionError(), context=WIRES)
        try:
            return await future
        finally:
            timer.cancel()
            port.open.pop(future, None)

    def _send(
        self,
        port: Port,
        route: c.Route[Any, Any],
        message: Struct,
        future: asyncio.Future[Any] | None,
        delay: float,
    ) -> None:
        def deliver() -> None:
            if port.process.alive:
                port.process.spawn(self._handle(port, route, message, future))
            elif future is not None:
                _fail(future, ConnectionError())

        asyncio.get_running_loop().call_later(delay, deliver, context=WIRES)

    async def _handle(
        self,
        port: Port,
        route: c.Route[Any, Any],
        message: Struct,
        future: asyncio.Future[Any] | None,
    ) -> None:
        """The coordinator's side of one message."""
        loop = asyncio.get_running_loop()
        reply: Any = None
        error: Exception | None = None
        try:
            reply = await port.routes[route](message)
        except Fenced as e:
            error = e
        except MoltError as e:
            error = Refused(f"{route.path}: {e}")
        except Exception as e:  # noqa: BLE001 - the server answers 500
            self._broken(f"{route.path} {message}: {type(e).__name__}: {e}")
            return
        if future is not None and port.process.alive:
            if error:
                loop.call_later(self._delay(), _fail, future, error, context=WIRES)
            else:
                loop.call_later(self._delay(), _answer, future, reply, context=WIRES)

    def _delay(self) -> float:
        """Mostly milliseconds, sometimes a second."""
        short = self._random.random() < 0.95
        return 0.001 + self._random.random() * (0.01 if short else 1.0)


def _answer(future: asyncio.Future[Any], reply: Any) -> None:
    if not future.done():
        future.set_result(reply)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
