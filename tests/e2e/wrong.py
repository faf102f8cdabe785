# SPDX-License-Identifier: Apache-2.0
"""Policies that are wrong on purpose, each by one mistake that only a comparison can show."""

from typing import Any

import torch
from torch import Tensor

from molt.config import Config
from molt.trainer.policy import AutoModelPolicy


class Temperature(AutoModelPolicy):
    """Divides logits by another temperature than the engine did."""

    def logprobs(
        self, tokens: Tensor, cu_seqlens: Tensor, temperature: Tensor, needed: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `Policy.logprobs`."""
        return super().logprobs(tokens, cu_seqlens, 1.25 * temperature, needed)


class Positions(AutoModelPolicy):
    """Counts one position too many from the 17th token on."""

    def __init__(self, config: Config, rank: int, world: int) -> None:
        super().__init__(config, rank, world)
        rotary = self.model.get_submodule("model.rotary_emb")
        rotary.register_forward_pre_hook(_shift, with_kwargs=True)


def _shift(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    hidden, *rest = args
    positions = rest[0] if rest else kwargs["position_ids"]
    return (hidden, positions + (positions >= 16)), {}


class Seams(AutoModelPolicy):
    """Packs sequences into one row and forgets to say where they begin."""

    def __init__(self, config: Config, rank: int, world: int) -> None:
        super().__init__(config, rank, world)
        self._arrange = lambda tokens, _: (
            {"input_ids": tokens[None]},
            torch.arange(len(tokens), device=tokens.device),
        )
