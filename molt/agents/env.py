# SPDX-License-Identifier: Apache-2.0
"""`Env`: the agent whose loop the framework owns, and `Result`, what every agent answers.

A new instance is made for each rollout. `reset` gives the first message(s), `step` receives the
text the policy wrote and answers one `Result`: with an observation the conversation goes on,
without one it ends. Both may be `async`; a step that raises becomes a rollout with status `error`,
never a reward of zero.
"""

from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]  # {"role": …, "content": …}


@dataclass(frozen=True)
class Result:
    """What one turn, or one whole rollout, was worth.

    Attributes:
        reward: adds to the rollout's reward. None means "not scored here"; a rollout that no turn
            scored is unscorable and is left out of every mean.
        observation: the next user message (or messages); None ends the rollout.
        metrics: numbers to record beside the reward.
    """

    reward: float | None = None
    observation: str | list[Message] | None = None
    metrics: dict[str, float] = field(default_factory=dict)


class Env:
    """Base class of environments; see `molt.agents.guess` for one with several turns.

    A rollout that was cut is resumed by running its agent again: as long as it says the same, the
    policy's answers are the recorded ones. An agent whose tools must not run twice says
    `resumable = False`: its rollouts start over.
    """

    resumable: bool = True

    def reset(
        self, prompt: Any, label: Any
    ) -> str | list[Message] | Awaitable[str | list[Message]]:
        """The first user message (or messages) for one row of the data; by default the prompt."""
        return prompt

    def step(self, action: str) -> Result | Awaitable[Result]:
        """Judge the policy's text and say how the conversation goes on."""
        raise NotImplementedError(f"{type(self).__name__} must define step(action) -> Result")
