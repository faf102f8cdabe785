# SPDX-License-Identifier: Apache-2.0
"""`molt train`: make or resume the run directory, launch the roles, show progress, report the end.

Resuming is the same command on the same directory. What would make the old groups mean something
else (model, tokenizer, data, seed, group size) is refused; other values may change, and the journal
says which did. One `molt train` at a time works on a directory: the first holds a lock, which a
crash frees, and where the filesystem knows no locks its coordinator answers. (Two that got past
both would do no harm: the journal lets one coordinator win.)
"""

import asyncio
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import xxhash
from rich.console import Console

from molt import control
from molt.config import Config, dump, load, load_resolved
from molt.data import load_prompts
from molt.inspect.progress import Progress
from molt.launch.check import check
from molt.launch.local import INTERRUPTED, Local
from molt.launch.role import CONFIG
from molt.records import ConfigError, MoltError
from molt.store.journal import read_state
from molt.store.run import RunDir, publish_file, read_metrics

FIXED = (
    "model.path",
    "model.max_len",
    "data",
    "run.seed",
    "sampling.num_samples",
    "trainer.groups",
)
TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "merges.txt",
    "added_tokens.json", "special_tokens_map.json", "chat_template.jinja",
)  # fmt: skip
ADDRESS = "address"  # in the attempt's log directory: where its coordinator listens
INPUTS = "inputs.json"  # in the log directory: hashes of what the run was started with
ASK_S = 2.0  # for an answer of a coordinator that may be alive


def train(path: Path, overrides: list[str], run_dir: str | None) -> int:
    """Run or resume on this machine; returns the exit status."""
    config = load(path, overrides, run_dir)
    check(config)
    run = open_or_create(config)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with alone(run):
        if (done := finished_steps(run)) >= config.trainer.steps:
            console.print(
                f"{run.path} has trained {done} steps already: raise trainer.steps to extend it"
            )
            return 0
        return _attempt(run, config, console)


def _attempt(run: RunDir, config: Config, console: Console) -> int:
    """One attempt, from the look at what is there to the report of its end."""
    refuse_other_inputs(run, config)
    for line in found(run, config):
        console.print(line, markup=False)
    logs = run.attempt_dir()
    publish_file(logs / CONFIG, dump(config))
    for key, (before, now) in run.changes(int(logs.name.rpartition("-")[2])).items():
        console.print(f"changed: {key} = {now!r}, was {before!r}", markup=False)
    make_model(config, logs, console)
    if not (run.logs / INPUTS).exists():
        publish_file(run.logs / INPUTS, msgspec.json.encode(inputs(config)))
    console.print(f"run {os.path.relpath(run.path)}, logs {os.path.relpath(logs)}")
    launcher = Local(run.path, config, logs, lambda address: ask_to_stop(run.path, address))
    publish_file(logs / ADDRESS, launcher.address.encode())
    with Progress(run.metrics, config.trainer.steps, console):
        outcome = asyncio.run(launcher.run())
    if outcome.message:
        console.print(outcome.message, markup=False, soft_wrap=True)
    elif outcome.status == INTERRUPTED:
        console.print("stopped; the same command resumes")
    else:
        summarize(run, console)
    return outcome.status


# ---------------------------------------------------------------- what is there


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


@contextmanager
def alone(run: RunDir) -> Iterator[None]:
    """Hold the run directory; the kernel lets it go when this process ends, however it ends.

    Raises:
        ConfigError: another `molt train` works on it.
    """
    with run.token.open("r+b") as held:  # NFS locks what is open for writing
        busy = False
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            busy = True
        except OSError:  # no locks on this filesystem
            pass
        if busy or _answers(run):
            raise ConfigError(
                f"another molt train works on {run.path}: let it end, stop it with Ctrl-C, or "
                "choose another run.dir"
            )
        yield


def _answers(run: RunDir) -> bool:
    """Whether the coordinator of the newest attempt is alive, after a moment to die in."""
    addresses = run.logs.glob(f"attempt-*/{ADDRESS}")
    newest = max(addresses, key=lambda p: int(p.parent.name.rpartition("-")[2]), default=None)
    if newest is None:
        return False
    deadline = time.monotonic() + ASK_S
    while asyncio.run(_status(run.path, newest.read_text(encoding="utf-8"))):
        if time.monotonic() > deadline:
            return True
        time.sleep(0.1)
    return False


