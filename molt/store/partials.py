# SPDX-License-Identifier: Apache-2.0
"""What unfinished sessions have so far: partials/<writer>/NNNNNNNN.arrow.

A row is a *part*: tokens that were added to one node of one session, a whole completion or a chunk
of it. A node is its parts in order, a session its nodes. A file holds what a writer's open sessions
gained since its last one; it is useless once all its groups are finished, and its writer removes it
then.

Whoever leases an unfinished group next reads the parts of all who held it before, who may not have
seen everything that the others wrote, or may still write. So every part carries the hash of the one
it follows: what a session is put together from was sampled in that order, whatever is missing. Of
two parts in one place, that of the later lease counts.
"""

# pyright: standard
# (pyarrow's stubs leave most types unknown, which strict mode refuses.)

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from molt.records import Sampling, StoreError
from molt.store.files import publishing
from molt.store.shards import ragged

log = logging.getLogger("molt.store")

Ids = npt.NDArray[np.int32]


class Origin(NamedTuple):
    """Whose part it is."""

    group: int
    lease: int
    rollout: int
    attempt: int  # of the agent, under this lease or before


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """Tokens added to a node. k context tokens, m sampled ones, v spans."""

    node: int  # position in the session's order
    parent: int  # −1 = a root
    part: int  # position in the node
    follows: int = 0  # hash of the node's part before it, or of the parent's last; 0 = none
    context: Ids  # [k], of the node's first part; else empty
    token_ids: Ids  # [m]
    logprobs: npt.NDArray[np.float32]  # [m] nats
    version_spans: npt.NDArray[np.int64]  # [v, 2] (end, version), ends count within the part
    sampling: Sampling  # of the node
    finish_reason: str  # "" = the completion goes on

    @cached_property
    def hash(self) -> int:
        """xxh3_64 of everything in it, and so of everything before it; what an int64 holds."""
        sampling = self.sampling
        arrays = (self.context, self.token_ids, self.logprobs, self.version_spans)
        place = (self.node, self.parent, self.part, self.follows)
        texts = (repr(float(sampling.temperature)), self.finish_reason, *sampling.stop)
        sizes = (sampling.max_tokens, *(x.size for x in arrays), *map(len, texts))
        hashed = xxhash.xxh3_64(np.array((*place, *sizes), np.int64).tobytes())
        for array in arrays:
            hashed.update(array.tobytes())
        hashed.update("".join(texts).encode())
        return hashed.intdigest() >> 1

    def seal(self, origin: Origin) -> int:
        """A hash of the whole row: a flipped bit must not become a token, or another's token."""
        return xxhash.xxh3_64_intdigest(np.array([*origin, self.hash], np.int64).tobytes()) >> 1


@dataclass(frozen=True)
class Recorded:
    """A node as it was left."""

    attempt: int  # of the agent
    parts: list[Part]

    @property
    def version_min(self) -> int:
        """The oldest weights that sampled a token of it."""
        return min(int(part.version_spans[:, 1].min()) for part in self.parts)


COUNTS = (*Origin._fields, "node", "parent", "part", "follows")
_text = pa.large_string()
_ints = pa.large_list(pa.int32())
SCHEMA = pa.schema(
    [
        *(pa.field(n, pa.int64(), False) for n in COUNTS),
        pa.field("context", _ints, False),
        pa.field("token_ids", _ints, False),
        pa.field("logprobs", pa.large_list(pa.float32()), False),
        pa.field("version_ends", pa.large_list(pa.int64()), False),
        pa.field("versions", pa.large_list(pa.int64()), False),
        pa.field("temperature", pa.float64(), False),
        pa.field("max_tokens", pa.int64(), False),
        pa.field("stop", pa.large_list(_text), False),
        pa.field("finish_reason", _text, False),
        pa.field("seal", pa.int64(), False),
    ],
    metadata={"molt.schema": "1"},
)
ALONE = pa.ipc.IpcReadOptions(use_threads=False)  # these files are small: threads cost more


# ---------------------------------------------------------------- writing


