# SPDX-License-Identifier: Apache-2.0
"""The client against a small server that speaks vLLM's HTTP on a unix socket."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web

from molt.config import Engine
from molt.records import EngineError, Sampling
from molt.rollout.client import PROBE_S, Client, EngineLost

PROMPT = np.array([5, 6, 7], np.int32)
STATUSES = {400: web.HTTPBadRequest, 500: web.HTTPInternalServerError}


def choice(index: int, ids: list[int], reason: str | None = "length", **changes) -> dict:
    """One choice as vLLM 0.32 writes it, fields we do not read included."""
    content = [
        {
            "token_id": i,
            "logprob": -i / 8,
            "rank": 1,
            "top_logprobs": [{"token_id": i, "logprob": -i / 8}],
        }
        for i in ids
    ]
    spans = [{"version": "3", "start": 0, "end": len(ids)}] if reason else None
    return {
        "index": index, "token_ids": ids, "logprobs": {"content": content}, "finish_reason": reason,
        "stop_reason": None, "routed_experts": None, "weight_versions": spans,
    } | changes  # fmt: skip


class Stub:
    """A server that answers with `events(body)`: the only one, or a stream of them."""

    def __init__(self, events: Callable[[dict], AsyncIterator[dict]]) -> None:
        self.events = events
        self.bodies: list[dict] = []
        self.aborted: list[str] = []
        self.dropped = 0
        self.health = 503
        self.release = asyncio.Event()

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        try:
            if not body["stream"]:
                return web.json_response(await anext(self.events(body)))
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            async for event in self.events(body):
                await response.write(f"data: {json.dumps(event)}\n\n".encode())
            await response.write(b"data: [DONE]\n\n")
            return response
        except asyncio.CancelledError:
            self.dropped += 1
            raise

    async def healthy(self, request: web.Request) -> web.Response:
        return web.Response(status=self.health)

    async def abort(self, request: web.Request) -> web.Response:
        self.aborted += (await request.json())["request_ids"]
        self.release.set()
        return web.json_response({"status": "aborted"})

    @contextlib.asynccontextmanager
    async def serve(self, tmp_path: Path, **engine) -> AsyncIterator[Client]:
        application = web.Application()
        application.router.add_post("/inference/v1/generate", self.generate)
        application.router.add_get("/health", self.healthy)
        application.router.add_post("/abort_requests", self.abort)
        runner = web.AppRunner(application, handler_cancellation=True)
        await runner.setup()
        await web.UnixSite(runner, str(tmp_path / "s")).start()
        client = Client(tmp_path / "s", Engine(**engine))
        try:
            yield client
        finally:
            await client.close()
            await runner.cleanup()


def whole(index: int, last: dict) -> dict:
    """The finishing event's spans cover the whole output, as vLLM's do."""
    return last | {"weight_versions": [{"version": "3", "start": 0, "end": 2}], "index": index}


async def in_two_parts(body: dict) -> AsyncIterator[dict]:
    """First every choice's first token, then the rest of each."""
    n = body["sampling_params"]["n"]
    for index in range(n):
        yield {"choices": [choice(index, [index], None)]}
    for index in range(n):
        yield {"choices": [whole(index, choice(index, [9]))]}


def only(one: dict) -> Callable[[dict], AsyncIterator[dict]]:
    """A server with one answer."""

    async def events(_: dict) -> AsyncIterator[dict]:
        yield one

    return events


def test_one_sample_is_one_plain_request(tmp_path: Path):
    async def run():
        stub = Stub(only({"choices": [choice(0, [4, 2], "stop")]}))
        async with stub.serve(tmp_path) as client:
            got = await client.generate(PROMPT, Sampling(temperature=0.7, max_tokens=8), "r")
        assert got.token_ids.dtype == np.int32
        assert got.token_ids.tolist() == [4, 2]
        assert got.logprobs.dtype == np.float32
        assert got.logprobs.tolist() == [-0.5, -0.25]  # −id/8
        assert got.version_spans.dtype == np.int64
        assert got.version_spans.tolist() == [[2, 3]]
        assert got.finish_reason == "stop"
        body = stub.bodies[0]
        assert body["token_ids"] == [5, 6, 7]
        assert body["stream"] is False
        assert body["sampling_params"]["temperature"] == 0.7
        assert body["sampling_params"]["max_tokens"] == 8
        assert body["sampling_params"]["logprobs"] == 0
        assert not {"seed", "top_p", "top_k", "allowed_token_ids"} & set(body["sampling_params"])

    asyncio.run(run())


