# SPDX-License-Identifier: Apache-2.0
"""Shards: groups on disk. One record batch of an Arrow file is one group, one row is one segment.

Writing: `to_batch` makes a batch from numpy buffers; `ShardWriter` collects batches and publishes
them as `shards/<writer>/NNNNNNNN.arrow`, telling where the bytes of each one are (`Where`). Each
batch carries its journal record as metadata, so a shard whose announcement was lost speaks for
itself. Reading: `read_group` reads the bytes of one group and no others, and refuses them unless
their hash is the journal's; `read_records` gives the records of a shard; `ragged` gives a list
column as flat values and offsets, and `to_rows` undoes `to_batch`.

Nothing here makes a Python list of tokens, maps a file into memory or looks a name up before it
exists.
"""

# pyright: standard
# (pyarrow's stubs leave most types unknown, which strict mode refuses.)

import errno
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from molt.records import Group, Sampling, StoreError, Where
from molt.store.files import publishing
from molt.store.schema import SCHEMA, SegmentRow

Array = npt.NDArray[Any]

MAGIC_BYTES = 8  # "ARROW1" and padding; the schema message follows
HEAD_BYTES = 1 << 14  # enough for a schema message
RECORD = b"molt.group"  # metadata key of a batch's journal record
CODECS = {"none": None, "zstd": pa.Codec("zstd", compression_level=1)}


# ---------------------------------------------------------------- rows ↔ batch


def to_batch(rows: Sequence[SegmentRow]) -> pa.RecordBatch:
    """One group as one record batch.

    Raises:
        ValueError: a row's parts do not fit together.
    """
    for row in rows:
        row.check()
    return pa.RecordBatch.from_arrays([_column(field, rows) for field in SCHEMA], schema=SCHEMA)


def to_rows(batch: pa.RecordBatch) -> list[SegmentRow]:
    """The rows of a batch; their arrays are views of it."""
    scalars = {
        field.name: batch.column(field.name).to_pylist()
        for field in SCHEMA
        if not pa.types.is_large_list(field.type)
    }
    lists = {
        field.name: ragged(batch, field.name)
        for field in SCHEMA
        if pa.types.is_large_list(field.type)
    }
    return [_row(scalars, lists, index) for index in range(batch.num_rows)]


def ragged(batch: pa.RecordBatch, name: str) -> tuple[Any, npt.NDArray[np.int64]]:
    """A list column as flat values and offsets, without copying where there are no nulls.

    Args:
        batch: Of S rows.
        name: A column of lists.

    Returns:
        values [N] of the items' dtype, nulls as NaN; for structs a dict of one array a field.
        offsets [S + 1] int64: row i is values[offsets[i]:offsets[i + 1]].
    """
    column: Any = batch.column(name)
    offsets = _numpy(column.offsets)
    items = column.flatten()
    if pa.types.is_struct(items.type):
        names = [items.type.field(i).name for i in range(items.type.num_fields)]
        return dict(zip(names, map(_numpy, items.flatten()), strict=True)), offsets - offsets[0]
    return _numpy(items), offsets - offsets[0]


def _numpy(array: Any) -> Array:
    """Without copying unless there are nulls; `to_numpy` would be slower and imports pandas."""
    if not array.null_count:
        return np.from_dlpack(array)
    validity, values = array.buffers()
    flat: Any = pa.Array.from_buffers(array.type, len(array), [None, values], 0, array.offset)
    bits = np.unpackbits(np.frombuffer(validity, np.uint8), bitorder="little")
    return np.where(bits[array.offset :][: len(array)], np.from_dlpack(flat), np.nan)


def _row(scalars: dict[str, list[Any]], lists: dict[str, tuple[Any, Array]], i: int) -> SegmentRow:
    def cut(name: str) -> Any:
        values, offsets = lists[name]
        part = slice(offsets[i], offsets[i + 1])
        if isinstance(values, dict):
            return [column[part] for column in values.values()]
        return values[part]

    return SegmentRow(
        **{name: values[i] for name, values in scalars.items()},
        token_ids=cut("token_ids"),
        behavior_logprobs=cut("behavior_logprobs"),
        action_spans=np.stack(cut("action_spans"), axis=1),
        version_spans=np.stack(cut("version_spans"), axis=1).astype(np.int64),
        turn_rewards=tuple(cut("turn_rewards").tolist()),
        sampling=tuple(
            Sampling(temperature=temperature, max_tokens=max_tokens)
            for temperature, max_tokens in zip(*(c.tolist() for c in cut("sampling")), strict=True)
        ),
    )


