# SPDX-License-Identifier: Apache-2.0
"""A server that speaks vLLM's HTTP, as far as Molt uses it, with deterministic tokens.

`engine.module = "tests.scripted_engine"` puts it in vLLM's place. It has no model: `token_after`
says what follows a prefix, so whoever reads a shard can tell whether its tokens are the ones that
were sampled. Everything around that is as in vLLM 0.32: a pause holds requests, an abort answers
with what there is, a span of weight versions comes with the finish, and weights arrive over the
real communicator.

Misbehaviour is written down in the environment or in the file that it names:

    MOLT_SCRIPT='[{"stage": "receive", "nth": 2, "do": "die"}]'

`stage` is a method of `Engine`; `do` is `die`, `hang` (the stage never ends), `freeze` (the whole
process stops to answer), `fail` (status 500) or a number of seconds to be late by. A rule applies
to the nth time that a process comes to its stage; with `"once": PATH` only if no process has
created PATH before. MOLT_TOKEN_S is the time that a token takes.
"""

import argparse
import asyncio
import contextlib
import importlib
import json
import os
import signal
import sys
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from aiohttp import web

from molt import transfer
from molt.records import EngineError, Tensor

STOP, FIRST, LAST = 2, 3, 97  # the token that ends a completion; those that are one character
TOKEN_S = 0.002


def token_after(prefix: list[int], sample: int = 0) -> int:
    """The token that follows `prefix`; the samples of one request differ in their first one."""
    drawn = zlib.crc32(np.array(prefix, np.int32).tobytes(), sample)
    return STOP if drawn % 16 == 0 else FIRST + drawn // 16 % (LAST + 1 - FIRST)


def logprob_of(token: int) -> float:
    """The log-probability that is told with a token, nats."""
    return -(1 + token % 31) / 16


class Choice:
    """One sample of a request while it grows."""

    def __init__(self, index: int) -> None:
        self.index, self.told = index, 0
        self.ids: list[int] = []
        self.spans: list[tuple[int, str]] = []  # (end, version)
        self.finish_reason: str | None = None

    def add(self, token: int, version: str) -> None:
        """Append a token that was sampled under `version`."""
        self.ids.append(token)
        if self.spans and self.spans[-1][1] == version:
            self.spans.pop()
        self.spans.append((len(self.ids), version))

    def event(self) -> dict[str, Any]:
        """What has not been told yet, as vLLM writes it."""
        ids, self.told = self.ids[self.told :], len(self.ids)
        starts = [0, *(end for end, _ in self.spans)]
        spans = [
            {"version": version, "start": start, "end": end}
            for start, (end, version) in zip(starts, self.spans, strict=False)
        ]
        return {
            "index": self.index,
            "token_ids": ids,
            "logprobs": {"content": [{"token_id": i, "logprob": logprob_of(i)} for i in ids]},
            "finish_reason": self.finish_reason,
            "weight_versions": spans if self.finish_reason else None,
        }


