# SPDX-License-Identifier: Apache-2.0
"""The server's process without vLLM in it: how it is guarded, and what it is told.

A shell script stands in for vLLM; the real one is in tests/e2e.
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
from molt.records import ConfigError, EngineError
from molt.rollout.engine import Server


class Script(Server):
    """A server that is a shell script."""

    script = ""

    def _command(self) -> list[str]:
        return ["/bin/sh", "-c", self.script]


def make(tmp_path: Path, script: str, **config) -> Script:
    server = Script(Config.model_validate(config), 3, tmp_path / "log")
    server.script = script
    return server


def wait_for(path: Path) -> str:
    """The text of a file that a process is about to write."""
    deadline = time.monotonic() + 10
    while not (path.exists() and path.read_text().endswith("\n")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return path.read_text()


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(("script", "status"), [("exit 7", 7), ("kill -SEGV $$", 128 + 11)])
def test_a_server_that_ends_says_with_which_status(tmp_path: Path, script: str, status: int):
    async def run():
        server = make(tmp_path, script)
        await server.start()
        with pytest.raises(EngineError, match=f"engine 3 ended with status {status}: see .*log"):
            await server.wait()
        with pytest.raises(EngineError, match=f"status {status}"):
            await server.wait_healthy()
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
        assert gone(orphan)
        assert not server.socket.parent.exists()

    asyncio.run(run())


def test_a_stopped_server_starts_again(tmp_path: Path):
    async def run():
        server = make(tmp_path, f"echo $$ > {tmp_path}/pid; exec sleep 60")
        pids = set()
        for _ in range(2):
            await server.start()
            pids.add(await asyncio.to_thread(wait_for, tmp_path / "pid"))
            assert server.returncode is None
            assert server.socket.parent.exists()
            await server.stop()
            (tmp_path / "pid").unlink()
        assert len(pids) == 2

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
from molt.rollout.engine import Server

class Script(Server):
    def _command(self):
        return ["/bin/sh", "-c", "sleep 60 & echo $$ $! > {tmp_path}/pids; wait"]

async def main():
    server = Script(Config(), 0, Path("{tmp_path}/log"))
    await server.start()
    Path("{tmp_path}/directory").write_text(f"{{server.socket.parent}}\\n")
    await server.wait()

asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", program])
    pids = [int(pid) for pid in wait_for(tmp_path / "pids").split()]
    directory = Path(wait_for(tmp_path / "directory").strip())
    assert directory.exists()
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 5
    while directory.exists() or not all(gone(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_path_too_long_for_a_socket_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/" + "x" * 100)
    with pytest.raises(EngineError, match="set TMPDIR to a shorter path"):
        Server(Config(), 0, tmp_path / "log")


def command(tmp_path: Path, **vllm) -> list[str]:
    config = {"model": {"path": "/m", "max_len": 64}, "run": {"seed": 5}, "engine": {"vllm": vllm}}
    return Server(Config.model_validate(config), 3, tmp_path / "log")._command()


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
