# SPDX-License-Identifier: Apache-2.0
"""The policies of the pool: pure functions of the state and the configuration.

A group leased now is trained within the bound if a plan of the next `max_lag + 1` steps takes it.
With B groups a plan, one is leased only while there is room in those plans:

    ready + leased + 1 ≤ B · (plans among step + 1 … step + max_lag + 1 that are not cut yet)

so staleness is bounded by what is let in, never by throwing finished work away. Plans are cut in
order; only a void one leaves a gap, which is filled first.
"""

from collections import Counter
from collections.abc import Container
from dataclasses import dataclass
from itertools import count

from molt.data import row_of
from molt.records import Group, Lease, Plan
from molt.store.state import State


@dataclass(frozen=True)
class Rules:
    """What the policies need to know of the configuration."""

    groups: int  # B, groups a plan
    max_lag: int
    cap: int  # pool.groups; 0 = none
    wait: bool  # pool.stale = "wait"
    steps: int  # the run's total
    seed: int
    num_prompts: int
    shuffle: bool = True


def open_plans(state: State, rules: Rules) -> list[int]:
    """Steps, in order, whose plan can take a group that is leased now."""
    last = min(state.step + rules.max_lag + 1, rules.steps)
    return [step for step in range(_trained(state) + 1, last + 1) if step not in state.plans]


def _trained(state: State) -> int:
    """The last step whose plan will never be cut again: published, or in every checkpoint."""
    return max(state.step, state.oldest)


def room(state: State, rules: Rules) -> int:
    """How many more training groups may be leased now."""
    bound = rules.groups * len(open_plans(state, rules))
    return max(0, min(bound, rules.cap or bound) - state.in_flight)


def train_leases(
    state: State, rules: Rules, num: int, runner: str, version: int, resumable: Container[int] = ()
) -> list[Lease]:
    """The next `num` leases for an engine that holds `version`: what came back, then the cursor.

    Sessions of the `resumable` groups go on from their tokens: they count from the oldest one.
    """
    again = sorted(state.returned)[:num]
    fresh = range(state.cursor, state.cursor + num - len(again))
    return [
        Lease(
            lease=state.next_lease + i,
            group=group,
            prompt=row_of(rules.seed, group, rules.num_prompts, rules.shuffle),
            runner=runner,
            version=min(version, state.returned[group]) if group in resumable else version,
        )
        for i, group in enumerate([*again, *fresh])
    ]


def next_step(state: State) -> int:
    """The first step after the published weights that has no plan."""
    return next(s for s in count(_trained(state) + 1) if s not in state.plans)


def cut_plan(state: State, rules: Rules) -> Plan | None:
    """The next plan, or None while groups are missing.

    The groups with the oldest tokens go first, then in lease order: a group that was resumed has
    old ones. One that is still being produced is waited for when the plans that could train it
    within the bound would all be full without it.
    """
    if len(state.ready) < rules.groups:
        return None
    step = next_step(state)
    by_age = sorted(
        state.ready.values(), key=lambda g: (state.steps.get(g.version_min, 0), g.lease)
    )
    chosen, rest = by_age[: rules.groups], by_age[rules.groups :]
    if rules.wait and _would_be_late(state, rules, step, rest):
        return None
    oldest = min(g.version_min for g in chosen)
    return Plan(
        step=step,
        groups=tuple(g.group for g in chosen),
        steps=tuple((v, s) for v, s in state.steps.items() if v >= oldest),
    )


def _would_be_late(state: State, rules: Rules, step: int, rest: list[Group]) -> bool:
    """Whether, after a plan for `step`, some group in production could not be trained in time.

    Each group has a last plan that trains it within the bound. Counted by that, there must be room
    in the plans after `step` for every group that is left: earliest deadline first.
    """
    in_production = Counter(state.leased)
    if room(state, rules) > 0:  # else they cannot be leased before the next plan
        in_production.update(state.returned.values())
    due: Counter[int] = Counter()
    for version, num in (in_production + Counter(g.version_min for g in rest)).items():
        due[state.steps.get(version, 0) + rules.max_lag + 1] += num
    awaited = [state.steps.get(version, 0) + rules.max_lag + 1 for version in in_production]
    left = 0
    for last in sorted(due):
        left += due[last]
        plans = sum(s not in state.plans for s in range(step + 1, last + 1))
        if left > rules.groups * plans and any(d <= last for d in awaited):
            return True
    return False


def groups_of(state: State, plan: Plan) -> tuple[Group, ...]:
    """The records of a plan's groups, in its order, whether it is in the journal yet or not."""
    return tuple(state.planned.get(g) or state.ready[g] for g in plan.groups)
