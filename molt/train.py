# SPDX-License-Identifier: Apache-2.0
"""`molt train`: make or resume the run directory, launch the roles, show progress, report the end.

Resuming is the same command on the same directory. What would make the old groups mean something
else (model, data, seed, group size) is refused; other values may change and are written to the
attempt's log.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from molt import control
from molt.config import Config, dump, load, load_resolved
from molt.inspect.progress import Progress
from molt.launch.check import check
from molt.launch.local import INTERRUPTED, Local
from molt.launch.role import CONFIG
from molt.records import ConfigError, MoltError
from molt.store.run import RunDir, publish_file, read_metrics

FIXED = (
    "model.path",
    "model.max_len",
    "data",
    "run.seed",
    "sampling.num_samples",
    "trainer.groups",
)


def train(path: Path, overrides: list[str], run_dir: str | None) -> int:
    """Run or resume on this machine; returns the exit status."""
    config = load(path, overrides, run_dir)
    check(config)
    run = open_or_create(config)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if (done := finished_steps(run)) >= config.trainer.steps:
        console.print(
            f"{run.path} has trained {done} steps already: raise trainer.steps to extend it"
        )
        return 0
    logs = run.attempt_dir()
    publish_file(logs / CONFIG, dump(config))
    make_model(config, logs, console)
    console.print(f"run {os.path.relpath(run.path)}, logs {os.path.relpath(logs)}")
    launcher = Local(run.path, config, logs, lambda address: ask_to_stop(run.path, address))
    with Progress(run.metrics, config.trainer.steps, console):
        outcome = asyncio.run(launcher.run())
    if outcome.message:
        console.print(outcome.message, markup=False, soft_wrap=True)
    elif outcome.status == INTERRUPTED:
        console.print("stopped; the same command resumes")
    else:
        summarize(run, console)
    return outcome.status


def open_or_create(config: Config) -> RunDir:
    """The run directory; one that exists must hold the same run."""
    path = Path(config.run.dir)
    if not (path / "config.json").exists():
        return RunDir.create(path, dump(config))
    run = RunDir.open(path)
    before = load_resolved(run.config)
    for key in FIXED:
        old, new = _value(before, key), _value(config, key)
        if old != new:
            raise ConfigError(
                f"{path} was started with {key} = {old!r}, not {new!r}: its groups would mean "
                "something else; keep the value or choose another run.dir"
            )
    return run


def _value(config: Config, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def finished_steps(run: RunDir) -> int:
    """Step of the newest complete checkpoint, 0 without one."""
    markers = sorted(run.checkpoints.glob("step-*/complete.json"))
    return int(json.loads(markers[-1].read_bytes())["step"]) if markers else 0


def make_model(config: Config, logs: Path, console: Console) -> None:
    """Build `model.path` with its recipe when it does not exist, in a process of its own."""
    if Path(config.model.path).exists():
        return
    log = logs / "recipe.log"
    began = time.monotonic()
    console.print(
        f"making {os.path.relpath(config.model.path)} with {config.model.recipe} …", soft_wrap=True
    )
    code = (
        "import sys; from molt.config import load_resolved; from molt.data import resolve;"
        "model = load_resolved(sys.argv[1]).model;"
        "resolve(model.recipe)(model.path, **model.recipe_args)"
    )
    with log.open("ab") as output:
        result = subprocess.run(
            [sys.executable, "-c", code, str(logs / CONFIG)],
            env={"OMP_NUM_THREADS": "1"} | os.environ,
            stdout=output,
            stderr=output,
            check=False,
        )
    if (
        result.returncode and not Path(config.model.path, "config.json").exists()
    ):  # else: another run's
        last = log.read_text(errors="replace").strip().rpartition("\n")[2]
        raise MoltError(f"{config.model.recipe} failed: {last}; see {log}")
    console.print(f"made in {time.monotonic() - began:.0f} s")


def ask_to_stop(run: Path, address: str) -> None:
    """Tell the coordinator that everyone may finish their step and leave."""

    async def ask() -> None:
        client = control.Client(run, address)
        try:
            await client.call(control.STOP, control.StopRequest(reason="asked to"), retry_s=5.0)
        finally:
            await client.close()

    asyncio.run(ask())


def summarize(run: RunDir, console: Console) -> None:
    """Reward before and after, and where to look next."""
    rows = read_metrics(run.metrics)
    names = sorted(
        {key for row in rows for key in row if key.startswith("eval/") and "/reward" in key}
    )
    for name in [*names, "reward/mean"]:
        values = [(row["step"], row[name]) for row in rows if name in row]
        if values:
            (_, first), (step, last) = values[0], values[-1]
            console.print(f"{name:28} before {first:.3f}   after {last:.3f}   ({step} steps)")
    console.print(f"what happened: molt inspect {os.path.relpath(run.path)}")
