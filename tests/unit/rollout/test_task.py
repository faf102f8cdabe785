# SPDX-License-Identifier: Apache-2.0
"""The engine task with a real coordinator: what dies or hangs is named and started again.

`stub_server` stands in vLLM's place, a shell script in the runner's.
"""

import asyncio
import os
import re
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from molt import control as c
from molt.config import Config
from molt.records import ConfigError, EngineError, LeaseEnd
from molt.rollout import task as module
from molt.rollout.task import EngineTask
from molt.store.journal import read_journal
from molt.store.run import RunDir
from tests.unit.coordinator.test_server import CONFIG, Peers, coordinator_of
from tests.unit.rollout.test_engine import misbehave

RUNNER = "trap 'exit 0' TERM; while :; do sleep 0.01; done"


class Stage:
    """A coordinator, an engine task, and a trainer that sends nothing."""

    def __init__(self, peers: Peers, task: EngineTask, tmp_path: Path) -> None:
        self.peers, self.task, self.tmp_path = peers, task, tmp_path
        self.running = asyncio.create_task(task.run())

    async def until(self, condition: Callable[[], Any]) -> Any:
        """What `condition` gives, once it is true; the task must not end meanwhile."""
        deadline = time.monotonic() + 20
        while not (got := condition()):
            assert not self.running.done() or self.running.result()
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        return got

    async def server(self) -> str:
        """The incarnation of a server that is up and idle, as the coordinator knows it."""
        return await self.until(lambda: self.said.incarnation != "a" and self.said.incarnation)

    @property
    def said(self) -> Any:
        return self.peers.coordinator.publications.engines[0]

    async def publish(self, error: str = "") -> c.PublishDone:
        """Publish to whoever is up; `error`: the trainer gives up once the engine is in it."""
        version = (await self.peers.begin(0)).version
        if error:
            await self.until(lambda: self.task._said.receiving == version)
        message = c.PublishWait(version=version, error=error)
        while not (done := await self.peers.client.call(c.PUBLISHED, message)).done:
            pass
        return done

    def linked(self) -> str:
        """The incarnation that runners reach, if any."""
        link = self.task._link
        return link.readlink().parent.name if link.is_symlink() else ""

    def script(self, **script: Any) -> None:
        misbehave(self.tmp_path, **script)


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run `work(stage)` with an engine task; `ends` is the error that it ends with, if any."""
    monkeypatch.setenv("TMP_PATH", str(tmp_path))
    monkeypatch.setenv("STUB_SCRIPT", str(tmp_path / "script.json"))

    def run(
        work: Callable[[Stage], Awaitable[None]],
        ends: str = "",
        kind: type[Exception] = EngineError,
        runner: str = RUNNER,
        restarts: dict[str, int] | None = None,
        **engine: Any,
    ) -> Path:
        base = CONFIG.model_dump()
        base["run"] |= {"stop_s": 4.0, "restarts": restarts or {}}
        base["engine"] |= {"module": "tests.unit.rollout.stub_server", **engine}
        directory = RunDir.create(tmp_path / "run", b"{}").path

        async def main() -> None:
            async with coordinator_of(directory, CONFIG) as peers:
                await peers.start()
                monkeypatch.setenv("MOLT_COORDINATOR", peers.client._base.removeprefix("http://"))
                monkeypatch.setattr(module, "RUNNER", ("/bin/sh", "-c", runner))
                task = EngineTask(directory, Config.model_validate(base), 0, tmp_path)
                stage = Stage(peers, task, tmp_path)
                await asyncio.wait_for(work(stage), 40)
                if ends:
                    with pytest.raises(BaseExceptionGroup) as caught:
                        await asyncio.wait_for(stage.running, 20)
                    assert caught.group_contains(kind, match=ends)
                else:
                    os.kill(os.getpid(), signal.SIGTERM)
                    await asyncio.wait_for(stage.running, 10)
                assert not task._home.exists()

        asyncio.run(main())
        return directory

    return run


def pid_of(stage: Stage) -> int:
    """The stub server's process, which is the child of its guard."""
    (pid,) = {
        int(p.name)
        for p in Path("/proc").glob("[0-9]*")
        if (p / "cmdline").exists()
        and f"--uds\0{stage.task._home}".encode() in (p / "cmdline").read_bytes()
        and not (p / "cmdline").read_bytes().startswith(b"/bin/sh")
    }
    return pid


def test_runners_reach_a_server_only_while_it_holds_published_weights(stage):
    async def work(stage: Stage) -> None:
        first = await stage.server()
        assert stage.linked() == ""
        assert (await stage.publish()).error == ""
        assert stage.linked() == first
        os.kill(pid_of(stage), signal.SIGKILL)
        await stage.until(lambda: not stage.said.incarnation)  # told at once
        assert stage.linked() == ""
        second = await stage.server()
        assert second != first and stage.linked() == ""
        assert (stage.said.version, stage.said.restarts) == (0, 1)
        assert (await stage.publish()).error == ""
        assert stage.linked() == second and stage.said.version == 2

    stage(work)