def _column(field: Any, rows: Sequence[SegmentRow]) -> Any:
    """The Arrow array of one field: lists from one numpy array a row, others from values."""
    parts: list[Any] = [getattr(row, field.name) for row in rows]
    if not pa.types.is_large_list(field.type):
        return pa.array(parts, field.type)
    if field.name == "sampling":
        pairs = [[(s.temperature, s.max_tokens) for s in part] for part in parts]
        parts = [np.array(p, np.float64).reshape(-1, 2) for p in pairs]
    offsets: Any = pa.array(np.cumsum([0, *map(len, parts)], dtype=np.int64))
    items = _items(np.concatenate(parts), field.type.value_field)
    return pa.LargeListArray.from_arrays(offsets, items, type=field.type)


def _items(values: Any, field: Any) -> Any:
    """The items of all lists: [N], or [N, fields] for structs.

    NaN becomes null where the field has nulls; the values' own buffer is used.
    """
    if pa.types.is_struct(field.type):
        fields = list(field.type)
        columns = [pa.array(values[:, i], f.type) for i, f in enumerate(fields)]
        return pa.StructArray.from_arrays(columns, fields=fields)
    if not field.nullable:
        return pa.array(values, field.type)
    values = values.astype(field.type.to_pandas_dtype(), copy=False)
    missing = np.isnan(values)
    bits: Any = np.packbits(~missing, bitorder="little")
    buffers: list[pa.Buffer | None] = [pa.py_buffer(bits), pa.py_buffer(values)]
    return pa.Array.from_buffers(field.type, len(values), buffers, int(missing.sum()))


# ---------------------------------------------------------------- batches → file


class ShardWriter:
    """The shards of one writer: one incarnation of one process, whose name is never used again.

    `publish` may run in a thread while others `add`: it takes what is there when it starts. After a
    StoreError everything is still held, and the next `publish` writes it under a new name.
    """

    def __init__(
        self, run_dir: Path, writer: str, compression: Literal["none", "zstd"] = "none"
    ) -> None:
        self._run_dir = run_dir
        self._directory = Path("shards") / writer
        self._options = pa.ipc.IpcWriteOptions(compression=CODECS[compression])
        self._waiting: list[tuple[float, pa.RecordBatch, Group | None]] = []  # time of `add`, …
        self._next = 0
        try:
            (run_dir / self._directory).mkdir(parents=True)
        except FileExistsError as error:
            raise StoreError(
                f"{run_dir / self._directory} exists: every start of a writer needs a new name"
            ) from error

    @property
    def num_batches(self) -> int:
        """Batches not published yet."""
        return len(self._waiting)

    @property
    def bytes(self) -> int:
        """Their size in memory."""
        return sum(batch.nbytes for _, batch, _ in self._waiting)

    @property
    def age_s(self) -> float:
        """Seconds since the oldest of them was added; 0 if there is none."""
        return time.monotonic() - self._waiting[0][0] if self._waiting else 0.0

    def add(self, batch: pa.RecordBatch, record: Group | None = None) -> None:
        """Hold a group, and its record without a place, until the next `publish`."""
        self._waiting.append((time.monotonic(), batch, record))

    def publish(self) -> list[Where]:
        """Write what is held as one shard.

        Returns:
            Where each batch is, in the order they were added.

        Raises:
            StoreError: the filesystem refused; no file is left behind, the batches are still held.
        """
        batches = [(batch, record) for _, batch, record in self._waiting]
        if not batches:
            return []
        path = self._directory / f"{self._next:08d}.arrow"
        self._next += 1
        with publishing(self._run_dir / path) as file:
            places = _write(file, batches, str(path), self._options)
        del self._waiting[: len(batches)]
        return places


