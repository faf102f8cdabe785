# SPDX-License-Identifier: Apache-2.0
"""What holds for every finished run, whatever happened to it: read from its files alone.

journal  one fold, and its numbers only grow; each prompt is trained once or dropped once
shards   the tokens of every group that counts are the ones that the engine samples
metrics  each step has a line, under a version that no other line has
weights  those of the last checkpoint come from training the live plans, once each, in order
"""

from collections import Counter
from pathlib import Path

import msgspec
import numpy as np

from molt.config import load_resolved
from molt.data import row_of
from molt.records import (
    TRAIN,
    Group,
    Lease,
    Plan,
    PublishBegin,
    Record,
    Restore,
    Retire,
    Void,
)
from molt.rollout.client import MAX_CHOICES
from molt.store.journal import read_journal, read_state
from molt.store.run import read_metrics
from molt.store.schema import SegmentRow
from molt.store.shards import read_group, to_rows
from molt.store.state import State
from tests.faults.task import PROMPTS, Game
from tests.scripted_engine import FIRST, STOP, logprob_of, token_after


def check(run: Path, steps: int = 6) -> None:
    """Every invariant of a run that has trained `steps` steps."""
    history = History(run)
    history.numbers_grow()
    history.each_prompt_counts_once(steps)
    history.tokens_are_the_sampled_ones()
    metrics_are_whole(run, steps)
    if not history.retired:
        weights_are_those_of_the_plans(run, history, steps)


def state_of(run: Path) -> State:
    """The state as the next coordinator will find it."""
    return read_state(run)


