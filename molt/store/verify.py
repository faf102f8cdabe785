# SPDX-License-Identifier: Apache-2.0
"""Verification: is everything in a run directory still what it was when it was written?

    journal      each epoch file is what its successor sealed, each line has its checksum, and the
                 state that an epoch starts from is the fold of everything before
    groups       the bytes of those that were not retired have the hash in their record, and agree
    partials     each part has its hash
    checkpoints  each file has the size and hash in its marker, and what a restart needs is there
    metrics      each line is an object

What a crash leaves and nobody reads (temporary files, claimed numbers, bytes behind a seal, shards
that were not announced, checkpoints without a marker, a group that was produced again) is reported
as a leftover and is no failure. To check something else, add a function of findings to `verify`.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import xxhash

from molt.records import (
    Epoch,
    Fenced,
    Group,
    Record,
    Retire,
    Segment,
    StoreError,
    Struct,
    Void,
)
from molt.store.journal import read_journal
from molt.store.partials import read_parts
from molt.store.run import RunDir, read_metrics
from molt.store.schema import SegmentRow
from molt.store.shards import read_group, to_rows
from molt.store.state import State

MARKER = "complete.json"  # written last into a checkpoint
CHUNK_BYTES = 1 << 24


class Finding(NamedTuple):
    """One line: what was checked, what a crash left, or what is not whole."""

    kind: Literal["checked", "leftover", "problem"]
    text: str


def verify(run_dir: Path) -> Iterator[Finding]:
    """Read everything in a run directory, and nothing but read.

    Raises:
        ConfigError: not a run directory.
    """
    run, history = RunDir.open(run_dir), _History()
    yield from _journal(run, history)
    yield from _groups(run, history)
    yield from _partials(run)
    yield from _checkpoints(run, history.state)
    yield from _metrics(run)
    for path in sorted(run.path.rglob(".*.tmp")):
        yield _leftover(run, path, "a temporary file")


def _problem(text: object) -> Finding:
    return Finding("problem", str(text))


def _leftover(run: RunDir, path: Path, what: str) -> Finding:
    return Finding("leftover", f"{path.relative_to(run.path)}: {what}")


# ---------------------------------------------------------------- journal


@dataclass
class _History:
    """What the other checks need to know of the journal."""

    state: State = field(default_factory=State)
    whole: bool = False
    records: int = 0
    sealed: dict[int, int] = field(default_factory=dict)  # epoch → bytes; 0 = not sealed
    leases: dict[int, int] = field(default_factory=dict)  # group → of its newest record
    void: set[int] = field(default_factory=set)  # leases whose groups were produced again
    shards: set[str] = field(default_factory=set)
    retired: set[str] = field(default_factory=set)

    def apply(self, record: Record) -> None:
        self.records += 1
        match record:
            case Epoch():
                self.sealed[record.previous] = record.sealed
                self.sealed[record.epoch] = 0
            case Group():
                self.leases[record.group] = record.lease
                self.shards.add(record.where.path)
            case Void():
                self.void.update(self.leases[g] for g in record.groups if g in self.leases)
            case Retire():
                self.retired.update(record.paths)
            case _:
                pass
        self.state.apply(record)


def _journal(run: RunDir, history: _History) -> Iterator[Finding]:
    torn: list[str] = []
    try:
        for record in read_journal(run.path, torn.append):
            if isinstance(record, Epoch) and record.previous:
                start = msgspec.json.decode(record.state, type=State)
                yield from _snapshot(record, start, history.state)
                history.state = start  # a difference is told once
            history.apply(record)
        history.whole = True
    except (StoreError, Fenced) as error:
        yield _problem(f"{error} (nothing after it in the journal was checked)")
    epochs = len(history.sealed.keys() - {0})
    yield Finding("checked", f"journal: {epochs} epochs, {history.records} records")
    for text in torn:
        yield Finding("leftover", text)
    if history.whole:
        yield from _beside_the_chain(run, history)


def _snapshot(epoch: Epoch, start: State, folded: State) -> Iterator[Finding]:
    """The state that an epoch starts from, against the fold of everything before it."""
    names = (f.name for f in msgspec.structs.fields(State))
    differ = [name for name in names if getattr(start, name) != getattr(folded, name)]
    if differ:
        yield _problem(
            f"epoch {epoch.epoch} starts from another state than epoch {epoch.previous} ended in "
            f"({', '.join(differ)} differ): report this, and go on from a copy of the run"
        )


def _beside_the_chain(run: RunDir, history: _History) -> Iterator[Finding]:
    """Files of starts that came to nothing, and what an old coordinator appended too late."""
    known: Counter[int] = Counter()
    paths = sorted(p for p in run.journal.iterdir() if p.name[:8].isdigit())
    for path in paths:
        epoch = int(path.name[:8])
        known[epoch] += path.suffix != ".claim"
        if path.suffix == ".jsonl" and (sealed := history.sealed.get(epoch)):
            behind = path.stat().st_size - sealed
            if behind > 0:
                yield _leftover(run, path, f"{behind} bytes behind its seal")
        if path.suffix != ".claim" and epoch not in history.sealed:
            yield _leftover(run, path, "an epoch that lost against another coordinator")
    for path in paths:
        if path.suffix == ".claim" and not known[int(path.name[:8])]:
            yield _leftover(run, path, "a start that did not come to its epoch")


# ---------------------------------------------------------------- groups


def _groups(run: RunDir, history: _History) -> Iterator[Finding]:
    """Compare every group of the journal with its bytes."""
    checked = 0
    with suppress(StoreError):  # of the journal: it was said already
        for record in read_journal(run.path):
            if isinstance(record, Group) and record.where.path not in history.retired:
                checked += 1
                for text in _differences(run.path, record):
                    again = record.lease in history.void
                    kind = "leftover" if again else "problem"
                    yield Finding(kind, f"{text} (produced again)" if again else text)
    yield Finding("checked", f"groups: {checked} in {len(history.shards - history.retired)} shards")
    if history.whole:
        yield from _unused_shards(run, history)


def _unused_shards(run: RunDir, history: _History) -> Iterator[Finding]:
    for path in sorted(run.shards.glob("*/*.arrow")):
        name = str(path.relative_to(run.path))
        if name in history.retired:
            yield _leftover(run, path, "retired and not yet deleted")
        elif name not in history.shards:
            yield _leftover(run, path, "its groups were not announced, or their leases had ended")


def _differences(run_dir: Path, group: Group) -> Iterator[str]:
    try:
        rows = to_rows(read_group(run_dir, group.where, deadline_s=0))
        for row in rows:
            row.check()
    except (StoreError, ValueError) as error:
        yield f"group {group.group}: {error}"
        return
    for name, recorded, found in _compare(group, rows):
        if recorded != found:
            where = group.where.path
            yield f"group {group.group}: {name} is {recorded} in the journal, {found} in {where}"


def _compare(group: Group, rows: list[SegmentRow]) -> Iterator[tuple[str, object, object]]:
    """(name, in the journal, in the shard) of everything that both know."""
    for name in ("group", "prompt", "task"):
        yield name, {getattr(group, name)}, {getattr(row, name) for row in rows}
    rewards = {row.rollout: row.reward for row in rows}
    yield "rewards", dict(enumerate(group.rewards)), rewards
    yield (
        "segments",
        group.segments,
        tuple(
            Segment(rollout=r.rollout, tokens=len(r.token_ids), actions=int(r.action_mask.sum()))
            for r in rows
        ),
    )
    sampled = [int(v) for row in rows for v in row.versions[row.action_mask]]
    if sampled:
        yield "version_min", group.version_min, min(sampled)
        yield "version_max", group.version_max, max(sampled)


# ---------------------------------------------------------------- the rest


def _partials(run: RunDir) -> Iterator[Finding]:
    files = sorted((run.path / "partials").glob("*/*.arrow"))
    tokens = 0
    for path in files:
        try:
            parts = read_parts(run.path, str(path.relative_to(run.path)))
            tokens += sum(len(part.token_ids) for _, part in parts)
        except StoreError as error:
            yield _problem(error)
    yield Finding("checked", f"partials: {tokens} sampled tokens in {len(files)} files")


class _Marker(Struct):
    """What the marker of a checkpoint says about its files."""

    step: int
    files: dict[str, tuple[int, str]]  # name → bytes, xxh3_128


def _checkpoints(run: RunDir, state: State) -> Iterator[Finding]:
    complete: set[int] = set()
    size = 0
    for path in sorted(run.checkpoints.glob("step-*")):
        try:
            marker = msgspec.json.decode((path / MARKER).read_bytes(), type=_Marker)
        except FileNotFoundError:
            yield _leftover(run, path, "a checkpoint that was not finished")
            continue
        except (OSError, msgspec.DecodeError) as error:
            yield _problem(f"{path / MARKER} is damaged ({error}): remove this checkpoint")
            continue
        complete.add(marker.step)
        for name, (length, digest) in marker.files.items():
            size += length
            yield from _file(path / name, length, digest)
    for step in sorted({state.oldest, state.checkpoint} - {0} - complete):
        path = run.checkpoint(step)
        if max(complete, default=0) > state.checkpoint:
            yield _leftover(run, path, "removed for a newer one that the journal does not know yet")
        else:
            yield _problem(f"{path} is in the journal and not here: restore it")
    yield Finding("checked", f"checkpoints: {len(complete)}, {size / 2**20:.1f} MiB")


def _file(path: Path, length: int, digest: str) -> Iterator[Finding]:
    hashed, read = xxhash.xxh3_128(), 0
    try:
        with path.open("rb") as file:
            while data := file.read(CHUNK_BYTES):
                hashed.update(data)
                read += len(data)
    except OSError as error:
        yield _problem(f"cannot read {path}: {error.strerror}: remove its checkpoint")
        return
    if (read, hashed.hexdigest()) != (length, digest):
        yield _problem(
            f"{path}: {read} bytes with hash {hashed.hexdigest()}, written were {length} with "
            f"{digest}: it was cut or changed, remove its checkpoint"
        )


def _metrics(run: RunDir) -> Iterator[Finding]:
    try:
        rows = read_metrics(run.metrics)
    except StoreError as error:
        yield _problem(error)
        return
    yield Finding("checked", f"metrics: {len(rows)} lines")
    if run.metrics.exists() and not run.metrics.read_bytes().endswith(b"\n"):
        yield _leftover(run, run.metrics, "an unfinished last line")
