# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from molt.algo.corrections import CORRECTIONS


def test_truncation_keeps_small_ratios_and_caps_large_ones() -> None:
    # π_old/μ of 0.25, 1, 4 and one that overflows float32, capped at 2
    log_ratio = torch.tensor([0.25, 1.0, 4.0, 1.0]).log() + torch.tensor([0.0, 0.0, 0.0, 1000.0])
    found = CORRECTIONS["truncate"](log_ratio, 2.0)
    assert found.tolist() == pytest.approx([0.25, 1.0, 2.0, 2.0])


def test_no_correction_is_one() -> None:
    assert CORRECTIONS["none"](torch.tensor([-3.0, 5.0]), 2.0).tolist() == [1.0, 1.0]
