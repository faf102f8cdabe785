# SPDX-License-Identifier: Apache-2.0
"""The state of a run: a fold over its journal, and nothing else.

`State.apply` is the only way the state changes, and it changes by records alone: replaying the
journal gives the same state, always. It is a Struct, so the state at the end of one epoch is the
first thing that the next epoch's file holds. What a finished group leaves in memory is dropped once
no kept checkpoint needs it: the state does not grow with the run.

The life of a group: leased → ready | filtered | failed → planned → trained. A lease that ends
without a group puts its number into `returned`, which is served before the cursor moves on; so does
a group that turns out to be unreadable, when its plan is voided.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import msgspec

from molt.records import (
    TRAIN,
    Checkpoint,
    Epoch,
    Fenced,
    Group,
    Lease,
    LeaseEnd,
    Plan,
    PublishBegin,
    PublishEnd,
    Record,
    Restore,
    Retire,
    StoreError,
    Void,
)


class State(msgspec.Struct, kw_only=True):
    """Everything the coordinator knows. Groups are keyed by their number, versions by theirs."""

    epoch: int = 0
    attempt: int = 0
    cursor: int = 0  # next training group that was never leased
    eval_cursor: int = -1  # next evaluation group; they count down
    next_lease: int = 1
    leases: dict[int, Lease] = {}  # group → its current lease
    holders: dict[str, set[int]] = {}  # runner → groups it holds leases of
    orphans: set[str] = set()  # of those runners, the ones whose attempt is over
    leased: dict[int, int] = {}  # version → training leases that were granted under it
    returned: dict[int, int] = {}  # training group to lease again → version its partials may reach
    announced: dict[str, int] = {}  # runner → number of the newest shard that it announced
    ready: dict[int, Group] = {}  # finished, in no plan yet
    plans: dict[int, Plan] = {}  # step → plan that a restore may still need
    planned: dict[int, Group] = {}  # the groups of those plans
    last_plan: int = 0  # newest step that ever had a plan
    step: int = 0  # training steps inside the newest published weights
    version: int = 0  # newest version that every engine held
    restored: bool = False  # since then the trainer went back: it has to publish again
    next_version: int = 1
    publishing: PublishBegin | None = None
    lineage: int = 0
    steps: dict[int, int] = {}  # version → the step its lag counts from
    checkpoint: int = 0  # step of the newest checkpoint
    oldest: int = 0  # step of the oldest one that is kept: plans up to it are forgotten
    needed: dict[str, int] = {}  # shard → groups of it that a plan or a restore may need
    spent: tuple[str, ...] = ()  # shards that the newest checkpoint made useless
    retired: tuple[str, ...] = ()  # shards of the newest retirement
    failures: int = 0  # training groups failed in a row
    last_failure: str = ""

    def apply(self, record: Record) -> None:
        """Fold one record into the state.

        Raises:
            Fenced: the record belongs to a lease that is not current.
            StoreError: the record contradicts the journal before it.
        """
        self._FOLDS[type(record)](self, record)

    @property
    def in_flight(self) -> int:
        """Training groups leased or ready: what the lag bound admits."""
        return len(self.ready) + sum(self.leased.values())

    def lag(self, version: int, step: int) -> int:
        """How many steps older than the weights after `step` the tokens of `version` are."""
        return max(0, step - self.steps.get(version, 0))

    def _release(self, group: int, number: int) -> Lease:
        """End a lease, if it is the current one of its group."""
        lease = self.leases.get(group)
        if lease is None or lease.lease != number:
            raise Fenced(
                f"lease {number} of group {group} is not current "
                f"({f'lease {lease.lease} is' if lease else 'none is'}): its work is not used"
            )
        del self.leases[group]
        self.holders[lease.runner].discard(group)
        if not self.holders[lease.runner]:
            del self.holders[lease.runner]
            self.orphans.discard(lease.runner)
        if lease.task == TRAIN:
            self._count(lease.version, -1)
        return lease

    def _count(self, version: int, change: int) -> None:
        count = self.leased.pop(version, 0) + change
        if count:
            self.leased[version] = count

    def _epoch(self, record: Epoch) -> None:
        """A new coordinator. Leases stay; a publication under way has lost its witness."""
        if record.attempt != self.attempt:
            self.orphans = set(self.holders)
        self.epoch, self.attempt = record.epoch, record.attempt
        self.publishing = None
        self.failures = 0
        self.announced = {r: n for r, n in self.announced.items() if r in self.holders}

    def _lease(self, record: Lease) -> None:
        self.next_lease = record.lease + 1
        self.leases[record.group] = record
        self.holders.setdefault(record.runner, set()).add(record.group)
        self.returned.pop(record.group, None)
        if record.task == TRAIN:
            self._count(record.version, 1)
            self.cursor = max(self.cursor, record.group + 1)
        else:
            self.eval_cursor = min(self.eval_cursor, record.group - 1)

    def _lease_end(self, record: LeaseEnd) -> None:
        lease = self._release(record.group, record.lease)
        if lease.task == TRAIN:
            self.returned[lease.group] = lease.version

    def _group(self, record: Group) -> None:
        lease = self._release(record.group, record.lease)
        path = record.where.path
        number = path.rpartition("/")[2].partition(".")[0]
        if lease.runner and number.isdigit():
            newest = max(self.announced.get(lease.runner, -1), int(number))
            self.announced[lease.runner] = newest
        trains = record.task == TRAIN and record.status == "ready"
        self.needed[path] = self.needed.get(path, 0) + trains
        if trains:
            self.ready[record.group] = record
        if record.task != TRAIN:
            return
        if record.status == "failed":
            self.failures += 1
            self.last_failure = record.reason
        else:
            self.failures = 0

    def _plan(self, record: Plan) -> None:
        missing = [g for g in record.groups if g not in self.ready]
        if missing or record.step > self.last_plan + 1 or record.step in self.plans:
            raise StoreError(
                f"plan {record.step} names groups {missing} that are not ready, or is not the next "
                f"after plan {self.last_plan}: the journal is not whole"
            )
        self.plans[record.step] = record
        self.planned.update((g, self.ready.pop(g)) for g in record.groups)
        self.last_plan = max(self.last_plan, record.step)

    def _void(self, record: Void) -> None:
        """Training parts here from what it was: no token counts as newer than this."""
        if record.step not in self.plans:
            raise StoreError(f"void names plan {record.step}, which is none: is the journal whole?")
        for number in self.plans.pop(record.step).groups:
            group = self.planned.pop(number)
            if number in record.groups:
                self.returned[number] = self.version
                self._unneed(group)
            else:
                self.ready[number] = group
        self.steps = {v: min(step, record.step - 1) for v, step in self.steps.items()}

    def _publish_begin(self, record: PublishBegin) -> None:
        self.publishing = record
        self.next_version = record.version + 1
        self.steps[record.version] = record.step

    def _publish_end(self, record: PublishEnd) -> None:
        begun, self.publishing = self.publishing, None
        if record.ok and begun is not None:
            self.version, self.step, self.lineage = begun.version, begun.step, begun.lineage
            self.restored = False

    def _checkpoint(self, record: Checkpoint) -> None:
        """Plans up to the oldest checkpoint that is kept will not be asked for again."""
        self.checkpoint, self.oldest = record.step, max(self.oldest, record.oldest)
        for step in [s for s in self.plans if s <= record.oldest]:
            for number in self.plans.pop(step).groups:
                self._unneed(self.planned.pop(number))
        self.spent = tuple(path for path, groups in self.needed.items() if not groups)
        for path in self.spent:
            del self.needed[path]
        groups = [*self.ready.values(), *self.planned.values()]
        oldest = min(
            [
                self.version,
                *(g.version_min for g in groups),
                *self.leased,
                *self.returned.values(),
            ]
        )
        self.steps = {v: step for v, step in self.steps.items() if v >= oldest}

    def _restore(self, record: Restore) -> None:
        self.lineage, self.step = record.lineage, record.step
        self.restored, self.publishing = True, None

    def _retire(self, record: Retire) -> None:
        self.retired, self.spent = record.paths, ()

    def _unneed(self, group: Group) -> None:
        self.needed[group.where.path] -= 1

    _FOLDS: ClassVar[dict[type[Record], Callable[["State", Any], None]]] = {
        Epoch: _epoch,
        Lease: _lease,
        LeaseEnd: _lease_end,
        Group: _group,
        Plan: _plan,
        Void: _void,
        PublishBegin: _publish_begin,
        PublishEnd: _publish_end,
        Checkpoint: _checkpoint,
        Restore: _restore,
        Retire: _retire,
    }