class _Hashed:
    """A file that Arrow writes to; it counts the bytes and hashes those since `start`."""

    closed = False

    def __init__(self, file: BinaryIO, start: int) -> None:
        self._file = file
        self._hash = xxhash.xxh3_128()
        self._position = 0
        self._start = start

    def write(self, data: Any) -> int:
        if self._position == self._start:
            self._hash.reset()
        self._hash.update(data)
        self._position += len(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def take(self, path: str) -> Where:
        """What was written since `start`, which moves here."""
        start, self._start = self._start, self._position
        length = self._position - start
        return Where(path=path, offset=start, length=length, hash=self._hash.hexdigest())


def _write(
    file: BinaryIO,
    batches: list[tuple[pa.RecordBatch, Group | None]],
    path: str,
    options: pa.ipc.IpcWriteOptions,
) -> list[Where]:
    """Write an Arrow file; its schema goes out with the first batch, so its end is computed."""
    sink: Any = _Hashed(file, MAGIC_BYTES + SCHEMA.serialize().size)
    with pa.ipc.new_file(pa.PythonFile(sink, "w"), SCHEMA, options=options) as writer:
        places: list[Where] = []
        for batch, record in batches:
            metadata = {RECORD: msgspec.json.encode(record)} if record else None
            writer.write_batch(batch, custom_metadata=metadata)
            places.append(sink.take(path))
        return places


# ---------------------------------------------------------------- file → batch


def read_group(run_dir: Path, where: Where, deadline_s: float = 120.0) -> pa.RecordBatch:
    """Read, verify and parse the bytes of one group.

    Args:
        run_dir: The run directory.
        where: From the group's record.
        deadline_s: How long an announced file may stay invisible (a network filesystem's caches).

    Raises:
        StoreError: the file is not there, or its bytes are not those that were published.
    """
    path = run_dir / where.path
    fd = _open(path, deadline_s)
    try:
        head = _pread(fd, HEAD_BYTES, MAGIC_BYTES)
        data = _pread(fd, where.length, where.offset)
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}: check the filesystem") from error
    finally:
        os.close(fd)
    found = xxhash.xxh3_128_hexdigest(data)
    if found != where.hash:
        raise StoreError(
            f"{path} bytes {where.offset}+{where.length}: {data.size} read with hash {found}, "
            f"published with {where.hash}: the file was changed or cut, restore it from a backup"
        )
    try:
        batch = pa.ipc.read_record_batch(data, _schema(head, path))
        batch.validate(full=True)
    except (pa.ArrowException, OSError) as error:
        raise StoreError(
            f"{path} bytes {where.offset}+{where.length} are no group ({error}): restore the file"
        ) from error
    return batch


def read_records(run_dir: Path, path: Path | str) -> list[Group]:
    """The records of all groups in a published shard, with their places.

    Raises:
        StoreError: it is not a whole shard.
    """
    groups: list[Group] = []
    try:
        with pa.OSFile(str(run_dir / path), "rb") as file:
            reader: Any = pa.ipc.open_file(file)
            for index in range(reader.num_record_batches):
                _, metadata = reader.get_batch_with_custom_metadata(index)
                groups.append(msgspec.json.decode(metadata[RECORD], type=Group))
            file.seek(MAGIC_BYTES + SCHEMA.serialize().size)
            return [_placed(group, file, str(path)) for group in groups]
    except (pa.ArrowException, OSError, KeyError, TypeError, msgspec.MsgspecError) as error:
        raise StoreError(f"{run_dir / path} is not a whole shard of groups: {error}") from error


def _placed(group: Group, file: Any, path: str) -> Group:
    """The record of the batch that starts where `file` stands; leaves it at the batch's end."""
    start = file.tell()
    pa.ipc.read_message(file)
    length = file.tell() - start
    file.seek(start)
    digest = xxhash.xxh3_128_hexdigest(file.read(length))
    where = Where(path=path, offset=start, length=length, hash=digest)
    return msgspec.structs.replace(group, where=where)


def _open(path: Path, deadline_s: float) -> int:
    """Open an announced file; until the deadline, not finding it means that a cache is stale."""
    deadline, pause = time.monotonic() + deadline_s, 0.01
    while True:
        try:
            return os.open(path, os.O_RDONLY)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE) or time.monotonic() >= deadline:
                raise StoreError(
                    f"cannot open {path}: {error.strerror}: was it removed, or is "
                    "it on a filesystem that not every node shares?"
                ) from error
        time.sleep(pause)
        pause = min(2 * pause, 1.0)
        for directory in (path.parent.parent, path.parent):  # drops what NFS remembers of them
            with suppress(OSError):
                os.close(os.open(directory, os.O_RDONLY | os.O_DIRECTORY))


def _pread(fd: int, length: int, offset: int) -> pa.Buffer:
    """`length` bytes, or as many as there are."""
    data = pa.allocate_buffer(length)
    view = memoryview(data)
    done = 0
    while done < length and (count := os.preadv(fd, [view[done:]], offset + done)):
        done += count
    return data.slice(0, done)


def _schema(head: pa.Buffer, path: Path) -> pa.Schema:
    """The schema of a shard, which may have more columns than ours."""
    schema = pa.ipc.read_schema(head)
    for field in SCHEMA:
        index = schema.get_field_index(field.name)
        if index < 0 or schema.field(index).type != field.type:
            raise StoreError(
                f"{path} has no column {field.name} of type {field.type}: is it of another Molt?"
            )
    return schema
