# SPDX-License-Identifier: Apache-2.0
"""The journal: what happened, in order, in one append-only file per epoch (start of a coordinator).

```
journal/00000001.jsonl.zst   sealed: compressed, never read again but for history
journal/00000002.claim       somebody took this number
journal/00000002.jsonl       the newest file: its first record holds the state it starts from
```

A line is the xxh3_64 of its JSON in 16 hex digits, a space, the JSON of one record, a newline. A
crash can tear the last line of a file, and only that: one that lacks its newline, or has bytes that
were never written (zeros), does not exist; any other unreadable line is damage.

A start takes a number first (hard links elect one), folds the newest file then, and opens its own
with the seal of that one: how many of its bytes exist, their hash and the folded state. A running
coordinator looks for higher numbers after its start and after every append, before anybody is
answered. So whatever was answered is inside the seal, what an old coordinator appends later does
not exist, and whoever starts later continues the file of one that passed. Names are listed and
never looked up: a network filesystem remembers for long that a name was not there.
"""

import io
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import xxhash
import zstandard

from molt.records import NULL, SCHEMA_VERSION, Epoch, Fenced, Record, StoreError
from molt.store.files import publish_file, publishing
from molt.store.state import State

FRAME_BYTES = 1 << 20  # of content in one compressed frame
Torn = Callable[[str], None]

_zstd: Any = zstandard  # its stubs leave most types unknown
_decoder = msgspec.json.Decoder(Record)
_encoder = msgspec.json.Encoder()


class Journal:
    """The open file of this epoch. One process appends to it, from one thread."""

    def __init__(self, path: Path, first: Epoch) -> None:
        self.path, self.first = path, first
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND)

    @classmethod
    def start(
        cls,
        run_dir: Path,
        run: str,
        attempt: int = 0,
        changes: dict[str, tuple[Any, Any]] | None = None,
        torn: Torn | None = None,
    ) -> tuple["Journal", State]:
        """Take the next epoch, seal the one before, and open a file of its own.

        Returns:
            The journal and the state: the fold of everything before and of its own first record.

        Raises:
            Fenced: another coordinator started at the same moment.
            StoreError: the filesystem refused, or the newest file is damaged.
        """
        directory = run_dir / "journal"
        epoch = max(_numbers(directory), default=0) + 1
        _claim(directory, epoch)
        newest = _newest(directory)
        state, content = _fold(newest, torn) if newest else (State(), b"")
        if newest:
            _sync(newest)  # what a killed process wrote may be in memory alone
        first = Epoch(
            epoch=epoch,
            run=run,
            time=time.time(),
            previous=_number(newest) if newest else 0,
            sealed=len(content),
            hash=xxhash.xxh3_128_hexdigest(content) if newest else "",
            state=msgspec.Raw(_encoder.encode(state)) if newest else NULL,
            attempt=attempt,
            changes=changes or {},
        )
        path = directory / f"{epoch:08d}.jsonl"
        publish_file(path, _line(first))
        _refuse_old(directory, epoch)
        state.apply(first)
        return cls(path, first), state

    def append(self, records: Iterable[Record]) -> None:
        """Append records in one write and one sync: they are durable when this returns.

        Raises:
            Fenced: another coordinator has taken over. Nobody may be answered: whether the records
                exist is for it to say.
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
            _refuse_old(self.path.parent, self.first.epoch)
        except OSError as error:
            self.close()
            raise StoreError(
                f"cannot append to {self.path}: {error.strerror}: make room, then start again"
            ) from error
        except Fenced:
            self.close()
            raise

    def compress_previous(self) -> None:
        """Compress what this epoch sealed, and what earlier epochs did not get to.

        Raises:
            StoreError: the filesystem refused; the run does not need the compression.
        """
        later, directory = self.first, self.path.parent
        names = {p.name for p in directory.iterdir()}
        while (name := f"{later.previous:08d}.jsonl") in names:
            path = directory / name
            content = _sealed(_read(path), later, path)
            if f"{name}.zst" not in names:
                _compress(content, directory / f"{name}.zst")
            path.unlink()
            later = _first(content, path)

    def close(self) -> None:
        """Close the file. Every record of it is durable already."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def read_state(run_dir: Path) -> State:
    """The state of a run, from its newest file alone.

    Raises:
        StoreError: that file is damaged.
    """
    newest = _newest(run_dir / "journal")
    return _fold(newest, None)[0] if newest else State()


