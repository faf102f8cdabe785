# SPDX-License-Identifier: Apache-2.0
"""`molt train` around its roles: what it finds, what it refuses, and who may work on a run."""

import asyncio
import contextlib
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread

import numpy as np
import pytest
from aiohttp import web

from molt import control
from molt.cli import main
from molt.config import load
from molt.launch import child
from molt.launch.local import hold_port
from molt.records import ConfigError, Group, Lease, LeaseEnd, Plan, Sampling, Where
from molt.store.journal import Journal
from molt.store.partials import Origin, Part, PartialWriter
from molt.store.run import RunDir
from molt.train import alone, found, open_or_create

NODE = Part(
    node=0, parent=-1, part=0, context=np.array([1], np.int32),
    token_ids=np.array([5, 6, 7], np.int32), logprobs=np.zeros(3, np.float32),
    version_spans=np.array([[3, 1]]), sampling=Sampling(), finish_reason="",
)  # fmt: skip


@pytest.fixture
def toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config whose roles are scripts: they take a leave, and the trainer is done at once."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(child, "command", lambda name, run: ["/bin/sh", "-c", f". ./{name}.sh"])
    monkeypatch.setattr("molt.train.ask_to_stop", lambda run, address: None)
    Path("m").mkdir()
    Path("m/config.json").write_text("{}")
    Path("m/tokenizer.json").write_text('{"a": 0}')
    Path("rows.jsonl").write_text('{"prompt": "1+1=", "label": 2}\n')
    for name in ("coordinator", "engine"):
        Path(f"{name}.sh").write_text("trap 'kill $!; exit 0' TERM; sleep 60 & wait")
    Path("trainer.sh").write_text("sleep 0.1")
    path = Path("c.toml")
    path.write_text(
        '[model]\npath = "m"\n[agent]\nname = "molt.agents.env:Env"\n'
        '[data]\nsource = "rows.jsonl"\n[run]\ndir = "run"\n[trainer]\ntokens = 512\n'
    )
    return path


