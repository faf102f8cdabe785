# SPDX-License-Identifier: Apache-2.0
"""Molt: reinforcement learning of language-model agents on Slurm clusters."""

from molt.agents import Env, Result

__all__ = ["Env", "Result"]
__version__ = "0.1.0"
