# SPDX-License-Identifier: Apache-2.0
"""The session: the durable conversation of one rollout with an engine, as a tree of exact tokens.

A `Node` is an extension of its parent by context tokens and a completion of them. Everything
generates through `Session.generate(parent, new_ids, sampling)`: token ids go in, token ids come
out, and what the policy sampled is never turned into text and back. Each leaf of the tree is a
*segment*; a completion that several segments share is an action in the first of them and context in
the others, so it is trained once.
"""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from molt.records import Sampling
from molt.rollout.client import Completion, Ids


class Engine(Protocol):
    """Where completions come from."""

    async def generate(self, ids: Ids, sampling: Sampling, request_id: str) -> Completion:
        """Continue `ids`."""
        ...


@dataclass(eq=False)
class Node:
    """One extension of a path: context, then the completion that was sampled after it."""

    key: int  # position in the session's order
    parent: "Node | None"
    context: Ids
    completion: Completion
    sampling: Sampling
    path: Ids  # every token up to and including the completion
    children: list["Node"] = field(default_factory=list)

    @property
    def start(self) -> int:
        """Position in `path` of the first sampled token."""
        return len(self.path) - len(self.completion.token_ids)


@dataclass(frozen=True)
class Path:
    """One leaf's token sequence, in the arrays a shard row wants. N tokens, A action spans."""

    token_ids: Ids  # [N]
    action_spans: NDArray[np.int32]  # [A, 2] (start, end)
    logprobs: NDArray[np.float32]  # [N], NaN off the actions
    version_spans: NDArray[np.int64]  # [V, 2] (end, version), the last end is N
    samplings: tuple[Sampling, ...]  # [A]


class Session:
    """The tree of one rollout.

    Args:
        key: unguessable or not, the name under which an engine sees the session's requests.
        engine: where completions come from.
        max_len: most tokens a path may hold.
    """

    def __init__(self, key: str, engine: Engine, max_len: int) -> None:
        self.key = key
        self.nodes: list[Node] = []
        self._engine = engine
        self._max_len = max_len
        self._requests = 0

    def room(self, parent: Node | None, new_ids: Ids) -> int:
        """Tokens that a completion after `new_ids` may still have; zero or less means no room."""
        return self._max_len - (len(parent.path) if parent else 0) - len(new_ids)

    async def generate(self, parent: Node | None, new_ids: Ids, sampling: Sampling) -> Node:
        """Extend `parent` (None: a new root) by context tokens and one completion.

        Args:
            new_ids: [n] int32, what follows the parent's path.
            sampling: its `max_tokens` is lowered to what fits.

        Raises:
            EngineError: the engine failed or answered something unusable.
            ValueError: there is no room for a single token; ask `room` first.
        """
        room = self.room(parent, new_ids)
        if room <= 0:
            raise ValueError(
                f"no room for a completion: {self._max_len - room} of {self._max_len} tokens"
            )
        prompt = np.concatenate((parent.path, new_ids)) if parent else new_ids
        limited = Sampling(
            temperature=sampling.temperature,
            max_tokens=min(sampling.max_tokens, room),
            stop=sampling.stop,
        )
        self._requests += 1
        completion = await self._engine.generate(prompt, limited, f"{self.key}-{self._requests}")
        node = Node(
            key=len(self.nodes),
            parent=parent,
            context=new_ids,
            completion=completion,
            sampling=limited,
            path=np.concatenate((prompt, completion.token_ids)),
        )
        self.nodes.append(node)
        if parent:
            parent.children.append(node)
        return node

    def paths(self) -> list[Path]:
        """One path a leaf, the oldest first. A shared completion is an action in the first only."""
        used: set[int] = set()
        return [_path(leaf, used) for leaf in self.nodes if not leaf.children]


def _path(leaf: Node, used: set[int]) -> Path:
    """Lay out the nodes from root to `leaf`; those in `used` are context, the others join it."""
    chain: list[Node] = []
    node: Node | None = leaf
    while node:
        chain.append(node)
        node = node.parent
    logprobs = np.full(len(leaf.path), np.nan, np.float32)
    spans, versions, samplings = [], [], []
    for node in reversed(chain):
        start, end = node.start, len(node.path)
        versions.append(node.completion.version_spans + np.array([start, 0], np.int64))
        if node.key in used:
            continue
        used.add(node.key)
        logprobs[start:end] = node.completion.logprobs
        spans.append((start, end))
        samplings.append(node.sampling)
    return Path(
        token_ids=leaf.path,
        action_spans=np.array(spans, np.int32).reshape(-1, 2),
        logprobs=logprobs,
        version_spans=np.concatenate(versions),
        samplings=tuple(samplings),
    )