@pytest.mark.parametrize("how", ["die", "500", "hang"])
def test_a_server_that_failed_an_update_is_replaced_and_takes_the_next(stage, how: str):
    async def work(stage: Stage) -> None:
        first = await stage.server()
        stage.script(update_weights=how)
        assert "engine 0" in (await stage.publish()).error
        stage.script()
        second = await stage.until(lambda: stage.said.incarnation not in ("", first))
        assert second and (await stage.publish()).error == ""

    stage(work, update_s=0.5)


def test_an_update_that_failed_elsewhere_is_given_up_and_not_counted_as_a_fault(stage):
    async def work(stage: Stage) -> None:
        first = await stage.server()
        stage.script(update_weights="hang")
        assert (await stage.publish(error="engine 7 died")).error == "engine 7 died"
        stage.script()
        await stage.until(lambda: stage.said.incarnation not in ("", first))
        assert (await stage.publish()).error == ""

    stage(work, restarts={"engine": 0})


def test_a_server_that_hangs_is_replaced(stage, caplog):
    async def work(stage: Stage) -> None:
        first = await stage.server()
        stage.script(running=1, grows=0)
        await stage.until(lambda: stage.said.incarnation not in ("", first))

    stage(work, stall_s=0.4)
    assert "engine 0 hangs: it has 1 requests" in caplog.text


def test_a_server_that_never_starts_ends_the_task_after_its_budget_with_its_last_lines(
    stage, caplog
):
    async def work(stage: Stage) -> None:
        pass

    stage(
        work, ends="engine 0 ended with status 1: .*; 1 restarts were not enough",
        restarts={"engine": 1}, module="tests.no_such_module",
    )  # fmt: skip
    assert "No module named tests.no_such_module" in caplog.text


def test_a_runner_that_dies_is_declared_gone_and_another_takes_its_place(stage, caplog):
    async def work(stage: Stage) -> None:
        await stage.server()
        await stage.publish()
        first = await stage.until(
            lambda: (stage.tmp_path / "name").exists() and (stage.tmp_path / "name").read_text()
        )
        assert re.fullmatch(r"runner-0-0-[0-9a-f]{8}\n", first)
        await stage.peers.lease(runner=first.strip())
        (stage.tmp_path / "name").unlink()
        (stage.tmp_path / "die").touch()
        second = await stage.until(
            lambda: (stage.tmp_path / "name").exists() and (stage.tmp_path / "name").read_text()
        )
        assert second != first
        await stage.until(lambda: stage.said.runner_restarts == 1)

    runner = """
    echo $MOLT_RUNNER_NAME > $TMP_PATH/name; trap 'exit 0' TERM
    while ! rm $TMP_PATH/die 2>/dev/null; do sleep 0.01; done
    echo the last line; kill -SEGV $$"""
    directory = stage(work, runner=runner)
    assert "the last line" in caplog.text
    reasons = {r.reason for r in read_journal(directory) if isinstance(r, LeaseEnd)}
    assert all(re.fullmatch(r"runner-0-0-.* ended with status 139", r) for r in reasons)
    assert reasons


@pytest.mark.parametrize(
    ("status", "kind", "ends"),
    [
        (7, EngineError, r"runner-0-0-.* ended with status 7; 1 restarts were not enough"),
        (2, ConfigError, r"runner-0-0-.* ended with status 2: see .*runner-0-0.log"),
    ],
)
def test_a_runner_that_keeps_dying_ends_the_task(stage, tmp_path, status, kind, ends):
    async def work(stage: Stage) -> None:
        pass

    runner = f"echo $MOLT_RUNNER_NAME >> $TMP_PATH/names; exit {status}"
    stage(work, ends=ends, kind=kind, runner=runner, restarts={"runner": 1})
    names = (tmp_path / "names").read_text().split()
    assert len(names) == len(set(names)) == (1 if status == 2 else 2)


def test_a_stop_lets_runners_finish_while_the_server_still_answers(stage, tmp_path):
    async def work(stage: Stage) -> None:
        await stage.server()
        await stage.publish()
        await stage.until((stage.tmp_path / "ready").exists)

    # The runner looks for the server half a second after it was told to stop.
    runner = """
    trap 'sleep 0.5; ls -L $MOLT_SOCKET > $TMP_PATH/seen 2>&1; exit 0' TERM
    touch $TMP_PATH/ready; while :; do sleep 0.01; done"""
    stage(work, runner=runner)
    assert (tmp_path / "seen").read_text().startswith("/")  # found, and no error
