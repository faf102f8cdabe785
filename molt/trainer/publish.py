# SPDX-License-Identifier: Apache-2.0
"""Publication from the trainer's side: weights leave rank 0 for every engine, under a new version.

    rank 0   /publish ─▶ version    gather ──▶ buckets ──▶ broadcast    /published ─▶ all engines
    hold it others                          gather (a collective)

The communicator spans rank 0 and every engine worker; it is built at the first publication and
kept. Sending runs on a thread, since a collective whose other end died cannot say so; another waits
for the engines, while the trainer goes on with the next plan.
"""

import secrets
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from threading import Thread
from typing import Any

import torch.distributed as dist

from molt import control, transfer
from molt.config import Config
from molt.records import EngineError, Tensor
from molt.trainer.policy import Policy


class Publisher:
    """Rank 0 announces and sends; the other ranks take part in the gathers.

    Args:
        client: to the coordinator, on rank 0; None elsewhere.
        address: of this host, where engines find the communicator's store.
    """

    def __init__(self, config: Config, client: control.BlockingClient | None, address: str) -> None:
        self._config, self._client, self._address = config, client, address
        self._manifest: tuple[Tensor, ...] = ()
        self._bucket_bytes = 0
        self._communicator: transfer.Communicator | None = None
        self._store: dist.TCPStore | None = None
        self._name = secrets.token_hex(8)
        self._outcome: Future[dict[str, float]] | None = None  # of the newest publication

    def publish(self, policy: Policy, step: int) -> int:
        """Send the weights after `step` towards every engine; `finish` waits until all hold them.

        Collective. The publication before this one must be finished.

        Returns:
            The version, 0 on other ranks.
        """
        if not self._manifest:
            self._manifest = transfer.describe(policy.weights())
            # A larger buffer than the model would be touched, page by page, at every publication.
            whole = transfer.stream_bytes(self._manifest)
            self._bucket_bytes = min(self._config.trainer.bucket_bytes, whole)
        if self._client is None:
            for _ in policy.weights():
                pass
            return 0
        began = time.monotonic()
        version = self._begin(self._client, step)
        sending = _in_thread(self._send, policy)
        self._outcome = _in_thread(self._wait, self._client, version, began, sending)
        wait([sending, self._outcome], return_when=FIRST_COMPLETED)
        self.check()
        return version

    def check(self) -> None:
        """Raise what went wrong with the newest publication, if that is known by now."""
        if self._outcome and self._outcome.done():
            self._outcome.result()

    def finish(self) -> dict[str, float]:
        """Wait until every engine holds the newest version.

        Returns:
            Its timings in seconds; empty on other ranks.

        Raises:
            EngineError: an engine failed or was late; the message names it.
        """
        return self._outcome.result() if self._outcome else {}

    def close(self) -> None:
        """Leave the communicator."""
        self._communicator = self._store = None

    def _begin(self, client: control.BlockingClient, step: int) -> int:
        """Announce; the answer comes when no evaluation holds the weights any more."""
        self._store = self._store or transfer.host(self._address, self._config.engine.update_s)
        request = control.PublishRequest(
            step=step,
            address=self._address,
            port=self._store.port,
            world=1 + num_workers(self._config),
            communicator=self._name,
            tensors=self._manifest,
            bucket_bytes=self._bucket_bytes,
        )
        while not (version := client.call(control.PUBLISH, request).version):
            pass
        return version

    def _send(self, policy: Policy) -> None:
        if self._communicator is None:
            assert self._store is not None
            self._communicator = transfer.Communicator(
                self._store,
                self._name,
                rank=0,
                world=1 + num_workers(self._config),
                device=policy.device,
                timeout_s=self._config.engine.update_s,
            )
        self._communicator.send(policy.weights(), self._bucket_bytes)

    def _wait(
        self, client: control.BlockingClient, version: int, began: float, sending: "Future[None]"
    ) -> dict[str, float]:
        """Ask until every engine holds `version`; a failure to send is told to the coordinator."""
        error = ""
        while True:
            if sending.done() and sending.exception():
                error = f"trainer: {sending.exception()}"
            done = client.call(control.PUBLISHED, control.PublishWait(version=version, error=error))
            if done.error:
                raise EngineError(f"publication of version {version} failed: {done.error}")
            if done.done:
                sending.result()
                return {"time/publish_s": time.monotonic() - began, "time/pause_s": done.pause_s}


def _in_thread(work: Callable[..., Any], *args: Any) -> "Future[Any]":
    """Run on a daemon: a broadcast that nobody receives must not keep a failed process alive."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work(*args))
        except BaseException as e:  # noqa: BLE001 - raised again by whoever asks for the result
            future.set_exception(e)

    Thread(target=run, name="publish", daemon=True).start()
    return future


def num_workers(config: Config) -> int:
    """Engine workers that receive weights."""
    vllm = config.engine.vllm
    parallel = vllm.get("tensor_parallel_size", 1) * vllm.get("pipeline_parallel_size", 1)
    return config.engine.count * int(parallel)
