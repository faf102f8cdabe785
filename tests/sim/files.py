# SPDX-License-Identifier: Apache-2.0
"""The run directory: a model of the journal's protocol, and of shards, partials and checkpoints.

Every step that another process can come between is a step here too: writing and syncing a batch,
taking an epoch's number, reading the newest file, publishing one's own. A listing may show a new
file late; opening one by a name that was announced always works.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgspec

from molt.records import (
    NULL,
    Epoch,
    Fenced,
    Group,
    Lease,
    Plan,
    PublishBegin,
    Record,
    Restore,
    StoreError,
)
from molt.store.state import State
from tests.sim.clock import alive

Point = Callable[[str], Awaitable[None]]  # a place where a fault may hit

_decoder = msgspec.json.Decoder(Record)


@dataclass(frozen=True, eq=False)
class Weights:
    """What was trained: the weights after `step`, made from those before by one plan.

    Training is a function of the weights and the plan, so equal histories are one object.
    """

    step: int
    before: "Weights | None" = None
    plan: tuple[tuple[int, int], ...] = ()  # (group, lease) in its order

    def history(self) -> "list[Weights]":
        """From the first step to this one, the initial weights left out."""
        chain: list[Weights] = []
        at: Weights | None = self
        while at is not None and at.before is not None:
            chain.append(at)
            at = at.before
        return chain[::-1]


@dataclass
class EpochFile:
    """journal/EEEEEEEE.jsonl."""

    first: Epoch
    lines: list[bytes] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Token:
    """A sampled token, and the one that it follows."""

    version: int
    lease: int  # under which it was sampled
    position: int
    before: "Token | None"

    def chain(self) -> "list[Token]":
        """All tokens up to this one."""
        tokens: list[Token] = []
        at: Token | None = self
        while at is not None:
            tokens.append(at)
            at = at.before
        return tokens[::-1]


@dataclass
class Shard:
    """shards/<writer>/NNNNNNNN.arrow: the groups in it, and their tokens."""

    groups: tuple[Group, ...]
    tokens: dict[int, list[Token]]
    visible: float
    damaged: set[int] = field(default_factory=set)  # groups that cannot be read any more


@dataclass
class Partial:
    """partials/<writer>/NNNNNNNN.arrow: what the sessions of groups gained."""

    parts: dict[int, list[Token]]
    visible: float


def resume(files: Sequence[Partial], group: int, version: int) -> list[Token]:
    """The newest session of a group that is there whole, without tokens older than `version`."""
    found = {token for file in files for token in file.parts.get(group, ())}
    for token in sorted(found, key=lambda t: (t.lease, t.position), reverse=True):
        chain = token.chain()
        if found.issuperset(chain) and all(t.version >= version for t in chain):
            return chain
    return []


@dataclass
class Checkpoint:
    """checkpoints/step-NNNNNN."""

    weights: Weights
    version: int
    damaged: bool = False


class Files:
    """What all processes see.

    Args:
        random: decides how long things take.
        delay_s: listings may lag behind for so long.
    """

    def __init__(self, random: Random, delay_s: float) -> None:
        self._random, self._delay_s = random, delay_s
        self.claims: set[int] = set()
        self.epochs: dict[int, EpochFile] = {}
        self.shards: dict[str, Shard] = {}
        self.partials: dict[str, Partial] = {}
        self.checkpoints: dict[int, Checkpoint] = {}
        self.acknowledged: list[tuple[int, bytes]] = []  # (epoch, line) that somebody relied on
        self.durable: set[tuple[type[Record], int]] = set()  # numbers that were given out

    async def pause(self) -> None:
        """As long as a call of the filesystem takes."""
        await asyncio.sleep(self._random.random() * 0.02)

    def visible(self) -> float:
        """From when on listings show what is published now."""
        late = self._random.random() * self._delay_s if self._random.random() < 0.2 else 0.0
        return asyncio.get_running_loop().time() + late

    def listed(self, found: Mapping[str, Shard | Partial], prefix: str) -> list[str]:
        """Names that begin with `prefix`, oldest first, as a listing shows them."""
        now = asyncio.get_running_loop().time()
        return sorted(p for p, x in found.items() if p.startswith(prefix) and x.visible <= now)

    def chain(self, epoch: int = 0) -> list[tuple[int, bytes]]:
        """(epoch, line) of every record that exists up to the newest epoch, or to this one."""
        lines: list[tuple[int, bytes]] = []
        epoch, sealed = epoch or max(self.epochs, default=0), None
        while epoch:
            file = self.epochs[epoch]
            content = [msgspec.json.encode(file.first), *file.lines][:sealed]
            lines[:0] = [(epoch, line) for line in content]
            epoch, sealed = file.first.previous, file.first.sealed
        return lines


NUMBERS = {Lease: "lease", Plan: "step", PublishBegin: "version", Restore: "lineage"}


def number_of(record: Record) -> tuple[type[Record], int]:
    """The number that a record gives out, if it does."""
    name = NUMBERS.get(type(record))
    return type(record), getattr(record, name) if name else 0


class Journal:
    """The file of one epoch."""

    def __init__(self, files: Files, epoch: int, random: Random, point: Point) -> None:
        self._files, self.epoch, self._random, self._point = files, epoch, random, point
        self._file = files.epochs[epoch]
        self.fail_next = False  # the disk is full

    @classmethod
    async def start(
        cls, files: Files, random: Random, attempt: int, point: Point
    ) -> "tuple[Journal, State]":
        """Take an epoch, read the newest file, seal it, open one's own."""
        await files.pause()
        alive()
        epoch = max(files.claims, default=0) + 1
        files.claims.add(epoch)
        await point("start.claimed")
        await files.pause()
        newest = max(files.epochs, default=0)
        lines = list(files.epochs[newest].lines) if newest else []
        state = State()
        if newest:
            first = files.epochs[newest].first
            state = State() if first.state == NULL else msgspec.json.decode(first.state, type=State)
            state.apply(first)
            for line in lines:
                state.apply(_decoder.decode(line))
        await point("start.read")
        await files.pause()
        alive()
        first = Epoch(
            epoch=epoch,
            run="sim",
            previous=newest,
            sealed=1 + len(lines) if newest else 0,  # lines stand for bytes
            state=msgspec.Raw(msgspec.json.encode(state)) if newest else NULL,
            attempt=attempt,
        )
        files.epochs[epoch] = EpochFile(first)
        files.durable.update(number_of(_decoder.decode(line)) for line in lines)
        await point("start.published")
        state.apply(first)
        return cls(files, epoch, random, point), state

    @property
    def superseded(self) -> bool:
        """Whether somebody has taken a higher number."""
        return max(self._files.claims) > self.epoch

    async def append(self, records: list[Record]) -> None:
        """Write, sync, look for a higher epoch; a crash leaves some of what was being written."""
        lines = [msgspec.json.encode(record) for record in records]
        await self._point("append.begin")
        if self.fail_next:
            self._file.lines += lines[: self._random.randint(0, len(lines))]
            raise StoreError("no space left on device")
        try:
            await self._files.pause()
            alive()
        except asyncio.CancelledError:
            self._file.lines += lines[: self._random.randint(0, len(lines))]
            raise
        self._file.lines += lines
        await self._point("append.written")
        await self._files.pause()  # fsync
        alive()
        if self.superseded:
            raise Fenced("a later epoch has begun")
        self._files.acknowledged += [(self.epoch, line) for line in lines]
        self._files.durable.update(map(number_of, records))
        await self._point("append.done")


