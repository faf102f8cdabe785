# SPDX-License-Identifier: Apache-2.0
"""A real policy of two tables that starts in seconds: `trainer.policy = "tests.toy_policy:build"`.

The token before predicts the next one. What it learns is of no interest; that its weights are a
function of the plans it was trained on, in their order, is: two trainings of the same plans end
with the same weights, and any other plan, or one trained twice, leaves others.
"""

import copy
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from molt.config import Config

VOCABULARY, WIDTH = 128, 4
FILE = "policy.pt"
WHOLE = StateDictOptions(full_state_dict=True)


class Bigram(nn.Module):
    """tokens [N] → log-probabilities and entropies [N]."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.2, generator=generator)

    def forward(
        self, tokens: Tensor, cu_seqlens: Tensor, temperature: Tensor
    ) -> tuple[Tensor, Tensor]:
        logits = self.head(self.embedding(tokens)).roll(1, 0) / temperature[:, None]
        logs = logits.log_softmax(-1)
        picked = logs.gather(1, tokens[:, None]).squeeze(1)
        inside = torch.ones_like(picked).index_fill(0, cu_seqlens[:-1], 0.0)
        return picked * inside, -(logs.exp() * logs).sum(-1).detach()


class ToyPolicy:
    """`molt.trainer.policy.Policy`, trained by SGD with momentum."""

    device = torch.device("cpu")

    def __init__(self, config: Config) -> None:
        self.model = Bigram()
        if dist.is_initialized():
            fully_shard(self.model)
        # Linear in the gradients, so that the rounding of another number of ranks stays small.
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(
            self.model.parameters(), lr=config.optim.lr, momentum=0.9
        )
        self._writer = ThreadPoolExecutor(1)

    def logprobs(
        self, tokens: Tensor, cu_seqlens: Tensor, temperature: Tensor, needed: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `Policy.logprobs`."""
        num_tokens = len(tokens)
        if num_tokens == 0:
            tokens, cu_seqlens = torch.zeros(1).long(), torch.tensor([0, 1])
            temperature = torch.ones(1)
        logprobs, entropy = self.model(tokens, cu_seqlens, temperature)
        return logprobs[:num_tokens], entropy[:num_tokens]

    def accumulate(self, last: bool) -> None:
        """See `Policy.accumulate`."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(last)

    def clip(self, max_norm: float, scale: float) -> float:
        """See `Policy.clip`."""
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = float(torch.stack([_whole(g).norm() for g in grads]).norm()) * scale
        for grad in grads:
            grad.mul_(scale * min(1.0, max_norm / (norm + 1e-6)))
        return norm

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `Policy.weights`."""
        return ((name, _whole(p.detach())) for name, p in self.model.named_parameters())

    def save(self, path: Path) -> "Future[Any]":
        """See `Policy.save`. Rank 0 writes all of it."""
        model, optimizer = get_state_dict(self.model, self.optimizer, options=WHOLE)
        staged = copy.deepcopy({"model": model, "optimizer": optimizer})
        if dist.is_initialized() and dist.get_rank():
            return self._writer.submit(lambda: None)
        return self._writer.submit(_write, path / FILE, staged)

    def load(self, path: Path, optimizer: bool = True) -> None:
        """See `Policy.load`."""
        state = torch.load(path / FILE)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=WHOLE,
        )


def build(config: Config, rank: int, world: int) -> ToyPolicy:
    """What `trainer.policy` names."""
    return ToyPolicy(config)


def _write(path: Path, state: dict[str, Any]) -> None:
    with path.open("xb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
