# SPDX-License-Identifier: Apache-2.0
"""One rollout of an `Env`: the loop between the agent and its session, ending in an `Episode`.

The agent is the user's code, so this is the one place that catches everything it raises: a failing
agent becomes an `AgentError` that carries its traceback.
"""

import asyncio
import inspect
import json
import math
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from molt.agents import Env, Message, Result
from molt.records import AgentError, Sampling
from molt.rollout.render import Renderer, canonical
from molt.rollout.session import Node, Session


@dataclass
class Episode:
    """What one run of the agent left: its session, its conversation as text and its rewards."""

    session: Session
    messages: list[Message] = field(default_factory=list)
    turn_rewards: list[float] = field(default_factory=list)
    reward: float | None = None
    status: str = "finished"  # finished | truncated | error
    reason: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True)
class Limits:
    """Bounds of one rollout."""

    max_turns: int
    timeout_s: float


async def play(
    make: Callable[[], Env], row: dict[str, Any], session: Session, renderer: Renderer,
    sampling: Sampling, limits: Limits,
) -> Episode:  # fmt: skip
    """Run one agent on one row of the data.

    Raises:
        AgentError: the agent raised, answered no Result, or took longer than its time.
        EngineError: the engine could not answer.
        Stopped: the engine was stopped.
    """
    episode, began = Episode(session), time.monotonic()
    try:
        async with asyncio.timeout(limits.timeout_s) as timer:
            session.away = partial(_standing_still, timer)
            await _turns(make, row, episode, renderer, sampling, limits.max_turns)
    except TimeoutError as e:
        raise AgentError(
            f"rollout {session.key} took longer than {limits.timeout_s:.0f} s: "
            "raise agent.timeout_s"
        ) from e
    episode.seconds = time.monotonic() - began
    return episode


@contextmanager
def _standing_still(timer: asyncio.Timeout, since: float) -> Generator[None]:
    """The agent's time stands still while its engine is away, from `since` on the loop's clock."""
    when = timer.when()
    if when is None or timer.expired():  # it stands still already, or it is too late
        yield
        return
    timer.reschedule(None)
    try:
        yield
    finally:
        timer.reschedule(asyncio.get_running_loop().time() + when - since)


async def _turns(
    make: Callable[[], Env], row: dict[str, Any], episode: Episode, renderer: Renderer,
    sampling: Sampling, max_turns: int,
) -> None:  # fmt: skip
    env = await _ask("__init__", make)
    opening = canonical(await _ask("reset", env.reset, row["prompt"], row["label"]))
    episode.messages += json.loads(opening)
    new_ids, node = renderer.start(opening), None
    for _ in range(max_turns):
        if episode.session.room(node, new_ids) <= 0:
            episode.status, episode.reason = "truncated", "the conversation fills model.max_len"
            return
        node = await episode.session.generate(node, new_ids, sampling)
        result = await _act(env, episode, renderer, node)
        if result.observation is None:
            return
        follow = canonical(result.observation)
        episode.messages += json.loads(follow)
        new_ids = renderer.follow(follow, node.completion.finish_reason == "stop")
    episode.status, episode.reason = (
        "truncated",
        f"agent.max_turns = {max_turns} turns were not enough",
    )


async def _act(env: Env, episode: Episode, renderer: Renderer, node: Node) -> Result:
    """Hand the policy's text to the agent and book what it answers."""
    text = renderer.text(node.completion.token_ids)
    episode.messages.append({"role": "assistant", "content": text})
    if node.completion.finish_reason == "length":
        episode.status, episode.reason = "truncated", "a completion reached its token limit"
    result = await _ask("step", env.step, text)
    if not isinstance(result, Result):
        raise AgentError(
            f"{type(env).__name__}.step answered {result!r}: it must answer a molt.Result"
        )
    if result.reward is not None:
        if not math.isfinite(result.reward):
            raise AgentError(
                f"{type(env).__name__}.step gave reward {result.reward}: use None if unscored"
            )
        episode.turn_rewards.append(float(result.reward))
        episode.reward = (episode.reward or 0.0) + float(result.reward)
    episode.metrics.update(result.metrics)
    return result


async def _ask(what: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call user code, which may be a coroutine function."""
    try:
        answer = function(*args)
        return await answer if inspect.isawaitable(answer) else answer
    except Exception as e:  # the agent boundary: whatever user code raises is the rollout's failure
        raise AgentError(f"{what} raised {type(e).__name__}: {e}\n{traceback.format_exc()}") from e
