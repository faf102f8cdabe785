# SPDX-License-Identifier: Apache-2.0
"""The server's process without vLLM in it: how it is guarded, and what it is told.

A shell script stands in for vLLM, or `stub_server`; the real one is in tests/e2e.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from molt.config import Config
from molt.records import ConfigError, EngineError, Publication
from molt.rollout.engine import Server, make_home


class Script(Server):
    """A server that is a shell script."""

    script = ""

    def _command(self) -> list[str]:
        return ["/bin/sh", "-c", self.script]


def make(tmp_path: Path, script: str, **config) -> Script:
    home = tmp_path / "home"
    home.mkdir(exist_ok=True)
    server = Script(Config.model_validate(config), 3, home, tmp_path / "log")
    server.script = script
    return server


def wait_for(path: Path) -> str:
    """The text of a file that a process is about to write."""
    deadline = time.monotonic() + 10
    while not (path.exists() and path.read_text().endswith("\n")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return path.read_text()


def ends(pid: int) -> bool:
    """Whether a process that was killed is gone soon."""
    deadline = time.monotonic() + 5
    while not gone(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return gone(pid)


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(("script", "status"), [("exit 7", 7), ("kill -SEGV $$", 128 + 11)])
def test_a_server_that_ends_says_with_which_status(tmp_path: Path, script: str, status: int):
    async def run():
        server = make(tmp_path, script)
        await server.start()
        with pytest.raises(EngineError, match=f"engine 3 ended with status {status}: see .*log"):
            await server.wait()
        assert server.returncode == status
        await server.stop()
        assert not server.socket.parent.exists()

    asyncio.run(run())


def test_the_deadline_of_a_start_is_an_error(tmp_path: Path):
    async def run():
        server = make(tmp_path, "sleep 60", engine={"start_s": 0.2})
        await server.start()
        with pytest.raises(EngineError, match=r"not up after 0\.2 s"):
            await server.wait_healthy()
        await server.stop()

    asyncio.run(run())


def test_stop_lets_the_server_end_itself_and_ends_what_it_leaves(tmp_path: Path):
    async def run():
        # The server writes a farewell on TERM and leaves a process behind that ignores TERM.
        script = f"""
        sh -c 'trap "" TERM; echo $$ > {tmp_path}/orphan; exec sleep 60' &
        trap 'echo bye > {tmp_path}/farewell; exit 0' TERM
        sleep 60 & wait
        """
        server = make(tmp_path, script)
        await server.start()
        orphan = int(await asyncio.to_thread(wait_for, tmp_path / "orphan"))
        assert server.socket.parent.stat().st_mode & 0o777 == 0o700
        await server.stop()
        await server.stop()  # safe to repeat
        assert (tmp_path / "farewell").read_text() == "bye\n"
        assert server.returncode == 0
        assert ends(orphan)
        assert not server.socket.parent.exists()

    asyncio.run(run())


def test_a_server_that_failed_gets_no_time_to_wait_for_its_clients(tmp_path: Path):
    async def run():
        server = make(tmp_path, f"trap '' TERM; echo $$ > {tmp_path}/pid; sleep 60; sleep 60")
        await server.start()
        pid = int(await asyncio.to_thread(wait_for, tmp_path / "pid"))
        began = time.monotonic()
        await server.stop(0.0)
        assert time.monotonic() - began < 5
        assert ends(pid)
        assert not server.socket.parent.exists()
        assert server.socket.parent.parent.exists()  # the home of the next one

    asyncio.run(run())


def test_signals_meant_for_a_job_do_not_reach_the_server(tmp_path: Path):
    async def run():
        server = make(tmp_path, f"echo $$ > {tmp_path}/pid; exec sleep 60")
        await server.start()
        pid = int(await asyncio.to_thread(wait_for, tmp_path / "pid"))
        guard = psutil.Process(pid).ppid()
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT):
            os.kill(pid, number)
            os.kill(guard, number)
        await asyncio.sleep(0.1)
        assert server.returncode is None
        assert not gone(pid)
        assert os.getsid(pid) == guard != os.getsid(0)  # a session of its own
        await server.stop()

    asyncio.run(run())


def test_a_killed_parent_takes_the_server_and_its_directory_along(tmp_path: Path):
    program = f"""
