# SPDX-License-Identifier: Apache-2.0
"""Corrections for training π_old on tokens that μ sampled: stale weights, other kernels.

Contract: `correction(log_ratio [T], limit) -> factor [T]`, where the log-ratio is log π_old − log μ
at trained tokens. The factor is ≥ 0 and multiplies the advantage; it is constant within a step.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Correction = Callable[[Tensor, float], Tensor]


def none(log_ratio: Tensor, limit: float) -> Tensor:
    """Trust the ratio to be 1."""
    return torch.ones_like(log_ratio)


def truncate(log_ratio: Tensor, limit: float) -> Tensor:
    """min(π_old/μ, limit) per token: truncated importance sampling (IMPALA, arXiv 1802.01561)."""
    return log_ratio.exp().clamp(max=limit)


CORRECTIONS: dict[str, Correction] = {"none": none, "truncate": truncate}
