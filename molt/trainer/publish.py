# SPDX-License-Identifier: Apache-2.0
"""Publication from the trainer's side: weights leave rank 0 for every engine, under a new version.

    rank 0   /publish ─▶ version    gather ──▶ buckets ──▶ broadcast    /published ─▶ all engines
    others                          gather (a collective)

The communicator spans rank 0 and every worker of the engines that are up, and is kept as long as
they stay. Rank 0 sends from the thread that trains; another watches: it waits for the engines,
while the trainer goes on with the next plan, and gives a send up that cannot succeed. It never
enters torch, since a thread that is inside C++ when the interpreter ends aborts the process. When a
publication fails, the engines in it are started again and the weights are published once more,
under another number and over another communicator.
"""

import logging
import secrets
import time
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import torch.distributed as dist

from molt import control, transfer
from molt.config import Config
from molt.records import EngineError, Tensor
from molt.trainer import ranks
from molt.trainer.policy import Policy

log = logging.getLogger("molt.trainer")
BUCKET_BYTES = {"cpu": 1 << 24, "cuda": 1 << 28}  # where they were fastest


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
        self._watcher = ThreadPoolExecutor(1, "publish")
        self._outcome: Future[dict[str, float]] | None = None  # of the newest publication
        self._failures = 0  # in a row

    def publish(self, policy: Policy, step: int, lineage: int) -> int:
        """Send the weights after `step` to every engine that is up; `finish` tells how it went.

        Collective: it returns when every weight was gathered, whether or not it could be sent.

        Returns:
            The version; 0 if the run stops before there is an engine to send to.

        Raises:
            EngineError: too many publications failed in a row.
        """
        if self.finish() is None:
            self._leave()
        began = time.monotonic()
        if not self._manifest:
            self._manifest = transfer.describe(policy.weights())
            # A larger buffer than the model would be touched, page by page, at every publication.
            whole = transfer.stream_bytes(self._manifest)
            chosen = self._config.trainer.bucket_bytes or BUCKET_BYTES[policy.device.type]
            self._bucket_bytes = min(chosen, whole)
        begun = self._begin(step, lineage)
        if begun.version:
            if self._client:
                sent: Future[None] = Future()
                self._outcome = self._watcher.submit(
                    self._watch, self._client, begun.version, began, sent
                )
                self._outcome.add_done_callback(self._give_up)
                self._send(policy, begun, sent)
            else:
                for _ in policy.weights():
                    pass
        return begun.version

    def finish(self) -> dict[str, float] | None:
        """Wait for the end of the newest publication. Collective.

        Returns:
            Its timings in seconds; None if it failed and the weights are to be published again.

        Raises:
            EngineError: too many failed in a row; the message names the culprit.
        """
        return ranks.first(self._result)

    def close(self) -> None:
        """Leave the communicator."""
        self._leave()
        self._store = None

    def _result(self) -> dict[str, float] | None:
        try:
            return self._outcome.result() if self._outcome else {}
        except EngineError as error:
            if self._failures > self._config.trainer.publish_retries:
                raise EngineError(f"{self._failures} times in a row, at last: {error}") from error
            return None

    def _begin(self, step: int, lineage: int) -> control.PublishReply:
        """Announce; the answer comes when engines are up and no evaluation holds the weights."""
        fresh = secrets.token_hex(8)
        while True:
            reply, stopping = ranks.first(lambda: self._ask(step, lineage, fresh))
            if reply.version or stopping:
                return reply

    def _ask(self, step: int, lineage: int, fresh: str) -> tuple[control.PublishReply, bool]:
        """On rank 0: one long poll, and whether to poll no more."""
        assert self._client
        self._store = self._store or transfer.host(self._address, self._config.engine.update_s)
        request = control.PublishRequest(
            step=step,
            lineage=lineage,
            address=self._address,
            port=self._store.port,
            workers=num_workers(self._config),
            communicator=self._communicator.name if self._communicator else "",
            fresh=fresh,
            tensors=self._manifest,
            bucket_bytes=self._bucket_bytes,
        )
        reply = self._client.call(control.PUBLISH, request)
        stopping = not reply.version and self._client.call(control.STATUS, control.Empty()).stopping
        return reply, stopping

    def _send(self, policy: Policy, begun: control.PublishReply, sent: "Future[None]") -> None:
        """Gather every weight, and send them for as long as that works."""
        weights = policy.weights()
        try:
            self._join(policy.device, begun).send(weights, self._bucket_bytes)
            sent.set_result(None)
        except EngineError as error:
            self._leave()  # whoever waits for this end fails too
            sent.set_exception(error)
        for _ in weights:  # gathering is a collective: half done, it would hang the other ranks
            pass

    def _join(self, device: torch.device, begun: control.PublishReply) -> transfer.Communicator:
        """The communicator that the members of a publication are in, built if need be."""
        assert self._store and self._outcome
        if self._communicator is None or self._communicator.name != begun.communicator:
            self._leave()
            self._communicator = transfer.Communicator(
                self._store,
                begun.communicator,
                rank=0,
                world=1 + len(begun.members) * num_workers(self._config),
                device=device,
                timeout_s=self._config.engine.update_s,
                given_up=self._outcome.done,
            )
        if self._outcome.done():  # before this communicator could be seen
            self._communicator.give_up()
        return self._communicator

    def _leave(self) -> None:
        communicator, self._communicator = self._communicator, None
        if communicator:
            communicator.close()

    def _watch(
        self,
        client: control.BlockingClient,
        version: int,
        began: float,
        sent: "Future[None]",
    ) -> dict[str, float]:
        """Wait until every engine holds `version`, or one of them or the sending fails it."""
        while True:
            failure = sent.exception() if sent.done() else None
            error = f"trainer: {failure}" if failure else ""
            done = client.call(control.PUBLISHED, control.PublishWait(version=version, error=error))
            if done.error:
                self._failures += 1
                log.warning("publication of version %d failed: %s", version, done.error)
                raise EngineError(f"publication of version {version} failed: {done.error}")
            if done.done:
                self._failures = 0
                return {"time/publish_s": time.monotonic() - began, "time/pause_s": done.pause_s}

    def _give_up(self, outcome: "Future[dict[str, float]]") -> None:
        if outcome.exception() and (communicator := self._communicator):
            communicator.give_up()


def num_workers(config: Config) -> int:
    """Workers of an engine, all of which receive weights."""
    vllm = config.engine.vllm
    parallel = vllm.get("tensor_parallel_size", 1) * vllm.get("pipeline_parallel_size", 1)
    return int(parallel)
