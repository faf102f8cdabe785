# SPDX-License-Identifier: Apache-2.0
"""One real vLLM server: what it samples, how new weights reach it, and how it ends.

The last test of the file leaves the shared server without usable weights.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file

from molt import control, transfer
from molt.config import Config
from molt.records import EngineError, Publication, Sampling
from molt.rollout.client import Client, Completion
from molt.rollout.engine import Server, make_home
from molt.rollout.task import EngineTask
from molt.store.run import RunDir
from tests.unit.coordinator.test_server import CONFIG as COORDINATOR
from tests.unit.coordinator.test_server import Peers, coordinator_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

TOLERANCE = 1e-5  # nats; float32, the same arithmetic in another order
Weights = dict[str, torch.Tensor]


class Trainer:
    """The sending end of publications, in this process."""

    def __init__(self) -> None:
        self.store = transfer.host("127.0.0.1", 60.0)
        self.communicator: transfer.Communicator | None = None
        self.failures = 0

    async def publish(self, server: Server, weights: Weights, version: int) -> dict[str, float]:
        """Send one version. After a failure the next goes over a new communicator."""
        publication = Publication(
            version=version,
            step=version,
            address="127.0.0.1",
            port=self.store.port,
            members=(0,),
            workers=1,
            communicator=f"after-{self.failures}-failures",
            tensors=transfer.describe(weights.items()),
            bucket_bytes=100_000,  # a dozen buckets, every matrix split
        )
        sending = asyncio.ensure_future(asyncio.to_thread(self._send, weights, publication))
        try:
            timings = await server.update(publication)
        except EngineError:
            with contextlib.suppress(EngineError):
                await asyncio.wait_for(sending, 10)
            self.communicator, self.failures = None, self.failures + 1
            raise
        await sending
        return timings

    def _send(self, weights: Weights, publication: Publication) -> None:
        self.communicator = self.communicator or transfer.Communicator(
            self.store,
            name=publication.communicator,
            rank=0,
            world=2,
            device=torch.device("cpu"),
            timeout_s=60.0,
        )
        self.communicator.send(weights.items(), publication.bucket_bytes)


class Rig:
    """The server with what the tests do to it, all on one event loop."""

    def __init__(self, models: tuple[Path, Path], log: Path) -> None:
        self.models = models
        self.config = Config.model_validate({"model": {"path": str(models[0]), "max_len": 512}})
        self.runner = asyncio.Runner()
        self.home = make_home()
        self.server = Server(self.config, 0, self.home, log)
        self.trainer = Trainer()
        self.version = 0
        self.client = self.runner.run(self._start())

    async def _start(self) -> Client:
        await self.server.start()
        await self.server.wait_healthy()
        return Client(self.server.socket, self.config.engine)

    async def publish(self, model: int) -> dict[str, float]:
        """Send the weights of models[model] under the next version."""
        self.version += 1
        weights = load_file(self.models[model] / "model.safetensors")
        return await self.trainer.publish(self.server, weights, self.version)

    async def sample(
        self, temperature: float = 1.0, num: int = 8
    ) -> list[tuple[np.ndarray, Completion]]:
        """Samples of at least 64 tokens in the mean, half of them sharing a prompt."""
        generator = np.random.default_rng(0)
        prompts = [generator.integers(3, 99, 20).astype(np.int32) for _ in range(num // 2)]
        prompts += [prompts[0]] * (num - len(prompts))
        sampling = Sampling(temperature=temperature, max_tokens=400)
        answers = await asyncio.gather(
            *[
                self.client.generate(p, sampling, f"t{temperature}-{i}")
                for i, p in enumerate(prompts)
            ]
        )
        return list(zip(prompts, answers, strict=True))

    def close(self) -> None:
        async def end() -> None:
            await self.client.close()
            await self.server.stop()

        self.runner.run(end())
        self.runner.close()
        self.home.rmdir()


@pytest.fixture(scope="module")
def rig(toy_models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    rig = Rig(toy_models, tmp_path_factory.mktemp("engine") / "vllm.log")
    try:
        yield rig
    finally:
        rig.close()


def reference(path: Path, prompt: np.ndarray, ids: np.ndarray, temperature: float) -> np.ndarray:
    """[m] log-probabilities of `ids` after `prompt`, by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokens = torch.from_numpy(np.concatenate((prompt, ids))).long()
    with torch.no_grad():
        logits = model(tokens[None]).logits[0, len(prompt) - 1 : -1]
    logprobs = torch.log_softmax(logits / temperature, -1)
    return logprobs.gather(1, tokens[len(prompt) :, None])[:, 0].numpy()


