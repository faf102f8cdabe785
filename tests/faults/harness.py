# SPDX-License-Identifier: Apache-2.0
"""One run directory with real processes: `molt train`, faults, and the same command again.

The task is `tests.faults.task`, the policy `tests.toy_policy`, and `tests.scripted_engine` stands
in for vLLM; everything else is what a user starts.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from molt.records import Group
from molt.store.journal import read_journal
from molt.store.partials import read_partials
from molt.store.state import State
from molt.store.verify import verify
from molt.trainer.recipe import CHATML
from tests.faults import inject, invariants
from tests.faults.inject import Fault
from tests.processes import left, lives, of_run
from tests.toy_model import save_tokenizer

ROOT = Path(__file__).parents[2]
STEPS = 6
CONFIG = f"""
[data]
source = "tests.faults.task:prompts"
[model]
max_len = 256
[agent]
name = "tests.faults.task:Game"
[sampling]
num_samples = 3
max_tokens = 24
[run]
stop_s = 8.0
[pool]
lease_s = 3.0
[session]
flush_s = 0.05
shard_age_s = 0.02
chunk_tokens = 8
visible_s = 1.0
[engine]
module = "tests.scripted_engine"
update_s = 8.0
start_s = 40.0
request_s = 20.0
stall_s = 2.0
[trainer]
policy = "tests.toy_policy:build"
steps = {STEPS}
groups = 3
ranks = 1
gate = false
[optim]
lr = 0.2
[checkpoint]
every = 2
"""


@dataclass(frozen=True)
class Ended:
    """How an attempt ended."""

    status: int
    output: str
    seconds: float


class Run:
    """A run directory below `root`, and the processes that work on it.

    Args:
        root: a directory of the test's own.
        overrides: config keys, `section.key=value`.
        path: the run directory, if it is to lie elsewhere.
    """

    def __init__(self, root: Path, *overrides: str, path: Path | None = None) -> None:
        self.root, self.path = root, path or root / "run"
        self._overrides = [f"model.path={make_model(root)}", *overrides]
        self._attempts = 0
        self.zombies: list[psutil.Process] = []  # that may outlive an attempt
        self._process: psutil.Popen | None = None
        self._tmp = Path(tempfile.mkdtemp(prefix="faults-"))  # short, for the sockets in it
        self.faults = root / "faults.json"
        (root / "config.toml").write_text(CONFIG)

    # ------------------------------------------------------------ attempts

    def start(
        self, *faults: Fault, script: list[dict[str, Any]] | None = None, overrides: Any = (),
    ) -> "Run":  # fmt: skip
        """The command, with faults and a script for its engines."""
        self._attempts += 1
        self.faults = self.root / f"faults-{self._attempts}.json"
        environment = os.environ | inject.write(self.faults, list(faults))
        environment |= {"TMPDIR": str(self._tmp), "OMP_NUM_THREADS": "1"}
        rules = [{"once": str(self.faults.with_suffix(f".{i}"))} | rule
                 for i, rule in enumerate(script or [])]  # fmt: skip
        environment["MOLT_SCRIPT"] = json.dumps(rules)
        with self._log.open("wb") as log:
            self._process = psutil.Popen(
                [sys.executable, "-m", "molt.cli", "train", str(self.root / "config.toml"),
                 *self._overrides, *overrides, "--run-dir", str(self.path)],
                cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        return self

    def end(self, within_s: float = 60.0, alone: bool = True) -> Ended:
        """Wait for its end; if nobody else works on the directory, nothing of it lives on."""
        assert self._process
        began = time.monotonic()
        try:
            status = self._process.wait(within_s)
        except (psutil.TimeoutExpired, subprocess.TimeoutExpired):
            raise AssertionError(f"no end within {within_s:g} s\n{self.story}") from None
        alive = [p for p in left(self.path, 10.0) if p not in self.zombies] if alone else []
        assert not alive, f"{alive} are left\n{self.story}"
        return Ended(status, self.output, time.monotonic() - began)

    def train(
        self, *faults: Fault, within_s: float = 60.0, alone: bool = True, **options: Any
    ) -> Ended:
        """One attempt, to its end."""
        return self.start(*faults, **options).end(within_s, alone)

    def finish(self, within_s: float = 60.0, **options: Any) -> Ended:
        """The same command, without faults; it has to reach the end."""
        before = unfinished(self.path)
        ended = self.train(within_s=within_s, **options)
        assert ended.status == 0, f"status {ended.status}\n{self.story}"
        invariants.resumed(self.path, before)
        return ended

    def check(self, **expected: Any) -> None:
        """Verify the directory and what the journal tells about the run."""
        problems = [f.text for f in verify(self.path) if f.kind == "problem"]
        assert not problems, f"{problems}\n{self.story}"
        invariants.check(self.path, **expected)

    # ------------------------------------------------------------ meddling

    def until(self, condition: Callable[[], Any], within_s: float = 40.0) -> Any:
        """Wait until something is the case while the command runs; returns what it is."""
        assert self._process
        deadline = time.monotonic() + within_s
        while not (found := condition()):
            assert not self.ended, self.story
            assert time.monotonic() < deadline, f"not within {within_s:g} s\n{self.story}"
            time.sleep(0.02)
        return found

    def struck(self, index: int = 0) -> psutil.Process:
        """The process that a fault struck, once it has."""
        number = self.until(lambda: inject.struck(self.faults).get(index))
        return psutil.Process(number)

    @property
    def ended(self) -> bool:
        """Whether the command has ended."""
        return self._process is not None and self._process.poll() is not None

    def signal(self, number: signal.Signals) -> None:
        """Signal `molt train`."""
        assert self._process
        self._process.send_signal(number)

    def close(self) -> None:
        """Leave nothing, also after a failure."""
        processes = [*of_run(self.path), *self.zombies]
        if self._process and self._process.poll() is None:
            processes.append(self._process)
        for process in processes:
            if lives(process):
                process.kill()
        if self._process:
            self._process.wait()
        shutil.rmtree(self._tmp, ignore_errors=True)

    # ------------------------------------------------------------ what there is

    @property
    def _log(self) -> Path:
        return self.root / f"attempt-{self._attempts}.log"

    @property
    def output(self) -> str:
        """What the user has seen of the newest attempt."""
        return self._log.read_text(encoding="utf-8")

    @property
    def logs(self) -> str:
        """What the processes of all attempts have logged."""
        found = sorted(self.path.glob("logs/attempt-*/*.log"))
        return "\n".join(f"--- {p.relative_to(self.path)}\n{p.read_text()}" for p in found)

    def tokens_held(self) -> int:
        """Sampled tokens on disk: of finished groups, and of unfinished ones in partials."""
        groups = [r for r in read_journal(self.path) if isinstance(r, Group)]
        finished = sum(s.actions for group in groups for s in group.segments)
        return finished + sum(tokens for _, tokens in unfinished(self.path).values())

    @property
    def story(self) -> str:
        """Everything that was said, for whoever has to find out."""
        return f"{self.root}\n{self.output}\n{self.logs[-20000:]}"


def make_model(root: Path) -> Path:
    """What a run needs of a model here: a name and a tokenizer with a template."""
    path = root / "model"
    if not path.exists():
        save_tokenizer(path, CHATML)
        (path / "config.json").write_text('{"model_type": "qwen3"}')
    return path


def unfinished(run: Path) -> dict[int, tuple[int, int]]:
    """Groups that were not finished: the lease of each, and the tokens that its partials hold."""
    state = invariants.state_of(run) if (run / "journal").exists() else State()
    groups = {g: x.lease for g, x in state.leases.items()} | dict.fromkeys(state.returned, 0)
    paths = sorted(str(p.relative_to(run)) for p in (run / "partials").glob("*/*.arrow"))
    found: dict[int, tuple[int, int]] = {}
    for group, lease in groups.items():
        sessions = read_partials(run, paths, group)
        parts = [part for nodes in sessions.values() for node in nodes for part in node.parts]
        found[group] = (lease, sum(len(part.token_ids) for part in parts))
    return found