import asyncio
from pathlib import Path
from molt.config import Config
from molt.rollout.engine import Server, make_home

class Script(Server):
    def _command(self):
        return ["/bin/sh", "-c", "sleep 60 & echo $$ $! > {tmp_path}/pids; wait"]

async def main():
    server = Script(Config(), 0, make_home(), Path("{tmp_path}/log"))
    await server.start()
    Path("{tmp_path}/directory").write_text(f"{{server.socket.parent.parent}}\\n")
    await server.wait()

asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", program])
    pids = [int(pid) for pid in wait_for(tmp_path / "pids").split()]
    directory = Path(wait_for(tmp_path / "directory").strip())
    assert directory.exists()
    parent.kill()
    parent.wait()
    assert all(ends(pid) for pid in pids)
    deadline = time.monotonic() + 5
    while directory.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_path_too_long_for_a_socket_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/" + "x" * 100)
    with pytest.raises(EngineError, match="set TMPDIR to a shorter path"):
        make_home()


def command(tmp_path: Path, **vllm) -> list[str]:
    config = {"model": {"path": "/m", "max_len": 64}, "run": {"seed": 5}, "engine": {"vllm": vllm}}
    return Server(Config.model_validate(config), 3, tmp_path, tmp_path / "log")._command()


def value(arguments: list[str], flag: str) -> str:
    assert arguments.count(flag) == 1
    return arguments[arguments.index(flag) + 1]


def test_vllm_options_pass_through_and_replace_defaults(tmp_path: Path):
    arguments = command(
        tmp_path,
        max_model_len=32,
        enforce_eager=False,
        enable_prefix_caching=True,
        hf_overrides={"a": 1},
    )
    assert value(arguments, "--max-model-len") == "32"
    assert "--no-enforce-eager" in arguments
    assert "--enforce-eager" not in arguments
    assert "--enable-prefix-caching" in arguments
    assert json.loads(value(arguments, "--hf-overrides")) == {"a": 1}
    assert value(arguments, "--seed") == "8"  # run.seed + index: engines must not sample alike


def test_what_exactness_rests_on_cannot_be_replaced(tmp_path: Path):
    arguments = command(tmp_path)
    assert value(arguments, "--logprobs-mode") == "processed_logprobs"
    assert json.loads(value(arguments, "--weight-transfer-config")) == {"backend": "molt"}
    with pytest.raises(ConfigError, match=r"engine\.vllm\.logprobs_mode is set by Molt itself"):
        command(tmp_path, logprobs_mode="raw_logprobs")


# ---------------------------------------------------------------- a server that answers


def publication(version: int, workers: int = 1) -> Publication:
    return Publication(
        version=version, step=version, address="127.0.0.1", port=1, members=(0, 3),
        workers=workers, communicator="c",
    )  # fmt: skip


def with_stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work, script=None, **engine):
    """Run `work(server)` with a healthy server that misbehaves as `script` says."""
    monkeypatch.setenv("STUB_SCRIPT", str(tmp_path / "script.json"))
    misbehave(tmp_path, **(script or {}))
    config = {"engine": {"module": "tests.unit.rollout.stub_server", **engine}}

    async def run():
        home = make_home()
        server = Server(Config.model_validate(config), 3, home, tmp_path / "log")
        try:
            await server.start()
            await server.wait_healthy()
            await asyncio.wait_for(work(server), 30)
        finally:
            await server.stop(0.0)
            home.rmdir()  # nothing else is in it

    asyncio.run(run())


def misbehave(tmp_path: Path, **script) -> None:
    (tmp_path / "script.new").write_text(json.dumps(script))
    (tmp_path / "script.new").replace(tmp_path / "script.json")


