# SPDX-License-Identifier: Apache-2.0
"""A real policy of 300 parameters and real shards, for the tests of what happens between them.

The model is causal and sees its past: the state after token i is its embedding, a position
embedding and the mean of its sequence's embeddings so far. On several ranks FSDP2 shards it, so
ranks that do not run the same passes hang here as they would with a large model.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from molt.config import Config
from molt.records import Group, Sampling, Segment
from molt.store.schema import SegmentRow
from molt.store.shards import ShardWriter, to_batch

VOCABULARY, WIDTH, POSITIONS = 11, 8, 64


class Toy(nn.Module):
    """tokens [N] → log-probabilities and entropies [N]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(POSITIONS, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        for table in (self.embedding, self.position):
            nn.init.normal_(table.weight, std=0.4)
        self.offset = 0  # of positions
        self.leaks = False  # sequences of one pass see those before them

    def forward(
        self, tokens: Tensor, cu_seqlens: Tensor, temperature: Tensor
    ) -> tuple[Tensor, Tensor]:
        start = cu_seqlens[:-1].repeat_interleave(cu_seqlens.diff())
        lengths = [len(tokens)] if self.leaks else cu_seqlens.diff().tolist()
        position = torch.cat([torch.arange(n) for n in lengths])
        embedded = self.embedding(tokens)
        past = torch.cat([part.cumsum(0) for part in embedded.split(lengths)])
        past = past / (position + 1)[:, None]
        hidden = embedded + self.position((position + self.offset) % POSITIONS) + past
        logits = self.head(hidden).roll(1, 0) / temperature[:, None]  # the token before predicts
        logs = logits.log_softmax(-1)
        logprobs = logs.gather(1, tokens[:, None]).squeeze(1) * (torch.arange(len(tokens)) != start)
        return logprobs, -(logs.exp() * logs).sum(-1).detach()


class ToyPolicy:
    """The policy of `molt.trainer.policy.Policy` that step and gate need, trained by plain SGD."""

    device = torch.device("cpu")

    def __init__(self, lr: float = 1.0) -> None:
        self.model = Toy()
        if dist.is_initialized():
            fully_shard(self.model)
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr)
        self.num_passes = self.num_updates = 0
        self.optimizer.register_step_post_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.num_updates += 1

    def logprobs(
        self, tokens: Tensor, cu_seqlens: Tensor, temperature: Tensor, needed: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        self.num_passes += 1
        if len(tokens):
            return self.model(tokens, cu_seqlens, temperature)
        logprobs, entropy = self.model(torch.zeros(1).long(), torch.tensor([0, 1]), torch.ones(1))
        return logprobs[:0], entropy[:0]

    def accumulate(self, last: bool) -> None:
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(last)

    def clip(self, max_norm: float, scale: float) -> float:
        grads = [_whole(p.grad) for p in self.model.parameters() if p.grad is not None]
        norm = float(torch.stack([g.norm() for g in grads]).norm()) * scale
        for p in self.model.parameters():
            if p.grad is not None:
                p.grad.mul_(scale * min(1.0, max_norm / (norm + 1e-6)))
        return norm

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, _whole(p.detach())) for name, p in self.model.named_parameters())

    def save(self, path: Path) -> "Future[None]":
        torch.save(dict(self.weights()), path / "toy.pt")
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def load(self, path: Path, optimizer: bool = True) -> None:
        self.model.load_state_dict(torch.load(path / "toy.pt"))

    def parameters(self) -> Tensor:
        return torch.cat([_whole(p.detach()).flatten() for p in self.model.parameters()])


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def config(**sections: dict[str, Any]) -> Config:
    """Defaults of the tests: one update with a gradient as it is."""
    base: dict[str, dict[str, Any]] = {
        "optim": {"lr": 1.0, "clip_norm": 1e9},
        "trainer": {"steps": 10},
    }
    merged = {name: base.get(name, {}) | sections.get(name, {}) for name in base | sections}
    return Config.model_validate(merged)


def row(
    group: int, rollout: int, tokens: list[int], spans: list[tuple[int, int]], **fields: Any
) -> SegmentRow:
    """A segment with μ = the toy policy's own log-probabilities at `temperatures`, one a span."""
    temperatures = fields.pop("temperatures", [1.0] * len(spans))
    versions = fields.pop("versions", [[len(tokens), 1]] if tokens else [])
    made = SegmentRow(
        run="toy",
        prompt=group,
        group=group,
        rollout=rollout,
        token_ids=np.array(tokens, np.int32),
        action_spans=np.array(spans, np.int32).reshape(-1, 2),
        behavior_logprobs=np.zeros(len(tokens), np.float32),
        version_spans=np.array(versions, np.int64).reshape(-1, 2),
        sampling=tuple(Sampling(temperature=t) for t in temperatures),
        **fields,
    )
    made.behavior_logprobs[:] = behavior(made, temperatures)
    return made


@torch.no_grad()
def behavior(made: SegmentRow, temperatures: list[float]) -> np.ndarray:
    """[n] float32 log μ of a toy engine, NaN off the actions."""
    at = np.ones(len(made.token_ids), np.float32)
    for (start, end), t in zip(made.action_spans.tolist(), temperatures, strict=True):
        at[start:end] = t
    tokens = torch.from_numpy(made.token_ids).long()
    found = Toy()(tokens, torch.tensor([0, len(tokens)]), torch.from_numpy(at))[0].numpy()
    return np.where(made.action_mask, found, np.nan).astype(np.float32)


def write_plan(
    run_dir: Path, rows: list[SegmentRow], rewards: dict[int, list[float | None]], writer: str = "w"
) -> tuple[Group, ...]:
    """One shard with a group for each key of `rewards`, and the groups' records."""
    shards = ShardWriter(run_dir, writer)
    of_group = {g: [r for r in rows if r.group == g] for g in rewards}
    for members in of_group.values():
        shards.add(to_batch(members))
    return tuple(
        Group(
            lease=g,
            group=g,
            prompt=g,
            where=where,
            rewards=tuple(rewards[g]),
            segments=tuple(
                Segment(
                    rollout=r.rollout, tokens=len(r.token_ids), actions=int(r.action_mask.sum())
                )
                for r in members
            ),
        )
        for where, (g, members) in zip(shards.publish(), of_group.items(), strict=True)
    )


def on_ranks(world: int, work: Callable[..., Any], path: Path, *args: Any) -> list[Any]:
    """What `work(rank, world, *args)` returns on each of `world` gloo ranks."""
    mp.spawn(_rank, (world, work, path, args), nprocs=world)
    return [torch.load(path / f"{rank}.pt", weights_only=False) for rank in range(world)]


def _rank(
    rank: int, world: int, work: Callable[..., Any], path: Path, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(path / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    torch.save(work(rank, world, *args), path / f"{rank}.pt")
    dist.destroy_process_group()