class Disk:
    """`molt.coordinator.disk.Disk` over `Files`."""

    def __init__(
        self,
        files: Files,
        deletes: Callable[[Sequence[str]], None],
        told: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self._files, self._deletes, self._told = files, deletes, told

    async def unannounced(self, runner: str, after: int) -> list[Group]:
        """Groups of the runner's shards numbered above `after`."""
        await self._files.pause()
        return [
            group
            for path in self._files.listed(self._files.shards, f"shards/{runner}/")
            if int(path[-14:-6]) > after
            for group in self._files.shards[path].groups
        ]

    async def partials(self, runner: str = "*") -> dict[str, list[int]]:
        """Partials files and the groups in them."""
        await self._files.pause()
        prefix = "partials/" if runner == "*" else f"partials/{runner}/"
        found = self._files.listed(self._files.partials, prefix)
        return {path: list(self._files.partials[path].parts) for path in found}

    async def delete(self, paths: Sequence[str]) -> None:
        """Remove files."""
        if not paths:
            return
        self._deletes(paths)
        await self._files.pause()
        alive()
        for path in paths:
            self._files.shards.pop(path, None)
            self._files.partials.pop(path, None)

    async def append_metrics(self, row: Mapping[str, Any]) -> None:
        """A line for people."""
        self._told(row)
