# SPDX-License-Identifier: Apache-2.0
"""The journal: what happened, in order, in one append-only file per epoch (start of a coordinator).

A line is the xxh3_64 of its JSON in 16 hex digits, a space, the JSON of one record, a newline. A
crash can tear the last line of a file, and only that: the next coordinator opens a new file and
never writes to an old one. So a last line that lacks its newline, or has bytes that were never
written (zeros), does not exist; any other unreadable line is damage.

A coordinator starts its epoch first and folds `read_journal` then (its own epoch record is in
it), so that nothing an earlier coordinator managed to append is missed.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec
import xxhash

from molt.records import SCHEMA_VERSION, Epoch, Fenced, Record, StoreError
from molt.store.files import publishing

_decoder = msgspec.json.Decoder(Record)
_encoder = msgspec.json.Encoder()


class Journal:
    """The open file of this epoch. One process appends to it, from one thread."""

    def __init__(self, path: Path, epoch: int) -> None:
        self.path = path
        self.epoch = epoch
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND)

    @classmethod
    def start(cls, run_dir: Path, run: str) -> "Journal":
        """Take the next epoch: publish a file that holds its epoch record.

        Raises:
            Fenced: another coordinator took the epoch at the same moment.
            StoreError: the filesystem refused.
        """
        files = _files(run_dir)
        epoch = max(files, default=0) + 1
        path = run_dir / "journal" / f"{epoch:08d}.jsonl"
        try:
            with publishing(path) as file:
                file.write(_line(Epoch(epoch=epoch, run=run, time=time.time())))
        except StoreError as error:
            if not isinstance(error.__cause__, FileExistsError):
                raise
            raise Fenced(
                f"another coordinator took epoch {epoch} of {run_dir}: stop one of them"
            ) from error
        return cls(path, epoch)

    def append(self, records: Iterable[Record]) -> None:
        """Append records in one write and one sync: they are durable when this returns.

        Raises:
            StoreError: the filesystem refused. What is in the file is then unknown, so the journal
                is closed; a new epoch reads what became durable.
        """
        data = b"".join(map(_line, records))
        if self._fd < 0:
            raise StoreError(f"{self.path} is closed: start a new epoch")
        try:
            while data:  # a write falls short only when the disk is full
                data = data[os.write(self._fd, data) :]
            os.fsync(self._fd)
        except OSError as error:
            self.close()
            raise StoreError(
                f"cannot append to {self.path}: {error.strerror}: make room, then start again"
            ) from error

    def close(self) -> None:
        """Close the file. Every record of it is durable already."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def read_journal(run_dir: Path, torn: Callable[[str], None] | None = None) -> Iterator[Record]:
    """Every record of every epoch, in order; also while a coordinator is appending.

    Args:
        run_dir: The run directory.
        torn: Told about each torn tail that was cut.

    Raises:
        StoreError: a line that a crash cannot explain, or an epoch file that is missing.
    """
    for index, (epoch, path) in enumerate(sorted(_files(run_dir).items()), 1):
        if epoch != index:
            raise StoreError(f"{path.parent} lacks {index:08d}.jsonl: restore it from a backup")
        yield from _read(path, epoch, torn)


def _files(run_dir: Path) -> dict[int, Path]:
    return {int(p.stem): p for p in (run_dir / "journal").glob("*.jsonl") if p.stem.isdigit()}


def _line(record: Record) -> bytes:
    data = _encoder.encode(record)
    return b"%016x %b\n" % (xxhash.xxh3_64_intdigest(data), data)


def _read(path: Path, epoch: int, torn: Callable[[str], None] | None) -> Iterator[Record]:
    with path.open("rb") as file:
        lines = file.readlines()
    for number, line in enumerate(lines, 1):
        data = line[17:-1]
        if line != b"%016x %b\n" % (xxhash.xxh3_64_intdigest(data), data):
            unfinished = not line.endswith(b"\n") or b"\0\0" in line
            if unfinished and 1 < number == len(lines):  # the first line was published whole
                if torn is not None:
                    torn(f"{path}:{number}: cut {len(line)} bytes of an unfinished record")
                return
            raise StoreError(
                f"{path}:{number} is damaged (its checksum differs): restore the file from a backup"
            )
        yield _decode(data, path, number, epoch)
    if not lines:
        raise StoreError(f"{path} is empty: restore the file from a backup")


def _decode(data: bytes, path: Path, number: int, epoch: int) -> Record:
    try:
        record = _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise StoreError(
            f"{path}:{number} holds a record this Molt does not know ({error}): update Molt"
        ) from error
    if isinstance(record, Epoch) and (record.epoch != epoch or record.schema > SCHEMA_VERSION):
        raise StoreError(
            f"{path}:{number} is of epoch {record.epoch} and schema {record.schema}, not of epoch "
            f"{epoch} and schema ≤ {SCHEMA_VERSION}: was it copied, or written by a newer Molt?"
        )
    return record
