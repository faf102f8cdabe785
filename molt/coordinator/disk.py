# SPDX-License-Identifier: Apache-2.0
"""What the coordinator reads and deletes beside the journal, off its event loop.

It looks into `shards/` and `partials/` only for what a process that is gone may have left there
unannounced; everything else it knows from the journal.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from molt.records import Group, StoreError
from molt.store.partials import groups_of
from molt.store.run import RunDir, append_metrics
from molt.store.shards import read_records

log = logging.getLogger("molt.coordinator")


class Disk:
    """The files of one run."""

    def __init__(self, run: RunDir) -> None:
        self._run = run

    async def unannounced(self, runner: str, after: int) -> list[Group]:
        """The groups in a runner's shards whose number is higher than `after`."""
        return await asyncio.get_running_loop().run_in_executor(
            None, self._unannounced, runner, after
        )

    async def partials(self, runner: str = "*") -> dict[str, list[int]]:
        """Partials files of a runner, or of all, oldest first, and the groups in each."""
        return await asyncio.get_running_loop().run_in_executor(None, self._partials, runner)

    async def delete(self, paths: Sequence[str]) -> None:
        """Remove files, relative to the run directory; those that are gone already are fine."""
        await asyncio.get_running_loop().run_in_executor(None, self._delete, paths)

    async def append_metrics(self, row: Mapping[str, Any]) -> None:
        """Append a line to metrics.jsonl."""
        append_metrics(self._run.metrics, row)

    def _unannounced(self, runner: str, after: int) -> list[Group]:
        groups: list[Group] = []
        for path in _files(self._run.shards / runner):
            if int(path.stem) > after:
                try:
                    groups += read_records(self._run.path, path.relative_to(self._run.path))
                except StoreError as error:  # its groups are produced again
                    log.warning("not adopted: %s", error)
        return groups

    def _partials(self, runner: str) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for directory in sorted((self._run.path / "partials").glob(runner)):
            for path in _files(directory):
                try:
                    name = str(path.relative_to(self._run.path))
                    found[name] = groups_of(self._run.path, name)
                except StoreError as error:  # its tokens are sampled again
                    log.warning("not resumed: %s", error)
        return found

    def _delete(self, paths: Sequence[str]) -> None:
        for path in paths:
            try:
                (self._run.path / path).unlink(missing_ok=True)
            except OSError as error:
                log.warning("cannot remove %s: %s", path, error.strerror)


def _files(directory: Path) -> list[Path]:
    """The published files of a writer, oldest first."""
    return sorted(p for p in directory.glob("*.arrow") if p.stem.isdigit())
