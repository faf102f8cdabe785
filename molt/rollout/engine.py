# SPDX-License-Identifier: Apache-2.0
"""One stock vLLM server as a process: its start, its health, its weight updates and its end.

A `Server` is one process, from its start to its end; who wants it again makes another. It listens
on a unix socket in a directory of its own, where its temporary files are too, and lives in a
session of its own. A guard, the shell that leads that session, ends it and removes everything when
our process is gone, however it went. Anything vLLM takes is passed through from `engine.vllm` and
`engine.env`.
"""

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp

from molt.config import Config
from molt.records import ConfigError, EngineError, Publication

STOP_S = 10.0  # after SIGTERM, before SIGKILL
START_POLL_S = 0.1
POLL_S = 1.0  # between two looks at a server that runs
ANSWER_S = 5.0  # a server that is well has answered by then
REFUSALS = 3  # of a connection, in a row: the server listens no more
# Prometheus metrics of the engine: requests that it has, and what grows with every token.
WORK = ("vllm:num_requests_running", "vllm:num_requests_waiting")
PROGRESS = (
    "vllm:iteration_tokens_total_count",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
)
SOCKET_BYTES = 107  # what the kernel allows for the path of a unix socket
INCARNATION_BYTES = 4
NAME_BYTES = 37  # of it, for a slash and the longest name, a UUID that vLLM gives its own

# Starts the server ("$@"), ends the session when the pipe to our process closes, and leaves with
# the server's status. (The pipe also closes when the server has ended: then our process cleans up.)
# A caught signal is default again in the server and an ignored one stays ignored: TERM is for the
# server, the others may be meant for a job that we are part of.
GUARD = """
home=$1; shift
trap '' HUP INT USR1 USR2; trap : TERM
exec 3<&0
"$@" 3<&- </dev/null & server=$!
( trap '' TERM; read -r _ <&3; kill -0 $$ 2>/dev/null && rm -rf "$home"; kill -KILL 0 ) &
exec 3<&-
while wait $server; status=$?; kill -0 $server 2>/dev/null; do :; done
exit $status
"""


def make_home() -> Path:
    """A private directory for the servers of one engine; the guard of any of them removes it.

    Raises:
        EngineError: the system's directory of temporary files has too long a path.
    """
    home = Path(tempfile.gettempdir()) / f"molt-{secrets.token_hex(4)}"
    if len(os.fsencode(home)) + 1 + 2 * INCARNATION_BYTES + NAME_BYTES > SOCKET_BYTES:
        raise EngineError(
            f"{home} is too long for unix sockets in it: set TMPDIR to a shorter path"
        )
    home.mkdir(mode=0o700)
    return home


