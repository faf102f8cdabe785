# SPDX-License-Identifier: Apache-2.0
"""Requests to one engine: token ids go over its unix socket and come back with log-probabilities.

`Client.generate` is one sample. Samples of one prompt that are asked for in the same turn of the
event loop travel as one request, and each is answered when it has finished: what HTTP costs is paid
once a group. Nothing is invented here: a sampled token without a log-probability or a weight
version is an `EngineError` that names the request. What goes away with a server (a broken
connection, an answer that does not come) is an `EngineLost`: the socket's path may lead to another
server soon, and `recovered` waits for that one.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path

import aiohttp
import msgspec
import numpy as np
from numpy.typing import NDArray

from molt.config import Engine
from molt.records import EngineError, Sampling

Ids = NDArray[np.int32]

MISSING = (
    -9000.0
)  # vLLM writes −9999.0 where it has no log-probability, and clamps −inf and NaN to it
MAX_CHOICES = 64  # samples a request carries at most; vLLM refuses more than its max_num_seqs
WHOLE = (
    1 << 30
)  # stream interval, tokens: a choice comes in two events, its first token and all the others
INITIAL = "default"  # vLLM's name for the weights it started with: version 0
PROBE_S = 0.2  # between two looks for a server that is lost
HEALTH_S = 5.0  # in which a healthy server says so


class EngineLost(EngineError):
    """The server went away, or did not answer in time: ask again once it has `recovered`."""


@dataclass(frozen=True)
class Completion:
    """What the policy sampled after a prompt. m tokens, v spans."""

    token_ids: Ids  # [m], the stop token included
    logprobs: NDArray[np.float32]  # [m] nats, of each token at the request's temperature
    version_spans: NDArray[np.int64]  # [v, 2] (end, version), the last end is m
    finish_reason: str  # "stop" | "length" | "abort"


NOTHING = Completion(  # of a request that was not made any more
    np.empty(0, np.int32), np.empty(0, np.float32), np.empty((0, 2), np.int64), "abort"
)


class _Logprob(msgspec.Struct, gc=False):
    token_id: int
    logprob: float


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_Logprob]


class _Span(msgspec.Struct, gc=False):
    version: str
    end: int


class _Choice(msgspec.Struct, gc=False):
    index: int
    token_ids: list[int]
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[_Span] | None = None


class _Answer(msgspec.Struct):
    """A whole answer or one event of a stream, as far as it is read."""

    choices: list[_Choice] = []
    error: msgspec.Raw = msgspec.Raw()


_decode = msgspec.json.Decoder(_Answer).decode


@dataclass(eq=False)
class _Batch:
    """Samples of one prompt: one request."""

    ids: Ids
    sampling: Sampling
    request_id: str
    answers: list["asyncio.Future[Completion]"] = field(default_factory=list)
    parts: dict[int, list[_Choice]] = field(
        default_factory=dict
    )  # of choices that are not finished


class Client:
    """A connection to one engine's server. Make it inside a running event loop and `close` it.

    Args:
        socket: where the engine's server listens, whichever it is at the time.
        config: of the engines; `request_s` is the deadline of one completion, `start_s` of a
            server's return.
    """

    def __init__(self, socket: Path, config: Engine) -> None:
        # Shorter than the server keeps an idle connection, which would break off under a request.
        connector = aiohttp.UnixConnector(path=str(socket), limit=0, keepalive_timeout=30)
        timeout = aiohttp.ClientTimeout(config.request_s)
        self._session = aiohttp.ClientSession("http://vllm", connector=connector, timeout=timeout)
        self._socket, self._config = socket, config
        self._stopped = False
        self._max_choices = min(MAX_CHOICES, config.vllm.get("max_num_seqs", MAX_CHOICES))
        self._waiting: dict[tuple[bytes, Sampling], _Batch] = {}
        self._running: dict[asyncio.Task[None], _Batch] = {}

    async def generate(self, ids: Ids, sampling: Sampling, request_id: str) -> Completion:
        """Sample one continuation. Cancelling it frees the engine.

        Args:
            ids: [n] int32, the prompt.
            sampling: stop strings stay in the completion, as the tokens they were sampled in.
            request_id: unique, for the server's log and for errors.

        Raises:
            EngineLost: the server went away, failed or answered too late.
            EngineError: it refused the request, or answered without a log-probability.
        """
        if self._stopped:
            return NOTHING
        loop = asyncio.get_running_loop()
        key = (ids.tobytes(), sampling)
        batch = self._waiting.get(key)
        if batch is None:
            batch = self._waiting[key] = _Batch(ids, sampling, request_id)
            loop.call_soon(self._start, key, batch)
        answer: asyncio.Future[Completion] = loop.create_future()
        batch.answers.append(answer)
        # vLLM refuses several greedy samples in one request.
        if len(batch.answers) == (self._max_choices if sampling.temperature > 0 else 1):
            del self._waiting[key]  # full: who comes next opens another
        return await answer

    async def recovered(self) -> None:
        """Wait until a server answers at the socket.

        Raises:
            EngineLost: none did within `engine.start_s`.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._config.start_s
        while loop.time() < deadline:
            await asyncio.sleep(PROBE_S)
            if self._stopped or (self._socket.exists() and await self._healthy()):
                return
        raise EngineLost(
            f"no server came back at {self._socket} within {self._config.start_s:g} s: "
            "see its engine's log, or raise engine.start_s"
        )

    async def stop(self, within_s: float) -> None:
        """Let every `generate`, those in flight too, return what it has, as "abort"."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + within_s
        self._stopped = True
        await asyncio.sleep(0)  # what was asked for in this turn of the loop starts now
        # A request that is still on its way to the server cannot be aborted there yet: repeat.
        while self._running and loop.time() < deadline:
            await self._abort()
            await asyncio.wait(list(self._running), timeout=PROBE_S)

    async def close(self) -> None:
        """Close the connection; requests in flight are cancelled."""
        for task in list(self._running):
            task.cancel()
        await self._session.close()

    async def _abort(self) -> None:
        """Ask the server to end what runs; one that is lost has nothing to say."""
        names = [f"generate-tokens-{batch.request_id}" for batch in self._running.values()]
        body, timeout = {"request_ids": names}, aiohttp.ClientTimeout(HEALTH_S)
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with self._session.post("/abort_requests", json=body, timeout=timeout):
                pass

    async def _healthy(self) -> bool:
        timeout = aiohttp.ClientTimeout(HEALTH_S)
        try:
            async with self._session.get("/health", timeout=timeout) as response:
                return response.status == HTTPStatus.OK
        except (aiohttp.ClientError, TimeoutError):
            return False

    def _start(self, key: tuple[bytes, Sampling], batch: _Batch) -> None:
        """Send a batch; nothing can join it any more."""
        if self._waiting.get(key) is batch:
            del self._waiting[key]
        task = asyncio.get_running_loop().create_task(self._run(batch))
        self._running[task] = batch
        task.add_done_callback(lambda task: self._end(task, batch))
        for answer in batch.answers:
            answer.add_done_callback(lambda _: self._cancel_unwanted(task, batch))

    def _cancel_unwanted(self, task: "asyncio.Task[None]", batch: _Batch) -> None:
        """Free the engine when nobody waits for the rest of a batch."""
        if all(answer.done() for answer in batch.answers) and any(
            a.cancelled() for a in batch.answers
        ):
            task.cancel()

    def _end(self, task: "asyncio.Task[None]", batch: _Batch) -> None:
        """Hand the failure of a request to those who wait for it."""
        del self._running[task]
        error = None if task.cancelled() else task.exception()
        for answer in batch.answers:
            if not answer.done():
                answer.set_exception(error) if error else answer.cancel()

    async def _run(self, batch: _Batch) -> None:
        """Send one request and hand out its choices as they finish."""
        try:
            async with self._session.post(
                "/inference/v1/generate",
                data=_encode(batch),
                headers={"content-type": "application/json"},
            ) as response:
                if response.status != HTTPStatus.OK:
                    lost = response.status >= HTTPStatus.INTERNAL_SERVER_ERROR
                    what = f"was refused with {response.status}: {(await response.text())[:300]}"
                    raise _error(batch, what, EngineLost if lost else EngineError)
                if len(batch.answers) == 1:
                    self._take(batch, await response.read())
                else:
                    async for event in _events(response.content):
                        self._take(batch, event)
        except TimeoutError as error:
            what = f"did not end within {self._config.request_s:g} s: raise engine.request_s"
            raise _error(batch, what, EngineLost) from error
        except aiohttp.ClientError as error:
            raise _error(batch, f"failed: {error or type(error).__name__}", EngineLost) from error
        except msgspec.MsgspecError as error:
            raise _error(batch, f"has an answer that is not vLLM's: {error}") from error
        if batch.parts or not all(answer.done() for answer in batch.answers):
            raise _error(batch, "broke off before every sample had finished", EngineLost)

    def _take(self, batch: _Batch, data: bytes) -> None:
        """Collect the parts of choices and answer those that are finished."""
        answer = _decode(data)
        if answer.error:
            what = f"failed: {bytes(answer.error)[:300].decode(errors='replace')}"
            raise _error(batch, what, EngineLost)
        for choice in answer.choices:
            if choice.finish_reason == "error" or (
                choice.finish_reason == "abort" and not self._stopped
            ):
                raise _error(batch, f"ended by the server: {choice.finish_reason}", EngineLost)
            parts = batch.parts.setdefault(choice.index, [])
            parts.append(choice)
            if choice.finish_reason is not None:
                completion = _completion(batch, batch.parts.pop(choice.index))
                if not batch.answers[choice.index].done():
                    batch.answers[choice.index].set_result(completion)


def _encode(batch: _Batch) -> bytes:
    """The body of a request. It carries no seed: the engine would build a generator for each."""
    num_choices, sampling = len(batch.answers), batch.sampling
    parameters = {
        "n": num_choices,
        "temperature": sampling.temperature,
        "max_tokens": sampling.max_tokens,
        "logprobs": 0,  # of the sampled token alone
        "flat_logprobs": True,  # two objects less a token in the server
        "detokenize": bool(sampling.stop),
    }
    if sampling.stop:
        parameters |= {"stop": sampling.stop, "include_stop_str_in_output": True}
    if num_choices > 1:
        parameters["stream_interval"] = WHOLE
    body = {
        "request_id": batch.request_id,
        "token_ids": batch.ids.tolist(),
        "stream": num_choices > 1,
        "sampling_params": parameters,
    }
    return msgspec.json.encode(body)


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of server-sent events, of any size."""
    buffer = bytearray()
    async for chunk in content.iter_any():
        buffer += chunk
        while (end := buffer.find(b"\n\n")) >= 0:
            data = bytes(buffer[len(b"data: ") : end])
            del buffer[: end + 2]
            if data != b"[DONE]":
                yield data


