# SPDX-License-Identifier: Apache-2.0
"""One row of a shard: one token-exact segment of one rollout.

`SCHEMA` is what any Arrow reader sees; `SegmentRow` is the same row as numpy arrays, which is
what sessions hold. A row whose parts do not fit never reaches a file: `SegmentRow.check` runs
before each write.

To add a column: a field here and in `SegmentRow`; a list also needs a line in `shards.to_rows`.
Readers find columns by name, so older shards stay readable; a changed meaning needs a new
`SCHEMA_VERSION`.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from molt.records import SCHEMA_VERSION, TRAIN, Sampling

STATUSES = ("finished", "truncated", "error", "filtered", "expired")


def _field(name: str, kind: pa.DataType, nullable: bool = False) -> "pa.Field[Any]":
    return pa.field(name, kind, nullable)


def _lists(item: pa.DataType, nullable: bool = False) -> pa.DataType:
    """Lists with 64-bit offsets: a table of many groups passes 2³¹ tokens."""
    return pa.large_list(_field("item", item, nullable))


_text = pa.large_string()
_span = pa.struct([_field("start", pa.int32()), _field("end", pa.int32())])
_version = pa.struct([_field("end", pa.int32()), _field("version", pa.int64())])
_sampling = pa.struct([_field("temperature", pa.float32()), _field("max_tokens", pa.int32())])

SCHEMA = pa.schema(
    [
        _field("run", _text),
        _field("prompt", pa.int64()),
        _field("group", pa.int64()),
        _field("lease", pa.int64()),
        _field("rollout", pa.int32()),
        _field("segment", pa.int32()),
        _field("num_segments", pa.int32()),
        _field("task", _text),
        _field("agent", _text),
        _field("token_ids", _lists(pa.int32())),
        _field("action_spans", _lists(_span)),
        _field("behavior_logprobs", _lists(pa.float32(), nullable=True)),
        _field("version_spans", _lists(_version)),
        _field("reward", pa.float64(), nullable=True),
        _field("score", pa.float64(), nullable=True),
        _field("turn_rewards", _lists(pa.float64())),
        _field("status", _text),
        _field("reason", _text),
        _field("sampling", _lists(_sampling)),
        _field("metrics", _text),
        _field("messages", _text),
        _field("resumed_tokens", pa.int32()),
        _field("engine", _text),
        _field("seconds", pa.float64()),
    ],
    metadata={"molt.schema": str(SCHEMA_VERSION)},
)


@dataclass(frozen=True, kw_only=True)
class SegmentRow:
    """One segment: n tokens, a action spans (sampled), v stretches of tokens of one version.

    A rollout that failed before its first token is a row too, with empty arrays and its reason.
    """

    run: str
    prompt: int
    group: int
    rollout: int
    token_ids: npt.NDArray[np.int32]  # [n]
    action_spans: npt.NDArray[np.int32]  # [a, 2] start, end
    behavior_logprobs: npt.NDArray[np.float32]  # [n] nats, NaN off the actions
    version_spans: npt.NDArray[np.int64]  # [v, 2] end, version
    lease: int = 0
    segment: int = 0
    num_segments: int = 1  # of this rollout
    task: str = TRAIN
    agent: str = ""
    reward: float | None = None  # of the rollout; None = unscorable
    score: float | None = None
    turn_rewards: tuple[float, ...] = ()
    status: str = "finished"
    reason: str = ""
    sampling: tuple[Sampling, ...] = ()  # one an action span; stop strings are not kept
    metrics: str = "{}"  # JSON object
    messages: str = "[]"  # JSON: the conversation as text, for people
    resumed_tokens: int = 0  # sampled by a session that was cut, and taken over
    engine: str = ""
    seconds: float = 0.0

    @property
    def action_mask(self) -> npt.NDArray[np.bool_]:
        """[n] bool: the tokens that were sampled."""
        mask = np.zeros(len(self.token_ids), np.bool_)
        for start, end in self.action_spans.tolist():
            mask[start:end] = True
        return mask

    @property
    def versions(self) -> npt.NDArray[np.int64]:
        """[n] int64: the weights that sampled each token, or the next sampled one."""
        ends, versions = self.version_spans.T
        return np.repeat(versions, np.diff(ends, prepend=0))

    def check(self) -> None:
        """Refuse a row whose parts do not fit together.

        Raises:
            ValueError: names the group, the rollout, the field and what it should be.
        """
        n, logprobs = len(self.token_ids), self.behavior_logprobs
        wrong = ""
        if self.status not in STATUSES:
            wrong = f"status {self.status!r} is none of {', '.join(STATUSES)}"
        elif not _ordered(self.action_spans.ravel().tolist(), n):
            wrong = f"action_spans {self.action_spans.tolist()} do not lie in {n} tokens in order"
        elif not _covers(self.version_spans[:, 0].tolist(), n):
            wrong = f"version_spans {self.version_spans.tolist()} do not cover {n} tokens once"
        elif len(self.sampling) != len(self.action_spans):
            wrong = f"{len(self.sampling)} sampling parameters for {len(self.action_spans)} actions"
        elif len(logprobs) != n:
            wrong = f"{len(logprobs)} log-probabilities for {n} tokens"
        elif (~np.isnan(logprobs) > self.action_mask).any():
            wrong = "a log-probability of a token that was not sampled"
        elif np.isinf(logprobs).any():
            wrong = "an infinite log-probability"
        if wrong:
            raise ValueError(f"group {self.group} rollout {self.rollout}: {wrong}")


def _ordered(bounds: list[int], n: int) -> bool:
    """Spans as start, end, start, …: in order, none empty, touching allowed."""
    starts, ends = bounds[0::2], bounds[1::2]
    return all(
        before <= start < end for before, start, end in zip([0, *ends], starts, ends, strict=False)
    ) and (not ends or ends[-1] <= n)


def _covers(ends: list[int], n: int) -> bool:
    """Strictly increasing ends, the last of which is n."""
    return all(a < b for a, b in pairwise([0, *ends])) and (ends[-1] if ends else 0) == n
