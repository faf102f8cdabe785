# SPDX-License-Identifier: Apache-2.0
"""What became of every group of a run, folded from its journal. No shard is read.

A reader's fold: it forgets nothing and refuses nothing, where the coordinator's keeps what it needs
and refuses what contradicts it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from molt.records import (
    TRAIN,
    Epoch,
    Group,
    Lease,
    LeaseEnd,
    Plan,
    PublishBegin,
    PublishEnd,
    Record,
    Restore,
    Void,
)
from molt.store.journal import read_journal


@dataclass
class Entry:
    """One group, from its newest lease on."""

    lease: Lease
    state: str = "leased"  # → returned, or ready | filtered | failed, then planned
    reason: str = ""  # why it was returned or dropped, or its plan is void
    record: Group | None = None  # once it is on disk
    step: int | None = None  # of its plan
    lag: int | None = None  # steps: weights its plan trained − oldest weights that sampled a token


@dataclass
class History:
    """The fold. `groups` are in the order of their newest lease."""

    name: str = ""
    epochs: int = 0
    groups: dict[int, Entry] = field(default_factory=dict)
    version: int = 0  # newest that every engine held
    step: int = 0  # training steps inside it
    trained: int = 0  # newest step whose weights were ready to publish
    lineage: int = 0
    steps: dict[int, int] = field(default_factory=dict)  # version → the step its lag counts from
    plans: dict[int, tuple[int, ...]] = field(default_factory=dict)  # step → groups

    @property
    def finished(self) -> Iterator[Group]:
        """The records of all groups on disk."""
        return (entry.record for entry in self.groups.values() if entry.record is not None)

    def status(self, entry: Entry) -> str:
        """The state of a group in one word."""
        if entry.step is not None and entry.step <= self.trained:
            return "trained"
        if entry.state == "ready" and entry.lease.task != TRAIN:
            return "scored"
        return entry.state

    def apply(self, record: Record) -> None:
        """Fold one record."""
        match record:
            case Epoch():
                self.name = record.run
                self.epochs += 1
            case Lease():
                self.groups.pop(record.group, None)
                self.groups[record.group] = Entry(record)
            case LeaseEnd():
                self._give_back(record.group, record.reason)
            case Group():
                entry = self.groups.setdefault(record.group, Entry(_lease_of(record)))
                entry.state, entry.reason, entry.record = record.status, record.reason, record
            case Plan():
                self._plan(record)
            case Void():
                self._void(record)
            case PublishBegin():
                self.steps[record.version] = self.trained = record.step
                self.lineage = record.lineage
            case PublishEnd():
                self._publish_end(record)
            case Restore():
                self.trained = self.step = record.step
                self.lineage = record.lineage
            case _:
                pass

    def _give_back(self, number: int, reason: str) -> None:
        if entry := self.groups.get(number):
            entry.state, entry.reason = "returned", reason
            entry.step = entry.lag = None

    def _publish_end(self, end: PublishEnd) -> None:
        if end.ok and end.version in self.steps:
            self.version, self.step = end.version, self.steps[end.version]

    def _plan(self, plan: Plan) -> None:
        self.plans[plan.step] = plan.groups
        for number in plan.groups:
            if entry := self.groups.get(number):
                entry.state, entry.step = "planned", plan.step
                entry.lag = self.lag_of(entry, plan.step - 1)

    def _void(self, void: Void) -> None:
        """Training parts here from what it was: no token counts as newer than this."""
        for number in self.plans.pop(void.step, ()):
            self._give_back(number, void.reason)
            if number not in void.groups and (entry := self.groups.get(number)):
                entry.state, entry.reason = "ready", ""
        self.steps = {version: min(step, void.step - 1) for version, step in self.steps.items()}

    def lag_of(self, entry: Entry, step: int) -> int | None:
        """Steps by which the oldest sampled token of a group is behind the weights after `step`."""
        version = entry.record.version_min if entry.record else None
        return max(0, step - self.steps[version]) if version in self.steps else None


def read_history(run: Path) -> History:
    """Fold the journal of a run, finished or live.

    Raises:
        StoreError: the journal is damaged.
    """
    history = History()
    for record in read_journal(run):
        history.apply(record)
    return history


def _lease_of(group: Group) -> Lease:
    return Lease(lease=group.lease, group=group.group, prompt=group.prompt, task=group.task)
