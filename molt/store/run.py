# SPDX-License-Identifier: Apache-2.0
"""The run directory: where each file of a run lies, and its two small formats.

```
RUN/config.json  token  journal/EEEEEEEE.jsonl  shards/<writer>/NNNNNNNN.arrow
    checkpoints/step-NNNNNN/  metrics.jsonl  logs/attempt-N/
```

config.json is published last: a directory is a run if and only if it has one.
"""

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec

from molt.records import ConfigError, StoreError
from molt.store.files import publish_file

__all__ = ["RunDir", "append_metrics", "publish_file", "read_metrics"]


@dataclass(frozen=True)
class RunDir:
    """Paths of one run directory."""

    path: Path

    @classmethod
    def create(cls, path: Path, config: bytes) -> "RunDir":
        """Make a run of an absent or empty directory, or of what an interrupted `create` left.

        Raises:
            StoreError: the directory is a run already or holds something else.
        """
        run = cls(path)
        ours = (run.journal, run.shards, run.checkpoints, run.logs)
        path.mkdir(parents=True, exist_ok=True)
        foreign = {p.name for p in path.iterdir() if not p.name.endswith(".tmp")}
        foreign -= {p.name for p in (*ours, run.token)}
        if foreign:
            raise StoreError(
                f"{path} holds {min(foreign)!r}: a new run needs an empty directory, "
                "name another with run.dir"
            )
        for directory in ours:
            directory.mkdir(exist_ok=True)
        if not run.token.exists():
            publish_file(run.token, secrets.token_hex(32).encode(), mode=0o600)
        publish_file(run.config, config)
        return run

    @classmethod
    def open(cls, path: Path) -> "RunDir":
        """The run in an existing directory.

        Raises:
            ConfigError: there is no run.
        """
        run = cls(path)
        needed = (run.config, run.journal)  # a model's directory has a config.json too
        if missing := [p.name for p in needed if not p.exists()]:
            what = f"has no {missing[0]}" if path.is_dir() else "does not exist"
            raise ConfigError(f"{path} is not a run directory (it {what}): check the path")
        return run

    @property
    def config(self) -> Path:
        """config.json, the resolved configuration."""
        return self.path / "config.json"

    @property
    def token(self) -> Path:
        """The file with the bearer token of the control routes; mode 0600."""
        return self.path / "token"

    @property
    def journal(self) -> Path:
        """Directory of the epoch files."""
        return self.path / "journal"

    @property
    def shards(self) -> Path:
        """Directory of the writers' directories."""
        return self.path / "shards"

    @property
    def checkpoints(self) -> Path:
        """Directory of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        """metrics.jsonl, one flat object a trained step."""
        return self.path / "metrics.jsonl"

    @property
    def logs(self) -> Path:
        """Directory of the attempts' logs."""
        return self.path / "logs"

    def checkpoint(self, step: int) -> Path:
        """Directory of the checkpoint after `step`."""
        return self.checkpoints / f"step-{step:06d}"

    def changes(self, attempt: int) -> dict[str, tuple[Any, Any]]:
        """Config keys that an attempt has otherwise than the one before: key → (before, now)."""
        paths = (self.logs / f"attempt-{n}" / "config.json" for n in range(attempt, 0, -1))
        newest = [_flat(msgspec.json.decode(p.read_bytes())) for p in paths if p.exists()][:2]
        if len(newest) < 2:
            return {}
        now, before = newest
        keys = sorted(before.keys() | now.keys())
        return {k: (before.get(k), now.get(k)) for k in keys if before.get(k) != now.get(k)}

    def attempt_dir(self) -> Path:
        """Make and return the next logs/attempt-N."""
        taken = [int(p.name.rpartition("-")[2]) for p in self.logs.glob("attempt-*")]
        path = self.logs / f"attempt-{max(taken, default=0) + 1}"
        path.mkdir(parents=True)
        return path


def append_metrics(path: Path, row: Mapping[str, Any]) -> None:
    """Append one object to metrics.jsonl in one write. A tail that a crash tore is cut first.

    Nothing is appended if the last line is of the same version: whoever wrote it could not say so.
    """
    with path.open("a+b", buffering=0) as file:
        whole = _whole_bytes(file.fileno())
        if whole < os.fstat(file.fileno()).st_size:
            file.truncate(whole)
        start = _whole_bytes(file.fileno(), whole - 1)
        last = _version_of(os.pread(file.fileno(), whole - start, start))
        if last is None or last != row.get("version"):
            file.write(msgspec.json.encode(row) + b"\n")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl as written; no file is no rows, a torn last line is no row.

    Raises:
        StoreError: a line that is not the last cannot be read.
    """
    if not path.exists():
        return []
    decoder = msgspec.json.Decoder(dict[str, Any])
    rows: list[dict[str, Any]] = []
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            rows.append(decoder.decode(line))
        except msgspec.DecodeError as error:
            raise StoreError(
                f"{path}:{number} is not a JSON object ({error}): remove the line; "
                "nothing but the plots depends on it"
            ) from error
    return rows


def _version_of(line: bytes) -> Any:
    """None if the line cannot be read: nothing but the plots depends on it."""
    try:
        return msgspec.json.decode(line, type=dict[str, Any]).get("version")
    except msgspec.DecodeError:
        return None


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys."""
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for key, value in cast(dict[str, Any], tree).items():
        flat |= _flat(value, f"{prefix}.{key}" if prefix else key)
    return flat


def _whole_bytes(fd: int, end: int | None = None) -> int:
    """Length of the file up to and including its last newline, of those before `end`."""
    end = os.fstat(fd).st_size if end is None else end
    while end > 0:
        start = max(0, end - 4096)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