class Server:
    """One incarnation of the vLLM server of engine `index`.

    Args:
        config: of the run.
        index: of the engine: it decides the ranks of its workers and its sampling seed.
        home: from `make_home`.
        log_path: what the server writes goes here, appended.
    """

    def __init__(self, config: Config, index: int, home: Path, log_path: Path) -> None:
        self.incarnation = secrets.token_hex(INCARNATION_BYTES)
        self._config, self._index, self._log_path = config, index, log_path
        self._home, self._directory = home, home / self.incarnation
        self.socket = self._directory / "vllm.sock"
        self._process: asyncio.subprocess.Process | None = None
        self._group = 0  # the server's process group; 0 = none is left
        self._session: aiohttp.ClientSession | None = None
        self._communicator = ""
        self._updating = False

    @property
    def returncode(self) -> int | None:
        """None while the server runs; 128 + n after signal n."""
        return self._process.returncode if self._process else None

    async def start(self) -> None:
        """Spawn the server. `wait_healthy` tells when it answers."""
        self._directory.mkdir(mode=0o700)
        with self._log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                "/bin/sh", "-c", GUARD, "molt-guard", str(self._home), *self._command(),
                stdin=asyncio.subprocess.PIPE, stdout=log, stderr=log,
                env=_environment(self._config) | {"TMPDIR": str(self._directory)},
                start_new_session=True,
            )  # fmt: skip
        self._group = self._process.pid
        # vLLM closes a connection after an error: control calls are few, so each gets its own.
        connector = aiohttp.UnixConnector(path=str(self.socket), force_close=True)
        self._session = aiohttp.ClientSession("http://vllm", connector=connector)

    async def wait_healthy(self) -> None:
        """Wait until the server answers.

        Raises:
            EngineError: it was not up within `engine.start_s`.
        """
        deadline = time.monotonic() + self._config.engine.start_s
        while time.monotonic() < deadline:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                if await self._probe("/health") is not None:
                    return
            await asyncio.sleep(START_POLL_S)
        raise EngineError(
            f"engine {self._index} was not up after {self._config.engine.start_s:g} s: "
            f"see {self._log_path}, or raise engine.start_s"
        )

    async def wait(self) -> None:
        """Return never: a server ends only when it is stopped.

        Raises:
            EngineError: it ended, with its exit status.
        """
        assert self._process, "start comes first"
        await self._process.wait()
        raise EngineError(
            f"the vLLM server of engine {self._index} ended with status {self.returncode}: "
            f"see {self._log_path}"
        )

    async def watch(self) -> None:
        """Return never, once the server is healthy.

        Raises:
            EngineError: its engine is dead, which it may survive for long while connections are
                open, or nothing has moved for `engine.stall_s` although there are requests.
        """
        stall_s, moved = self._config.engine.stall_s, time.monotonic()
        tokens, refused, what = -1.0, 0, ""
        while time.monotonic() - moved <= stall_s:
            await asyncio.sleep(min(POLL_S, stall_s / 4))
            try:
                work, now = await self._measure()
            except TimeoutError:
                work, now, what = 1.0, tokens, "does not answer"
            except aiohttp.ClientError as error:
                refused += 1
                if refused == REFUSALS:
                    raise EngineError(
                        f"engine {self._index} answers no more ({error}): see {self._log_path}"
                    ) from error
                continue
            else:
                refused, what = 0, f"has {work:.0f} requests"
            if self._updating or not work or now != tokens:
                moved, tokens = time.monotonic(), now
        raise EngineError(
            f"engine {self._index} hangs: it {what} and no token came for {stall_s:g} s: "
            f"see {self._log_path}, or raise engine.stall_s"
        )

    async def update(self, publication: Publication) -> dict[str, float]:
        """Take one version of the weights; requests in flight go on under it afterwards.

        Returns:
            Seconds: `pause_s` that generation stood still, `receive_s` of it for the transfer.

        Raises:
            EngineError: a stage failed or passed its deadline; the server is of no more use.
        """
        start = time.monotonic()
        self._updating = True
        # Preempts what runs and drops its cache, to be recomputed under the new weights.
        await self._post("/pause?mode=keep&clear_cache=true")
        if publication.communicator != self._communicator:
            await self._join(publication)
        await self._post("/start_weight_update")
        received = time.monotonic()
        tensors = [(t.name, t.dtype, t.shape) for t in publication.tensors]
        info = {"tensors": tensors, "bucket_bytes": publication.bucket_bytes}
        await self._post("/update_weights", {"update_info": info})
        receive_s = time.monotonic() - received
        await self._post("/finish_weight_update", {"weight_version": str(publication.version)})
        reset = await self._post("/reset_prefix_cache")
        if not reset.get("success"):
            raise EngineError(
                f"engine {self._index} kept cached prefixes of the old weights: {reset}"
            )
        await self._post("/resume")
        self._updating = False
        return {"pause_s": time.monotonic() - start, "receive_s": receive_s}

    async def stop(self, within_s: float = STOP_S) -> None:
        """End every process of the server's session and remove its directory. Safe to repeat.

        Args:
            within_s: what the server gets to end by itself. It waits for its clients to close
                their connections: give one that failed no time at all.
        """
        if self._session:
            await self._session.close()
        if self._group and self._process:
            if within_s:
                self._signal(signal.SIGTERM)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._process.wait(), within_s)
            self._signal(signal.SIGKILL)
            await self._process.wait()
            self._group = 0
        shutil.rmtree(self._directory, ignore_errors=True)

    async def _join(self, publication: Publication) -> None:
        """Make every worker join the publication's communicator."""
        workers = (await self._get("/get_world_size"))["world_size"]
        if workers != publication.workers:
            raise EngineError(
                f"engine {self._index} has {workers} workers, the trainer expects "
                f"{publication.workers}: compare the parallel sizes in engine.vllm"
            )
        info = {
            "address": publication.address,
            "port": publication.port,
            "name": publication.communicator,
            "rank_offset": publication.rank_offset(self._index),
            "world": publication.world,
            "timeout_s": self._config.engine.update_s,
        }
        await self._post("/init_weight_transfer_engine", {"init_info": info})
        self._communicator = publication.communicator

    async def _measure(self) -> tuple[float, float]:
        """Requests that the engine has, and what has grown with every token.

        Raises:
            EngineError: the engine is dead.
        """
        if await self._probe("/health") is None:
            raise EngineError(f"engine {self._index} is dead: see {self._log_path}")
        totals = dict.fromkeys((*WORK, *PROGRESS), 0.0)
        for line in (await self._probe("/metrics") or "").splitlines():
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0]
            if name in totals:
                totals[name] += float(value)
        return sum(totals[name] for name in WORK), sum(totals[name] for name in PROGRESS)

    async def _probe(self, path: str) -> str | None:
        """The answer to a GET; None if it is an error."""
        assert self._session, "start comes first"
        timeout = aiohttp.ClientTimeout(ANSWER_S)
        async with self._session.get(path, timeout=timeout) as response:
            return await response.text() if response.status == HTTPStatus.OK else None

    async def _get(self, path: str) -> dict[str, Any]:
        return await self._request("GET", path, None)

    async def _post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return await self._request("POST", path, body)

    async def _request(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        """One control request; its path names the stage in the error."""
        assert self._session, "start comes first"
        deadline_s = self._config.engine.update_s
        timeout = aiohttp.ClientTimeout(deadline_s)
        try:
            async with self._session.request(method, path, json=body, timeout=timeout) as response:
                text = await response.text()
        except TimeoutError as error:
            raise EngineError(
                f"engine {self._index} did not answer {path} within {deadline_s:g} s: "
                f"see {self._log_path}, or raise engine.update_s"
            ) from error
        except aiohttp.ClientError as error:
            raise EngineError(
                f"engine {self._index} broke off {path}: {error}; see {self._log_path}"
            ) from error
        if response.status != HTTPStatus.OK:
            raise EngineError(
                f"engine {self._index} answered {path} with {response.status}: {_message(text)}; "
                f"see {self._log_path}"
            )
        return json.loads(text) if text else {}

    def _signal(self, number: signal.Signals) -> None:
        """Signal the whole session, which may outlive its leader."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._group, number)

    def _command(self) -> list[str]:
        """The server's command line: defaults, `engine.vllm`, and what Molt cannot do without."""
        config = self._config
        options: dict[str, Any] = {
            "dtype": config.model.dtype,
            "max_model_len": config.model.max_len,
            # Never per request, where the engine would build a generator for each.
            "seed": config.run.seed + self._index,
        }
        if not has_gpu():
            options |= {"enforce_eager": True, "block_size": 32, "kv_cache_memory_bytes": 1 << 27}
        needed: dict[str, Any] = {
            "model": config.model.path,
            "served_model_name": "policy",
            "uds": str(self.socket),
            "enable_scale_out": True,  # the route that takes and returns token ids
            "logprobs_mode": "processed_logprobs",  # of the distribution that is sampled from
            "weight_transfer_config": {"backend": "molt"},
            "disable_uvicorn_access_log": True,
        }
        if taken := sorted(needed.keys() & config.engine.vllm.keys()):
            raise ConfigError(f"engine.vllm.{taken[0]} is set by Molt itself: remove it")
        command = [sys.executable, "-m", config.engine.module]
        for name, value in (options | config.engine.vllm | needed).items():
            command += _argument(name, value)
        return command


def has_gpu() -> bool:
    """Whether this host has an NVIDIA GPU, without importing torch."""
    return Path("/dev/nvidiactl").exists()


def _message(text: str) -> str:
    """What vLLM says in an error, in one line."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        text = json.loads(text)["error"]["message"]
    return " ".join(text.split())[:500]


def _argument(name: str, value: object) -> list[str]:
    """One vLLM option as command line arguments."""
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    return [flag, json.dumps(value) if isinstance(value, dict | list) else str(value)]


def _environment(config: Config) -> dict[str, str]:
    """The server's environment; `engine.env` has the last word."""
    environment = {
        **os.environ,
        "VLLM_SERVER_DEV_MODE": "1",  # the routes of weight updates
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",  # seconds: a client may think between two turns
    }
    if not has_gpu():
        environment.pop("VLLM_CPU_KVCACHE_SPACE", None)  # a second, larger cache
        environment |= {
            "TORCHDYNAMO_DISABLE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the worker lives in the engine core's process
            "GLOO_SOCKET_IFNAME": "lo",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }
    return environment | config.engine.env
