# SPDX-License-Identifier: Apache-2.0
"""Verification: is every group of a run still what the journal says?"""

from collections.abc import Iterator
from pathlib import Path

from molt.records import Group, Segment, StoreError
from molt.store.journal import read_journal
from molt.store.schema import SegmentRow
from molt.store.shards import read_group, to_rows


def verify(run_dir: Path) -> Iterator[str]:
    """Read every group of the journal and compare it with its record.

    Yields:
        One line a problem; nothing if all is whole. A damaged journal ends it.
    """
    try:
        for record in read_journal(run_dir):
            if isinstance(record, Group):
                yield from _problems(run_dir, record)
    except StoreError as error:
        yield str(error)


def _problems(run_dir: Path, group: Group) -> Iterator[str]:
    try:
        rows = to_rows(read_group(run_dir, group.where, deadline_s=0))
        for row in rows:
            row.check()
    except (StoreError, ValueError) as error:
        yield f"group {group.group}: {error}"
        return
    for field, recorded, found in _compare(group, rows):
        if recorded != found:
            where = group.where.path
            yield f"group {group.group}: {field} is {recorded} in the journal, {found} in {where}"


def _compare(group: Group, rows: list[SegmentRow]) -> Iterator[tuple[str, object, object]]:
    """(name, in the journal, in the shard) of everything that both know."""
    for name in ("group", "prompt", "task"):
        yield name, {getattr(group, name)}, {getattr(row, name) for row in rows}
    rewards = {row.rollout: row.reward for row in rows}
    yield "rewards", dict(enumerate(group.rewards)), rewards
    yield (
        "segments",
        group.segments,
        tuple(
            Segment(rollout=r.rollout, tokens=len(r.token_ids), actions=int(r.action_mask.sum()))
            for r in rows
        ),
    )
    sampled = [int(v) for row in rows for v in row.versions[row.action_mask]]
    if sampled:
        yield "version_min", group.version_min, min(sampled)
        yield "version_max", group.version_max, max(sampled)