def read_journal(run_dir: Path, torn: Torn | None = None) -> Iterator[Record]:
    """Every record of every epoch, in order; also while a coordinator is appending.

    An epoch whose coordinator lost against another one, started at the same moment, is not part of
    the history.

    Args:
        run_dir: The run directory.
        torn: Told about a torn tail that was cut.

    Raises:
        StoreError: a line that a crash cannot explain, or an epoch file that is missing, or is not
            what its seal says.
    """
    directory = run_dir / "journal"
    files, path = _files(directory), _newest(directory)
    chain: list[tuple[Path, Epoch | None]] = []  # newest first, each with the one that sealed it
    sealer: Epoch | None = None
    while path:
        chain.append((path, sealer))
        sealer = _first(_read(path, line=True), path)
        path = files.get(sealer.previous)
        if sealer.previous and not path:
            raise StoreError(
                f"{directory} lacks {sealer.previous:08d}.jsonl: restore it from a backup"
            )
    for path, sealer in reversed(chain):
        content = _read(path)
        yield from _records(_sealed(content, sealer, path) if sealer else content, path, torn)


# ---------------------------------------------------------------- files


def _claim(directory: Path, epoch: int) -> None:
    """Take a number; a link cannot replace, so one of two wins."""
    try:
        publish_file(directory / f"{epoch:08d}.claim", b"")
    except StoreError as error:
        if not isinstance(error.__cause__, FileExistsError):
            raise
        raise Fenced(
            f"another coordinator took epoch {epoch} of {directory.parent}: stop one of them"
        ) from error


def _numbers(directory: Path) -> set[int]:
    """Every number that was ever taken."""
    return {int(n) for p in os.scandir(directory) if (n := p.name.partition(".")[0]).isdigit()}


def _refuse_old(directory: Path, epoch: int) -> None:
    newest = max(_numbers(directory))
    if newest > epoch:
        raise Fenced(f"epoch {newest} has begun: the coordinator of epoch {epoch} ends")


def _files(directory: Path) -> dict[int, Path]:
    """Epoch files by number. Until it is removed, the one that was written is as good."""
    names = sorted(p for p in directory.iterdir() if p.name.endswith((".jsonl", ".jsonl.zst")))
    return {_number(p): p for p in reversed(names) if p.name[:8].isdigit()}


def _number(path: Path) -> int:
    return int(path.name[:8])


def _newest(directory: Path) -> Path | None:
    """The file that the run goes on from."""
    files = _files(directory)
    path = files[max(files)] if files else None
    if path and path.suffix == ".zst":
        raise StoreError(
            f"{directory} lacks the file after {path.name}, which a later epoch sealed: "
            "restore it from a backup"
        )
    return path


def _read(path: Path, line: bool = False) -> bytes:
    """The content of a file, or its first line."""
    try:
        with _open(path) as file:
            return file.readline() if line else file.read()
    except _zstd.ZstdError as error:
        raise StoreError(f"{path} is damaged ({error}): restore it from a backup") from error
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}: check the filesystem") from error


def _open(path: Path) -> BinaryIO:
    """Content to read. That a compressed file is cut is for its seal to tell."""
    try:
        file = path.open("rb")
    except FileNotFoundError:  # compressed since it was listed
        path = path.with_name(f"{path.name}.zst")
        file = path.open("rb")
    if path.suffix != ".zst":
        return file
    return io.BufferedReader(
        _zstd.ZstdDecompressor().stream_reader(file, read_across_frames=True), FRAME_BYTES
    )


