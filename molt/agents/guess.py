# SPDX-License-Identifier: Apache-2.0
"""`guess`: three turns to find a number from 1 to 6, told "higher" or "lower" in between."""

import random
from collections.abc import Iterator
from typing import Any

from molt.agents.env import Env, Message, Result

TURNS = 3


class Guess(Env):
    """Reward 1 when the number is found within three guesses."""

    def reset(self, prompt: str, label: int) -> str:
        """Remember the number; the prompt only names the range."""
        self.number, self.turns = label, 0
        return prompt

    def step(self, action: str) -> Result:
        """Compare the guess and say where the number lies."""
        self.turns += 1
        guess = int(action) if action.strip().isdigit() else None
        if guess == self.number:
            return Result(reward=1.0)
        if self.turns == TURNS:
            return Result(reward=0.0)
        return Result(observation=_hint(guess, self.number))


def _hint(guess: int | None, number: int) -> str:
    if guess is None:
        return "?"
    return "higher" if number > guess else "lower"


def prompts() -> list[dict[str, Any]]:
    """The six numbers; the prompt is the same for all."""
    return [{"prompt": "1-6?", "label": n} for n in range(1, 7)]


def demonstrations(seed: int, num: int) -> Iterator[dict[str, Any]]:
    """`num` games of a demonstrator that forgets all it was told in 40 of 100 guesses."""
    rng = random.Random(seed)
    for _ in range(num):
        env = Guess()
        messages: list[Message] = [{"role": "user", "content": "1-6?"}]
        env.reset("1-6?", rng.randrange(1, 7))
        low, high = 1, 6
        while True:
            forgets = rng.random() < 0.4 or low > high
            guess = rng.randint(1, 6) if forgets else rng.randint(low, high)
            messages.append({"role": "assistant", "content": str(guess)})
            hint = env.step(str(guess)).observation
            if hint is None:
                break
            if hint == "higher":
                low = max(low, guess + 1)
            else:
                high = min(high, guess - 1)
            messages.append({"role": "user", "content": hint})
        yield {"messages": messages}
