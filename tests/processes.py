# SPDX-License-Identifier: Apache-2.0
"""Which processes belong to a run, as the kernel sees it: nothing may be left of one that ended."""

import time
from pathlib import Path

import psutil


def of_run(run: Path) -> list[psutil.Process]:
    """Living processes whose environment says that they log into a directory below `run`."""
    found = []
    for process in psutil.process_iter():
        try:
            logs = process.environ().get("MOLT_LOGS")
            if logs and Path(logs).is_relative_to(run) and lives(process):
                found.append(process)
        except psutil.Error:  # of another user, or gone meanwhile
            continue
    return found


def left(run: Path, within_s: float) -> list[psutil.Process]:
    """What still lives of a run that ended `within_s` ago: a killed process needs a moment."""
    deadline = time.monotonic() + within_s
    while (found := of_run(run)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def lives(process: psutil.Process) -> bool:
    """Whether a process is there and no zombie that waits to be reaped."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
