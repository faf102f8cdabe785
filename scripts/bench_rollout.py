# SPDX-License-Identifier: Apache-2.0
"""Rollout speed: tokens/s through Molt's coordinator, runner, sessions and shards ÷ raw AsyncLLM.

The model's tokenizer and configs name no end of sequence, so every sample has exactly n new tokens
on both sides, with nothing else changed. Molt's side is the real coordinator and engine task; this
process plays a trainer with lag 0 that trains nothing: a round lasts from the end of a publication,
which lets the leases out, to the plan, which needs all of its groups on disk and announced. The raw
side is AsyncLLM in a process of its own, with the same arguments, log-probabilities included, in
its fastest form: one request with n = 16 for each prompt, final output only. It is stopped by a
signal while Molt runs.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from bench_rig import SCRIPTS, Rig, Row, configure

from molt import control
from molt.agents.add import prompts
from molt.config import Config

GROUPS, SAMPLES, POSITIONS = 32, 16, 1024
AIMS = {3: "≥ 0.5", 64: "≥ 0.8", 512: "≥ 0.85"}
VLLM: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 30, "block_size": 32, "max_num_seqs": 512}


def rollout(where: Path, repeats: int) -> Iterator[Row]:
    """A row for each number of new tokens."""
    model, data = where / "endless", where / "prompts.jsonl"
    where.mkdir(exist_ok=True)
    endless_model(model)
    data.write_text("".join(json.dumps(row) + "\n" for row in prompts()[:GROUPS]))
    with Raw(model, data) as raw:
        raw.wait_up()
        for tokens, aim in AIMS.items():
            config = configure(
                "add", where, f"rollout-{tokens}", trainer={"steps": repeats + 1, "groups": GROUPS},
                model={"path": str(model), "max_len": POSITIONS}, data={"source": str(data)},
                sampling={"num_samples": SAMPLES, "max_tokens": tokens}, pool={"max_lag": 0},
                engine={"vllm": VLLM},
            )  # fmt: skip
            yield compare(config, raw, tokens, repeats, aim)


def compare(config: Config, raw: "Raw", tokens: int, repeats: int, aim: str) -> Row:
    """One start of Molt's side, both sides in turns; the first round of each is not counted."""
    seconds: dict[str, list[float]] = {"molt": [], "raw": []}
    with Rig(config) as rig:
        rig.role("coordinator")
        rig.role("engine")
        trainer = IdleTrainer(config)
        for _ in range(repeats + 1):
            seconds["molt"].append(trainer.round(GROUPS * SAMPLES * tokens))
            seconds["raw"].append(raw.round(tokens))
        trainer.close()
    speeds = {k: GROUPS * SAMPLES * tokens / median(s[1:]) for k, s in seconds.items()}
    detail = f"{speeds['molt']:,.0f} ÷ {speeds['raw']:,.0f} tokens/s"
    ratio = speeds["molt"] / speeds["raw"]
    return Row(f"rollout, {tokens} new tokens: Molt ÷ raw AsyncLLM", ratio, aim, detail)


class IdleTrainer:
    """Publishes the weights it started with, step after step."""

    def __init__(self, config: Config) -> None:
        import torch
        from safetensors.torch import load_file

        from molt.trainer.publish import Publisher

        self.device = torch.device("cpu")
        self._weights = load_file(Path(config.model.path) / "model.safetensors")
        self._client = control.BlockingClient(Path(config.run.dir))
        self._publisher = Publisher(config, self._client, "127.0.0.1")
        start = control.TrainerStart(step=0, incarnation="bench")
        self._lineage = self._client.call(control.TRAINER, start).lineage
        self._step = 0

    def weights(self) -> Any:
        """What a `Policy` publishes."""
        return self._weights.items()

    def round(self, num_tokens: int) -> float:
        """Seconds from a publication to the next plan."""
        self._publisher.publish(self, self._step, self._lineage)  # type: ignore[arg-type]
        self._publisher.finish()
        began = time.monotonic()
        self._step += 1
        request = control.PlanRequest(step=self._step, lineage=self._lineage)
        while (reply := self._client.call(control.PLAN, request)).plan is None:
            pass
        seconds = time.monotonic() - began
        sampled = sum(s.actions for group in reply.groups for s in group.segments)
        assert sampled == num_tokens, f"{sampled} tokens sampled, not {num_tokens}"
        return seconds

    def close(self) -> None:
        """Leave."""
        self._publisher.close()
        self._client.close()


