# SPDX-License-Identifier: Apache-2.0
"""`guess`, killed three times with everything it has, at random moments, and resumed each time.

The same command goes on: the reward reaches the level of a run that nobody touched, every group is
trained once or dropped with a reason, and what open sessions had written down is not sampled again.
"""

import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from molt.records import TRAIN, Group, Lease, Plan, PublishBegin, Restore, Void
from molt.store.journal import read_journal
from molt.store.shards import read_group, to_rows
from molt.store.verify import verify
from tests.e2e.attempt import Attempt

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1200)]

STEPS, GROUPS, KILLS = 150, 32, 3
PROMPTS = 6  # of the data: an epoch
OVERRIDES = (
    "checkpoint.every=20", "session.flush_s=0.05", "eval.sampled.num_samples=8",
    f"trainer.steps={STEPS}",
)  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attempt]:
    """The last attempt, after three that were killed."""
    run = tmp_path_factory.mktemp("kill") / "guess"
    seed = int(os.environ.get("MOLT_SEED", random.randrange(10**6)))
    moments = sorted(random.Random(seed).sample(range(2, STEPS - 20), KILLS))
    attempts: list[Attempt] = []
    try:
        for moment in moments:
            attempts.append(Attempt(run, "guess", *OVERRIDES))
            attempts[-1].until(lambda step, moment=moment: step >= moment).kill_everything()
            assert attempts[-1].left(15.0) == []
        attempts.append(Attempt(run, "guess", *OVERRIDES))
        attempts[-1].end()
        yield attempts[-1]
    finally:
        for attempt in attempts:
            attempt.close()


def test_the_reward_is_that_of_a_run_nobody_touched(finished: Attempt):
    assert finished.status == 0, finished.output
    last = [row["reward/mean"] for row in finished.rows[-20:]]
    assert sum(last) / len(last) >= 0.90


def test_every_group_is_trained_once_or_dropped_with_a_reason(finished: Attempt):
    records = list(read_journal(finished.run))
    live = {record.step: record for record in records if isinstance(record, Plan)}
    assert sorted(live) == [*range(1, STEPS + 1)]
    planned = Counter(group for plan in live.values() for group in plan.groups)
    assert set(planned.values()) == {1}
    groups = [r for r in records if isinstance(r, Group) and r.task == TRAIN]
    dropped = {r.group for r in groups if r.status != "ready"}
    assert all(r.reason for r in groups if r.status != "ready")
    complete = min({*range(STEPS * GROUPS * 2)} - planned.keys() - dropped) // PROMPTS
    assert complete >= STEPS * GROUPS // PROMPTS - GROUPS
    assert not planned.keys() & dropped
    prompts = {r.group: r.prompt for r in records if isinstance(r, Lease) and r.task == TRAIN}
    for epoch in range(complete):
        numbers = range(epoch * PROMPTS, (epoch + 1) * PROMPTS)
        assert sorted(prompts[g] for g in numbers) == [*range(PROMPTS)]


def test_plans_are_never_cut_twice_and_versions_never_used_twice(finished: Attempt):
    records = list(read_journal(finished.run))
    plans = [r.step for r in records if isinstance(r, Plan)]
    voids = [r.step for r in records if isinstance(r, Void)]
    assert voids == []
    assert plans == [*range(1, STEPS + 1)]
    versions = [r.version for r in records if isinstance(r, PublishBegin)]
    assert versions == [*range(1, len(versions) + 1)]
    lineages = [r.lineage for r in records if isinstance(r, Restore)]
    assert lineages == [*range(1, KILLS + 2)]


def test_tokens_of_open_sessions_are_reused(finished: Attempt):
    groups = [r for r in read_journal(finished.run) if isinstance(r, Group)]
    resumed = [r for r in groups if r.resumed]
    rows = [row for r in resumed for row in to_rows(read_group(finished.run, r.where, 0.0))]
    assert sum(row.resumed_tokens for row in rows) == sum(r.resumed for r in resumed) > 0
    assert sum(r.replay_miss for r in groups) == 0


def test_all_of_it_verifies(finished: Attempt):
    assert [f for f in verify(finished.run) if f.kind == "problem"] == []
    assert not list(Path(finished.run).glob("partials/*/*.arrow"))
