# SPDX-License-Identifier: Apache-2.0
"""The session: the durable conversation of one rollout with an engine, as a tree of exact tokens.

A `Node` is an extension of its parent by context tokens and a completion of them. Everything
generates through `Session.generate(parent, new_ids, sampling)`: token ids go in, token ids come
out, and what the policy sampled is never turned into text and back. Each leaf of the tree is a
*segment*; a completion that several segments share is an action in the first of them and context in
the others, so it is trained once.

A completion grows by parts (chunks, or what an engine had when it was stopped); each is logged, so
that it can be written down before the completion ends. A session that is given what an earlier one
logged is the same session: the agent runs again, its requests are answered from the record as long
as they are the recorded ones, the completion that was cut goes on from its tokens, and then the
session is live. Recorded nodes that this run of the agent does not touch are dead.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from molt.records import EngineError, MoltError, Sampling
from molt.rollout.client import Completion, EngineLost, Ids
from molt.store.partials import Part, Recorded

LOST = 5  # times in a row that an engine may be lost under one completion


class Stopped(MoltError):
    """The engine was asked to stop: the session is left as it is, to be resumed."""


class Engine(Protocol):
    """Where completions come from."""

    async def generate(self, ids: Ids, sampling: Sampling, request_id: str) -> Completion:
        """Continue `ids`."""
        ...

    async def recovered(self) -> None:
        """Wait until the engine answers again, after an `EngineLost`."""
        ...


NO_IDS = np.empty(0, np.int32)
NOTHING = Completion(NO_IDS, np.empty(0, np.float32), np.empty((0, 2), np.int64), "")


@dataclass(eq=False)
class Node:
    """One extension of a path: context, then the completion that was sampled after it."""

    key: int  # position in the session's order
    parent: "Node | None"
    context: Ids
    sampling: Sampling
    completion: Completion = NOTHING  # its finish_reason is "" until it is whole
    parts: int = 0
    hash: int = 0  # of its last part
    resumed: int = 0  # tokens of it that an earlier session sampled
    path: Ids = field(default_factory=lambda: NO_IDS)  # every token, completion included
    children: list["Node"] = field(default_factory=list)

    @property
    def start(self) -> int:
        """Position in `path` of the first sampled token."""
        return len(self.path) - len(self.completion.token_ids)

    @property
    def prompt(self) -> Ids:
        """Every token before the completion."""
        return np.concatenate((self.parent.path, self.context)) if self.parent else self.context

    def add(self, part: Part) -> None:
        """Append what was sampled next."""
        had = self.completion
        spans, more = had.version_spans, part.version_spans + np.array([len(had.token_ids), 0])
        if len(spans) and len(more) and spans[-1, 1] == more[0, 1]:
            spans = spans[:-1]  # the same weights went on
        self.completion = Completion(
            np.concatenate((had.token_ids, part.token_ids)),
            np.concatenate((had.logprobs, part.logprobs)),
            np.concatenate((spans, more)),
            part.finish_reason,
        )
        self.parts, self.hash = self.parts + 1, part.hash


@dataclass(frozen=True)
class Path:
    """One leaf's token sequence, in the arrays a shard row wants. N tokens, A action spans."""

    token_ids: Ids  # [N]
    action_spans: NDArray[np.int32]  # [A, 2] (start, end)
    logprobs: NDArray[np.float32]  # [N], NaN off the actions
    version_spans: NDArray[np.int64]  # [V, 2] (end, version), the last end is N
    samplings: tuple[Sampling, ...]  # [A]
    resumed: int  # sampled tokens that an earlier session had


