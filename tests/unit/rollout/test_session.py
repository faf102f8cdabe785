# SPDX-License-Identifier: Apache-2.0
"""The session keeps exactly the tokens that were generated, whatever the conversation's shape."""

import asyncio
import dataclasses

import numpy as np
import pytest

from molt.records import EngineError, Sampling
from molt.rollout.client import Completion, EngineLost
from molt.rollout.session import Session
from molt.store.partials import Part


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

    async def recovered(self) -> None:
        raise AssertionError("nothing was lost")


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


class Policy:
    """An engine whose next token is a function of the tokens before it, token 0 ends.

    `stop_after` tokens in all it is stopped; a `lost` request is the n-th one.
    """

    def __init__(self, stop_after: int | None = None, lost: tuple[int, ...] = (), version: int = 1):
        self.left, self.lost, self.version = stop_after, set(lost), version
        self.num_requests = self.num_tokens = self.num_recoveries = 0

    async def generate(self, ids: np.ndarray, sampling: Sampling, request_id: str) -> Completion:
        self.num_requests += 1
        if self.num_requests in self.lost:
            raise EngineLost("connection reset")
        tokens, reason = ids.tolist(), "length"
        start = len(tokens)
        while len(tokens) - start < sampling.max_tokens:
            if self.left is not None and self.num_tokens >= self.left:
                reason = "abort"
                break
            tokens.append(int(sum(t * (i + 3) for i, t in enumerate(tokens)) * 7919 % 13))
            self.num_tokens += 1
            if tokens[-1] == 0:
                reason = "stop"
                break
        got = np.array(tokens[start:], np.int32)
        spans = np.array([[len(got), self.version]] if len(got) else [], np.int64).reshape(-1, 2)
        return Completion(got, -got.astype(np.float32), spans, reason)

    async def recovered(self) -> None:
        self.num_recoveries += 1


def test_weights_that_change_between_chunks_are_told_apart():
    engine = Policy()

    def publish(part: Part) -> None:  # after every chunk
        engine.version += 1

    session = Session("s", engine, 500, chunk_tokens=2, log=publish)
    asyncio.run(session.generate(None, ids(4), Sampling(max_tokens=5)))
    (path,) = session.paths()
    sampled = len(path.token_ids) - 1
    assert sampled > 2  # or nothing is shown
    assert path.version_spans.tolist() == [
        [1 + min(2 * i, sampled), i] for i in range(1, -(-sampled // 2) + 1)
    ]


def test_a_completion_with_stop_strings_is_asked_for_whole():
    engine = Scripted([5] * 8)
    session = Session("s", engine, 100, chunk_tokens=2)
    asyncio.run(session.generate(None, ids(1), Sampling(max_tokens=20, stop=("x",))))
    assert engine.limits == [20]


def test_an_engine_that_is_lost_again_and_again_is_given_up():
    session = Session("s", Policy(lost=tuple(range(1, 20))), 100)
    with pytest.raises(EngineError, match="6th time in a row"):
        asyncio.run(session.generate(None, ids(1), Sampling()))


def test_an_engine_that_answers_no_token_is_not_asked_for_ever():
    session = Session("s", Scripted([]), 100, chunk_tokens=2)
    with pytest.raises(EngineError, match="s-1 has no token: stop"):
        asyncio.run(session.generate(None, ids(1), Sampling()))


def test_a_completion_that_was_stopped_at_its_last_token_is_whole():
    class Stopping(Scripted):
        async def generate(self, ids: np.ndarray, sampling: Sampling, request_id: str):
            got = await super().generate(ids, sampling, request_id)
            return dataclasses.replace(got, finish_reason="abort")

    session = Session("s", Stopping([5, 6, 7]), 100)
    node = asyncio.run(session.generate(None, ids(1), Sampling(max_tokens=3)))
    assert node.completion.finish_reason == "length"