def test_samples_of_one_prompt_in_one_turn_share_a_request(tmp_path: Path):
    async def run():
        stub = Stub(in_two_parts)
        async with stub.serve(tmp_path) as client:
            tasks = [client.generate(PROMPT, Sampling(), f"r{i}") for i in range(4)]
            got = await asyncio.gather(*tasks)
        assert [body["sampling_params"]["n"] for body in stub.bodies] == [4]
        assert stub.bodies[0]["request_id"] == "r0"
        assert [completion.token_ids.tolist() for completion in got] == [
            [0, 9],
            [1, 9],
            [2, 9],
            [3, 9],
        ]

    asyncio.run(run())


def test_other_prompts_samplings_and_turns_do_not_share(tmp_path: Path):
    async def run():
        stub = Stub(only({"choices": [choice(0, [1])]}))
        async with stub.serve(tmp_path) as client:
            await asyncio.gather(
                client.generate(PROMPT, Sampling(), "a"),
                client.generate(PROMPT[:2], Sampling(), "b"),
                client.generate(PROMPT, Sampling(temperature=0.5), "c"),
            )
            await client.generate(PROMPT, Sampling(), "d")
        assert [body["sampling_params"]["n"] for body in stub.bodies] == [1, 1, 1, 1]

    asyncio.run(run())


def test_a_request_carries_no_more_samples_than_the_server_runs(tmp_path: Path):
    async def run():
        stub = Stub(in_two_parts)
        async with stub.serve(tmp_path, vllm={"max_num_seqs": 2}) as client:
            await asyncio.gather(*[client.generate(PROMPT, Sampling(), f"r{i}") for i in range(4)])
        assert [body["sampling_params"]["n"] for body in stub.bodies] == [2, 2]

    asyncio.run(run())


def test_greedy_samples_go_alone_because_vllm_refuses_them_together(tmp_path: Path):
    async def run():
        stub = Stub(only({"choices": [choice(0, [1])]}))
        async with stub.serve(tmp_path) as client:
            greedy = Sampling(temperature=0.0)
            await asyncio.gather(*[client.generate(PROMPT, greedy, f"r{i}") for i in range(3)])
        assert [body["sampling_params"]["n"] for body in stub.bodies] == [1, 1, 1]

    asyncio.run(run())


def test_each_sample_is_answered_when_it_has_finished(tmp_path: Path):
    async def run():
        async def events(_: dict) -> AsyncIterator[dict]:
            yield {"choices": [choice(0, [0], None)]}
            yield {"choices": [whole(1, choice(1, [1, 9]))]}
            await stub.release.wait()
            yield {"choices": [whole(0, choice(0, [9]))]}

        stub = Stub(events)
        async with stub.serve(tmp_path) as client:
            slow = asyncio.ensure_future(client.generate(PROMPT, Sampling(), "slow"))
            fast = asyncio.ensure_future(client.generate(PROMPT, Sampling(), "fast"))
            assert (await fast).token_ids.tolist() == [1, 9]
            assert not slow.done()
            stub.release.set()
            assert (await slow).token_ids.tolist() == [0, 9]

    asyncio.run(run())


def test_an_answer_larger_than_a_socket_buffer_is_read_whole(tmp_path: Path):
    async def run():
        ids = [i % 120 for i in range(20_000)]  # 2.5 MB of JSON in one event

        async def events(body: dict) -> AsyncIterator[dict]:
            for index in range(body["sampling_params"]["n"]):
                yield {"choices": [choice(index, ids)]}

        async with Stub(events).serve(tmp_path) as client:
            got = await asyncio.gather(
                *[client.generate(PROMPT, Sampling(), f"r{i}") for i in range(2)]
            )
        assert all(completion.token_ids.tolist() == ids for completion in got)

    asyncio.run(run())


def test_the_weights_a_server_starts_with_are_version_0(tmp_path: Path):
    async def run():
        spans = [
            {"version": "default", "start": 0, "end": 1},
            {"version": "12", "start": 1, "end": 3},
        ]
        stub = Stub(only({"choices": [choice(0, [1, 2, 3], weight_versions=spans)]}))
        async with stub.serve(tmp_path) as client:
            got = await client.generate(PROMPT, Sampling(), "r")
        assert got.version_spans.tolist() == [[1, 0], [3, 12]]

    asyncio.run(run())