class History:
    """The journal of a run, folded record by record."""

    def __init__(self, run: Path) -> None:
        self.run, self.config = run, load_resolved(run / "config.json")
        self.records: list[Record] = list(read_journal(run))
        self.retired = {p for r in self.records if isinstance(r, Retire) for p in r.paths}
        self.state = State()
        self.groups: dict[int, Group] = {}  # the newest of each number
        self.plans: dict[int, Plan] = {}  # that are not void
        for record in self.records:
            if isinstance(record, Plan):
                self._is_fresh(record)
                self.plans[record.step] = record
            elif isinstance(record, Void):
                del self.plans[record.step]
            elif isinstance(record, Group):
                self.groups[record.group] = record
            self.state.apply(record)
        encode = msgspec.json.encode
        assert encode(self.state) == encode(read_state(run)), "the newest file is another state"

    def _is_fresh(self, plan: Plan) -> None:
        """No token of a new plan is older than the bound."""
        bound = self.config.pool.max_lag
        for group in plan.groups:
            oldest = self.groups[group].version_min
            lag = self.state.lag(oldest, plan.step - 1)
            assert lag <= bound, f"plan {plan.step}: group {group} lags by {lag}"

    def numbers_grow(self) -> None:
        """No lease, version or lineage is used twice."""
        for kind, name in ((Lease, "lease"), (PublishBegin, "version"), (Restore, "lineage")):
            numbers = [getattr(r, name) for r in self.records if isinstance(r, kind)]
            assert numbers == sorted(set(numbers)), f"{name}: {numbers}"

    def each_prompt_counts_once(self, steps: int) -> None:
        """Every number below the cursor is in one place, and leads to its own prompt."""
        assert sorted(self.plans) == [*range(1, steps + 1)]
        trained = Counter(g for plan in self.plans.values() for g in plan.groups)
        train = {g: r for g, r in self.groups.items() if r.task == TRAIN}
        dropped = {g for g, r in train.items() if r.status != "ready"}
        assert all(train[g].reason for g in dropped)
        state = self.state
        elsewhere = [dropped, state.ready, {g for g in state.leases if g >= 0}, state.returned]
        places = trained + Counter(g for place in elsewhere for g in place)
        assert places == Counter(range(state.cursor)), places
        prompts = {r.group: r.prompt for r in self.records if isinstance(r, Lease)}
        for group in range(state.cursor):
            assert prompts[group] == row_of(self.config.run.seed, group, PROMPTS)
        for epoch in range(state.cursor // PROMPTS):
            numbers = range(epoch * PROMPTS, (epoch + 1) * PROMPTS)
            if all(g in trained or g in dropped for g in numbers):
                assert sorted(prompts[g] for g in numbers) == [*range(PROMPTS)]

    def tokens_are_the_sampled_ones(self) -> None:
        """Of every group on disk that counts; the journal says about it what the shard says."""
        begun = {r.version for r in self.records if isinstance(r, PublishBegin)}
        for group in self.groups.values():
            if group.where.path in self.retired:
                continue
            rows = to_rows(read_group(self.run, group.where, 1.0))
            actions = np.concatenate([row.versions[row.action_mask] for row in rows])
            assert {*actions.tolist()} <= begun
            if len(actions):
                assert (actions.min(), actions.max()) == (group.version_min, group.version_max)
            if group.status != "failed":
                section = (
                    self.config.sampling if group.task == TRAIN else self.config.eval[group.task]
                )
                assert len(rows) == len(group.rewards) == section.num_samples
                for row in rows:
                    _is_played(row, self.config.session.chunk_tokens)


def _is_played(row: SegmentRow, chunk_tokens: int) -> None:
    """A rollout is one game with the tokens that the engine samples after each prefix."""
    ids = row.token_ids.tolist()
    game, result = Game(), None
    game.reset("", None)
    for start, end in row.action_spans.tolist():
        assert result is None or result.observation
        others = [at for at in range(start, end) if ids[at] != token_after(ids[:at])]
        # The first token of a request is one of several samples: a chunk is a request.
        assert len(others) <= 1 + (end - start) // chunk_tokens, f"group {row.group}: {others}"
        for at in others:
            assert ids[at] in {token_after(ids[:at], sample) for sample in range(MAX_CHOICES)}
        logprobs = [logprob_of(token) for token in ids[start:end]]
        assert row.behavior_logprobs[start:end].tolist() == logprobs
        result = game.play("".join(chr(i - FIRST + 32) for i in ids[start:end] if i != STOP))
    assert result and result.reward == row.reward, f"group {row.group}: {result} {row.reward}"


def metrics_are_whole(run: Path, steps: int) -> None:
    """Each step has a line; the lines are in the order of versions, which no two share."""
    rows = read_metrics(run / "metrics.jsonl")
    assert {row["step"] for row in rows} == {*range(1, steps + 1)}
    versions = [row["version"] for row in rows]
    assert versions == sorted(set(versions)), versions


def weights_are_those_of_the_plans(run: Path, history: History, steps: int) -> None:
    """Train the live plans again, in this process, and compare."""
    import torch

    from molt.trainer.batch import read_plan
    from molt.trainer.step import train_step
    from tests.toy_policy import FILE, build

    torch.set_num_threads(1)
    policy = build(history.config, 0, 1)
    for step in range(1, steps + 1):
        plan = history.plans[step]
        groups = tuple(history.groups[g] for g in plan.groups)
        lags = {v: max(0, step - 1 - counts_from) for v, counts_from in plan.steps}
        batch = read_plan(run, groups, lags, 0, 1, 1.0)
        train_step(policy, batch, history.config, step)
    saved = torch.load(run / f"checkpoints/step-{steps:06d}" / FILE)["model"]
    for name, tensor in policy.weights():
        assert torch.allclose(tensor, saved[name], atol=1e-5), f"{name}: something else was trained"


def resumed(run: Path, before: dict[int, tuple[int, int]]) -> None:
    """What the partials of unfinished groups held was used when they were played again."""
    groups = {r.group: r for r in read_journal(run) if isinstance(r, Group)}
    for number, (lease, tokens) in before.items():
        group = groups.get(number)
        if group and group.lease != lease:  # else its shard was there already
            assert group.dead == 0
            assert group.resumed >= tokens, f"group {number}: {group.resumed} of {tokens} tokens"
