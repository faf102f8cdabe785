# SPDX-License-Identifier: Apache-2.0
"""The session keeps exactly the tokens that were generated, whatever the conversation's shape."""

import asyncio

import numpy as np
import pytest

from molt.records import Sampling
from molt.rollout.client import Completion
from molt.rollout.session import Session


class Scripted:
    """An engine that answers what the test says and remembers what it was asked."""

    def __init__(self, *answers: list[int], version: int = 7) -> None:
        self.answers, self.version, self.prompts, self.limits = list(answers), version, [], []

    async def generate(self, ids: np.ndarray, sampling: Sampling, request_id: str) -> Completion:
        self.prompts.append(ids.tolist())
        self.limits.append(sampling.max_tokens)
        answer = np.array(self.answers.pop(0), np.int32)
        tokens = answer[: sampling.max_tokens]
        logprobs = -tokens.astype(np.float32)
        spans = np.array([[len(tokens), self.version]], np.int64)
        reason = "stop" if len(tokens) == len(answer) else "length"
        return Completion(tokens, logprobs, spans, reason)


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_actions_are_exactly_the_sampled_tokens_with_their_stop_token():
    # prompt 10 11, sampled 5 6 EOS(2), template adds 3, tool says 20 21, sampled 7 EOS(4)
    engine = Scripted([5, 6, 2], [7, 4])
    session = Session("s", engine, 100)

    async def talk() -> None:
        first = await session.generate(None, ids(10, 11), Sampling())
        await session.generate(first, ids(3, 20, 21), Sampling())

    asyncio.run(talk())
    (path,) = session.paths()
    assert path.token_ids.tolist() == [10, 11, 5, 6, 2, 3, 20, 21, 7, 4]
    assert path.action_spans.tolist() == [[2, 5], [8, 10]]
    assert np.isnan(path.logprobs).tolist() == [True] * 2 + [False] * 3 + [True] * 3 + [False] * 2
    assert path.logprobs[[2, 9]].tolist() == [-5.0, -4.0]  # row i is for token i
    assert path.version_spans.tolist() == [[5, 7], [10, 7]]
    assert engine.prompts[1] == [10, 11, 5, 6, 2, 3, 20, 21]


def test_a_completion_shared_by_two_segments_is_an_action_once():
    session = Session("s", Scripted([5], [6], [7]), 100)

    async def talk() -> None:
        root = await session.generate(None, ids(1), Sampling())
        await session.generate(root, ids(2), Sampling())
        await session.generate(root, ids(3), Sampling())

    asyncio.run(talk())
    first, second = session.paths()
    assert first.token_ids.tolist() == [1, 5, 2, 6] and second.token_ids.tolist() == [1, 5, 3, 7]
    assert first.action_spans.tolist() == [[1, 2], [3, 4]]
    assert second.action_spans.tolist() == [[3, 4]]
    assert np.isnan(second.logprobs[1])  # never two log-probabilities for one sampled token


def test_the_token_limit_is_lowered_to_what_the_model_can_hold():
    engine = Scripted([5, 6])
    session = Session("s", engine, 8)
    asyncio.run(session.generate(None, ids(1, 2, 3), Sampling(max_tokens=50)))
    assert engine.limits == [5]
    assert session.room(session.nodes[0], ids(9, 9, 9)) == 0
    with pytest.raises(ValueError, match="no room"):
        asyncio.run(session.generate(session.nodes[0], ids(9, 9, 9), Sampling()))