def content(*logprobs: object) -> dict:
    return {"content": [{"token_id": i + 1, "logprob": p} for i, p in enumerate(logprobs)]}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"logprobs": None}, "log-probabilities of 0 tokens for 2"),
        ({"logprobs": content(-0.1)}, "log-probabilities of 1 tokens for 2"),
        ({"logprobs": content(-0.1, None)}, "not vLLM's: .*null"),
        ({"logprobs": content(-0.1, -9999.0)}, "no log-probability for sampled token 1 of 2"),
        ({"token_ids": [1, 3]}, "log-probabilities of 2 tokens for 2"),  # of another token
        ({"weight_versions": None}, "weight versions"),
        ({"weight_versions": [{"version": "3", "start": 0, "end": 1}]}, "weight versions"),
    ],
)
def test_an_incomplete_answer_is_refused_by_its_request(
    tmp_path: Path, changes: dict, problem: str
):
    async def run():
        stub = Stub(only({"choices": [choice(0, [1, 2], **changes)]}))
        async with stub.serve(tmp_path) as client:
            with pytest.raises(EngineError, match=f"request r7 .*{problem}"):
                await client.generate(PROMPT, Sampling(), "r7")

    asyncio.run(run())


def test_infinite_log_probabilities_are_refused(tmp_path: Path):
    async def run():
        # Python's json writes Infinity, which is not JSON: the answer is unusable either way.
        stub = Stub(only({"choices": [choice(0, [1], logprobs=content(float("-inf")))]}))
        async with stub.serve(tmp_path) as client:
            with pytest.raises(EngineError, match="request r"):
                await client.generate(PROMPT, Sampling(), "r")

    asyncio.run(run())


def test_an_error_inside_a_stream_reaches_every_sample(tmp_path: Path):
    async def run():
        stub = Stub(only({"error": {"message": "engine is dead", "code": 500}}))
        async with stub.serve(tmp_path) as client:
            got = await asyncio.gather(
                *[client.generate(PROMPT, Sampling(), f"r{i}") for i in range(2)],
                return_exceptions=True,
            )
        assert [type(error) for error in got] == [EngineLost, EngineLost]
        assert "engine is dead" in str(got[0])

    asyncio.run(run())


def test_a_stream_that_ends_early_is_an_error_of_the_samples_it_lacks(tmp_path: Path):
    async def run():
        stub = Stub(only({"choices": [choice(1, [1])]}))
        async with stub.serve(tmp_path) as client:
            got = await asyncio.gather(
                *[client.generate(PROMPT, Sampling(), f"r{i}") for i in range(2)],
                return_exceptions=True,
            )
        assert isinstance(got[0], EngineLost)
        assert "broke off" in str(got[0])
        assert not isinstance(got[1], BaseException)

    asyncio.run(run())


def test_a_late_answer_is_an_error_that_names_the_deadline(tmp_path: Path):
    async def run():
        async def never(_: dict) -> AsyncIterator[dict]:
            await asyncio.Event().wait()
            yield {}

        async with Stub(never).serve(tmp_path, request_s=0.2) as client:
            with pytest.raises(EngineLost, match=r"request r did not end within 0\.2 s"):
                await client.generate(PROMPT, Sampling(), "r")

    asyncio.run(run())


def test_a_server_that_is_not_there_is_lost(tmp_path: Path):
    async def run():
        client = Client(tmp_path / "nothing", Engine())
        with pytest.raises(EngineLost, match="request r failed"):
            await client.generate(PROMPT, Sampling(), "r")
        await client.close()

    asyncio.run(run())


@pytest.mark.parametrize(("status", "kind"), [(400, EngineError), (500, EngineLost)])
def test_a_refusal_is_final_and_a_failing_server_is_lost(tmp_path: Path, status: int, kind: type):
    async def run():
        async def events(_: dict) -> AsyncIterator[dict]:
            raise STATUSES[status](text="why not")
            yield {}

        async with Stub(events).serve(tmp_path) as client:
            with pytest.raises(EngineError, match=f"was refused with {status}: why not") as caught:
                await client.generate(PROMPT, Sampling(), "r")
            assert caught.type is kind

    asyncio.run(run())


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_a_sample_that_the_server_ended_for_itself_is_lost_and_not_a_result(
    tmp_path: Path, reason: str
):
    async def run():
        stub = Stub(only({"choices": [choice(0, [3], reason)]}))
        async with stub.serve(tmp_path) as client:
            with pytest.raises(EngineLost, match=f"ended by the server: {reason}"):
                await client.generate(PROMPT, Sampling(), "r")

    asyncio.run(run())