class PartialWriter:
    """The partials of one writer, whose name is never used again.

    `flush` may run in a thread while another one does the rest.
    """

    def __init__(self, run_dir: Path, writer: str) -> None:
        self._run_dir, self._directory = run_dir, Path("partials") / writer
        self._lock = Lock()  # of the next two; never held while a file is written
        self._waiting: list[tuple[Origin, Part]] = []
        self._files: dict[Path, set[int]] = {}  # file → groups in it that are not finished
        self._next = 0
        try:
            (run_dir / self._directory).mkdir(parents=True)
        except FileExistsError as error:
            raise StoreError(
                f"{run_dir / self._directory} exists: every start of a writer needs a new name"
            ) from error

    def add(self, origin: Origin, part: Part) -> None:
        """Hold a part until the next `flush`."""
        with self._lock:
            self._waiting.append((origin, part))

    def drop(self, group: int) -> None:
        """A group is finished, or of no use: what is not written yet need not be."""
        with self._lock:
            self._waiting = [(o, p) for o, p in self._waiting if o.group != group]

    def forget(self, group: int) -> None:
        """A group is finished and announced: nobody will resume it."""
        self.drop(group)
        with self._lock:
            for groups in self._files.values():
                groups.discard(group)
        self._remove_useless()

    def flush(self) -> int:
        """Publish what is held as one file; no file for nothing.

        Returns:
            The number of sampled tokens in it.

        Raises:
            StoreError: the filesystem refused; everything is still held.
        """
        with self._lock:
            held = self._waiting[:]
        if not held:
            return 0
        path = self._directory / f"{self._next:08d}.arrow"
        self._next += 1
        with publishing(self._run_dir / path) as file:
            sink: Any = file
            with pa.ipc.new_file(pa.PythonFile(sink, "w"), SCHEMA) as writer:
                writer.write_batch(_batch(held))
        with self._lock:
            wanted = {id(part) for _, part in self._waiting}  # a group may be gone meanwhile
            self._files[path] = {o.group for o, p in held if id(p) in wanted}
            written = {id(part) for _, part in held}
            self._waiting = [(o, p) for o, p in self._waiting if id(p) not in written]
        self._remove_useless()
        return sum(len(part.token_ids) for _, part in held)

    def _remove_useless(self) -> None:
        with self._lock:
            useless = [path for path, groups in self._files.items() if not groups]
            for path in useless:
                del self._files[path]
        for path in useless:
            try:
                (self._run_dir / path).unlink(missing_ok=True)
            except OSError as error:  # it costs a name, no token
                log.warning("cannot remove %s: %s", path, error.strerror)


