# SPDX-License-Identifier: Apache-2.0
"""A session that was cut and resumed, through files as in a run, is the one that was not.

`Policy` says the same after the same tokens, so that whole sessions can be compared; `Dice` never
says anything twice, so that it knows of each token where it belongs.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molt.records import Sampling
from molt.rollout.client import Completion
from molt.rollout.session import Node, Session, Stopped
from molt.store.partials import Origin, Part, PartialWriter, Recorded, read_partials
from tests.unit.rollout.test_session import Policy, Scripted, ids


async def talk(session: Session, num_turns: int, seed: int) -> None:
    """An agent: what it says depends on what it heard."""
    node, new = None, ids(seed + 1, seed + 2)
    for _ in range(num_turns):
        node = await session.generate(node, new, Sampling(max_tokens=9))
        new = ids(int(node.completion.token_ids.sum()) % 11, 7)


@settings(max_examples=60, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 12), max_size=4),
    turns=st.integers(1, 4),
    seed=st.integers(0, 50),
    chunk=st.integers(0, 4),
    lost=st.sets(st.integers(1, 8), max_size=3),
)
def test_a_session_stopped_anywhere_any_number_of_times_is_the_uninterrupted_one(
    tmp_path_factory: pytest.TempPathFactory, cuts, turns, seed, chunk, lost
):
    once = Policy()
    whole = Session("w", once, 500)
    asyncio.run(talk(whole, turns, seed))
    run, sampled = tmp_path_factory.mktemp("run"), 0
    engine, session = once, whole
    for lease, cut in enumerate([*cuts, None]):
        engine = Policy(cut, tuple(lost))
        writer = PartialWriter(run, f"w{lease}")
        session = Session("s", engine, 500, chunk, logged(writer, lease), left(run))
        try:
            asyncio.run(talk(session, turns, seed))
        except Stopped:
            assert cut is not None
        sampled += engine.num_tokens
        writer.flush()
    assert sampled == once.num_tokens  # nothing was sampled twice
    assert session.resumed_tokens + engine.num_tokens == once.num_tokens
    (path,), (expected,) = session.paths(), whole.paths()
    assert path.token_ids.tolist() == expected.token_ids.tolist()
    assert path.action_spans.tolist() == expected.action_spans.tolist()
    assert np.array_equal(path.logprobs, expected.logprobs, equal_nan=True)
    assert path.version_spans.tolist() == expected.version_spans.tolist()
    assert (session.replay_misses, session.dead_tokens) == (0, 0)


def logged(writer: PartialWriter, lease: int) -> Callable[[Part], None]:
    return lambda part: writer.add(Origin(3, lease, 1, 0), part)


def left(run: Path) -> list[Recorded]:
    """What there is of the session."""
    paths = sorted(str(path.relative_to(run)) for path in run.glob("partials/*/*.arrow"))
    return read_partials(run, paths, group=3).get(1, [])


class Killed(Exception):
    """The process is gone."""


class Dice:
    """An engine that never says anything twice: it knows what each token was sampled after.

    The process is killed when `left` tokens in all are sampled, and what it then samples is lost;
    or the engine is stopped then.
    """

    def __init__(self, rng: Random) -> None:
        self.rng, self.stops, self.ending = rng, False, 0.2
        self.left: int | None = None
        self.before: dict[int, tuple[int, ...]] = {}
        self.next = 1000

    async def generate(self, ids: np.ndarray, sampling: Sampling, request_id: str) -> Completion:
        await asyncio.sleep(0)
        tokens, reason = ids.tolist(), "length"
        while len(tokens) - len(ids) < sampling.max_tokens and reason == "length":
            if self.left == 0:
                if not self.stops:
                    raise Killed
                reason = "abort"
                break
            self.left = self.left and self.left - 1
            self.next += 1
            self.before[self.next] = tuple(tokens)
            tokens.append(self.next)
            reason = "stop" if self.rng.random() < self.ending else "length"
        got = np.array(tokens[len(ids) :], np.int32)
        spans = np.array([[len(got), 1]] if len(got) else [], np.int64).reshape(-1, 2)
        return Completion(got, -got.astype(np.float32), spans, reason)

    async def recovered(self) -> None:
        raise AssertionError("nothing was lost")

    def check(self, session: Session) -> None:
        """Every sampled token is where it was sampled, as an action once."""
        trained: list[int] = []
        for path in session.paths():
            tokens = path.token_ids.tolist()
            for i, token in enumerate(tokens):
                assert token < 1000 or self.before[token] == tuple(tokens[:i])
            for start, end in path.action_spans.tolist():
                trained += tokens[start:end]
            assert path.version_spans[-1].tolist() == [len(tokens), 1]
        assert len(set(trained)) == len(trained)


async def wander(session: Session, seed: int, heard: list[list[int]]) -> None:
    """An agent that goes back, branches and asks for other samples, as it is told."""
    nodes: list[Node | None] = [None]
    for _ in range(seed % 7 + 1):
        rng = Random(f"{seed} {heard}")
        parent, new = rng.choice(nodes), ids(rng.randrange(2))
        nodes.append(node := await session.generate(parent, new, Sampling(max_tokens=9)))
        heard.append(node.completion.token_ids.tolist())


def live(session: Session, seed: int) -> list[list[int]]:
    """Run an agent to its end, or until it is stopped or killed; what it has heard."""
    heard: list[list[int]] = []
    with contextlib.suppress(Stopped, Killed):
        asyncio.run(wander(session, seed, heard))
    return heard


def tokens_left(run: Path) -> list[list[int]]:
    return [[t for part in node.parts for t in part.token_ids.tolist()] for node in left(run)]


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    ends=st.lists(st.tuples(st.integers(0, 20), st.booleans()), max_size=4),
    chunk=st.integers(0, 4),
    every=st.integers(1, 4),
)
def test_an_agent_hears_again_what_was_flushed_before_it_was_killed(
    tmp_path_factory: pytest.TempPathFactory, seed, ends, chunk, every
):
    run, dice = tmp_path_factory.mktemp("run"), Dice(Random(seed))
    before: list[list[int]] = []
    for lease, (cut, stops) in enumerate([*ends, (None, False)]):
        writer = PartialWriter(run, f"w{lease}")

        def log(part: Part, writer: PartialWriter = writer, lease: int = lease) -> None:
            writer.add(Origin(3, lease, 1, 0), part)
            if part.token_ids[-1] % every == 0:
                writer.flush()

        dice.left, dice.stops = cut, stops
        session = Session("s", dice, 500, chunk, log, left(run))
        heard = live(session, seed)
        if stops:
            writer.flush()
        after = tokens_left(run)
        assert len(after) >= len(before)
        for told in (heard, after):
            for old, new in zip(before, told, strict=False):
                assert new[: len(old)] == old
        assert session.replay_misses == 0
        dice.check(session)
        if cut is None:
            assert session.dead_tokens == 0
            assert session.resumed_tokens == sum(map(len, before))
        before = after


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 10_000), leases=st.integers(2, 5), chunk=st.integers(0, 3))
def test_no_token_is_put_after_others_than_it_was_sampled_after_whatever_is_missing(
    tmp_path_factory: pytest.TempPathFactory, seed, leases, chunk
):
    run, rng = tmp_path_factory.mktemp("run"), Random(seed)
    dice, zombies = Dice(rng), []
    for lease in range(leases):
        files = sorted(str(path.relative_to(run)) for path in run.glob("partials/*/*.arrow"))
        seen = [path for path in files if rng.random() < 0.7]  # damaged, or not visible yet
        recorded = read_partials(run, seen, group=3).get(1, [])
        writer = PartialWriter(run, f"w{lease}")

        def log(part: Part, writer: PartialWriter = writer, lease: int = lease) -> None:
            writer.add(Origin(3, lease, 1, 0), part)
            for late in (writer, *zombies):  # who lost the lease and does not know it
                if rng.random() < 0.4:
                    late.flush()

        dice.left, dice.stops = rng.choice([None, 3, 9, 20]), rng.random() < 0.5
        session = Session("s", dice, 500, chunk, log, recorded)
        live(session, rng.choice([seed, lease]))
        zombies.append(writer)
        dice.check(session)


def test_branches_that_were_stopped_together_go_on_together(tmp_path: Path):
    async def fork(session: Session) -> None:
        root = await session.generate(None, ids(1), Sampling(max_tokens=4))
        branches = (session.generate(root, ids(i), Sampling(max_tokens=30)) for i in range(3))
        await asyncio.gather(*branches)

    dice, before = Dice(Random(1)), 0
    session, dice.ending = Session("s", dice, 500), 0.01
    for lease, cut in enumerate((9, 5, 5, None)):
        before = dice.next - 1000
        writer, dice.left, dice.stops = PartialWriter(tmp_path, f"w{lease}"), cut, True
        session = Session("s", dice, 500, 2, logged(writer, lease), left(tmp_path))
        with contextlib.suppress(Stopped):
            asyncio.run(fork(session))
        writer.flush()
    dice.check(session)
    assert (session.replay_misses, session.dead_tokens) == (0, 0)
    assert session.resumed_tokens == before == 19
    assert sum(len(node.completion.token_ids) for node in session.nodes) == dice.next - 1000


def recorded_of(*turns: tuple[list[int], list[int]], finish_reason: str = "stop") -> list[Recorded]:
    """A recorded conversation: (context, completion) of each turn, the last of which may be cut."""
    return [
        Recorded(
            attempt=0,
            parts=[Part(node=key, parent=key - 1, part=0, context=ids(*context),
                        token_ids=ids(*sampled), logprobs=-ids(*sampled).astype(np.float32),
                        version_spans=np.array([[len(sampled), 1]], np.int64),
                        sampling=Sampling(max_tokens=4, stop=("x",)),
                        finish_reason=finish_reason if key == len(turns) - 1 else "stop")],
        )
        for key, (context, sampled) in enumerate(turns)
    ]  # fmt: skip


def test_a_miss_ends_the_replay_and_what_was_not_touched_is_dead():
    recorded = recorded_of(([1], [5]), ([2], [6, 6]), ([3], [7, 7, 7]))
    session = Session("s", Scripted([8], [9]), 100, recorded=recorded)

    async def stray() -> None:
        first = await session.generate(None, ids(1), Sampling())
        second = await session.generate(first, ids(4), Sampling())  # the record says 2
        await session.generate(second, ids(3), Sampling())

    asyncio.run(stray())
    assert [path.token_ids.tolist() for path in session.paths()] == [[1, 5, 4, 8, 3, 9]]
    assert session.replay_misses == 1
    assert session.dead_tokens == 5
    assert session.resumed_tokens == session.paths()[0].resumed == 1


def test_going_on_behind_the_record_is_no_miss():
    session = Session("s", Scripted([8]), 100, recorded=recorded_of(([1], [5])))

    async def on() -> None:
        first = await session.generate(None, ids(1), Sampling())
        await session.generate(first, ids(4), Sampling())

    asyncio.run(on())
    assert (session.replay_misses, session.dead_tokens) == (0, 0)


def test_nodes_are_numbered_on_from_the_record_though_some_of_it_is_missing():
    (record,), parts = recorded_of(([1], [5])), []
    fourth = Recorded(0, [dataclasses.replace(record.parts[0], node=3)])
    session = Session("s", Scripted([8]), 100, log=parts.append, recorded=[record, fourth])
    asyncio.run(session.generate(None, ids(9), Sampling()))
    assert [part.node for part in parts] == [4]


def test_a_completion_with_stop_strings_that_was_cut_is_sampled_anew():
    engine, recorded = Scripted([6, 7]), recorded_of(([1], [5, 5]), finish_reason="")
    session = Session("s", engine, 100, recorded=recorded)
    asyncio.run(session.generate(None, ids(1), Sampling(max_tokens=9, stop=("x",))))
    assert engine.limits == [9]
    assert (session.replay_misses, session.dead_tokens) == (1, 2)
