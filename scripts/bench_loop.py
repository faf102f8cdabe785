# SPDX-License-Identifier: Apache-2.0
"""The whole loop on `add`, 32 prompts × 16 samples, 4 minibatches: seconds a step, and overlap.

Overlap is measured twice: a step with `max_lag = 1` ÷ what generation and training take in a run
with `max_lag = 0`, where they take turns. With an engine that only sleeps, a step should last as
long as the longer of the two (publication counts as neither, so it shows); with real vLLM on the
same cores, no longer than both together.
Medians over the steps from the 21st on.
"""

import asyncio
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from aiohttp import web
from bench_rig import Rig, Row, configure

from molt import control, transfer
from molt.config import Config, load_resolved
from molt.launch.role import die_with_parent
from molt.records import Publication

SKIP = 20  # steps: the first ones are slower
SLEEP_S = 0.15  # about what a train step takes
Times = dict[str, float]


def asynchronous(where: Path, repeats: int) -> Iterator[Row]:
    """Both overlaps."""
    for engine in ("sleeper", "engine"):
        turns, _ = loop(where, repeats, engine, max_lag=0)
        both, _ = loop(where, repeats, engine, max_lag=1)
        trains, seconds = turns["time/train_s"], both["time/step_s"]
        # The wait for a plan also holds the end of the publication, which goes on meanwhile.
        generate = turns["time/step_s"] - trains - turns["time/publish_s"]
        detail = (
            f"{seconds:.3f} s; in turns: generate {generate:.3f}, train {trains:.3f}, publish "
            f"{turns['time/publish_s']:.3f}, step {turns['time/step_s']:.3f} s"
        )
        if engine == "sleeper":
            name, bound, aim = "max(generate, train), sleeping engine", max(generate, trains), 1.2
        else:
            name, bound, aim = "(generate + train), real vLLM", generate + trains, 1.0
        yield Row(f"async step ÷ {name}", seconds / bound, f"≤ {aim}", detail)


def step(where: Path, repeats: int) -> Iterator[Row]:
    """Seconds a step with the task's own settings, and who uses the CPU."""
    times, cpu = loop(where, repeats, "engine", max_lag=1, run="step")
    names = ("wait", "train", "publish", "pause")
    parts = ", ".join(f"{name} {times[f'time/{name}_s']:.3f}" for name in names)
    yield Row("add, 32 × 16, 4 minibatches: s/step", times["time/step_s"], "≤ 0.6", parts)
    roles = ", ".join(f"{who} {seconds:.2f}" for who, seconds in sorted(cpu.items()))
    yield Row("CPU-seconds a step", sum(cpu.values()), "", roles)


def loop(
    where: Path, repeats: int, engine: str, max_lag: int, run: str = ""
) -> tuple[Times, Times]:
    """Train for a while; median seconds of a step's parts, and CPU-seconds a step by role."""
    num_steps = SKIP + 12 * repeats
    config = configure(
        "add", where, run or f"{engine}-{max_lag}", pool={"max_lag": max_lag},
        trainer={"steps": num_steps + 1, "gate": engine == "engine"},
    )  # fmt: skip
    with Rig(config) as rig:
        rig.role("coordinator")
        if engine == "sleeper":
            rig.script("bench_loop.py", "sleeper")
            rig.role(
                "runner",
                MOLT_ENGINE="0",
                MOLT_RUNNER_NAME="runner-0-0-bench",
                MOLT_SOCKET=str(socket(rig.path)),
            )
        else:
            rig.role("engine")
        rig.trainer()
        rig.steps(SKIP)
        before = rig.cpu()
        rows = rig.steps(num_steps)
        after, counted = rig.cpu(), len(rows) - SKIP
        rig.wait("trainer")
    times = {k: median(r[k] for r in rows[SKIP:]) for k in rows[-1] if k.startswith("time/")}
    return times, {who: (s - before.get(who, 0.0)) / counted for who, s in after.items()}


# ---------------------------------------------------------------- the engine that sleeps


def socket(run: Path) -> Path:
    """Where it listens."""
    return run / "sleeper.sock"


class Sleeper:
    """An engine task: answers after `SLEEP_S` with a random digit, takes weights and drops them."""

    def __init__(self, run: Path, config: Config) -> None:
        self._config, self._run = config, run
        self._version = 0
        self._communicator: transfer.Communicator | None = None

    async def run(self) -> None:
        """Serve completions and follow the publications, until killed."""
        app = web.Application()
        app.router.add_post("/inference/v1/generate", self._generate)
        server = web.AppRunner(app, access_log=None)
        await server.setup()
        await web.UnixSite(server, str(socket(self._run))).start()
        client = control.Client(self._run)
        while True:
            request = control.EngineRequest(engine=0, incarnation="sleeper", version=self._version)
            publication = (await client.call(control.ENGINE, request)).publication
            if publication is not None:
                await asyncio.to_thread(self._receive, publication)
                self._version = publication.version

    def _receive(self, p: Publication) -> None:
        import torch

        if self._communicator is None:
            timeout_s = self._config.engine.update_s
            store = transfer.join(p.address, p.port, timeout_s)
            self._communicator = transfer.Communicator(
                store, p.communicator, 1, p.world, torch.device("cpu"), timeout_s
            )
        for _ in self._communicator.receive(p.tensors, p.bucket_bytes):
            pass

    async def _generate(self, request: web.Request) -> web.Response:
        """What vLLM answers, in one event: a digit and the end of the message, for each choice."""
        asked = await request.json()
        version = str(self._version)
        await asyncio.sleep(SLEEP_S)
        choices = []
        for index in range(asked["sampling_params"]["n"]):
            ids = [random.randrange(23, 33), 2]  # the toy tokenizer's digits and <|im_end|>
            choices.append({
                "index": index, "token_ids": ids, "finish_reason": "stop",
                "logprobs": {"content": [{"token_id": i, "logprob": -2.0} for i in ids]},
                "weight_versions": [{"version": version, "end": 2}],
            })  # fmt: skip
        body = web.json_response({"choices": choices}).text or ""
        return web.Response(text=f"data: {body}\n\n" if asked["stream"] else body)


if __name__ == "__main__":
    die_with_parent()
    place = Path(sys.argv[2])
    asyncio.run(Sleeper(place, load_resolved(Path(os.environ["MOLT_LOGS"], "config.json"))).run())