def endless_model(path: Path) -> None:
    """The toy with random weights, that never ends by itself."""
    from molt.trainer.recipe import toy_model, toy_tokenizer

    toy_tokenizer(path, POSITIONS)
    toy_model(path, positions=POSITIONS)
    for name in ("tokenizer_config", "config", "generation_config"):
        file = path / f"{name}.json"
        said = json.loads(file.read_text())
        file.write_text(json.dumps({k: v for k, v in said.items() if not k.startswith("eos_")}))


class Raw:
    """The process with AsyncLLM."""

    def __init__(self, model: Path, data: Path) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="bench-")  # for the sockets it leaves
        environment = os.environ | {
            "TMPDIR": self._directory.name,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1",
            "GLOO_SOCKET_IFNAME": "lo", "VLLM_NO_USAGE_STATS": "1",
        }  # fmt: skip
        with (model.parent / "raw.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(SCRIPTS / "bench_rollout.py"), str(model), str(data)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                env=environment, start_new_session=True,
            )  # fmt: skip

    def wait_up(self) -> None:
        """Until it is ready, which it says with a first answer; then let it sleep."""
        self._answer()
        self.stop()

    def round(self, tokens: int) -> float:
        """Seconds that all samples of all prompts took."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin
        self._process.stdin.write(f"{tokens}\n")
        self._process.stdin.flush()
        seconds = self._answer()
        self.stop()
        return seconds

    def stop(self) -> None:
        """Let it use no CPU until the next round."""
        self._signal(signal.SIGSTOP)

    def _answer(self) -> float:
        assert self._process.stdout
        for line in self._process.stdout:
            if line.startswith("seconds "):
                return float(line.split()[1])
        sys.exit("bench: the process with AsyncLLM ended, see raw.log (--keep)")

    def _signal(self, number: int) -> None:
        os.killpg(self._process.pid, number)

    def __enter__(self) -> "Raw":
        return self

    def __exit__(self, *_: object) -> None:
        family = [psutil.Process(self._process.pid)]
        family += family[0].children(recursive=True)
        for process in family:
            process.kill()
        psutil.wait_procs(family)
        self._directory.cleanup()


async def raw_rounds(model: str, data: str) -> None:
    """What the process with AsyncLLM does: reads a number of tokens, says how long a round took."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    from molt.rollout.render import Renderer, canonical

    renderer = Renderer(model)
    rows = [json.loads(line) for line in Path(data).read_text().splitlines()]
    ids = [renderer.start(canonical(row["prompt"])).tolist() for row in rows]
    arguments = AsyncEngineArgs(
        model=model, dtype="float32", max_model_len=POSITIONS, enforce_eager=True,
        logprobs_mode="processed_logprobs", disable_log_stats=True, **VLLM,
    )  # fmt: skip
    engine = AsyncLLM.from_engine_args(arguments)

    async def one(prompt: list[int], name: str, sampling: SamplingParams) -> int:
        final = None
        async for output in engine.generate({"prompt_token_ids": prompt}, sampling, name):
            final = output
        assert final is not None
        return sum(len(o.token_ids) for o in final.outputs)

    print("seconds 0", flush=True)
    for number, line in enumerate(sys.stdin):
        sampling = SamplingParams(
            n=SAMPLES, temperature=1.0, max_tokens=int(line), logprobs=0, detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        began = time.monotonic()
        made = await asyncio.gather(*(one(p, f"{number}-{i}", sampling) for i, p in enumerate(ids)))
        seconds = time.monotonic() - began
        assert sum(made) == GROUPS * SAMPLES * int(line)
        print(f"seconds {seconds}", flush=True)


if __name__ == "__main__":
    asyncio.run(raw_rounds(*sys.argv[1:]))