def test_an_update_goes_through_its_stages_in_order(tmp_path: Path, monkeypatch):
    async def work(server: Server):
        bodies = []
        request = server._request

        async def spy(method, path, body):
            bodies.append((path, body))
            return await request(method, path, body)

        monkeypatch.setattr(server, "_request", spy)
        timings = await server.update(publication(4))
        await server.update(publication(5))
        paths = [path for path, _ in bodies]
        assert paths[:8] == [
            "/pause?mode=keep&clear_cache=true", "/get_world_size",
            "/init_weight_transfer_engine", "/start_weight_update", "/update_weights",
            "/finish_weight_update", "/reset_prefix_cache", "/resume",
        ]  # fmt: skip
        assert "/init_weight_transfer_engine" not in paths[8:]  # the communicator is the same
        info = dict(bodies)["/init_weight_transfer_engine"]["init_info"]
        assert (info["rank_offset"], info["world"]) == (2, 3)  # trainer, engine 0, engine 3
        assert dict(bodies)["/finish_weight_update"] == {"weight_version": "5"}
        assert 0 < timings["receive_s"] <= timings["pause_s"]

    with_stub(tmp_path, monkeypatch, work)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("500", "engine 3 answered /update_weights with 500: update_weights is broken"),
        ("die", "engine 3 broke off /update_weights"),
        ("hang", r"engine 3 did not answer /update_weights within 0\.5 s"),
    ],
)
def test_an_update_that_fails_names_its_stage(tmp_path: Path, monkeypatch, how: str, message: str):
    async def work(server: Server):
        with pytest.raises(EngineError, match=message):
            await server.update(publication(1))

    with_stub(tmp_path, monkeypatch, work, {"update_weights": how}, update_s=0.5)


def test_a_trainer_that_counts_other_workers_is_refused(tmp_path: Path, monkeypatch):
    async def work(server: Server):
        with pytest.raises(EngineError, match="engine 3 has 1 workers, the trainer expects 2"):
            await server.update(publication(1, workers=2))

    with_stub(tmp_path, monkeypatch, work)


def test_an_engine_without_progress_hangs_and_one_with_progress_or_without_work_does_not(
    tmp_path: Path, monkeypatch
):
    async def work(server: Server):
        watch = asyncio.create_task(server.watch())
        for quiet in ({"running": 0, "grows": 0}, {"running": 2, "grows": 1}):
            misbehave(tmp_path, **quiet)
            done, _ = await asyncio.wait({watch}, timeout=1.5)
            assert not done
        misbehave(tmp_path, running=2, grows=0)
        with pytest.raises(EngineError, match=r"engine 3 hangs: it has 2 requests .* for 0\.8 s"):
            await watch

    with_stub(tmp_path, monkeypatch, work, stall_s=0.8)


def test_an_engine_that_is_paused_for_an_update_does_not_hang(tmp_path: Path, monkeypatch):
    async def work(server: Server):
        watch = asyncio.create_task(server.watch())
        update = asyncio.create_task(server.update(publication(1)))
        done, _ = await asyncio.wait({watch, update}, timeout=1.5)
        assert not done
        misbehave(tmp_path, running=2, grows=0)  # it goes on, and stands still afterwards
        update.cancel()
        watch.cancel()

    script = {"running": 2, "grows": 0, "update_weights": "hang"}
    with_stub(tmp_path, monkeypatch, work, script, stall_s=0.4)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ({"health": "500"}, "engine 3 is dead"),  # vLLM's process outlives its engine
        ({"health": "die"}, "engine 3 answers no more"),
    ],
)
def test_a_dead_engine_is_noticed(tmp_path: Path, monkeypatch, script: dict, message: str):
    async def work(server: Server):
        misbehave(tmp_path, **script)
        with pytest.raises(EngineError, match=message):
            await server.watch()

    with_stub(tmp_path, monkeypatch, work)


def test_a_server_that_does_not_answer_hangs(tmp_path: Path, monkeypatch):
    async def work(server: Server):
        monkeypatch.setattr("molt.rollout.engine.ANSWER_S", 0.2)
        misbehave(tmp_path, health="hang")
        with pytest.raises(EngineError, match="engine 3 hangs: it does not answer"):
            await server.watch()

    with_stub(tmp_path, monkeypatch, work, stall_s=0.5)
