# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: a table row, and a run directory with some of its processes.

A `Rig` starts real roles one by one, as `molt train` starts them all, so that a benchmark can play
the missing ones itself.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from molt.config import Config, dump, load
from molt.launch.local import hold_port
from molt.launch.role import CONFIG
from molt.store.run import RunDir, publish_file, read_metrics
from molt.train import ask_to_stop, make_model

SCRIPTS = Path(__file__).resolve().parent
Env = dict[str, str]
LEAVE_S = 30.0  # a role may take this long to leave


@dataclass(frozen=True)
class Row:
    """One line of the table: a ratio (or another number), its aim, and what it was made from."""

    name: str
    value: float
    aim: str  # such as "≥ 0.5", or "" for a number without one
    detail: str

    def __str__(self) -> str:
        sign, _, bound = self.aim.partition(" ")
        met = self.value >= float(bound) if sign == "≥" else self.value <= float(bound or "inf")
        verdict = ("met" if met else "NOT MET") if self.aim else ""
        return f"{self.name:44} {self.value:7.3f}  {self.aim:6} {verdict:8} {self.detail}"


def configure(name: str, where: Path, run: str, **sections: dict[str, Any]) -> Config:
    """configs/NAME.toml without evaluations and checkpoints on the way, with some keys replaced."""
    config = load(f"configs/{name}.toml", ["checkpoint.every=0"], str(where / run))
    tree = config.model_dump() | {"eval": {}}
    for section, keys in sections.items():
        tree[section] = tree[section] | keys
    return Config.model_validate(tree)


class Rig:
    """A new run and its processes, all gone when the `with` block ends."""

    def __init__(self, config: Config) -> None:
        self.run = RunDir.create(Path(config.run.dir), dump(config))
        self.config, self.path = config, self.run.path
        self._logs = self.run.attempt_dir()
        publish_file(self._logs / CONFIG, dump(config))
        make_model(config, self._logs, Console(stderr=True))
        self._port = hold_port()
        os.environ |= {
            "MOLT_COORDINATOR": f"127.0.0.1:{self._port.getsockname()[1]}",
            "MOLT_LOGS": str(self._logs),
            "MOLT_PARENT": str(os.getpid()),
        }
        self.processes: list[tuple[str, subprocess.Popen[bytes]]] = []

    def role(self, name: str, rank: int = 0, world: int = 1, **env: str) -> None:
        """Start a role of Molt's."""
        self._spawn(name, ["-m", "molt.cli", "role", name, str(self.path)], rank, world, env)

    def script(self, file: str, name: str, rank: int = 0, world: int = 1) -> None:
        """Start the role that a benchmark's file plays when it is run: `file NAME RUN`."""
        self._spawn(name, [str(SCRIPTS / file), name, str(self.path)], rank, world, {})

    def trainer(self) -> None:
        """Start all ranks of Molt's trainer."""
        for rank in range(self.config.trainer.ranks):
            self.role("trainer", rank, self.config.trainer.ranks)

    def _spawn(self, name: str, args: list[str], rank: int, world: int, env: Env) -> None:
        places = {"SLURM_PROCID": str(rank), "SLURM_NTASKS": str(world)}
        with (self._logs / f"{name}-{rank}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, *args], env=os.environ | places | env,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self.processes.append((name, process))

    def wait(self, name: str) -> None:
        """Until every process of this name has ended; anything that fails ends the benchmark."""
        while any(p.poll() is None for n, p in self.processes if n == name):
            self.check()
            time.sleep(0.2)
        self.check()

    def check(self) -> None:
        """Exit when a process failed, with the end of its log."""
        for name, process in self.processes:
            if process.poll():
                logs = {p.name: p for p in self._logs.glob(f"{name}-*.log")}
                tails = "\n".join(p.read_text(errors="replace")[-1500:] for p in logs.values())
                sys.exit(f"bench: {name} ended with status {process.returncode}:\n{tails}")

    def steps(self, number: int) -> list[dict[str, Any]]:
        """Wait until this many steps are trained; their metrics."""
        while len(rows := read_metrics(self.run.metrics)) < number:
            self.check()
            time.sleep(0.05)
        return rows

    def cpu(self) -> dict[str, float]:
        """CPU-seconds so far by role; an engine task counts as its runners and its server."""
        seconds: dict[str, float] = {}
        for name, process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                root = psutil.Process(process.pid)
                for p in [root, *root.children(recursive=True)]:
                    command = " ".join(p.cmdline())
                    who = name if p == root else "runner" if "role runner" in command else "vllm"
                    used = p.cpu_times()
                    seconds[who] = seconds.get(who, 0.0) + used.user + used.system
        return seconds

    def __enter__(self) -> "Rig":
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        """Ask everyone to leave, then make them."""
        if kind is None:
            ask_to_stop(self.path, os.environ["MOLT_COORDINATOR"])
        order = sorted(self.processes, key=lambda p: p[0] == "coordinator")  # it leaves last
        for _, process in order:
            process.terminate()
            try:
                process.wait(LEAVE_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
