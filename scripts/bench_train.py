# SPDX-License-Identifier: Apache-2.0
"""The trainer's ranks alone: a publication ÷ a raw broadcast, a train step ÷ a bare FSDP2 loop.

Publication: SmolLM2-135M in float32, sharded over two ranks, to one real vLLM server; all that
`Publisher.publish` does, against `dist.broadcast` of one flat tensor of as many bytes between the
two ranks. The engine is idle: its pause is what generation would stand still.

Train: `train_step` without its pass for π_old, against forward, PPO loss, backward, clip and AdamW
on the same AutoModel under the same FSDP2 with the same minibatches, whose padded inputs and
targets are ready before the clock starts. The bare loop computes all logits.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from bench_rig import Rig, Row, configure
from torch import Tensor

from molt.config import Config, load_resolved
from molt.trainer.batch import Batch

RESULT = "bench.json"
GROUPS, SAMPLES, PROMPT = 32, 16, 12
SHAPES = {"add, 4 minibatches": (3, 4), "64 new tokens": (64, 1), "256 new tokens": (256, 1)}


def publish(where: Path, repeats: int) -> Iterator[Row]:
    """Publication and pause of a 135M model."""
    config = configure(
        "smollm", where, "publish", trainer={"groups": 1}, pool={"max_lag": 0},
        sampling={"num_samples": 1, "max_tokens": 1},
    )  # fmt: skip
    with Rig(config) as rig:
        rig.role("coordinator")
        rig.role("engine")
        found = on_ranks(rig, "publish", repeats)
    whole, raw, pause = (median(found[k][1:]) for k in ("publish", "raw", "pause"))
    detail = f"{whole:.2f} s ÷ {raw:.2f} s, {found['bytes'][0] / 1e6:.0f} MB"
    yield Row("publication of 135M ÷ raw gloo broadcast", whole / raw, "", detail)
    yield Row("generation pause for one update, 135M, s", pause, "", "")


def train(where: Path, repeats: int) -> Iterator[Row]:
    """A train step for each shape of batch."""
    config = configure("add", where, "train")
    with Rig(config) as rig:
        rig.role("coordinator")
        found = on_ranks(rig, "train", repeats)
    for name in SHAPES:
        ours, bare, old = (median(found[f"{name} {k}"][1:]) for k in ("ours", "bare", "old"))
        detail = f"{ours:.3f} s ÷ {bare:.3f} s; the pass for π_old takes {old:.3f} s more"
        yield Row(f"train step, {name}: Molt ÷ bare FSDP2", ours / bare, "≤ 1.1", detail)


def on_ranks(rig: Rig, name: str, repeats: int) -> dict[str, list[float]]:
    """Run this file on every rank; what rank 0 measured."""
    os.environ["BENCH_REPEATS"] = str(repeats)
    for rank in range(rig.config.trainer.ranks):
        rig.script("bench_train.py", name, rank, rig.config.trainer.ranks)
    rig.wait(name)
    return json.loads((rig.path / RESULT).read_text())


def publish_rank(run: Path, config: Config, rank: int, world: int) -> dict[str, list[float]]:
    """Publications and raw broadcasts in turns. Collective."""
    from molt import control
    from molt.trainer.policy import build
    from molt.trainer.publish import Publisher

    client = control.BlockingClient(run) if rank == 0 else None
    policy = build(config, rank, world)
    publisher = Publisher(config, client, "127.0.0.1")
    lineage = 0
    if client:
        start = control.TrainerStart(step=0, incarnation="bench")
        lineage = client.call(control.TRAINER, start).lineage
    flat = torch.empty(sum(w.numel() * w.element_size() for _, w in policy.weights()) // 4)
    found = {"publish": [], "raw": [], "pause": [], "bytes": [flat.numel() * 4]}
    for _ in range(int(os.environ["BENCH_REPEATS"]) + 1):
        dist.barrier()
        began = time.monotonic()
        publisher.publish(policy, 0, lineage)
        times = publisher.finish()
        assert times is not None, "a publication failed"
        found["publish"].append(time.monotonic() - began)
        found["pause"].append(times.get("time/pause_s", 0.0))
        found["raw"].append(timed(lambda: dist.broadcast(flat, 0)))
    publisher.close()
    return found


def train_rank(run: Path, config: Config, rank: int, world: int) -> dict[str, list[float]]:
    """Train steps and bare steps in turns, for each shape. Collective."""
    from molt.trainer import step
    from molt.trainer.policy import build

    ours, bare = build(config, rank, world), build(config, rank, world)
    del bare.model.lm_head.forward  # type: ignore[attr-defined]  # logits again
    found: dict[str, list[float]] = {}
    old_logprobs = step.old_logprobs
    for name, (actions, minibatches) in SHAPES.items():
        shape = config.model_copy(
            update={"trainer": config.trainer.model_copy(update={"minibatches": minibatches})}
        )
        rows = {k: found.setdefault(f"{name} {k}", []) for k in ("ours", "bare", "old")}

        def without_old(*args: Any, old: list[float] = rows["old"]) -> Tensor:
            began = time.monotonic()
            entropy = old_logprobs(*args)
            old.append(time.monotonic() - began)
            return entropy

        step.old_logprobs = without_old
        for i in range(int(os.environ["BENCH_REPEATS"]) + 1):
            batch = make_batch(rank, world, actions)
            inputs = ready(step.split(ours, batch, shape, i + 1), batch)
            whole = timed(lambda b=batch, s=shape, n=i + 1: step.train_step(ours, b, s, n))
            rows["ours"].append(whole - rows["old"][-1])
            rows["bare"].append(timed(lambda m=inputs: bare_step(bare, m)))
    return found


def make_batch(rank: int, world: int, actions: int) -> Batch:
    """This rank's share of random rollouts: [S, PROMPT + actions] tokens."""
    generator = torch.Generator().manual_seed(rank)
    num_mine, length = GROUPS * SAMPLES // world, PROMPT + actions
    mask = (torch.arange(num_mine * length) % length) >= PROMPT
    return Batch(
        tokens=torch.randint(7, 103, (num_mine * length,), generator=generator),
        cu_seqlens=torch.arange(num_mine + 1) * length,
        action_mask=mask,
        behavior_logprobs=torch.where(mask, -4.0, torch.nan),
        temperature=torch.ones(num_mine * length),
        lag=torch.zeros(num_mine * length, dtype=torch.int64),
        rollout=torch.arange(num_mine) + rank * num_mine,
        group_of_rollout=torch.arange(GROUPS).repeat_interleave(SAMPLES),
        rewards=(torch.arange(GROUPS * SAMPLES) % 3 == 0).double(),
    )


