# SPDX-License-Identifier: Apache-2.0
"""`add`: one turn, the sum of two digits. Its prompts, environment and noisy demonstrations."""

import random
from collections.abc import Iterator
from typing import Any

from molt.agents.env import Env, Result


class Add(Env):
    """Reward 1 for the right sum, 0 for anything else."""

    def reset(self, prompt: str, label: int) -> str:
        """Remember the answer; the prompt is the question."""
        self.answer = label
        return prompt

    def step(self, action: str) -> Result:
        """The one turn."""
        return Result(reward=float(action.strip() == str(self.answer)))


def prompts() -> list[dict[str, Any]]:
    """All 100 sums of two digits."""
    return [{"prompt": f"{a}+{b}=", "label": a + b} for a in range(10) for b in range(10)]


def demonstrations(seed: int, num: int) -> Iterator[dict[str, Any]]:
    """`num` conversations of a demonstrator: right in 40 of 100, near the sum otherwise."""
    rng = random.Random(seed)
    for _ in range(num):
        a, b = rng.randrange(10), rng.randrange(10)
        answer = a + b if rng.random() < 0.4 else max(0, a + b + rng.choice([-2, -1, 1, 2]))
        yield {
            "messages": [
                {"role": "user", "content": f"{a}+{b}="},
                {"role": "assistant", "content": str(answer)},
            ]
        }