def _batch(held: list[tuple[Origin, Part]]) -> pa.RecordBatch:
    parts = [part for _, part in held]
    columns: dict[str, Any] = {
        name: [getattr(origin, name) for origin, _ in held] for name in Origin._fields
    }
    for name in ("node", "parent", "part", "follows", "finish_reason"):
        columns[name] = [getattr(part, name) for part in parts]
    columns |= {
        "context": _lists([p.context for p in parts]),
        "token_ids": _lists([p.token_ids for p in parts]),
        "logprobs": _lists([p.logprobs for p in parts]),
        "version_ends": _lists([p.version_spans[:, 0] for p in parts]),
        "versions": _lists([p.version_spans[:, 1] for p in parts]),
        "temperature": [p.sampling.temperature for p in parts],
        "max_tokens": [p.sampling.max_tokens for p in parts],
        "stop": [list(p.sampling.stop) for p in parts],
        "seal": [part.seal(origin) for origin, part in held],
    }
    arrays = [
        c if isinstance(c := columns[f.name], pa.Array) else pa.array(c, f.type) for f in SCHEMA
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def _lists(arrays: list[np.ndarray]) -> Any:
    offsets: Any = pa.array(np.cumsum([0, *map(len, arrays)], dtype=np.int64))
    return pa.LargeListArray.from_arrays(offsets, pa.array(np.concatenate(arrays)))


# ---------------------------------------------------------------- reading


def groups_of(run_dir: Path, path: str) -> list[int]:
    """The groups that a file has parts of.

    Raises:
        StoreError: it cannot be read.
    """
    return sorted({int(g) for g in _open(run_dir, path).column("group").to_numpy()})


def read_parts(run_dir: Path, path: str) -> Iterator[tuple[Origin, Part]]:
    """Every part in a file.

    Raises:
        StoreError: it cannot be read, or a part is not what was written.
    """
    yield from _parts(_open(run_dir, path), run_dir / path)


def _parts(batch: pa.RecordBatch, path: Path) -> Iterator[tuple[Origin, Part]]:
    lists = {
        name: ragged(batch, name)
        for name in ("context", "token_ids", "logprobs", "version_ends", "versions")
    }
    scalars: dict[str, list[Any]] = {
        f.name: batch.column(f.name).to_pylist()
        for f in SCHEMA
        if f.name == "stop" or not pa.types.is_large_list(f.type)
    }
    for i in range(batch.num_rows):
        row = {name: values[i] for name, values in scalars.items()}
        row |= {name: values[at[i] : at[i + 1]] for name, (values, at) in lists.items()}
        origin = Origin(*(row[name] for name in Origin._fields))
        try:
            part = _part(row)
        except ValueError:
            part = None
        if part is None or part.seal(origin) != row["seal"]:
            raise StoreError(f"{path} row {i} is damaged: it was changed after its write")
        yield origin, part


def _part(row: dict[str, Any]) -> Part:
    same = ("node", "parent", "part", "follows", "context", "token_ids", "logprobs")
    return Part(
        **{name: row[name] for name in same},
        finish_reason=row["finish_reason"],
        version_spans=np.stack([row["version_ends"], row["versions"]], axis=1),
        sampling=Sampling(
            temperature=row["temperature"], max_tokens=row["max_tokens"], stop=tuple(row["stop"])
        ),
    )


class PartialReader:
    """Reads sessions back. The groups of one file are read one after the other: files are kept."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._open = lru_cache(maxsize=512)(partial(_open, run_dir))

    def sessions(self, paths: Iterable[str], group: int) -> dict[int, list[Recorded]]:
        """The sessions of a group as they were left: rollout → its nodes, in order.

        Only the newest attempt of an agent counts. A file that cannot be read is logged and left
        out, and so is all that follows what is in it.
        """
        found: dict[int, list[tuple[Origin, Part]]] = {}
        for path in paths:
            try:
                batch = self._open(path)
                number: Any = group
                mine = batch.filter(pc.equal(batch.column("group"), number))
                parts = list(_parts(mine, self._run_dir / path))
            except StoreError as error:
                log.warning("not resumed: %s", error)
                continue
            for origin, part in parts:
                found.setdefault(origin.rollout, []).append((origin, part))
        return {rollout: _session(parts) for rollout, parts in found.items()}


def read_partials(run_dir: Path, paths: Iterable[str], group: int) -> dict[int, list[Recorded]]:
    """The sessions of one group; see `PartialReader.sessions`."""
    return PartialReader(run_dir).sessions(paths, group)


def _session(parts: list[tuple[Origin, Part]]) -> list[Recorded]:
    """Put the parts of one rollout together."""
    attempt = max((origin.lease, origin.attempt) for origin, _ in parts)[1]
    firsts: dict[int, Part] = {}  # node → its first part
    later: dict[int, Part] = {}  # hash of a part → the next one of its node
    for origin, part in sorted(parts, key=lambda x: x[0].lease):
        if origin.attempt != attempt:
            continue
        if part.part:
            later[part.follows] = part
        else:
            firsts[part.node] = part
    nodes: dict[int, Recorded] = {}
    for key, first in sorted(firsts.items()):
        parent = nodes.get(first.parent)
        if first.follows != (parent.parts[-1].hash if parent else 0):
            continue
        chain: list[Part] = []
        part: Part | None = first
        while part:
            chain.append(part)
            part = later.get(part.hash)
        nodes[key] = Recorded(attempt, chain)
    return list(nodes.values())


def _open(run_dir: Path, path: str) -> pa.RecordBatch:
    try:
        source = pa.BufferReader((run_dir / path).read_bytes())
        reader: Any = pa.ipc.open_file(source, options=ALONE)
        if not reader.schema.equals(SCHEMA, check_metadata=True):
            raise StoreError(f"{run_dir / path} has other columns: is it of another Molt?")
        batch = reader.get_batch(0)
        batch.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise StoreError(f"cannot read {run_dir / path}: {error}") from error
    return batch