class Engine:
    """The state of the server. Its public coroutines are the stages that a script names."""

    def __init__(self) -> None:
        self.version = "default"
        self.running: dict[str, asyncio.Event] = {}  # request → set when it is aborted
        self.num_tokens = 0
        self._unpaused = asyncio.Event()
        self._unpaused.set()
        self._communicator: transfer.Communicator | None = None
        self._undefined = False
        self._rules, self._counts = read_script(), Counter[str]()
        self._token_s = float(os.environ.get("MOLT_TOKEN_S", TOKEN_S))

    # ------------------------------------------------------------ weights

    async def pause(self, request: web.Request) -> dict[str, Any]:
        assert request.query["mode"] == "keep"
        self._unpaused.clear()
        return {"status": "paused"}

    async def resume(self, request: web.Request) -> dict[str, Any]:
        self._unpaused.set()
        return {"status": "resumed"}

    async def world_size(self, request: web.Request) -> dict[str, Any]:
        return {"world_size": 1}

    async def join(self, request: web.Request) -> dict[str, Any]:
        info = (await request.json())["init_info"]
        await asyncio.to_thread(self._join, info)
        return {"message": "Weight transfer initialized"}

    async def begin(self, request: web.Request) -> dict[str, Any]:
        if self._undefined:
            raise EngineError("an earlier update failed and left the weights undefined")
        self._undefined = True
        return {"message": "Weight update started"}

    async def receive(self, request: web.Request) -> dict[str, Any]:
        info = (await request.json())["update_info"]
        tensors = [Tensor(name=n, dtype=d, shape=tuple(s)) for n, d, s in info["tensors"]]
        await asyncio.to_thread(self._receive, tensors, info["bucket_bytes"])
        return {"message": "Weights updated"}

    async def midway(self) -> None:
        """The first tensor has come."""

    async def finish(self, request: web.Request) -> dict[str, Any]:
        self.version = (await request.json())["weight_version"]
        self._undefined = False
        return {"message": "Weight update finished"}

    async def reset(self, request: web.Request) -> dict[str, Any]:
        return {"success": True}

    def _join(self, info: dict[str, Any]) -> None:
        if self._communicator:
            self._communicator.close()
        store = transfer.join(info["address"], info["port"], info["timeout_s"])
        self._communicator = transfer.Communicator(
            store, info["name"], info["rank_offset"], info["world"], torch.device("cpu"),
            info["timeout_s"],
        )  # fmt: skip

    def _receive(self, tensors: list[Tensor], bucket_bytes: int) -> None:
        assert self._communicator, "join comes first"
        try:
            for index, _ in enumerate(self._communicator.receive(tensors, bucket_bytes)):
                if index == 0:
                    asyncio.run(self.stage("midway"))
        except BaseException:
            self._communicator.close()
            self._communicator = None
            raise

    # ------------------------------------------------------------ tokens

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        name = f"generate-tokens-{body['request_id']}"
        aborted = self.running[name] = asyncio.Event()
        choices = [Choice(i) for i in range(body["sampling_params"]["n"])]
        events = self._events(body, choices, aborted)
        try:
            if not body["stream"]:
                async for _ in events:
                    pass
                choices[0].told = 0
                return web.json_response({"choices": [choices[0].event()]})
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            async for event in events:
                data = json.dumps({"choices": [event]})
                await response.write(f"data: {data}\n\n".encode())
            await response.write(b"data: [DONE]\n\n")
            return response
        finally:
            del self.running[name]

    async def token(self) -> None:
        """A request is about to sample its next token."""

    async def abort(self, request: web.Request) -> dict[str, Any]:
        names = (await request.json()).get("request_ids") or list(self.running)
        for name in names:
            if name in self.running:
                self.running[name].set()
        return {"status": "aborted", "aborted": len(names)}

    async def _events(
        self, body: dict[str, Any], choices: list[Choice], aborted: asyncio.Event
    ) -> AsyncIterator[dict[str, Any]]:
        """The first token of each choice, then each as a whole when it has finished."""
        prompt, max_tokens = body["token_ids"], body["sampling_params"]["max_tokens"]
        left = list(choices)
        while left:
            if not aborted.is_set():
                await self._step(aborted)
            for choice in list(left):
                if aborted.is_set():
                    choice.finish_reason = "abort"
                else:
                    self._sample(choice, prompt, max_tokens)
                if choice.finish_reason:
                    left.remove(choice)
                if choice.finish_reason or len(choice.ids) == 1:
                    yield choice.event()

    async def _step(self, aborted: asyncio.Event) -> None:
        """Wait for the next token: while the engine is paused, none comes."""
        await self.stage("token")
        woken = [asyncio.ensure_future(e.wait()) for e in (aborted, self._unpaused)]
        try:
            await asyncio.wait(woken, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in woken:
                task.cancel()
        await asyncio.sleep(self._token_s)
        if not self._unpaused.is_set() and not aborted.is_set():
            await self._step(aborted)

    def _sample(self, choice: Choice, prompt: list[int], max_tokens: int) -> None:
        token = token_after(prompt + choice.ids, 0 if choice.ids else choice.index)
        choice.add(token, self.version)
        self.num_tokens += 1
        if token == STOP:
            choice.finish_reason = "stop"
        elif len(choice.ids) == max_tokens:
            choice.finish_reason = "length"

    # ------------------------------------------------------------ health

    async def health(self, request: web.Request) -> web.StreamResponse:
        return web.Response()

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        numbers = {
            "vllm:num_requests_running": len(self.running),
            "vllm:num_requests_waiting": 0,
            "vllm:iteration_tokens_total_count": self.num_tokens,
            "vllm:prompt_tokens_total": 0,
            "vllm:generation_tokens_total": self.num_tokens,
        }
        label = '{engine="0",model_name="policy"}'
        return web.Response(text="".join(f"{n}{label} {v}.0\n" for n, v in numbers.items()))

    # ------------------------------------------------------------ misbehaviour

    async def stage(self, name: str) -> None:
        """Do what the script says about this time at a stage."""
        self._counts[name] += 1
        for rule in self._rules:
            if (rule["stage"], rule.get("nth", 1)) != (name, self._counts[name]):
                continue
            if (once := rule.get("once")) and not is_first(Path(once)):
                continue
            await misbehave(rule["do"], name)

    def routes(self) -> list[web.RouteDef]:
        """The routes of vLLM and the stages behind them."""
        post = {
            "/pause": self.pause, "/resume": self.resume,
            "/init_weight_transfer_engine": self.join, "/start_weight_update": self.begin,
            "/update_weights": self.receive, "/finish_weight_update": self.finish,
            "/reset_prefix_cache": self.reset, "/inference/v1/generate": self.generate,
            "/abort_requests": self.abort,
        }  # fmt: skip
        get = {
            "/get_world_size": self.world_size, "/health": self.health, "/metrics": self.metrics
        }  # fmt: skip
        return [
            *(web.post(path, self._endpoint(stage)) for path, stage in post.items()),
            *(web.get(path, self._endpoint(stage)) for path, stage in get.items()),
        ]

    def _endpoint(self, stage: Any) -> Any:
        async def endpoint(request: web.Request) -> web.StreamResponse:
            try:
                await self.stage(stage.__name__)
                answer = await stage(request)
            except EngineError as error:
                return web.json_response({"error": {"message": str(error)}}, status=500)
            return answer if isinstance(answer, web.StreamResponse) else web.json_response(answer)

        return endpoint


async def misbehave(what: str | float, stage: str) -> None:
    """Carry out one rule."""
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "fail":
        raise EngineError(f"the script fails {stage}")
    elif what == "freeze":
        time.sleep(3600)
    await asyncio.sleep(3600 if what == "hang" else float(what))


def is_first(path: Path) -> bool:
    """Whether no process came here before."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def read_script() -> list[dict[str, Any]]:
    """The rules in MOLT_SCRIPT, or in the file that it names."""
    script = os.environ.get("MOLT_SCRIPT", "[]")
    return json.loads(script if script.startswith("[") else Path(script).read_text())


async def serve(socket: str) -> None:
    """Serve until SIGTERM."""
    engine = Engine()
    await engine.stage("start")
    application = web.Application(client_max_size=1 << 28)
    application.add_routes(engine.routes())
    runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    await web.UnixSite(runner, socket).start()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(runner.cleanup(), 2)
    sys.stdout.write(f"sampled {engine.num_tokens} tokens\n")
    sys.stdout.flush()


def main() -> None:
    """Entry point, with vLLM's arguments."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--uds", required=True)
    arguments, _ = parser.parse_known_args()
    torch.set_num_threads(1)
    asyncio.run(serve(arguments.uds))
    os._exit(0)  # a thread that waits for a broadcast does not end


if __name__ == "__main__":
    # As a module of that name: what a test replaces in it is then replaced here.
    importlib.import_module("tests.scripted_engine").main()
