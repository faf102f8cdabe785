# SPDX-License-Identifier: Apache-2.0
"""The control routes between roles: HTTP with JSON, long polls, always towards the coordinator.

A `Route` is a path, a request type and a reply type; the server and the client share it, so a
message can not be read differently on its two ends. Messages are hints: losing one costs a poll,
never data. Every route is safe to repeat, which is what `Client` does until its deadline when a
connection breaks.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any, Generic, TypeVar

import aiohttp
import msgspec
from aiohttp import web
from msgspec import field

from molt.records import Fenced, Group, Lease, MoltError, Plan, Publication, Struct, Tensor

Q = TypeVar("Q", bound=Struct)
R = TypeVar("R", bound=Struct)
T = TypeVar("T")

POLL_S = 20.0  # one long poll; the asker simply asks again
RETRY_S = 60.0  # how long a role tries to reach the coordinator before it gives up


class Empty(Struct):
    """A reply or request that says nothing."""


class LeaseRequest(Struct):
    """A runner with room for `free` more rollouts, which holds the leases numbered `holding`."""

    runner: str
    engine: int
    free: int
    holding: tuple[int, ...] = ()


class LeaseReply(Struct):
    """Leases to work on, which may be none: ask again. `stop`: finish and leave."""

    leases: tuple[Lease, ...] = ()
    partials: dict[int, tuple[str, ...]] = field(default_factory=dict)  # group → what to resume
    stop: bool = False


class Heartbeat(Struct):
    """A runner lives and works on the leases numbered `holding`."""

    runner: str
    holding: tuple[int, ...] = ()


class HeartbeatReply(Struct):
    """Those of its leases that are no longer current: their work is of no use."""

    lost: tuple[int, ...] = ()


class Gone(Struct):
    """A runner's process has ended, as its engine task saw: nothing more comes from it."""

    runner: str
    reason: str


class Announce(Struct):
    """Groups whose shard is published. Repeating an announcement changes nothing."""

    runner: str
    groups: tuple[Group, ...]


class LeaseEndRequest(Struct):
    """Leases a runner gives back because it stops."""

    runner: str
    leases: tuple[Lease, ...]
    reason: str


class EngineRequest(Struct):
    """An engine holds `version` and waits for a newer one; `error` says what failed the last.

    Its server is the `incarnation`; one that was started again holds version 0.
    """

    engine: int
    incarnation: str
    version: int
    receiving: int = 0  # the version it is taking now; 0 = none
    error: str = ""
    seconds: float = 0.0  # generation stood still for the update to `version`
    runners: tuple[str, ...] | None = None  # that live; None = not known
    restarts: int = 0  # of the server, so far
    runner_restarts: int = 0


class EngineReply(Struct):
    """The publication to join at once, or none yet: ask again.

    `failed`: the newest version that will not come to its end. Whoever still receives it gives up.
    """

    publication: Publication | None = None
    failed: int = 0


class TrainerStart(Struct):
    """A trainer, of this `incarnation`, holds the weights after `step` and starts a new lineage."""

    step: int
    incarnation: str


class TrainerReply(Struct):
    """A lineage that no trainer had before; the restart is in the journal."""

    lineage: int


class PlanRequest(Struct):
    """The trainer wants the groups of `step`. A plan is cut once: asking again gives the same.

    Here and below, a message of a lineage that is not the newest is `Fenced`.
    """

    step: int
    lineage: int


class PlanReply(Struct):
    """The plan of a step with the records of its groups, or neither: ask again. `stop` wins."""

    plan: Plan | None = None
    groups: tuple[Group, ...] = ()
    publish: bool = False  # an engine lacks the weights: publish those of the last step again
    stop: bool = False


class VoidRequest(Struct):
    """Groups of the plan of `step` that the trainer cannot read, and the leases they came by.

    A plan that was cut anew has other leases: a late copy of this message does not touch it.
    """

    step: int
    lineage: int
    groups: tuple[int, ...]
    leases: tuple[int, ...]
    reason: str


class PublishRequest(Struct):
    """The trainer's rank 0 offers the weights after `step`.

    It has built `communicator` ("" = none); if an engine has come, gone or started again since
    then, one is to be built under the name `fresh`, which no request before this one had.
    """

    step: int
    lineage: int
    address: str
    port: int
    workers: int  # of one engine
    communicator: str
    fresh: str
    tensors: tuple[Tensor, ...]
    bucket_bytes: int


class PublishReply(Struct):
    """The number of the publication, which `members` now join. No other ever has it."""

    version: int = 0  # 0: not yet (an evaluation holds the weights, an engine starts), ask again
    communicator: str = ""
    members: tuple[int, ...] = ()  # engines, in the order of their ranks


class PublishWait(Struct):
    """The trainer waits for the end of the publication of `version`."""

    version: int
    error: str = ""  # set when the trainer itself could not send


class PublishDone(Struct):
    """`done` without `error`: every engine holds the version. Not `done`: ask again."""

    done: bool = False
    error: str = ""
    pause_s: float = 0.0  # longest generation pause among the engines


class CheckpointRequest(Struct):
    """A checkpoint is complete and durable, and none older than that of step `oldest` is kept.

    Groups that no restore can need are forgotten.
    """

    step: int
    lineage: int
    oldest: int
    path: str
    version: int


class StepRequest(Struct):
    """Metrics of a trained and published step."""

    step: int
    lineage: int
    version: int
    metrics: dict[str, float]


