# SPDX-License-Identifier: Apache-2.0
"""Publications by a real coordinator over real communicators, to engines that are threads."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread, Timer, current_thread, main_thread
from typing import Any

import pytest
import torch

from molt import control, transfer
from molt.config import Config, Data, Engine, Pool, Trainer, dump
from molt.records import EngineError, Publication
from molt.store.run import RunDir
from molt.trainer.loop import Q, R
from molt.trainer.publish import Publisher
from tests.unit.coordinator.test_server import coordinator_of

CPU = torch.device("cpu")
WEIGHTS = [("a", torch.arange(5.0)), ("b", torch.ones(300, 7)), ("c", torch.tensor(2.5))]


def config_of(engines: int = 1, retries: int = 5, update_s: float = 3.0) -> Config:
    """Buckets of 1,024 bytes: nine of them."""
    return Config(
        data=Data(source="molt.agents.guess:prompts"),
        engine=Engine(count=engines, update_s=update_s),
        pool=Pool(lease_s=10.0),
        trainer=Trainer(groups=1, steps=9, publish_retries=retries, bucket_bytes=1024),
    )


class Weights:
    """A policy as far as publications see one."""

    device = CPU

    def __init__(self) -> None:
        self.gathered: list[str] = []

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in WEIGHTS:
            self.gathered.append(name)
            yield name, tensor


class ScriptedEngine:
    """An engine task and its server: takes what is published, or fails as `faults` says.

    Args:
        faults: of its updates, in order: "" works, "refuse" ends the server before it joins,
            "die" ends it after the third bucket.
    """

    def __init__(self, number: int, faults: tuple[str, ...]) -> None:
        self._number, self._faults = number, list(faults)
        self.version = 0
        self.communicators: list[str] = []
        self._communicator: transfer.Communicator | None = None

    async def run(self, client: control.Client) -> None:
        """Until cancelled."""
        starts, error = 1, ""
        while True:
            request = control.EngineRequest(
                engine=self._number,
                incarnation=f"{self._number}-{starts}",
                version=self.version,
                error=error,
            )
            error = ""
            publication = (await client.call(control.ENGINE, request)).publication
            if publication is not None:
                try:
                    await asyncio.to_thread(self._take, publication)
                    self.version = publication.version
                except EngineError as failure:
                    if self._communicator:  # a server dies some time after it failed
                        Timer(0.3, self._communicator.close).start()
                    self._communicator, self.version, error = None, 0, str(failure)
                    starts += 1

    def _take(self, p: Publication) -> None:
        fault = self._faults.pop(0) if self._faults else ""
        if fault == "refuse":
            raise EngineError("the server refused")
        if self._communicator is None or self._communicator.name != p.communicator:
            store = transfer.join(p.address, p.port, 3.0)
            rank = p.rank_offset(self._number)
            self._communicator = transfer.Communicator(
                store, p.communicator, rank, p.world, CPU, 3.0
            )
            self.communicators.append(p.communicator)
        if fault == "die":
            for _ in range(3):
                self._communicator.broadcast(torch.empty(p.bucket_bytes, dtype=torch.uint8))
            raise EngineError("the server died")
        got = list(self._communicator.receive(p.tensors, p.bucket_bytes))
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(got, WEIGHTS, strict=True))


class Rig:
    """A coordinator in a thread, engines beside it, and the trainer's end of publications."""

    def __init__(self, run: Path, config: Config) -> None:
        self._run, self._config = run, config
        self._ready, self._done = Event(), asyncio.Event()
        self._engines: list[asyncio.Task[None]] = []
        self._thread = Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        assert self._ready.wait(20)
        client: Any = self  # as far as it is called
        self.publisher = Publisher(config, client, "127.0.0.1")
        start = control.TrainerStart(step=0, incarnation="t")
        self._lineage = self.call(control.TRAINER, start).lineage
        self.policy = Weights()

    async def _serve(self) -> None:
        async with coordinator_of(self._run, self._config) as peers:
            peers.coordinator.publications.engines.clear()
            self._http, self._loop = peers.client, asyncio.get_running_loop()
            self._ready.set()
            await self._done.wait()
            for engine in self._engines:
                engine.cancel()
            await asyncio.gather(*self._engines, return_exceptions=True)

    def call(self, route: control.Route[Q, R], message: Q) -> R:
        work = self._http.call(route, message)
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def engine(self, *faults: str) -> ScriptedEngine:
        engine = ScriptedEngine(len(self._engines), faults)

        async def start() -> None:
            self._engines.append(asyncio.create_task(engine.run(self._http)))

        asyncio.run_coroutine_threadsafe(start(), self._loop).result()
        return engine

    def publish(self, step: int = 0) -> int:
        return self.publisher.publish(self.policy, step, self._lineage)  # type: ignore[arg-type]

    def publish_until_held(self) -> int:
        """What the trainer's loop does."""
        version = self.publish()
        while self.publisher.finish() is None:
            version = self.publish()
        return version

    def close(self) -> None:
        self.publisher.close()
        self._loop.call_soon_threadsafe(self._done.set)
        self._thread.join(20)