class Session:
    """The tree of one rollout.

    Args:
        key: unguessable or not, the name under which an engine sees the session's requests.
        engine: where completions come from.
        max_len: most tokens a path may hold.
        chunk_tokens: a completion is asked for so many tokens at a time; 0 = whole.
        log: told every part of a completion as it comes.
        recorded: the nodes of the session that this one resumes.
    """

    def __init__(
        self,
        key: str,
        engine: Engine,
        max_len: int,
        chunk_tokens: int = 0,
        log: Callable[[Part], None] = lambda part: None,
        recorded: Sequence[Recorded] = (),
    ) -> None:
        self.key = key
        self.nodes: list[Node] = []  # that this run of the agent has used
        self.replay_misses = 0
        # Entered while the engine is away, with the loop's time of the request that was lost.
        self.away: Callable[[float], AbstractContextManager[None]] = lambda since: nullcontext()
        self._engine, self._max_len, self._chunk_tokens = engine, max_len, chunk_tokens
        self._log = log
        self._requests = 0
        self._untouched = _nodes(recorded)
        self._replaying = True
        self._next_key = 1 + max((node.key for node in self._untouched), default=-1)

    @property
    def resumed_tokens(self) -> int:
        """Sampled tokens that came from the record."""
        return sum(node.resumed for node in self.nodes)

    @property
    def dead_tokens(self) -> int:
        """Sampled tokens of the record that this run of the agent did not use."""
        return sum(len(node.completion.token_ids) for node in self._untouched)

    def room(self, parent: Node | None, new_ids: Ids) -> int:
        """Tokens that a completion after `new_ids` may still have; zero or less means no room."""
        return self._max_len - (len(parent.path) if parent else 0) - len(new_ids)

    async def generate(self, parent: Node | None, new_ids: Ids, sampling: Sampling) -> Node:
        """Extend `parent` (None: a new root) by context tokens and one completion.

        Args:
            new_ids: [n] int32, what follows the parent's path.
            sampling: its `max_tokens` is lowered to what fits.

        Raises:
            Stopped: the engine was stopped; what it had is logged.
            EngineError: the engine refused, or was lost too often, or answered something unusable.
            ValueError: there is no room for a single token; ask `room` first.
        """
        room = self.room(parent, new_ids)
        if room <= 0:
            raise ValueError(
                f"no room for a completion: {self._max_len - room} of {self._max_len} tokens"
            )
        node = self._replayed(parent, new_ids)
        if node is None:
            limited = structs.replace(sampling, max_tokens=min(sampling.max_tokens, room))
            node = Node(key=self._next_key, parent=parent, context=new_ids, sampling=limited)
            self._next_key += 1
        if not node.completion.finish_reason:
            await self._complete(node)
        node.path = np.concatenate((node.prompt, node.completion.token_ids))
        self.nodes.append(node)
        if parent:
            parent.children.append(node)
        return node

    def paths(self) -> list[Path]:
        """One path a leaf, the oldest first. A shared completion is an action in the first only."""
        used: set[int] = set()
        return [_path(leaf, used) for leaf in self.nodes if not leaf.children]

    def _replayed(self, parent: Node | None, new_ids: Ids) -> Node | None:
        """The next recorded child of `parent` after the same context; a miss ends the replay.

        An agent that asks for the same again wants another sample, so they come in their order.
        """
        children = [n for n in self._untouched if n.parent is parent] if self._replaying else []
        for node in children:
            # A stop string may lie across a cut, where the engine would not see it.
            useless = node.sampling.stop and not node.completion.finish_reason
            if not useless and np.array_equal(node.context, new_ids):
                self._untouched.remove(node)
                return node
        if children:
            self._replaying = False
            self.replay_misses += 1
        return None

    async def _complete(self, node: Node) -> None:
        """Ask the engine for the rest of a completion, part by part."""
        chunk = 0 if node.sampling.stop else self._chunk_tokens  # as for a cut
        while not node.completion.finish_reason:
            have = node.completion.token_ids
            left = node.sampling.max_tokens - len(have)
            limit = min(left, chunk or left)
            got = await self._sample(np.concatenate((node.prompt, have)), node.sampling, limit)
            num, reason = len(got.token_ids), got.finish_reason
            if not num and reason != "abort":
                raise EngineError(f"request {self.key}-{self._requests} has no token: {reason}")
            if reason == "abort" and num == left:
                reason = "length"
            cut = reason == "abort" or (reason == "length" and num == limit < left)
            if num:
                self._grow(node, got, "" if cut else reason)
            if reason == "abort":
                raise Stopped(f"request {self.key}-{self._requests} was stopped")

    async def _sample(self, ids: Ids, sampling: Sampling, max_tokens: int) -> Completion:
        """One answer of the engine, which is waited for when it is lost."""
        asked = structs.replace(sampling, max_tokens=max_tokens)
        loop, lost = asyncio.get_running_loop(), 0
        while True:
            self._requests += 1
            since = loop.time()
            try:
                return await self._engine.generate(ids, asked, f"{self.key}-{self._requests}")
            except EngineLost as error:
                lost += 1
                if lost > LOST:
                    raise EngineError(f"{error} (the {lost}th time in a row)") from error
            with self.away(since):
                await self._engine.recovered()

    def _grow(self, node: Node, got: Completion, finish_reason: str) -> None:
        """Add a part to a node, and log it."""
        part = Part(
            node=node.key,
            parent=node.parent.key if node.parent else -1,
            part=node.parts,
            follows=node.hash or (node.parent.hash if node.parent else 0),
            context=NO_IDS if node.parts else node.context,
            token_ids=got.token_ids,
            logprobs=got.logprobs,
            version_spans=got.version_spans,
            sampling=node.sampling,
            finish_reason=finish_reason,
        )
        node.add(part)
        self._log(part)


def _nodes(recorded: Sequence[Recorded]) -> list[Node]:
    """The nodes of an earlier session, as it left them."""
    nodes: dict[int, Node] = {}
    for record in recorded:
        first = record.parts[0]
        parent = nodes[first.parent] if first.parent >= 0 else None
        node = Node(key=first.node, parent=parent, context=first.context, sampling=first.sampling)
        for part in record.parts:
            node.add(part)
        node.resumed = len(node.completion.token_ids)
        nodes[node.key] = node
    return list(nodes.values())


def _path(leaf: Node, used: set[int]) -> Path:
    """Lay out the nodes from root to `leaf`; those in `used` are context, the others join it."""
    chain: list[Node] = []
    node: Node | None = leaf
    while node:
        chain.append(node)
        node = node.parent
    logprobs = np.full(len(leaf.path), np.nan, np.float32)
    spans, versions, samplings, resumed = [], [], [], 0
    for node in reversed(chain):
        start, end = node.start, len(node.path)
        versions.append(node.completion.version_spans + np.array([start, 0], np.int64))
        if node.key in used:
            continue
        used.add(node.key)
        logprobs[start:end] = node.completion.logprobs
        spans.append((start, end))
        samplings.append(node.sampling)
        resumed += node.resumed
    return Path(
        token_ids=leaf.path,
        action_spans=np.array(spans, np.int32).reshape(-1, 2),
        logprobs=logprobs,
        version_spans=np.concatenate(versions),
        samplings=tuple(samplings),
        resumed=resumed,
    )