def _compress(content: bytes, path: Path) -> None:
    compressor = _zstd.ZstdCompressor(write_checksum=True)
    with publishing(path) as file:
        for start in range(0, len(content), FRAME_BYTES):
            file.write(compressor.compress(content[start : start + FRAME_BYTES]))


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _sealed(content: bytes, sealer: Epoch, path: Path) -> bytes:
    """What exists of a sealed file."""
    content = content[: sealer.sealed]
    if xxhash.xxh3_128_hexdigest(content) != sealer.hash:
        raise StoreError(
            f"{path} is not what epoch {sealer.epoch} sealed ({sealer.sealed} bytes, "
            f"xxh3_128 {sealer.hash}): it was cut or changed, restore it from a backup"
        )
    return content


# ---------------------------------------------------------------- lines


def _line(record: Record) -> bytes:
    data = _encoder.encode(record)
    return b"%016x %b\n" % (xxhash.xxh3_64_intdigest(data), data)


def _first(content: bytes, path: Path) -> Epoch:
    """The epoch record that a file begins with."""
    first = next(_records(content[: content.find(b"\n") + 1], path, None))
    if not isinstance(first, Epoch):
        raise StoreError(f"{path} does not begin with its epoch: restore it from a backup")
    return first


def _fold(path: Path, torn: Torn | None) -> tuple[State, bytes]:
    """The state after a file, and its content without a torn tail."""
    content = _read(path)
    first = _first(content, path)
    content = content[: _whole(content, path, torn)]
    try:
        state = State() if first.state == NULL else msgspec.json.decode(first.state, type=State)
        for record in _records(content, path, None):
            state.apply(record)
    except (Fenced, msgspec.DecodeError) as error:
        raise StoreError(
            f"{path} contradicts itself ({error}): restore it from a backup"
        ) from error
    return state, content


def _whole(content: bytes, path: Path, torn: Torn | None) -> int:
    """Bytes of a file that exist: all, but for a last line that a crash tore."""
    start = content.rfind(b"\n", 0, -1) + 1
    last = content[start:]
    if not last or _is_whole(last):
        return len(content)
    if start == 0 or (last.endswith(b"\n") and b"\0\0" not in last):
        return len(content)  # published whole, or damaged: reading it says so
    if torn is not None:
        number = content.count(b"\n", 0, start) + 1
        torn(f"{path}:{number}: cut {len(last)} bytes of an unfinished record")
    return start


def _is_whole(line: bytes) -> bool:
    data = line[17:-1]
    return line == b"%016x %b\n" % (xxhash.xxh3_64_intdigest(data), data)


def _records(content: bytes, path: Path, torn: Torn | None) -> Iterator[Record]:
    if not content:
        raise StoreError(f"{path} is empty: restore the file from a backup")
    lines = io.BytesIO(content[: _whole(content, path, torn)])
    for number, line in enumerate(lines, 1):
        data = line[17:-1] if line.endswith(b"\n") else line[17:]
        if line[:17] != b"%016x " % xxhash.xxh3_64_intdigest(data):
            raise StoreError(
                f"{path}:{number} is damaged (its checksum differs): restore the file from a backup"
            )
        yield _decode(data, path, number)


def _decode(data: bytes, path: Path, number: int) -> Record:
    try:
        record = _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise StoreError(
            f"{path}:{number} holds a record this Molt does not know ({error}): update Molt"
        ) from error
    if not isinstance(record, Epoch):
        return record
    if record.epoch != _number(path) or record.schema > SCHEMA_VERSION:
        raise StoreError(
            f"{path}:{number} is of epoch {record.epoch} and schema {record.schema}, not of epoch "
            f"{_number(path)} and schema ≤ {SCHEMA_VERSION}: was it copied, or written by a newer "
            "Molt?"
        )
    return record