Inputs = list[list[tuple[Tensor, Tensor, Tensor]]]


def ready(parts: list[list[Tensor]], batch: Batch) -> Inputs:
    """For each micro-batch of each minibatch: ids [B, T], their mask and advantages [B, T − 1]."""
    width = int(batch.lengths[0])
    ids, mask = batch.tokens.view(-1, width), batch.action_mask.view(-1, width)[:, 1:]
    advantages = torch.randn(mask.shape)
    return [[(ids[s], mask[s], advantages[s]) for s in part] for part in parts]


def bare_step(policy: Any, minibatches: Inputs) -> None:
    """What a plain FSDP2 loop does for one step. Collective."""
    for micro in minibatches:
        for i, (ids, mask, advantages) in enumerate(micro):
            policy.model.set_requires_gradient_sync(i == len(micro) - 1)
            logits = policy.model(input_ids=ids, use_cache=False).logits[:, :-1]
            logs = torch.log_softmax(logits.float(), -1).gather(2, ids[:, 1:, None]).squeeze(2)
            ratio = (logs - logs.detach()).exp()
            clipped = ratio.clamp(0.8, 1.28)
            loss = -torch.minimum(ratio * advantages, clipped * advantages)[mask].sum()
            (loss / mask.sum() / len(micro)).backward()
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
        policy.optimizer.step()
        policy.optimizer.zero_grad()


def timed(work: Callable[[], Any]) -> float:
    """Seconds until every rank has done `work`. Collective."""
    dist.barrier()
    began = time.monotonic()
    work()
    dist.barrier()
    return time.monotonic() - began


def main(name: str, run: Path) -> None:
    """One rank."""
    from molt.launch.role import die_with_parent
    from molt.trainer import ranks

    die_with_parent()
    config = load_resolved(run / "config.json")
    rank, world = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    torch.set_num_threads(1)
    ranks.join(run, rank, world)
    found = {"publish": publish_rank, "train": train_rank}[name](run, config, rank, world)
    if rank == 0:
        (run / RESULT).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