def worst(
    path: Path, samples: list[tuple[np.ndarray, Completion]], temperature: float = 1.0
) -> float:
    """Largest difference to transformers over all tokens of `samples`: at least 8 × 64 of them."""
    assert sum(len(answer.token_ids) for _, answer in samples) >= 8 * 64
    return max(
        np.abs(reference(path, prompt, answer.token_ids, temperature) - answer.logprobs).max()
        for prompt, answer in samples
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_are_those_of_the_sampled_distribution(rig: Rig, temperature: float):
    samples = rig.runner.run(rig.sample(temperature))
    assert worst(rig.models[0], samples, temperature) <= TOLERANCE
    assert all(
        answer.version_spans.tolist() == [[len(answer.token_ids), 0]] for _, answer in samples
    )


def test_a_sample_ends_with_its_stop_token_or_at_its_limit(rig: Rig):
    for _, answer in rig.runner.run(rig.sample()):
        ends = np.flatnonzero(answer.token_ids == 2)  # <|im_end|>
        if answer.finish_reason == "stop":
            assert ends.tolist() == [len(answer.token_ids) - 1]
        else:
            assert answer.finish_reason == "length"
            assert len(ends) == 0
            assert len(answer.token_ids) == 400


def test_samples_of_one_request_differ(rig: Rig):
    # 16 equal samples of several tokens with some nats each would be a shared random state.
    async def run() -> list[Completion]:
        prompt = np.arange(10, 30, dtype=np.int32)
        return await asyncio.gather(
            *[rig.client.generate(prompt, Sampling(max_tokens=20), f"s{i}") for i in range(16)]
        )

    samples = rig.runner.run(run())
    assert len({answer.token_ids.tobytes() for answer in samples}) == 16


def test_published_weights_replace_the_old_ones_entirely(rig: Rig):
    # The tied output head is what a reload leaves behind; there and back, so that neither the first
    # weights nor the last ones can pass for the published ones.
    for model in (1, 0, 1):
        timings = rig.runner.run(rig.publish(model))
        samples = rig.runner.run(rig.sample())
        assert worst(rig.models[model], samples) <= TOLERANCE
        assert all(
            a.version_spans.tolist() == [[len(a.token_ids), rig.version]] for _, a in samples
        )
        assert 0 < timings["receive_s"] <= timings["pause_s"] < 10


def test_a_sample_across_an_update_is_exact_on_both_sides(rig: Rig):
    async def run() -> tuple[list[tuple[np.ndarray, Completion]], int]:
        await rig.publish(0)
        before = rig.version
        running = asyncio.ensure_future(rig.sample(num=16))
        await asyncio.sleep(0.15)
        await rig.publish(1)
        return await running, before

    samples, before = rig.runner.run(run())
    crossed = [(p, a) for p, a in samples if len(a.version_spans) == 2]
    assert crossed
    for prompt, answer in crossed:
        (cut, old), (end, new) = answer.version_spans.tolist()
        assert (old, new, end) == (before, before + 1, len(answer.token_ids))
        under_old = reference(rig.models[0], prompt, answer.token_ids, 1.0)
        under_new = reference(rig.models[1], prompt, answer.token_ids, 1.0)
        assert np.abs(under_old - answer.logprobs)[:cut].max() <= TOLERANCE
        assert np.abs(under_new - answer.logprobs)[cut:].max() <= TOLERANCE


def test_an_aborted_sample_returns_what_it_has_and_continues_exactly(rig: Rig):
    async def run() -> tuple[np.ndarray, Completion, Completion]:
        prompt = np.arange(40, 60, dtype=np.int32)
        while True:  # until a sample did not end by itself first
            client = Client(rig.server.socket, rig.config.engine)
            pair = [
                asyncio.ensure_future(client.generate(prompt, Sampling(max_tokens=400), f"a{i}"))
                for i in range(16)
            ]
            await asyncio.sleep(0.1)
            await client.stop(10)
            cut = [
                answer for answer in await asyncio.gather(*pair) if answer.finish_reason == "abort"
            ]
            await client.close()
            if cut and len(cut[0].token_ids):
                break
        partial = cut[0]
        rest = await rig.client.generate(
            np.concatenate((prompt, partial.token_ids)), Sampling(max_tokens=64), "rest"
        )
        return prompt, partial, rest

    prompt, partial, rest = rig.runner.run(run())
    assert partial.version_spans.tolist() == [[len(partial.token_ids), rig.version]]
    ids = np.concatenate((partial.token_ids, rest.token_ids))
    logprobs = np.concatenate((partial.logprobs, rest.logprobs))
    assert np.abs(reference(rig.models[1], prompt, ids, 1.0) - logprobs).max() <= TOLERANCE


def test_stop_strings_end_a_sample_and_stay_in_its_tokens(rig: Rig):
    async def run() -> list[Completion]:
        prompt = np.arange(10, 30, dtype=np.int32)
        sampling = Sampling(max_tokens=400, stop=("a", "e"))
        return await asyncio.gather(
            *[rig.client.generate(prompt, sampling, f"w{i}") for i in range(8)]
        )

    stops = {
        3 + ord("a") - 32,
        3 + ord("e") - 32,
    }  # the tokenizer's ids: three specials, then from " " on
    for answer in rig.runner.run(run()):
        assert answer.finish_reason == "stop"
        assert answer.token_ids[-1] in stops | {2}
        assert not stops & set(answer.token_ids[:-1].tolist())
        assert len(answer.logprobs) == len(answer.token_ids)


def test_a_server_dies_with_its_parent_and_leaves_nothing(
    toy_models: tuple[Path, Path], tmp_path: Path
):
    program = f"""
import asyncio
from pathlib import Path
from molt.config import Config
from molt.rollout.engine import Server, make_home

async def main():
    config = Config.model_validate({{"model": {{"path": {str(toy_models[0])!r}, "max_len": 512}}}})
    server = Server(config, 0, make_home(), Path({str(tmp_path / "vllm.log")!r}))
    await server.start()
    await server.wait_healthy()
    print(server.socket, flush=True)
    await server.wait()

asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    socket = Path(parent.stdout.readline().strip())
    processes = psutil.Process(parent.pid).children(recursive=True)
    assert len(processes) >= 4  # guard and its watcher, server, engine core
    assert socket.is_socket()
    os.kill(parent.pid, signal.SIGKILL)
    parent.communicate()
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive
    assert not socket.parent.parent.exists()


class Publisher:
    """A trainer's rank 0 towards a real coordinator and a real engine task."""

    def __init__(self, peers: Peers) -> None:
        self.call, self.lineage = peers.client.call, peers.lineage
        self.store = transfer.host("127.0.0.1", 60.0)
        self.requests = 0

    async def meet(self, weights: Weights) -> tuple[int, transfer.Communicator]:
        """Begin a publication and build its communicator: the engine waits for the first bucket."""
        self.requests += 1
        request = control.PublishRequest(
            step=0, lineage=self.lineage, address="127.0.0.1", port=self.store.port, workers=1,
            communicator="", fresh=f"c{self.requests}", tensors=transfer.describe(weights.items()),
            bucket_bytes=1 << 20,
        )  # fmt: skip
        while not (reply := await self.call(control.PUBLISH, request)).version:
            pass
        cpu = torch.device("cpu")
        return reply.version, await asyncio.to_thread(
            transfer.Communicator, self.store, reply.communicator, 0, 2, cpu, 60.0
        )

    async def outcome(self, version: int) -> str:
        while not (
            done := await self.call(control.PUBLISHED, control.PublishWait(version=version))
        ).done:
            pass
        return done.error


def test_an_engine_that_dies_in_an_update_is_replaced_and_takes_the_next_one(
    toy_models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    base = COORDINATOR.model_dump()
    base["model"] |= {"path": str(toy_models[0]), "max_len": 512}
    config = Config.model_validate(base)
    run = RunDir.create(tmp_path / "run", b"{}").path
    weights = load_file(toy_models[1] / "model.safetensors")
    monkeypatch.setattr("molt.rollout.task.RUNNER", ("/bin/sh", "-c", "exec sleep 1000"))

    others = cores()

    async def work(peers: Peers, task: EngineTask) -> None:
        publications = peers.coordinator.publications
        del publications.engines[0]  # the one that these tests' coordinator makes up
        publisher = Publisher(peers)
        version, communicator = await publisher.meet(weights)
        incarnation = publications.up[0]
        (core,) = [p for p in cores() if p not in others]
        core.kill()
        killed = time.monotonic()
        assert "engine 0" in await publisher.outcome(version)
        assert not task._link.exists()
        communicator.close()
        version, communicator = await publisher.meet(weights)
        assert time.monotonic() - killed < 120
        assert publications.up[0] != incarnation
        await asyncio.to_thread(communicator.send, weights.items(), 1 << 20)
        assert await publisher.outcome(version) == ""
        client = Client(task._link, config.engine)
        prompt = np.arange(10, 30, dtype=np.int32)
        answer = await client.generate(prompt, Sampling(max_tokens=64), "r")
        await client.close()
        communicator.close()
        logprobs = reference(toy_models[1], prompt, answer.token_ids, 1.0)
        assert np.abs(logprobs - answer.logprobs).max() <= TOLERANCE
        assert answer.version_spans.tolist() == [[len(answer.token_ids), version]]

    async def main() -> None:
        async with coordinator_of(run, config) as peers:
            await peers.start()
            monkeypatch.setenv("MOLT_COORDINATOR", peers.client._base.removeprefix("http://"))
            task = EngineTask(run, config, 0, tmp_path)
            running = asyncio.create_task(task.run())
            working = asyncio.create_task(work(peers, task))
            ends = asyncio.FIRST_COMPLETED
            await asyncio.wait({working, running}, timeout=280, return_when=ends)
            working.result()
            os.kill(os.getpid(), signal.SIGTERM)
            await running

    asyncio.run(main())


def cores() -> list[psutil.Process]:
    """The engine cores that were started by this process: their title replaces their command."""
    return [
        process
        for process in psutil.Process().children(recursive=True)
        if "EngineCore" in " ".join(process.cmdline())
    ]


def test_an_incomplete_publication_fails_and_spoils_the_server(rig: Rig):
    # One of two tensors that the engine fuses into one parameter: by name it would count as loaded.
    weights = load_file(rig.models[0] / "model.safetensors")
    fewer = {
        name: tensor
        for name, tensor in weights.items()
        if name != "model.layers.1.mlp.up_proj.weight"
    }
    with pytest.raises(
        EngineError, match=r"update_weights with 500.*whole, first model.layers.1.mlp.gate_up_proj"
    ):
        rig.runner.run(rig.trainer.publish(rig.server, fewer, rig.version + 1))
    with pytest.raises(EngineError, match="restart the engine"):
        rig.runner.run(rig.trainer.publish(rig.server, weights, rig.version + 2))
