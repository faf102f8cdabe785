# SPDX-License-Identifier: Apache-2.0
"""One `molt train` as a user starts it, with what a test needs to meddle with it.

Each attempt has a TMPDIR of its own, so that what it leaves there can be seen. Everything is set
down before a signal is sent: a process whose parent died can only be found by its number.
"""

import getpass
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from molt.store.run import read_metrics
from tests.processes import left, lives

ROOT = Path(__file__).parents[2]
SERVER = "vllm.entrypoints"
TORCH_CACHE = f"torchinductor_{getpass.getuser()}"  # one a user, left for the next process


def molt(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Any other command, to its end."""
    return subprocess.run(
        [sys.executable, "-m", "molt.cli", *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


class Attempt:
    """A running `molt train configs/<name>.toml <overrides> --run-dir <run>`."""

    def __init__(self, run: Path, name: str, *overrides: str) -> None:
        self.run, self.status, self.seconds = run, -1, 0.0
        self.before = len(self.rows)  # lines that earlier attempts wrote
        number = len(list(run.parent.glob(f"{run.name}.*.log"))) + 1
        self.tmp = Path(tempfile.mkdtemp(prefix="e2e-"))  # short, for the sockets in it
        self._log = run.with_name(f"{run.name}.{number}.log")
        self._seen: list[psutil.Process] = []
        self._since = time.monotonic()
        with self._log.open("wb") as log:
            self.process = psutil.Popen(
                [sys.executable, "-m", "molt.cli", "train", f"configs/{name}.toml", *overrides,
                 "--run-dir", str(run)],
                cwd=ROOT, env=os.environ | {"TMPDIR": str(self.tmp), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    @property
    def output(self) -> str:
        """What the user has seen so far."""
        return self._log.read_text(encoding="utf-8")

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, earlier attempts included."""
        return read_metrics(self.run / "metrics.jsonl")

    def until(self, steps: Callable[[int], bool] = lambda _: True) -> "Attempt":
        """Wait for a new line of the metrics, of a step that satisfies `steps`."""
        while not any(steps(row["step"]) for row in self.rows[self.before :][-1:]):
            assert self.process.poll() is None, self.output
            time.sleep(0.02)
        self._seen = self.process.children(recursive=True)
        return self

    def child(self, text: str, **environment: str) -> psutil.Process:
        """The process whose command line contains `text`, in this environment."""
        (found,) = [
            p
            for p in self._seen
            if text in " ".join(p.cmdline())
            and p.name() != "sh"
            and environment.items() <= p.environ().items()
        ]
        return found

    def kill(self, process: psutil.Process | None = None) -> "Attempt":
        """SIGKILL to one of its processes, or to `molt train` itself."""
        self._since = time.monotonic()
        (process or self.process).kill()
        return self

    def kill_everything(self) -> "Attempt":
        """SIGKILL to `molt train` and to every process below it."""
        self._since = time.monotonic()
        for process in [self.process, *self.process.children(recursive=True)]:
            if lives(process):
                process.kill()
        return self.end()

    def interrupt(self) -> "Attempt":
        """Ctrl-C."""
        self._since = time.monotonic()
        self.process.send_signal(signal.SIGINT)
        return self

    def end(self) -> "Attempt":
        """Wait for the end; `seconds` counts from the last signal."""
        self.status = self.process.wait()
        self.seconds = time.monotonic() - self._since
        return self

    def left(self, within_s: float) -> list[str]:
        """Processes and temporary files that are still there `within_s` after the end."""
        deadline = time.monotonic() + within_s
        found = left(self.run, within_s)
        while (alive := [p for p in self._seen if lives(p)]) and time.monotonic() < deadline:
            time.sleep(0.05)
        files = {*self.tmp.rglob("*")} - {self.tmp / TORCH_CACHE}
        return [*map(str, {*found, *alive}), *map(str, files)]

    def close(self) -> None:
        """Clear up, also when a test failed half-way."""
        if self.process.poll() is None:
            for process in [*self.process.children(recursive=True), self.process]:
                if lives(process):
                    process.kill()
            self.process.wait()
        shutil.rmtree(self.tmp)