@pytest.fixture
def run(toml: Path) -> RunDir:
    return open_or_create(load(toml))


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that `molt train` refuses something with."""
    before = sorted(Path("run").rglob("*"))
    capsys.readouterr()
    assert main(["train", "c.toml", *arguments]) in (2, 3)
    assert sorted(Path("run").rglob("*")) == before
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("molt: ")
    return line


# ---------------------------------------------------------------- resuming


def test_the_same_command_goes_on_with_the_next_attempt(
    toml: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["train", "c.toml"]) == 0
    assert main(["train", "c.toml", "optim.lr=0.5"]) == 0
    assert sorted(p.name for p in Path("run/logs").glob("attempt-*")) == ["attempt-1", "attempt-2"]
    err = capsys.readouterr().err
    assert "changed: optim.lr = 0.5, was 1e-06" in err
    assert err.count("changed:") == 1


def test_a_new_run_finds_nothing(run: RunDir, toml: Path):
    assert list(found(run, load(toml))) == []


def test_a_resumed_run_tells_what_it_found(run: RunDir, toml: Path):
    groups = {n: Group(lease=n, group=n, prompt=0, where=where(n)) for n in (1, 2)}
    journal, _ = Journal.start(run.path, "name", 1)
    journal.append([Lease(lease=n, group=n, prompt=0, runner="r") for n in (1, 2, 3)])
    journal.append([*groups.values(), Plan(step=1, groups=(1,)), Plan(step=2, groups=(2,))])
    journal.append([LeaseEnd(lease=3, group=3, reason="stopped")])
    journal.close()
    write_partials(run, (2, 0), (3, 0), (3, 1))
    (run.checkpoints / "step-000001").mkdir()
    (run.checkpoints / "step-000001/complete.json").write_text('{"step": 1}')
    (run.checkpoints / "step-000002").mkdir()

    skipped, resuming = found(run, load(toml))
    assert skipped == "skipping run/checkpoints/step-000002: it was not finished"
    # Plan 1 is in the checkpoint. Group 2 is finished: what its sessions left does not count.
    assert resuming == (
        "resuming after step 1: 1 plans to train again, 1 unfinished groups with 6 sampled tokens "
        "of 2 rollouts"
    )


def test_after_a_kill_it_says_what_is_lost_at_most(run: RunDir, toml: Path):
    journal, _ = Journal.start(run.path, "name", 1)
    journal.append([Lease(lease=n, group=n, prompt=0, runner="r") for n in (1, 2)])
    journal.close()
    write_partials(run, (1, 0))
    _, lost = found(run, load(toml, ["session.flush_s=0.5", "session.chunk_tokens=64"]))
    assert lost == (
        "2 groups were under way when it was killed: lost is at most what each gained since its "
        "last flush (every 0.5 s, in chunks of 64 tokens)"
    )


def where(number: int) -> Where:
    return Where(path=f"shards/r/{number:08d}.arrow", offset=0, length=1, hash="")


def write_partials(run: RunDir, *rollouts: tuple[int, int]) -> None:
    """A part of three tokens for each (group, rollout)."""
    writer = PartialWriter(run.path, "r")
    for group, rollout in rollouts:
        writer.add(Origin(group, lease=group, rollout=rollout, attempt=0), NODE)
    writer.flush()


# ---------------------------------------------------------------- what is refused


def test_what_would_change_the_meaning_of_old_groups_is_refused_in_one_line(
    toml: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["train", "c.toml"]) == 0
    assert "run.seed = 0, not 1" in refused(capsys, "run.seed=1")
    tokenizer, rows = Path("m/tokenizer.json").read_text(), Path("rows.jsonl").read_text()
    Path("m/tokenizer.json").write_text('{"a": 1}')
    assert "the tokenizer in " in refused(capsys)
    Path("m/tokenizer.json").write_text(tokenizer)
    Path("rows.jsonl").write_text(rows * 2)
    assert "the data in " in refused(capsys)
    Path("rows.jsonl").write_text(rows)
    assert main(["train", "c.toml"]) == 0


def test_a_directory_of_something_else_is_refused(toml: Path, capsys: pytest.CaptureFixture[str]):
    Path("run").mkdir()
    Path("run/README.md").touch()
    assert "run holds 'README.md': a new run needs an empty directory" in refused(capsys)
    Path("run/config.json").write_text('{"model_type": "qwen3"}')
    assert "run is not a run directory (it has no journal)" in refused(capsys)


def test_a_journal_of_a_newer_molt_is_refused(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    Journal.start(run.path, "name", 1)[0].close()
    monkeypatch.setattr("molt.store.journal.SCHEMA_VERSION", 0)
    assert "written by a newer Molt" in refused(capsys)


# ---------------------------------------------------------------- one at a time


def test_two_on_one_directory_do_not_work(run: RunDir, capsys: pytest.CaptureFixture[str]):
    with alone(run):
        assert "another molt train works on " in refused(capsys)
    with alone(run):
        pass


def test_a_killed_one_leaves_no_lock(run: RunDir):
    program = (
        "import sys; from pathlib import Path; from molt.store.run import RunDir\n"
        "from molt.train import alone\n"
        f"with alone(RunDir(Path({str(run.path)!r}))): print('holds', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with holder:
        assert holder.stdout
        assert holder.stdout.readline() == b"holds\n"
        with pytest.raises(ConfigError), alone(run):
            pass
        holder.send_signal(signal.SIGKILL)
    with alone(run):
        pass


def unknown(*_: object) -> None:
    """A system call that the filesystem does not offer."""
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def test_a_living_coordinator_is_enough_where_locks_are_not_known(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("molt.train.ASK_S", 0.3)
    monkeypatch.setattr("molt.train.fcntl.flock", unknown)
    with hold_port() as held:
        address = f"127.0.0.1:{held.getsockname()[1]}"
        (run.attempt_dir() / "address").write_text(address)
        with alone(run):  # nobody listens there
            pass
        with answering(address, "another run's token"), alone(run):
            pass
        with (
            answering(address, run.token.read_text()),
            pytest.raises(ConfigError, match="another molt train works on"),
            alone(run),
        ):
            pass


@contextlib.contextmanager
def answering(address: str, token: str) -> Iterator[None]:
    """A server that says what a coordinator says, in a thread."""
    ready, end = Event(), Event()

    async def status(_: control.Empty) -> control.Status:
        return control.Status(step=1, version=1, ready=0, leased=0, engines=1)

    async def serve() -> None:
        runner = web.AppRunner(control.serve({control.STATUS: status}, token))
        await runner.setup()
        host, _, port = address.partition(":")
        await web.TCPSite(runner, host, int(port)).start()
        ready.set()
        await asyncio.get_running_loop().run_in_executor(None, end.wait)
        await runner.cleanup()

    thread = Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(5)
    try:
        yield
    finally:
        end.set()
        thread.join()
