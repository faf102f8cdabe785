# SPDX-License-Identifier: Apache-2.0
"""One process of a run as its launcher sees it: how it is started, and how it ended.

Each child is the head of a session of its own, so that a Ctrl-C on the terminal reaches the
launcher alone and `kill` takes along what the child started.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

TAIL_LINES = 15  # of a log, in an obituary
ERRORS = (2, 3)  # exit statuses of an error that Molt has named in one line


class Child:
    """A started process. `ended` is done when it has ended; `code` and what follows count then."""

    def __init__(
        self, kind: str, rank: int, world: int, log: Path, process: asyncio.subprocess.Process
    ) -> None:
        self.kind, self.log, self._process = kind, log, process
        self.name = f"{kind} {rank}" if world > 1 else kind
        self.rank = rank
        self.ended = asyncio.ensure_future(process.wait())

    @classmethod
    async def start(
        cls, kind: str, rank: int, world: int, run: Path, logs: Path, environment: Mapping[str, str]
    ) -> "Child":
        """Start one of `world` equals; its log is appended to."""
        log = logs / (f"{kind}.log" if world == 1 else f"{kind}-{rank}.log")
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *command(kind, run),
                env=environment, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
        return cls(kind, rank, world, log, process)

    @property
    def code(self) -> int:
        """The return code: −n for signal n."""
        return self._process.returncode or 0

    @property
    def status(self) -> int:
        """A shell's view of `code`: 128 + n for signal n; 3 for an end that was none of its own."""
        return 128 - self.code if self.code < 0 else self.code or 3

    @property
    def named_error(self) -> bool:
        """Whether it ended because of something that a person has to read and mend."""
        return self.code in ERRORS

    @property
    def struck(self) -> bool:
        """Whether a signal ended it; not SIGABRT, which a collective without its peer ends with."""
        return self.code < 0 and self.code != -signal.SIGABRT

    @property
    def how(self) -> str:
        """Its end in two words."""
        if self.code < 0:
            return f"signal {signal.Signals(-self.code).name}"
        return f"status {self.code}"

    @property
    def last_lines(self) -> list[str]:
        """The end of its log."""
        return self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]

    def note(self, line: str) -> None:
        """Add a line to its log."""
        with self.log.open("a", encoding="utf-8") as log:
            log.write(f"{line}\n")

    def terminate(self) -> None:
        """Ask it to leave."""
        if not self.ended.done():
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    def kill(self) -> None:
        """End it, and what is left of what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def command(kind: str, run: Path) -> list[str]:
    """What starts a role; its place among its equals is in the environment."""
    return [sys.executable, "-m", "molt.cli", "role", kind, str(run)]


def culprit(failed: list[Child]) -> Child:
    """Who of some equals, in the order of their ends, took the others along."""
    return min(failed, key=lambda c: (not c.struck, c.code == -signal.SIGABRT))
