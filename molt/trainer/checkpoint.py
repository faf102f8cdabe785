# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of the trainer: RUN/checkpoints/step-NNNNNN/, complete only when its marker exists.

The marker is written last and holds what a restart needs beside weights and optimizer state: the
step, which is the cursor over plans, the version and the lineage. A directory without one is what a
crash left: nobody reads it, and the next save clears it away. A checkpoint that is no longer kept
loses its marker first, so that at no moment half of one looks whole.
"""

import logging
import shutil
from pathlib import Path

import msgspec
import torch.distributed as dist

from molt.records import Struct
from molt.store.files import publish_file, sync_directory
from molt.store.run import RunDir
from molt.trainer.policy import Policy

MARKER = "complete.json"
log = logging.getLogger("molt.trainer")


class Marker(Struct):
    """What a complete checkpoint says about itself."""

    step: int  # plans 1 … step are trained
    version: int  # that its weights were published under; 0 = never
    lineage: int


def save(run_dir: Path, marker: Marker, policy: Policy, rank: int, keep: int) -> Path:
    """Write the checkpoint of `marker.step` and delete all but the `keep` newest. Collective.

    Returns:
        Its directory, complete and durable.
    """
    path = RunDir(run_dir).checkpoint(marker.step)
    if rank == 0:
        _remove(path)
        path.mkdir(parents=True)
    _barrier()
    policy.save(path)
    if rank == 0:
        sync_directory(path.parent)
        publish_file(path / MARKER, msgspec.json.encode(marker))
        kept = sorted(complete(run_dir))[-keep:]
        for old in path.parent.glob("step-*"):
            if old not in kept:
                _remove(old)
    _barrier()
    return path


def newest(run_dir: Path) -> tuple[Path, Marker] | None:
    """The complete checkpoint with the highest step; None if there is none."""
    return max(complete(run_dir).items(), default=None, key=lambda item: item[1].step)


def load(path: Path, policy: Policy) -> None:
    """Bring weights and optimizer back to what `save` wrote. Collective."""
    policy.load(path)


def complete(run_dir: Path) -> dict[Path, Marker]:
    """All complete checkpoints; what is not complete is logged with the reason and left out."""
    found = {}
    for path in RunDir(run_dir).checkpoints.glob("step-*"):
        try:
            found[path] = msgspec.json.decode((path / MARKER).read_bytes(), type=Marker)
        except (OSError, msgspec.DecodeError) as error:
            log.warning("skipping checkpoint %s, which is not complete: %s", path, error)
    return found


def _remove(path: Path) -> None:
    """Delete a checkpoint, marker first."""
    if not path.exists():
        return
    (path / MARKER).unlink(missing_ok=True)
    sync_directory(path)
    shutil.rmtree(path)


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