class StepReply(Struct):
    """`done` is false while a final evaluation is still running: ask again."""

    done: bool = True
    publish: bool = False  # it cannot go on: an engine lacks the weights, publish them again


class StopRequest(Struct):
    """Every role shall finish what it must and leave; their next answers say so."""

    reason: str


class Put(Struct):
    """A value for the other ranks of a group to find, such as the address of a rendezvous store."""

    key: str
    value: str


class Get(Struct):
    """Wait for the value of `key`."""

    key: str


class Value(Struct):
    """What was put last under the key, or nothing yet: ask again."""

    value: str = ""  # empty: not there yet


class Status(Struct):
    """What a person wants to know while the run goes."""

    step: int
    version: int
    ready: int
    leased: int
    engines: int
    stopping: bool = False


@dataclass(frozen=True)
class Route(Generic[Q, R]):
    """One path and the types of its two messages."""

    path: str
    request: type[Q]
    reply: type[R]


LEASE = Route("/lease", LeaseRequest, LeaseReply)
LEASE_END = Route("/lease_end", LeaseEndRequest, Empty)
HEARTBEAT = Route("/heartbeat", Heartbeat, HeartbeatReply)
GONE = Route("/gone", Gone, Empty)
ANNOUNCE = Route("/announce", Announce, Empty)
ENGINE = Route("/engine", EngineRequest, EngineReply)
TRAINER = Route("/trainer", TrainerStart, TrainerReply)
PLAN = Route("/plan", PlanRequest, PlanReply)
VOID = Route("/void", VoidRequest, Empty)
PUBLISH = Route("/publish", PublishRequest, PublishReply)
PUBLISHED = Route("/published", PublishWait, PublishDone)
CHECKPOINT = Route("/checkpoint", CheckpointRequest, Empty)
STEP = Route("/step", StepRequest, StepReply)
STOP = Route("/stop", StopRequest, Empty)
PUT = Route("/put", Put, Empty)
GET = Route("/get", Get, Value)
STATUS = Route("/status", Empty, Status)


Handler = Callable[[Any], Awaitable[Struct]]


def serve(routes: dict[Route[Any, Any], Handler], token: str) -> web.Application:
    """The aiohttp application that answers `routes` to whoever shows `token`.

    A `Fenced` answers 409, a request that does not parse 400, another of Molt's own errors 422; the
    text of the answer is the error's line.
    """
    app = web.Application(client_max_size=1 << 28)
    for route, handler in routes.items():
        app.router.add_post(route.path, _endpoint(route, handler, f"Bearer {token}"))
    return app


def _endpoint(route: Route[Any, Any], handler: Handler, bearer: str) -> Any:
    decoder = msgspec.json.Decoder(route.request)

    async def endpoint(request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != bearer:
            return web.Response(status=401, text="wrong or missing token: read it from RUN/token")
        try:
            reply = await handler(decoder.decode(await request.read()))
        except Fenced as e:
            return web.Response(status=409, text=str(e))
        except msgspec.ValidationError as e:
            return web.Response(status=400, text=f"{route.path}: {e}")
        except MoltError as e:
            return web.Response(status=422, text=str(e))
        return web.Response(body=msgspec.json.encode(reply), content_type="application/json")

    return endpoint


class Client:
    """A role's connection to the coordinator at `MOLT_COORDINATOR=host:port`, with RUN/token.

    Raises:
        Fenced: the coordinator knows a newer lease or epoch.
        MoltError: it refused the request, or could not be reached for `RETRY_S`.
    """

    def __init__(self, run: Path, address: str | None = None) -> None:
        self._base = f"http://{address or os.environ['MOLT_COORDINATOR']}"
        self._headers = {"Authorization": f"Bearer {(run / 'token').read_text().strip()}"}
        self._http: aiohttp.ClientSession | None = None

    async def call(self, route: Route[Q, R], message: Q, retry_s: float = RETRY_S) -> R:
        """Send `message`; repeat it for at most `retry_s` while the coordinator is not reached."""
        self._http = self._http or aiohttp.ClientSession(
            headers=self._headers, timeout=aiohttp.ClientTimeout(total=POLL_S * 3)
        )
        body = msgspec.json.encode(message)
        deadline = asyncio.get_running_loop().time() + retry_s
        while True:
            try:
                async with self._http.post(self._base + route.path, data=body) as answer:
                    content = await answer.read()
                    if answer.status == 200:
                        return msgspec.json.decode(content, type=route.reply)
                    error = Fenced if answer.status == 409 else MoltError
                    raise error(content.decode())
            except (aiohttp.ClientConnectionError, TimeoutError) as e:
                if asyncio.get_running_loop().time() > deadline:
                    raise MoltError(
                        f"coordinator at {self._base} not reached for {retry_s:.0f} s ({e}): "
                        "is it alive?"
                    ) from e
                await asyncio.sleep(0.2)

    async def close(self) -> None:
        """Close the connections."""
        if self._http:
            await self._http.close()


class BlockingClient:
    """The same for the trainer, blocking: its event loop runs in a daemon thread."""

    def __init__(self, run: Path, address: str | None = None) -> None:
        self._loop = asyncio.new_event_loop()
        Thread(target=self._loop.run_forever, name="control", daemon=True).start()
        self._client = Client(run, address)

    def call(self, route: Route[Q, R], message: Q, retry_s: float = RETRY_S) -> R:
        """As `Client.call`, blocking."""
        return self._run(self._client.call(route, message, retry_s))

    def close(self) -> None:
        """Close the connections and end the thread."""
        self._run(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
