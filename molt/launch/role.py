# SPDX-License-Identifier: Apache-2.0
"""The inside of every role process: its configuration, its log, its end when its launcher ends."""

import asyncio
import ctypes
import importlib
import logging
import os
import signal
import sys
from pathlib import Path
from types import TracebackType

from molt.config import load_resolved
from molt.records import ConfigError, MoltError

ROLES = {
    "coordinator": "molt.coordinator.server",
    "engine": "molt.rollout.task",
    "runner": "molt.rollout.runner",
    "trainer": "molt.trainer.loop",
}
CONFIG = "config.json"  # in the attempt's log directory: what this attempt runs with
PR_SET_PDEATHSIG = 1


def run_role(name: str, run: Path) -> int:
    """Run one role to its end. An error of Molt's own is one line, others keep their traceback.

    After either, this process ends at once: destructors and threads of a collective whose other
    end is gone would abort it or keep it for ever, and then nobody learns why it failed.
    """
    die_with_parent()
    sys.excepthook = _end
    config = load_resolved(Path(os.environ["MOLT_LOGS"]) / CONFIG)
    logging.basicConfig(
        level=config.log.level.upper(), format="%(asctime)s %(name)s %(message)s", stream=sys.stderr
    )
    try:
        work = importlib.import_module(ROLES[name]).main(run, config)
        if asyncio.iscoroutine(work):
            asyncio.run(work)
    except (MoltError, BaseExceptionGroup) as e:
        error = _leaf(e)
        if not isinstance(error, MoltError):
            raise
        print(f"molt {name}: {error}", file=sys.stderr, flush=True)
        _leave(2 if isinstance(error, ConfigError) else 3)
    return 0


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the one that started it dies, however it dies."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    parent = int(os.environ.get("MOLT_PARENT", "0"))
    if parent and os.getppid() != parent:
        sys.exit(f"the launcher, process {parent}, is gone")


def _end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    sys.__excepthook__(kind, error, trace)
    _leave(1)


def _leave(status: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _leaf(error: BaseException) -> BaseException:
    """The first real error of a task group's."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
