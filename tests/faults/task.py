# SPDX-License-Identifier: Apache-2.0
"""The task of the fault tests: games of up to three turns that depend on the policy's text alone.

The other agents are the same game with a fault of their own.
"""

import asyncio
import time
import zlib
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from molt.agents.env import Env, Result
from tests.scripted_engine import is_first

TURNS, PROMPTS = 3, 7


def prompts() -> list[dict[str, Any]]:
    """Few, and a number that no plan divides: plans span epochs."""
    return [{"prompt": f"game {i}"} for i in range(PROMPTS)]


class Game(Env):
    """Every text is answered with a number; one game in four ends early."""

    def reset(self, prompt: str, label: Any) -> str:
        self.turns, self.drawn = 0, 0
        return prompt

    def step(self, action: str) -> Result | Awaitable[Result]:
        return self.play(action)

    def play(self, action: str) -> Result:
        """One turn."""
        self.turns += 1
        self.drawn = zlib.crc32(action.encode(), self.drawn)
        if self.turns == TURNS or self.drawn % 4 == 0:
            return Result(reward=float(self.drawn % 2))
        return Result(observation=str(self.drawn % 100))


class Unrepeatable(Game):
    """Its tools cannot be called again."""

    resumable = False


class Breaks(Game):
    """The first of all to take a second turn does something wrong."""

    def __init__(self, mark: str, how: str) -> None:
        self.mark, self.how = Path(mark), how

    async def step(self, action: str) -> Result:
        if self.turns == 1 and is_first(self.mark):
            if self.how == "blocks":
                time.sleep(3600)
            if self.how == "waits":
                await asyncio.sleep(3600)
            raise RuntimeError("the tool broke")
        return self.play(action)


class Broken(Game):
    """One prompt never works."""

    def reset(self, prompt: str, label: Any) -> str:
        self.works = prompt != "game 3"
        return super().reset(prompt, label)

    def step(self, action: str) -> Result:
        if not self.works:
            raise RuntimeError("the tool broke")
        return self.play(action)
