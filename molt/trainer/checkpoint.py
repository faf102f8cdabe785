# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of the trainer: RUN/checkpoints/step-NNNNNN/, complete only when its marker exists.

    Saving(…) ─▶ ranks write ─▶ ranks hash what lies there ─▶ finish: marker, older ones go
                 └─── in the background, `done` goes on ───┘

The marker is written last and holds what a restart needs beside weights and optimizer state: the
step, which is the cursor over plans, the version and the lineage; and what the files have to be. A
directory without one is what a crash left: nobody reads it, and the next save clears it away. A
checkpoint that is no longer kept loses its marker first, and not before the newer one has its own.

All functions but `complete` are collective.
"""

import logging
import shutil
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import xxhash
from msgspec import field

from molt.records import StoreError, Struct
from molt.store.files import publish_file, sync_directory
from molt.store.run import RunDir
from molt.trainer import ranks
from molt.trainer.policy import Policy

MARKER = "complete.json"
CHUNK_BYTES = 1 << 24
log = logging.getLogger("molt.trainer")

Files = dict[str, tuple[int, str]]  # name → bytes, xxh3_128


class Marker(Struct):
    """What a complete checkpoint says about itself."""

    step: int  # plans 1 … step are trained
    version: int  # that its weights were published under; 0 = never
    lineage: int
    files: Files = field(default_factory=dict)


class Saving:
    """A checkpoint on its way to the disk.

    Args:
        run_dir: The run directory.
        marker: What it will say, without its files.
        policy: Is copied when this returns: training may go on.

    Raises:
        StoreError: here and in the methods, on every rank: one of them could not write. What was
            complete before still is.
    """

    def __init__(self, run_dir: Path, marker: Marker, policy: Policy) -> None:
        self.marker, self.path = marker, RunDir(run_dir).checkpoint(marker.step)
        ranks.first(self._clear)
        self._work: Future[Any] = policy.save(self.path)
        self._hashing = False

    def done(self) -> bool:
        """Whether `finish` has nothing to wait for."""
        while all(ranks.gathered(self._work.done())):
            if self._hashing:
                return True
            self._hash()
        return False

    def finish(self, keep: int) -> list[int]:
        """Wait, publish the marker, and delete all but the `keep` newest.

        Returns:
            The steps of the checkpoints that are kept, in order.
        """
        if not self._hashing:
            self._hash()
        self._wait()
        files: Files = {}
        for part in ranks.gathered(self._work.result()):
            files |= part
        return ranks.first(lambda: self._complete(files, keep))

    def _clear(self) -> None:
        with _named(self.path):
            _remove(self.path)
            self.path.mkdir(parents=True)

    def _hash(self) -> None:
        """Begin to hash the files, whichever rank wrote them."""
        self._wait()
        seen = ranks.gathered([f.name for f in self.path.iterdir() if f.is_file()])
        names = sorted({name for part in seen for name in part})
        self._work = ThreadPoolExecutor(1, "hash").submit(_hashes, self.path, ranks.share(names))
        self._hashing = True

    def _wait(self) -> None:
        """Wait for the work of every rank."""
        wait_for([self._work])
        for rank, reason in enumerate(ranks.gathered(_reason(self._work.exception()))):
            if reason:
                free = shutil.disk_usage(self.path.parent).free / 2**30
                raise StoreError(
                    f"checkpoint {self.path} was not written, rank {rank}: {reason} ({free:.1f} "
                    "GiB are free there): make room or mend the filesystem, then start it again"
                )

    def _complete(self, files: Files, keep: int) -> list[int]:
        with _named(self.path):
            sync_directory(self.path)
            sync_directory(self.path.parent)
            marker = msgspec.structs.replace(self.marker, files=files)
            publish_file(self.path / MARKER, msgspec.json.encode(marker))
            found = complete(self.path.parents[1])
            kept = sorted(found, key=lambda path: found[path].step)[-keep:]
            for old in self.path.parent.glob("step-*"):
                if old not in kept:
                    _remove(old)
        return [found[path].step for path in kept]


def restore(run_dir: Path, policy: Policy) -> Marker | None:
    """Load the newest checkpoint whose files are what its marker says.

    Returns:
        Its marker, the same on every rank; None if the run has no complete checkpoint.

    Raises:
        StoreError: there are complete checkpoints and none can be loaded.
    """
    found = ranks.first(lambda: _newest_first(run_dir))
    for path, marker in found:
        wrong = [text for part in ranks.gathered(_differences(path, marker)) for text in part]
        if not wrong:
            policy.load(path)
            return marker
        log.warning("skipping checkpoint %s: %s", path, wrong[0])
    if found:
        raise StoreError(
            f"none of the {len(found)} complete checkpoints of {run_dir} can be loaded: "
            "restore one from a backup (molt verify tells what is wrong with each)"
        )
    return None


def abandon(run_dir: Path, step: int) -> list[int]:
    """Take back checkpoints newer than the one that was restored, which were damaged.

    Training takes another way from here on. One of them that can be read again would lead back.

    Returns:
        The steps of those that are left, in order.
    """
    return ranks.first(lambda: _abandon(run_dir, step))


def complete(run_dir: Path) -> dict[Path, Marker]:
    """All complete checkpoints; what is not complete is left out."""
    found = _look(run_dir)
    return {path: m for path, m in found.items() if isinstance(m, Marker) and _has_sizes(path, m)}


def _look(run_dir: Path) -> dict[Path, Marker | str]:
    """The marker of each checkpoint, or why it has none that can be read."""
    found: dict[Path, Marker | str] = {}
    for path in sorted(RunDir(run_dir).checkpoints.glob("step-*")):
        try:
            found[path] = msgspec.json.decode((path / MARKER).read_bytes(), type=Marker)
        except (OSError, msgspec.DecodeError) as error:
            found[path] = str(error)
    return found


def _newest_first(run_dir: Path) -> list[tuple[Path, Marker]]:
    found: list[tuple[Path, Marker]] = []
    for path, marker in _look(run_dir).items():
        if isinstance(marker, Marker):
            found.append((path, marker))
        else:
            log.warning("skipping checkpoint %s, which is not complete: %s", path, marker)
    return sorted(found, key=lambda item: -item[1].step)


def _abandon(run_dir: Path, step: int) -> list[int]:
    for path, marker in _look(run_dir).items():
        if isinstance(marker, Marker) and marker.step > step:
            log.warning("checkpoint %s is taken back: training goes on from %d", path, step)
            with _named(path):
                _unmark(path)
    return sorted(marker.step for marker in complete(run_dir).values())


def _hashes(path: Path, names: Sequence[str]) -> Files:
    """Size and xxh3_128 of files."""
    found: Files = {}
    for name in names:
        hashed, size = xxhash.xxh3_128(), 0
        with (path / name).open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                hashed.update(chunk)
                size += len(chunk)
        found[name] = (size, hashed.hexdigest())
    return found


def _differences(path: Path, marker: Marker) -> list[str]:
    """What is not as the marker says, in this rank's share of the files."""
    names = ranks.share(sorted(marker.files))
    try:
        found = _hashes(path, names)
    except OSError as error:
        return [f"{error.filename} cannot be read: {error.strerror}"]
    return [f"{name} was cut or changed" for name in names if marker.files[name] != found[name]]


def _reason(error: BaseException | None) -> str:
    """What an error says; torch's say where first, over many lines."""
    lines = f"{type(error).__name__}: {error}".strip().splitlines()
    return lines[-1] if error else ""


def _has_sizes(path: Path, marker: Marker) -> bool:
    """Whether each file is there and has its size."""
    files = ((path / name, size) for name, (size, _) in marker.files.items())
    return all(file.exists() and file.stat().st_size == size for file, size in files)


def _remove(path: Path) -> None:
    """Delete a checkpoint, marker first."""
    if path.exists():
        _unmark(path)
        shutil.rmtree(path)


def _unmark(path: Path) -> None:
    (path / MARKER).unlink(missing_ok=True)
    sync_directory(path)


@contextmanager
def _named(path: Path) -> Generator[None]:
    """What the filesystem refuses, as an error of Molt's own."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"cannot write or remove checkpoint {error.filename or path}: {error.strerror}: make "
            "room or mend the filesystem, then start it again"
        ) from error
