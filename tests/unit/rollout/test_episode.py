# SPDX-License-Identifier: Apache-2.0
"""The loop between an `Env` and its session: turns, rewards, limits, and agents that misbehave."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from molt.agents import Env, Result
from molt.agents.add import Add
from molt.agents.guess import Guess
from molt.records import AgentError, Sampling
from molt.rollout.client import Completion, EngineLost
from molt.rollout.episode import Episode, Limits, play
from molt.rollout.render import Renderer
from molt.rollout.session import Session
from tests.unit.rollout.test_session import Scripted


class Letters(Renderer):
    """A renderer without a model: a token a character, fixed tokens around them, 0 ends a turn."""

    def __init__(self) -> None:
        pass

    def start(self, messages: str) -> np.ndarray:
        return np.array([1, 2, 3], np.int32)

    def follow(self, messages: str, ended: bool) -> np.ndarray:
        return np.array([4, 5] if ended else [0, 4, 5], np.int32)

    def text(self, ids: np.ndarray) -> str:
        return "".join(map(chr, ids[ids > 5]))


def answers(*texts: str) -> Scripted:
    return Scripted(*([*map(ord, text), 0] for text in texts))


def run(
    make: Callable[[], Any],
    engine: Scripted,
    label: Any = None,
    max_turns: int = 8,
    timeout_s: float = 5.0,
) -> Episode:
    session, limits = Session("s", engine, 100), Limits(max_turns, timeout_s)
    row = {"prompt": "p", "label": label}
    return asyncio.run(play(make, row, session, Letters(), Sampling(), limits))


def test_one_turn_is_scored_on_the_text_without_its_stop_token():
    episode = run(Add, answers("12"), label=12)
    assert (episode.reward, episode.status) == (1.0, "finished")
    assert episode.messages == [
        {"role": "user", "content": "p"},
        {"role": "assistant", "content": "12"},
    ]


def test_turns_go_on_until_the_agent_observes_nothing():
    episode = run(Guess, answers("2", "6", "5"), label=5)
    assert episode.reward == 1.0
    assert [m["content"] for m in episode.messages] == ["p", "2", "higher", "6", "lower", "5"]
    (path,) = episode.session.paths()
    assert path.token_ids.tolist() == [1, 2, 3, 50, 0, 4, 5, 54, 0, 4, 5, 53, 0]
    assert path.action_spans.tolist() == [[3, 5], [7, 9], [11, 13]]


def test_a_rollout_that_nothing_scored_has_no_reward():
    class Silent(Env):
        def step(self, action: str) -> Result:
            return Result()

    assert run(Silent, answers("x")).reward is None


def test_rewards_of_turns_add_up_and_agents_may_be_coroutines():
    class Paid(Env):
        async def step(self, action: str) -> Result:
            await asyncio.sleep(0)
            return Result(reward=0.25, observation="more" if action != "c" else None)

    episode = run(Paid, answers("a", "b", "c"))
    assert episode.reward == 0.75 and episode.turn_rewards == [0.25] * 3


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        (lambda _: 1 / 0, "ZeroDivisionError"),
        (lambda _: None, "must answer a molt.Result"),
        (lambda _: Result(reward=float("nan")), "use None if unscored"),
    ],
)
def test_an_agent_that_misbehaves_is_an_error_and_never_a_reward(behaviour, message):
    class Bad(Env):
        def step(self, action: str) -> Result:
            return behaviour(action)

    with pytest.raises(AgentError, match=message):
        run(Bad, answers("x"))


def test_an_agent_that_never_returns_is_ended_by_its_deadline():
    class Stuck(Env):
        async def step(self, action: str) -> Result:
            await asyncio.Event().wait()
            return Result()

    with pytest.raises(AgentError, match=r"took longer than .* agent\.timeout_s"):
        run(Stuck, answers("x"), timeout_s=0.05)


class Away(Scripted):
    """An engine that dies under each request and takes longer to return than an agent may."""

    def __init__(self, *answers: list[int]) -> None:
        super().__init__(*answers)
        self.here = False

    async def generate(self, ids: np.ndarray, sampling: Sampling, request_id: str) -> Completion:
        if not self.here:
            await asyncio.sleep(0.2)
            raise EngineLost("connection reset")
        self.here = False
        return await super().generate(ids, sampling, request_id)

    async def recovered(self) -> None:
        await asyncio.sleep(0.35)
        self.here = True


def test_an_agents_time_stands_still_while_its_engine_is_away():
    engine = Away([ord("2"), 0], [ord("5"), 0])
    assert run(Guess, engine, label=5, timeout_s=0.3).reward == 1.0


def test_an_agents_time_goes_on_when_its_engine_is_back():
    class Stuck(Env):
        async def step(self, action: str) -> Result:
            await asyncio.Event().wait()
            return Result()

    with pytest.raises(AgentError, match=r"agent\.timeout_s"):
        run(Stuck, Away([ord("2"), 0]), timeout_s=0.3)


def test_a_conversation_that_fills_the_model_is_truncated_and_keeps_its_tokens():
    class Endless(Env):
        def step(self, action: str) -> Result:
            return Result(reward=0.1, observation="again")

    engine = answers(*["yyyyyyyyyyyyyyyyyyyy"] * 9)
    episode = run(Endless, engine)
    assert episode.status == "truncated" and "max_len" in episode.reason
    assert len(episode.session.paths()[0].token_ids) <= 100


def test_too_many_turns_are_truncated():
    class Endless(Env):
        def step(self, action: str) -> Result:
            return Result(observation="again")

    episode = run(Endless, answers("a", "b"), max_turns=2)
    assert episode.status == "truncated" and "max_turns = 2" in episode.reason
