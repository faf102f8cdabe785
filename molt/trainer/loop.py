# SPDX-License-Identifier: Apache-2.0
"""The trainer's loop: what a rank does from its start to its end.

    restore ─▶ publish ┌▶ plan ─▶ read ─▶ step ─▶ publish ─▶ checkpoint? ─▶ metrics ┐▶ checkpoint
                       └───────────────────── until trainer.steps ──────────────────┘

| | consumes | produces | waits for |
|---|---|---|---|
| plan | journal, through the coordinator | the group records of one step | B ready groups |
| read | shard bytes of this rank's groups | a `Batch` | |
| step | batch, policy | updated policy, metrics | every rank |
| publish | gathered weights | a version | every engine's acknowledgement |

Rank 0 alone talks to the coordinator and passes what it hears to the others over gloo, in rounds as
short as one long poll, so that a rank that waits for a plan is never mistaken for one that hangs.
"""

import logging
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from molt import control
from molt.config import Config
from molt.records import MoltError
from molt.trainer import checkpoint, gate
from molt.trainer.batch import read_plan
from molt.trainer.policy import Policy, build
from molt.trainer.publish import Publisher
from molt.trainer.step import train_step

log = logging.getLogger("molt.trainer")
RENDEZVOUS = "trainer"
COLLECTIVE_S = 1800.0  # deadline of a collective between trainer ranks


class Trainer:
    """One rank."""

    def __init__(self, run: Path, config: Config, rank: int, world: int) -> None:
        self.run_dir, self.config, self.rank, self.world = run, config, rank, world
        self.client = control.BlockingClient(run) if rank == 0 else None
        self.policy: Policy = build(config, rank, world)
        self.publisher = Publisher(config, self.client, address())
        self.step, self.version, self.lineage = 0, 0, 0
        self.saved = -1  # step of the newest checkpoint
        self.unreported: tuple[int, int, dict[str, float]] | None = None
        self.gated = not config.trainer.gate

    def run(self) -> None:
        """Train until `trainer.steps` or until told to stop; leave a checkpoint in either case."""
        self._restore()
        self.version = self.publisher.publish(self.policy, self.step)
        while self.step < self.config.trainer.steps:
            began = time.monotonic()
            reply = self._plan()
            if reply.stop:
                break
            waited = time.monotonic()
            metrics = self._train(reply)
            trained = time.monotonic()
            self._report()  # the step before: its publication went on meanwhile
            self.version = self.publisher.publish(self.policy, self.step)
            metrics |= {"time/wait_s": waited - began, "time/train_s": trained - waited}
            metrics["time/step_s"] = time.monotonic() - began
            self.unreported = (self.step, self.version, metrics)
            every = self.config.checkpoint.every
            if every and self.step % every == 0:
                self._save()
        self._report()
        if self.saved != self.step:
            self._save()

    def _restore(self) -> None:
        """Load the newest complete checkpoint; every rank takes the one that rank 0 found."""
        found = self._agree(checkpoint.newest(self.run_dir) if self.rank == 0 else None)
        if found is not None:
            path, marker = found
            checkpoint.load(path, self.policy)
            self.step = self.saved = marker.step
            log.info("restored step %d from %s", self.step, path)
        if self.client:
            self.lineage = self.client.call(
                control.TRAINER, control.TrainerStart(step=self.step)
            ).lineage

    def _plan(self) -> control.PlanReply:
        """The plan of the next step, or the word to stop."""
        request = control.PlanRequest(step=self.step + 1)
        while True:
            self.publisher.check()
            reply = self._agree(self.client.call(control.PLAN, request) if self.client else None)
            if reply.stop or reply.plan is not None:
                return reply

    def _train(self, reply: control.PlanReply) -> dict[str, float]:
        lags = {version: self.step - counts_from for version, counts_from in reply.steps}
        batch = read_plan(self.run_dir, reply.groups, lags, self.rank, self.world)
        self.gated = self.gated or gate.check(self.policy, batch, self.config)
        began = time.monotonic()
        metrics = train_step(self.policy, batch, self.config, self.step + 1)
        self.step += 1
        tokens = sum(s.tokens for group in reply.groups for s in group.segments)
        return metrics | {"throughput/train_tokens_per_s": tokens / (time.monotonic() - began)}

    def _save(self) -> None:
        self._report()  # first: a step inside a checkpoint is never trained, and told, again
        marker = checkpoint.Marker(step=self.step, version=self.version, lineage=self.lineage)
        path = checkpoint.save(
            self.run_dir, marker, self.policy, self.rank, self.config.checkpoint.keep
        )
        self.saved = self.step
        if self.client:
            name = str(path.relative_to(self.run_dir))
            self.client.call(
                control.CHECKPOINT,
                control.CheckpointRequest(step=self.step, path=name, version=self.version),
            )

    def _report(self) -> None:
        """Finish the newest publication and tell the coordinator about its step."""
        published = self.publisher.finish()
        unreported, self.unreported = self.unreported, None
        if self.client is None or unreported is None:
            return
        step, version, metrics = unreported
        request = control.StepRequest(step=step, version=version, metrics=metrics | published)
        while not self.client.call(control.STEP, request).done:
            pass

    def _agree(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def close(self) -> None:
        """Leave the groups."""
        self.publisher.close()
        if self.client:
            self.client.close()


def address() -> str:
    """Where other hosts reach this one: what the launcher says, else the loopback address."""
    return os.environ.get("MOLT_ADDRESS", "127.0.0.1")


def join_ranks(run: Path, rank: int, world: int) -> None:
    """Make the default process group; the store's address travels through the coordinator.

    CPU tensors go over gloo and CUDA tensors over NCCL.
    """
    if world == 1:
        return
    client = control.BlockingClient(run)
    timeout = timedelta(seconds=COLLECTIVE_S)
    if rank == 0:
        store = dist.TCPStore(
            address(), 0, world, is_master=True, timeout=timeout, wait_for_workers=False
        )
        client.call(control.PUT, control.Put(key=RENDEZVOUS, value=f"{address()}:{store.port}"))
    else:
        deadline, where = time.monotonic() + COLLECTIVE_S, ""
        while not where:
            if time.monotonic() > deadline:
                raise MoltError(f"trainer rank {rank} waited {COLLECTIVE_S:.0f} s for rank 0")
            where = client.call(control.GET, control.Get(key=RENDEZVOUS)).value
        host, _, port = where.rpartition(":")
        store = dist.TCPStore(host, int(port), world, is_master=False, timeout=timeout)
    client.close()
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)


def main(run: Path, config: Config) -> None:
    """Entry point of a trainer rank, whose place is in its environment as srun gives it."""
    rank, world = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("SLURM_LOCALID", "0")) % torch.cuda.device_count())
    else:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.manual_seed(config.run.seed)
    join_ranks(run, rank, world)
    trainer = Trainer(run, config, rank, world)
    try:
        trainer.run()
    finally:
        trainer.close()
        if dist.is_initialized():
            dist.destroy_process_group()