@contextmanager
def rig_of(tmp_path: Path, config: Config) -> Iterator[Rig]:
    rig = Rig(RunDir.create(tmp_path / "run", dump(config)).path, config)
    try:
        yield rig
    finally:
        rig.close()


def test_every_engine_gets_the_weights_over_one_communicator(tmp_path: Path) -> None:
    with rig_of(tmp_path, config_of(engines=2)) as rig:
        engines = [rig.engine(), rig.engine()]
        assert [rig.publish_until_held(), rig.publish_until_held()] == [1, 2]
        assert [e.version for e in engines] == [2, 2]
        assert len(engines[0].communicators) == 1
        assert engines[0].communicators == engines[1].communicators


def test_weights_are_published_again_when_an_engine_dies_amid_a_broadcast(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with rig_of(tmp_path, config_of(engines=2)) as rig:
        good, bad = rig.engine(), rig.engine("", "die")
        assert rig.publish_until_held() == 1
        version = rig.publish_until_held()
        assert version > 2
        assert good.version == bad.version == version
        assert "publication of version 2 failed: engine 1: the server died" in caplog.text
        assert rig.policy.gathered == [name for name, _ in WEIGHTS] * (version + 1)
        assert len(set(bad.communicators)) == len(bad.communicators) >= 2


def test_an_engine_that_never_joins_is_not_waited_for(tmp_path: Path) -> None:
    with rig_of(tmp_path, config_of(update_s=60.0)) as rig:
        engine = rig.engine("refuse")
        began = time.monotonic()
        assert rig.publish_until_held() == engine.version == 2
        assert time.monotonic() - began < 20
        assert rig.policy.gathered == [name for name, _ in WEIGHTS] * 3


def test_too_many_failures_in_a_row_end_with_the_culprits_name(tmp_path: Path) -> None:
    with rig_of(tmp_path, config_of(retries=1)) as rig:
        rig.engine("die", "refuse")
        with pytest.raises(
            EngineError, match=r"2 times in a row, at last: .*engine 0: the server refused"
        ):
            rig.publish_until_held()


def test_a_success_forgives_the_failures_before_it(tmp_path: Path) -> None:
    with rig_of(tmp_path, config_of(retries=1)) as rig:
        rig.engine("refuse", "", "refuse", "")
        assert rig.publish_until_held() == 2
        assert rig.publish_until_held() == 4


def test_a_stop_ends_the_wait_for_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "POLL_S", 0.2)
    with rig_of(tmp_path, config_of()) as rig:
        rig.call(control.STOP, control.StopRequest(reason="test"))
        began = time.monotonic()
        assert rig.publish() == 0
        assert time.monotonic() - began < 10


def test_torch_is_entered_from_the_thread_that_trains_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A daemon thread that comes back from gloo while the interpreter ends aborts the process.
    seen: set[Thread] = set()
    real = transfer.Communicator.broadcast

    def broadcast(self: transfer.Communicator, tensor: torch.Tensor) -> None:
        if self.rank == 0:
            seen.add(current_thread())
        real(self, tensor)

    monkeypatch.setattr(transfer.Communicator, "broadcast", broadcast)
    with rig_of(tmp_path, config_of()) as rig:
        rig.engine("", "die", "")
        rig.publish_until_held()
        rig.publish_until_held()
    assert seen == {main_thread()}
