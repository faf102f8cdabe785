# SPDX-License-Identifier: Apache-2.0
"""How a file becomes visible: whole, durable and under a name that nothing else ever had.

Publish = temporary file in the same directory → write → fsync → link under its name → fsync the
directory. A link, unlike a rename, cannot replace: if two writers want one name, exactly one gets
it, on NFS too. A crash leaves at most a `.NAME.XXXXXXXX.tmp`, which nobody reads.
"""

import os
import secrets
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from molt.records import StoreError

BUFFER_BYTES = 1 << 20  # an Arrow message is written in many small pieces


@contextmanager
def publishing(path: Path, mode: int = 0o644) -> Generator[BinaryIO]:
    """Give a temporary file to write; it becomes `path` when the block ends without an exception.

    Raises:
        StoreError: the name is taken (its cause is a FileExistsError), or the filesystem refused
            (full, over quota, read-only). Nothing is left behind.
    """
    temp = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        try:
            with open(temp, "xb", BUFFER_BYTES, opener=lambda p, f: os.open(p, f, mode)) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            _link(temp, path)
        finally:
            temp.unlink(missing_ok=True)
        sync_directory(path.parent)
    except FileExistsError as error:
        raise StoreError(f"{path} exists: a published file never changes") from error
    except OSError as error:
        raise StoreError(
            f"cannot publish {path}: {error.strerror}: make room or mend the filesystem, then go on"
        ) from error


def publish_file(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Publish a small file; errors as of `publishing`."""
    with publishing(path, mode) as file:
        file.write(data)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _link(temp: Path, path: Path) -> None:
    """Give `temp` its name.

    NFS repeats a call whose reply was lost and then reports its own success as an error: the link
    count decides.
    """
    try:
        os.link(temp, path)
    except OSError:
        if temp.stat().st_nlink != 2:
            raise
