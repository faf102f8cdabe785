# SPDX-License-Identifier: Apache-2.0
"""The state of a run: a fold over its journal, and nothing else.

`State.apply` is the only way the state changes, and it changes by records alone: replaying the
journal gives the same state, always. What a finished group leaves in memory is dropped once a
checkpoint has passed the plan that trained it.

The life of a group: leased → ready | filtered | failed → planned → trained. A lease that ends
without a group puts its number into `returned`, which is served before the cursor moves on.
"""

from dataclasses import dataclass, field

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
    StoreError,
)


@dataclass
class State:
    """Everything the coordinator knows. Groups are keyed by their number, versions by theirs."""

    epoch: int = 0
    cursor: int = 0  # next training group that was never leased
    eval_cursor: int = -1  # next evaluation group; they count down
    next_lease: int = 1
    leases: dict[int, Lease] = field(default_factory=dict)  # group → its current lease
    returned: set[int] = field(default_factory=set)  # training groups to lease again
    ready: dict[int, Group] = field(default_factory=dict)  # finished, in no plan yet
    plans: dict[int, Plan] = field(
        default_factory=dict
    )  # step → plan that a restore may still need
    planned: dict[int, Group] = field(default_factory=dict)  # the groups of those plans
    last_plan: int = 0  # newest step with a plan
    step: int = 0  # training steps inside the newest published weights
    version: int = 0  # newest version that every engine holds
    next_version: int = 1
    publishing: PublishBegin | None = None
    lineage: int = 0
    steps: dict[int, int] = field(default_factory=dict)  # version → the step its lag counts from
    checkpoint: int = 0  # step of the newest checkpoint
    failures: int = 0  # training groups failed in a row
    last_failure: str = ""

    def apply(self, record: Record) -> None:
        """Fold one record into the state.

        Raises:
            Fenced: the record belongs to a lease that is not current.
            StoreError: the record contradicts the journal before it.
        """
        match record:
            case Epoch():
                self._epoch(record)
            case Lease():
                self._lease(record)
            case LeaseEnd():
                self._current(record.group, record.lease)
                self._give_back(self.leases.pop(record.group))
            case Group():
                self._group(record)
            case Plan():
                self._plan(record)
            case PublishBegin():
                self.publishing = record
                self.next_version = record.version + 1
                self.steps[record.version] = record.step
            case PublishEnd():
                self._publish_end(record)
            case Checkpoint():
                self._checkpoint(record)
            case Restore():
                self._restore(record)

    @property
    def unpublished(self) -> int:
        """Plans cut whose weights the engines do not hold yet."""
        return self.last_plan - self.step

    @property
    def in_flight(self) -> int:
        """Training groups leased or ready: what the lag bound admits."""
        return len(self.ready) + sum(lease.task == TRAIN for lease in self.leases.values())

    def lag(self, version: int, step: int) -> int:
        """How many steps older than the weights after `step` the tokens of `version` are."""
        return step - self.steps[version]

    def _current(self, group: int, lease: int) -> None:
        held = self.leases.get(group)
        if held is None or held.lease != lease:
            raise Fenced(
                f"lease {lease} of group {group} is not current "
                f"({f'lease {held.lease} is' if held else 'none is'}): its work is not used"
            )

    def _epoch(self, record: Epoch) -> None:
        """A new coordinator: whoever held a lease is gone, and so is a publication under way."""
        self.epoch = record.epoch
        for lease in self.leases.values():
            self._give_back(lease)
        self.leases.clear()
        self.publishing = None
        self.failures = 0

    def _give_back(self, lease: Lease) -> None:
        if lease.task == TRAIN:
            self.returned.add(lease.group)

    def _lease(self, record: Lease) -> None:
        self.next_lease = record.lease + 1
        self.leases[record.group] = record
        self.returned.discard(record.group)
        if record.task == TRAIN:
            self.cursor = max(self.cursor, record.group + 1)
        else:
            self.eval_cursor = min(self.eval_cursor, record.group - 1)

    def _group(self, record: Group) -> None:
        self._current(record.group, record.lease)
        del self.leases[record.group]
        if record.task != TRAIN:
            return
        if record.status == "ready":
            self.ready[record.group] = record
        if record.status == "failed":
            self.failures += 1
            self.last_failure = record.reason
        else:
            self.failures = 0

    def _plan(self, record: Plan) -> None:
        missing = [g for g in record.groups if g not in self.ready]
        if missing or record.step != self.last_plan + 1:
            raise StoreError(
                f"plan {record.step} names groups {missing} that are not ready, or is not plan "
                f"{self.last_plan + 1}: the journal is not whole"
            )
        self.plans[record.step] = record
        self.planned.update((g, self.ready.pop(g)) for g in record.groups)
        self.last_plan = record.step

    def _publish_end(self, record: PublishEnd) -> None:
        begun, self.publishing = self.publishing, None
        if record.ok and begun is not None:
            self.version, self.step, self.lineage = begun.version, begun.step, begun.lineage

    def _checkpoint(self, record: Checkpoint) -> None:
        """Plans before the checkpoint that came before this one will not be asked for again."""
        oldest, self.checkpoint = self.checkpoint, record.step
        for step in [s for s in self.plans if s <= oldest]:
            for group in self.plans.pop(step).groups:
                del self.planned[group]

    def _restore(self, record: Restore) -> None:
        """Back to `step`: later plans are replayed, abandoned tokens count their lag from here."""
        self.lineage = record.lineage
        self.step = record.step
        self.steps = {version: min(step, record.step) for version, step in self.steps.items()}