async def _status(run: Path, address: str) -> control.Status | None:
    """What the coordinator at an address says, if that is one of this run and it answers."""
    client = control.Client(run, address)
    try:
        return await asyncio.wait_for(
            client.call(control.STATUS, control.Empty(), retry_s=0.0), ASK_S
        )
    except (MoltError, OSError, aiohttp.ClientError, msgspec.DecodeError):
        return None
    finally:
        await client.close()


def finished_steps(run: RunDir) -> int:
    """Step of the newest complete checkpoint, 0 without one."""
    for marker in sorted(run.checkpoints.glob("step-*/complete.json"), reverse=True):
        with suppress(json.JSONDecodeError, KeyError):  # damaged: the trainer skips it too
            return int(json.loads(marker.read_bytes())["step"])
    return 0


def found(run: RunDir, config: Config) -> Iterator[str]:
    """What a resumed run starts from, and what is lost.

    Raises:
        StoreError: its journal is damaged, or written by a newer Molt.
    """
    state = read_state(run.path)
    if not state.epoch:
        return
    done = finished_steps(run)
    for path in sorted(run.checkpoints.glob("step-*")):
        if not (path / "complete.json").exists():
            yield f"skipping {os.path.relpath(path)}: it was not finished"
    unfinished = {*state.returned, *(g for g in state.leases if g >= 0)}
    sessions, tokens = written_down(run, unfinished)
    plans = sum(step > done for step in state.plans)
    yield (
        f"resuming after step {done}: {plans} plans to train again, {len(unfinished)} unfinished "
        f"groups with {tokens:,} sampled tokens of {sessions} rollouts"
    )
    if state.leases:
        chunk = config.session.chunk_tokens or config.sampling.max_tokens
        yield (
            f"{len(state.leases)} groups were under way when it was killed: lost is at most what "
            f"each gained since its last flush (every {config.session.flush_s:g} s, in chunks of "
            f"{chunk} tokens)"
        )


def written_down(run: RunDir, groups: set[int]) -> tuple[int, int]:
    """(rollouts, sampled tokens) of some groups that their partials hold."""
    import pyarrow as pa
    import pyarrow.compute as pc

    rollouts: set[tuple[int, int]] = set()
    tokens = 0
    for path in (run.path / "partials").glob("*/*.arrow"):
        try:
            with pa.OSFile(str(path), "rb") as file:
                table: Any = pa.ipc.open_file(file).read_all()
        except (pa.ArrowException, OSError):  # the coordinator logs it
            continue
        table = table.filter(pc.is_in(table["group"], pa.array(groups, pa.int64())))
        rollouts.update(zip(table["group"].to_pylist(), table["rollout"].to_pylist(), strict=True))
        tokens += pc.sum(pc.list_value_length(table["token_ids"])).as_py() or 0
    return len(rollouts), tokens


def refuse_other_inputs(run: RunDir, config: Config) -> None:
    """Compare what config keys lead to with what they led to when the run was started.

    Raises:
        ConfigError: the content of the data or of the tokenizer is another one.
    """
    if not (run.logs / INPUTS).exists():
        return
    before = msgspec.json.decode((run.logs / INPUTS).read_bytes(), type=dict[str, str])
    now = inputs(config)
    for name, where in (("data", config.data.source), ("tokenizer", config.model.path)):
        if now[name] != before.get(name) and (":" in where or Path(where).exists()):
            raise ConfigError(
                f"the {name} in {where} changed after {run.path} was started: its groups would "
                "mean something else; bring back what it was, or choose another run.dir"
            )


def inputs(config: Config) -> dict[str, str]:
    """Hashes of what the tokens and the prompt numbers of a run depend on, beside its config."""
    data, tokenizer = xxhash.xxh3_128(), xxhash.xxh3_128()
    if ":" in config.data.source:
        for row in load_prompts(config.data):
            data.update(msgspec.json.encode(row, enc_hook=repr))
    else:
        data.update(Path(config.data.source).read_bytes())
    for name in TOKENIZER:
        if (path := Path(config.model.path, name)).exists():
            tokenizer.update(name.encode() + path.read_bytes())
    return {"data": data.hexdigest(), "tokenizer": tokenizer.hexdigest()}


def _value(config: Config, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


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