def _completion(batch: _Batch, parts: list[_Choice]) -> Completion:
    """Join the parts of one finished choice.

    Raises:
        EngineError: a token has no log-probability or no version.
    """
    ids = np.concatenate([np.array(part.token_ids, np.int32) for part in parts])
    entries = [entry for part in parts if part.logprobs for entry in part.logprobs.content]
    logprobs = np.array([entry.logprob for entry in entries], np.float32)
    if [entry.token_id for entry in entries] != ids.tolist():
        raise _error(
            batch, f"has log-probabilities of {len(entries)} tokens for {len(ids)} sampled ones"
        )
    wrong = np.flatnonzero(~(np.isfinite(logprobs) & (logprobs > MISSING)))
    if len(wrong):
        raise _error(batch, f"has no log-probability for sampled token {wrong[0]} of {len(ids)}")
    return Completion(
        ids, logprobs, _spans(batch, parts[-1], len(ids)), parts[-1].finish_reason or ""
    )


def _spans(batch: _Batch, last: _Choice, num_tokens: int) -> NDArray[np.int64]:
    """[v, 2] (end, version) of a completion."""
    spans = last.weight_versions or []
    if (spans[-1].end if spans else 0) != num_tokens:
        raise _error(batch, f"has weight versions for other than its {num_tokens} tokens: {spans}")
    versions = [0 if span.version == INITIAL else int(span.version) for span in spans]
    return np.array(
        [(span.end, v) for span, v in zip(spans, versions, strict=True)], np.int64
    ).reshape(-1, 2)


def _error(batch: _Batch, what: str, kind: type[EngineError] = EngineError) -> EngineError:
    return kind(f"request {batch.request_id} {what}")