def test_a_lost_server_has_recovered_when_another_answers_at_its_path(tmp_path: Path):
    async def run():
        stub = Stub(only({"choices": [choice(0, [4])]}))
        client = Client(tmp_path / "link", Engine())
        with pytest.raises(EngineLost):
            await client.generate(PROMPT, Sampling(), "r1")
        waiting = asyncio.create_task(client.recovered())
        async with stub.serve(tmp_path):
            (tmp_path / "link").symlink_to(tmp_path / "s")
            await asyncio.sleep(2 * PROBE_S)
            assert not waiting.done()  # it answers, but it is not well
            stub.health = 200
            await waiting
            assert (await client.generate(PROMPT, Sampling(), "r2")).token_ids.tolist() == [4]
        await client.close()

    asyncio.run(asyncio.wait_for(run(), 20))


def test_a_server_that_does_not_come_back_is_lost_for_good(tmp_path: Path):
    async def run():
        client = Client(tmp_path / "nothing", Engine(start_s=0.3))
        with pytest.raises(EngineLost, match=r"no server came back .* within 0\.3 s"):
            await client.recovered()
        await client.close()

    asyncio.run(run())


def test_a_stop_ends_samples_with_what_they_have_and_starts_no_other(tmp_path: Path):
    async def run():
        async def events(_: dict) -> AsyncIterator[dict]:
            await stub.release.wait()
            yield {"choices": [choice(0, [3], "abort")]}

        stub = Stub(events)
        async with stub.serve(tmp_path) as client:
            running = asyncio.ensure_future(client.generate(PROMPT, Sampling(), "r1"))
            while not stub.bodies:
                await asyncio.sleep(0.001)
            # This one is on its way when the stop comes.
            asked = asyncio.ensure_future(client.generate(PROMPT[:2], Sampling(), "r2"))
            await asyncio.sleep(0)
            await client.stop(5)
            got = [running.result(), asked.result()]
            later = await client.generate(PROMPT, Sampling(), "r3")
            await client.recovered()  # whoever waits for the server is not kept
        assert {"generate-tokens-r1", "generate-tokens-r2"} == set(stub.aborted)
        assert [a.finish_reason for a in (*got, later)] == ["abort"] * 3
        assert [a.token_ids.tolist() for a in (*got, later)] == [[3], [3], []]
        assert [body["request_id"] for body in stub.bodies] == ["r1", "r2"]

    asyncio.run(run())


def test_a_stop_does_not_wait_longer_than_it_may_for_a_server_that_hangs(tmp_path: Path):
    async def run():
        async def never(_: dict) -> AsyncIterator[dict]:
            await asyncio.Event().wait()
            yield {}

        stub = Stub(never)
        async with stub.serve(tmp_path) as client:
            running = asyncio.ensure_future(client.generate(PROMPT, Sampling(), "r1"))
            while not stub.bodies:
                await asyncio.sleep(0.001)
            await asyncio.wait_for(client.stop(0.3), 5)
            assert not running.done()
            running.cancel()

    asyncio.run(run())


def test_a_cancelled_sample_frees_the_engine_but_not_under_its_siblings(tmp_path: Path):
    async def run():
        async def events(body: dict) -> AsyncIterator[dict]:
            if body["request_id"] == "alone":
                await asyncio.Event().wait()
            await stub.release.wait()
            async for event in in_two_parts(body):
                yield event

        stub = Stub(events)
        async with stub.serve(tmp_path) as client:
            alone = asyncio.ensure_future(client.generate(PROMPT, Sampling(), "alone"))
            while not stub.bodies:
                await asyncio.sleep(0.001)
            alone.cancel()
            while not stub.dropped:
                await asyncio.sleep(0.001)
            pair = [
                asyncio.ensure_future(client.generate(PROMPT, Sampling(), f"r{i}"))
                for i in range(2)
            ]
            while len(stub.bodies) < 2:
                await asyncio.sleep(0.001)
            pair[0].cancel()
            stub.release.set()
            assert (await pair[1]).token_ids.tolist() == [1, 9]
            assert stub.dropped == 1

    asyncio.run(run())
