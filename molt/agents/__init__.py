# SPDX-License-Identifier: Apache-2.0
"""Agents: the programs whose model calls are trained."""

from molt.agents.env import Env, Message, Result

__all__ = ["Env", "Message", "Result"]
