# SPDX-License-Identifier: Apache-2.0
"""The only way the state changes: a record is folded at once and durable with the next batch.

    fold ─▶ state, pending ─▶ write: one append (one fsync) for all that gathered ─▶ commit returns

Nobody is answered before what the answer rests on is durable. An append that fails ends the
coordinator: those who wait get no answer, reconnect, and ask the next epoch.
"""

import asyncio
from collections.abc import Awaitable, Callable

from molt.coordinator.changes import Changes, Topic
from molt.records import (
    Checkpoint,
    Epoch,
    Group,
    Lease,
    LeaseEnd,
    Plan,
    PublishBegin,
    PublishEnd,
    Record,
    Restore,
    Retire,
    Void,
)
from molt.store.state import State

TOUCHES: dict[type[Record], tuple[Topic, ...]] = {
    Epoch: (),
    Lease: (),
    LeaseEnd: (Topic.ROOM, Topic.PLANS),
    Group: (Topic.PLANS,),
    Plan: (),
    Void: (Topic.ROOM, Topic.PLANS),
    PublishBegin: (Topic.WEIGHTS,),
    PublishEnd: (Topic.ROOM, Topic.PLANS, Topic.WEIGHTS),
    Checkpoint: (),
    Restore: (Topic.PLANS, Topic.WEIGHTS),
    Retire: (),
}


class Commits:
    """The state and the records on their way to the journal.

    Args:
        state: what is folded into.
        append: makes records durable, in order; one call at a time.
        changes: told what every record touches.
    """

    def __init__(
        self,
        state: State,
        append: Callable[[list[Record]], Awaitable[None]],
        changes: Changes,
    ) -> None:
        self.state, self._append, self._changes = state, append, changes
        self._pending: list[Record] = []
        self._filled = asyncio.Event()
        self._durable: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._durable.set_result(None)  # of the newest batch; nothing is pending yet

    def fold(self, *records: Record) -> None:
        """Change the state and queue the records.

        Raises:
            Fenced: a record's lease is not current; it and those after it are not folded.
        """
        for record in records:
            self.state.apply(record)
            if not self._pending:
                self._durable = asyncio.get_running_loop().create_future()
                self._filled.set()
            self._pending.append(record)
            topics = TOUCHES[type(record)]
            if isinstance(record, Group) and record.status != "ready":
                topics = (Topic.ROOM,)  # its slot is free
            if topics:
                self._changes.touch(*topics)

    async def commit(self, *records: Record) -> None:
        """Fold `records`, and wait until all that was folded is durable."""
        self.fold(*records)
        await asyncio.shield(self._durable)

    async def confirm(self) -> None:
        """Wait until everything is durable and this is known to be the run's coordinator."""
        if not self._pending:
            self._durable = asyncio.get_running_loop().create_future()
        self._filled.set()
        await asyncio.shield(self._durable)

    async def write(self) -> None:
        """Append what was folded, until cancelled.

        Raises:
            StoreError, Fenced: of `append`.
        """
        while True:
            await self._filled.wait()
            self._filled.clear()
            batch, self._pending, durable = self._pending, [], self._durable
            await self._append(batch)
            durable.set_result(None)
