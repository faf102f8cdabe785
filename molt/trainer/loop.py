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

A publication that fails is repeated with the weights of the moment; a plan with a group that a rank
cannot read is void, and another is asked for; a checkpoint is written while training goes on.

Rank 0 alone talks to the coordinator and passes what it hears to the others over gloo, in rounds as
short as one long poll, so that a rank that waits for a plan is never mistaken for one that hangs.
"""

import logging
import os
import secrets
import time
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from molt import control
from molt.config import Config
from molt.records import StoreError, Struct
from molt.store.run import RunDir
from molt.trainer import checkpoint, gate, ranks
from molt.trainer.batch import Batch, UnreadableError, read_plan
from molt.trainer.policy import Policy, build
from molt.trainer.publish import Publisher
from molt.trainer.step import train_step

log = logging.getLogger("molt.trainer")
MAX_VOID = 5  # plans of one step that cannot be read before that is no accident
Q = TypeVar("Q", bound=Struct)
R = TypeVar("R", bound=Struct)


class Trainer:
    """One rank."""

    def __init__(self, run: Path, config: Config, rank: int, world: int) -> None:
        self.run_dir, self.config, self.rank, self.world = run, config, rank, world
        self.client = control.BlockingClient(run) if rank == 0 else None
        self.policy: Policy = build(config, rank, world)
        self.publisher = Publisher(config, self.client, ranks.address())
        self.step, self.version, self.lineage = 0, 0, 0
        self.first_version = 0  # that this process published
        self.saved = -1  # step of the newest checkpoint
        self.saving: checkpoint.Saving | None = None
        self.unreported: dict[str, float] | None = None  # metrics of this step
        self.gated = not config.trainer.gate

    def run(self) -> None:
        """Train until `trainer.steps` or until told to stop; leave a checkpoint in either case."""
        self._restore()
        self._publish()
        while self.step < self.config.trainer.steps:
            began = time.monotonic()
            found = self._plan()
            if found is None:
                break
            waited = time.monotonic()
            metrics = self._train(*found)
            trained = time.monotonic()
            self._report()  # the step before: its publication went on meanwhile
            self.step += 1
            self._publish()
            metrics |= {"time/wait_s": waited - began, "time/train_s": trained - waited}
            self.unreported = metrics | {"time/step_s": time.monotonic() - began}
            self._saved(wait=False)
            every = self.config.checkpoint.every
            if every and self.step % every == 0:
                self._save()
        else:  # the last weights are to be evaluated
            while self.publisher.finish() is None and self._publish():
                pass
        self._report()
        if self.saved != self.step:
            self._save()
        self._saved(wait=True)

    def _restore(self) -> None:
        """Load the newest checkpoint that is whole."""
        marker = checkpoint.restore(self.run_dir, self.policy)
        if marker is not None:
            self.step = self.saved = marker.step
            log.info("restored step %d", self.step)
        start = control.TrainerStart(step=self.step, incarnation=secrets.token_hex(8))
        self.lineage = self._call(control.TRAINER, start).lineage
        kept = checkpoint.abandon(self.run_dir, self.step)
        if marker is not None:  # whoever wrote it may have died before it was told
            self._tell(marker, kept)

    def _publish(self) -> bool:
        """Whether the weights were sent; if not, the run stops and nobody is there to get them."""
        version = self.publisher.publish(self.policy, self.step, self.lineage)
        self.version = version or self.version
        self.first_version = self.first_version or version
        return version > 0

    def _plan(self) -> tuple[control.PlanReply, Batch] | None:
        """The plan of the next step and this rank's share of it; None is the word to stop."""
        request = control.PlanRequest(step=self.step + 1, lineage=self.lineage)
        num_void = 0
        while True:
            reply = self._call(control.PLAN, request)
            if reply.stop:
                return None
            if reply.publish:
                self._publish()
            elif reply.plan is not None:
                batch = self._read(reply, num_void + 1)
                if batch is not None:
                    return reply, batch
                num_void += 1

    def _read(self, reply: control.PlanReply, attempt: int) -> Batch | None:
        """The batch of a plan; None if a group of it cannot be read, and the plan is void."""
        assert reply.plan is not None
        lags = {version: max(0, self.step - step) for version, step in reply.plan.steps}
        deadline_s = self.config.session.visible_s
        batch, unreadable = None, dict[int, str]()
        try:
            batch = read_plan(self.run_dir, reply.groups, lags, self.rank, self.world, deadline_s)
        except UnreadableError as error:
            unreadable = error.groups
        bad = {g: reason for found in ranks.gathered(unreadable) for g, reason in found.items()}
        if not bad:
            return batch
        reason = next(iter(bad.values()))
        if attempt >= MAX_VOID:
            raise StoreError(
                f"the plan of step {reply.plan.step} could not be read {attempt} times in a row: "
                f"{reason}; mend the filesystem, then start it again"
            )
        void = control.VoidRequest(
            step=reply.plan.step,
            lineage=self.lineage,
            groups=tuple(g.group for g in reply.groups if g.group in bad),
            leases=tuple(g.lease for g in reply.groups if g.group in bad),
            reason=reason,
        )
        self._call(control.VOID, void)
        return None

    def _train(self, reply: control.PlanReply, batch: Batch) -> dict[str, float]:
        assert reply.plan is not None
        # Weights that an earlier trainer published may not be those that training led to again.
        fresh = [version for version, step in reply.plan.steps if step >= self.step]
        if fresh and min(fresh) >= self.first_version:
            self.gated = self.gated or gate.check(self.policy, batch, self.config)
        began = time.monotonic()
        metrics = train_step(self.policy, batch, self.config, self.step + 1)
        tokens = sum(s.tokens for group in reply.groups for s in group.segments)
        return metrics | {"throughput/train_tokens_per_s": tokens / (time.monotonic() - began)}

    def _save(self) -> None:
        """Begin a checkpoint of this step; training goes on while it is written."""
        self._report()  # first: a step inside a checkpoint is never trained, and told, again
        self._saved(wait=True)
        marker = checkpoint.Marker(step=self.step, version=self.version, lineage=self.lineage)
        self.saving = checkpoint.Saving(self.run_dir, marker, self.policy)
        self.saved = self.step

    def _saved(self, wait: bool) -> None:
        """Complete the checkpoint that is being written, if it can be or must be now."""
        saving = self.saving
        if saving is None or not (wait or saving.done()):
            return
        kept = saving.finish(self.config.checkpoint.keep)
        self.saving = None
        self._tell(saving.marker, kept)

    def _tell(self, marker: checkpoint.Marker, kept: list[int]) -> None:
        """Tell the coordinator about a complete checkpoint, and which steps are kept."""
        path = RunDir(self.run_dir).checkpoint(marker.step)
        request = control.CheckpointRequest(
            step=marker.step,
            lineage=self.lineage,
            oldest=kept[0],
            path=str(path.relative_to(self.run_dir)),
            version=marker.version,
        )
        self._call(control.CHECKPOINT, request)

    def _report(self) -> None:
        """Finish the newest publication and tell the coordinator about its step."""
        published = self.publisher.finish()
        if self.unreported is None:
            return
        request = control.StepRequest(
            step=self.step,
            lineage=self.lineage,
            version=self.version,
            metrics=self.unreported | (published or {}),
        )
        while not (reply := self._call(control.STEP, request)).done:
            if reply.publish:
                self._publish()
        self.unreported = None

    def _call(self, route: control.Route[Q, R], message: Q) -> R:
        """What the coordinator answers to rank 0, on every rank."""
        return ranks.first(lambda: self._client().call(route, message))

    def _client(self) -> control.BlockingClient:
        assert self.client is not None, "rank 0 alone talks to the coordinator"
        return self.client

    def close(self) -> None:
        """Leave the groups."""
        self.publisher.close()
        if self.client:
            self.client.close()


def main(run: Path, config: Config) -> None:
    """Entry point of a trainer rank, whose place is in its environment as srun gives it."""
    rank, world = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("SLURM_LOCALID", "0")) % torch.cuda.device_count())
    else:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.manual_seed(config.run.seed)
    ranks.join(run, rank, world)
    trainer = Trainer(run, config, rank, world)
    trainer.run()
    trainer.close()  # after a failure nobody waits for the others: the process ends
    if dist.is_initialized():
        dist.destroy_process_group()
