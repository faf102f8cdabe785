# SPDX-License-Identifier: Apache-2.0
"""The fold and the policies: what a run's journal means, for any order in which things happen."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molt.coordinator import pool
from molt.records import (
    Checkpoint,
    Epoch,
    Fenced,
    Group,
    GroupStatus,
    Lease,
    LeaseEnd,
    Plan,
    PublishBegin,
    PublishEnd,
    Record,
    Restore,
    Retire,
    StoreError,
    Void,
    Where,
)
from molt.store.state import State

RULES = pool.Rules(groups=2, max_lag=1, cap=0, wait=True, steps=500, seed=0, num_prompts=5)
NOWHERE = Where(path="", offset=0, length=0, hash="")


def group_of(lease: Lease, status: GroupStatus = "ready") -> Group:
    return Group(
        lease=lease.lease,
        group=lease.group,
        prompt=lease.prompt,
        where=NOWHERE,
        status=status,
        version_min=lease.version,
        version_max=lease.version,
    )


def started(step: int = 0) -> list[Record]:
    """The journal of a run whose first weights are published."""
    return [
        Epoch(epoch=1, run="r"),
        Restore(step=step, lineage=1, version=0),
        PublishBegin(version=1, step=step, lineage=1),
        PublishEnd(version=1),
    ]


def fold(records: list[Record]) -> State:
    state = State()
    for record in records:
        state.apply(record)
    return state


class Simulation:
    """A run in memory: every action is one that some process could take now."""

    def __init__(self, rules: pool.Rules) -> None:
        self.rules, self.records, self.state = rules, [], State()
        self.trained: list[tuple[int, ...]] = []  # plans in the order they were trained
        self.lags: list[int] = []
        for record in started():
            self.journal(record)

    def journal(self, record: Record) -> None:
        self.state.apply(record)
        self.records.append(record)

    def lease(self, num: int) -> None:
        granted = min(num, pool.room(self.state, self.rules))
        for lease in pool.train_leases(self.state, self.rules, granted, "r", self.state.version):
            self.journal(lease)

    def finish(self, index: int, status: GroupStatus) -> None:
        leases = sorted(self.state.leases.values(), key=lambda x: x.lease)
        if leases:
            self.journal(group_of(leases[index % len(leases)], status))

    def give_back(self, index: int) -> None:
        leases = list(self.state.leases.values())
        if leases:
            lease = leases[index % len(leases)]
            self.journal(LeaseEnd(lease=lease.lease, group=lease.group, reason="test"))

    def step(self) -> None:
        plan = pool.cut_plan(self.state, self.rules)
        if plan is None or self.state.last_plan >= self.rules.steps:
            return
        self.journal(plan)
        self.trained.append(plan.groups)
        for group in pool.groups_of(self.state, plan):
            self.lags.append(self.state.lag(group.version_min, plan.step - 1))
        version = self.state.next_version
        self.journal(PublishBegin(version=version, step=plan.step, lineage=self.state.lineage))
        self.journal(PublishEnd(version=version))

    def restart(self) -> None:
        """Every process is gone; the journal is folded again and a new epoch begins."""
        state = fold(self.records)
        assert msgspec.json.decode(msgspec.json.encode(state), type=State) == state == self.state
        self.journal(Epoch(epoch=self.state.epoch + 1, run="r"))
        for lease in list(self.state.leases.values()):
            self.journal(LeaseEnd(lease=lease.lease, group=lease.group, reason="attempt ended"))


ACTIONS = st.one_of(
    st.tuples(st.just("lease"), st.integers(1, 6)),
    st.tuples(st.just("finish"), st.integers(0, 9), st.sampled_from(["ready", "ready", "filtered",
    "failed"])), st.tuples(st.just("give_back"), st.integers(0, 9)), st.tuples(st.just("step")),
    st.tuples(st.just("restart")),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(ACTIONS, max_size=80), st.integers(0, 2), st.integers(1, 3))
def test_any_schedule_keeps_the_bound_and_trains_each_group_once(actions, max_lag, groups):
    sim = Simulation(
        pool.Rules(
            groups=groups, max_lag=max_lag, cap=0, wait=True, steps=50, seed=0, num_prompts=5
        )
    )
    for name, *args in actions:
        getattr(sim, name)(*args)
        assert sim.state.in_flight <= groups * (max_lag + 1)
    planned = [g for plan in sim.trained for g in plan]
    assert len(planned) == len(set(planned))
    assert all(len(plan) == groups for plan in sim.trained)
    assert all(lag <= max_lag for lag in sim.lags)
    accounted = {*planned, *sim.state.ready, *sim.state.leases, *sim.state.returned}
    dropped = {r.group for r in sim.records if isinstance(r, Group) and r.status != "ready"}
    assert accounted | dropped == set(range(sim.state.cursor))


@settings(max_examples=100, deadline=None)
@given(st.lists(ACTIONS, max_size=60))
def test_replaying_the_journal_gives_the_live_state_at_every_prefix(actions):
    sim = Simulation(RULES)
    for name, *args in actions:
        getattr(sim, name)(*args)
    lines = [msgspec.json.encode(r) for r in sim.records]
    replayed = fold([msgspec.json.decode(line, type=Record) for line in lines])
    assert replayed == fold(sim.records)
    if actions and actions[-1][0] != "restart":
        assert replayed == sim.state


def test_a_group_of_an_old_lease_is_fenced():
    first = Lease(lease=1, group=0, prompt=0, version=1)
    second = Lease(lease=2, group=0, prompt=0, version=1)
    state = fold([*started(), first, LeaseEnd(lease=1, group=0, reason="lapsed"), second])
    with pytest.raises(Fenced, match="lease 1 of group 0 is not current"):
        state.apply(group_of(first))
    state.apply(group_of(second))
    assert state.ready.keys() == {0}


def test_groups_that_came_back_are_leased_before_the_cursor_moves():
    lease = Lease(lease=1, group=0, prompt=0, version=1)
    state = fold([*started(), lease, LeaseEnd(lease=1, group=0, reason="lapsed")])
    assert [x.group for x in pool.train_leases(state, RULES, 3, "r", 1)] == [0, 1, 2]


def test_on_policy_leases_nothing_while_a_plan_is_unpublished():
    rules = pool.Rules(groups=2, max_lag=0, cap=0, wait=True, steps=50, seed=0, num_prompts=5)
    sim = Simulation(rules)
    sim.lease(9)
    assert len(sim.state.leases) == 2
    sim.finish(0, "ready")
    sim.finish(0, "ready")
    plan = pool.cut_plan(sim.state, rules)
    assert plan is not None
    sim.journal(plan)
    assert pool.room(sim.state, rules) == 0


def test_a_straggler_is_waited_for_when_the_next_plan_would_be_too_late():
    rules = pool.Rules(groups=2, max_lag=0, cap=0, wait=True, steps=50, seed=0, num_prompts=5)
    state = fold([
        *started(),
        *(Lease(lease=i + 1, group=i, prompt=i, version=1) for i in range(3)),
    ])  # fmt: skip
    for group in (1, 2):
        state.apply(group_of(state.leases[group]))
    assert pool.cut_plan(state, rules) is None  # group 0 may not be trained at lag 1
    state.apply(group_of(state.leases[0]))
    plan = pool.cut_plan(state, rules)
    assert plan is not None and plan.groups == (0, 1)


def test_nothing_is_leased_that_no_plan_can_use():
    rules = pool.Rules(groups=2, max_lag=3, cap=0, wait=True, steps=1, seed=0, num_prompts=5)
    assert pool.room(fold(started()), rules) == 2


def test_plans_behind_a_restored_checkpoint_are_kept_for_replay():
    sim = Simulation(RULES)
    for _ in range(4):
        sim.lease(9)
        for _ in range(4):
            sim.finish(0, "ready")
        sim.step()
        if sim.state.step in (1, 2):
            step = sim.state.step
            sim.journal(Checkpoint(step=step, oldest=step - 1, path="", version=sim.state.version))
    sim.restart()
    sim.journal(Restore(step=2, lineage=2, version=sim.state.version))
    assert pool.room(sim.state, RULES) == 0  # the two plans in reach are cut already
    assert {3, 4} <= sim.state.plans.keys()
    assert 1 not in sim.state.plans
    assert pool.groups_of(sim.state, sim.state.plans[3])[0].group == sim.trained[2][0]


def trained(num_steps: int) -> Simulation:
    """A run of two groups a plan, with a plan more of groups that are ready."""
    sim = Simulation(RULES)
    for step in range(num_steps + 1):
        sim.lease(2)
        sim.finish(0, "ready")
        sim.finish(0, "ready")
        if step < num_steps:
            sim.step()
    return sim


def test_a_replay_leads_to_the_same_weights_so_abandoned_tokens_keep_their_lag():
    sim = trained(3)  # versions 2, 3, 4 after steps 1, 2, 3; groups 6 and 7 are of version 4
    sim.journal(Restore(step=1, lineage=2, version=4))
    assert sim.state.lag(4, step=1) == 0  # not older than what they descend from
    assert sim.state.lag(4, step=4) == 1
    assert sim.state.next_version == 5


def test_where_a_plan_is_voided_lineages_part_and_lag_counts_from_there():
    sim = trained(3)
    sim.journal(Restore(step=1, lineage=2, version=4))
    sim.journal(Void(step=3, groups=(4,), reason="unreadable"))
    assert sim.state.lag(4, step=4) == 2  # their weights are those of step 2, and then others
    assert sim.state.lag(2, step=4) == 3
    assert set(sim.state.returned) == {4}
    assert set(sim.state.ready) == {5, 6, 7}


def test_a_void_plan_is_cut_anew_when_its_turn_comes():
    sim = trained(3)
    sim.journal(Restore(step=1, lineage=2, version=4))
    sim.journal(Void(step=2, groups=(2, 3), reason="unreadable"))
    plan = pool.cut_plan(sim.state, RULES)
    assert plan is not None and plan.step == 2
    assert plan.groups == (6, 7)  # the groups of plan 3 stay where they are
    sim.journal(plan)
    assert pool.cut_plan(sim.state, RULES) is None  # 4 is next


def test_a_void_plan_makes_room_even_when_the_pool_has_nothing_ready():
    sim = Simulation(RULES)
    for _ in range(4):
        sim.lease(2)
        sim.finish(0, "ready")
        sim.finish(0, "ready")
        sim.step()
    sim.journal(Restore(step=0, lineage=2, version=5))
    assert pool.room(sim.state, RULES) == 0
    sim.journal(Void(step=1, groups=(0,), reason="unreadable"))
    assert pool.room(sim.state, RULES) == 1  # group 1 is ready
    (lease,) = pool.train_leases(sim.state, RULES, 1, "r", 5)
    assert lease.group == 0


def test_a_plan_remembers_the_lags_of_its_cut():
    sim = trained(1)
    plan = pool.cut_plan(sim.state, RULES)
    assert plan is not None and plan.steps == ((2, 1),)


def test_a_resumed_group_counts_from_its_oldest_token():
    state = fold(started())
    state.apply(Lease(lease=1, group=0, prompt=0, version=1))
    state.apply(LeaseEnd(lease=1, group=0, reason="lapsed"))
    fresh, resumed = (pool.train_leases(state, RULES, 1, "r", 7, r)[0] for r in ((), (0,)))
    assert (fresh.version, resumed.version) == (7, 1)


def test_shards_are_spent_when_no_kept_checkpoint_can_need_a_group_of_them():
    sim = Simulation(RULES)
    sim.lease(4)
    for group, name in enumerate("aabb"):
        where = Where(path=f"shards/r/{name}", offset=0, length=0, hash="")
        record = group_of(sim.state.leases[group], "filtered" if group == 3 else "ready")
        sim.journal(msgspec.structs.replace(record, where=where))
    sim.step()  # trains the groups of a
    sim.journal(Checkpoint(step=1, oldest=0, path="", version=2))
    assert sim.state.spent == ()
    sim.journal(Checkpoint(step=1, oldest=1, path="", version=2))
    assert sim.state.spent == ("shards/r/a",)  # group 2 in b is still to be trained
    sim.journal(Retire(paths=sim.state.spent))
    assert (sim.state.spent, sim.state.retired) == ((), ("shards/r/a",))


def test_the_state_does_not_grow_with_the_run():
    sizes = []
    sim = Simulation(RULES)
    for step in range(1, 201):
        sim.lease(2)
        sim.finish(0, "ready")
        sim.finish(0, "filtered" if step % 3 == 0 else "ready")
        sim.step()
        if sim.state.step:
            at = sim.state.step
            sim.journal(Checkpoint(step=at, oldest=max(0, at - 1), path="", version=at))
        sizes.append(len(msgspec.json.encode(sim.state)))
    assert sizes[-1] < 1.2 * sizes[20]


def test_a_plan_of_groups_that_are_not_ready_is_refused():
    with pytest.raises(StoreError, match="not ready"):
        fold([*started(), Plan(step=1, groups=(0, 1))])
