# SPDX-License-Identifier: Apache-2.0
"""The policies of the pool: pure functions of the state and the configuration.

With B groups a plan, a group is leased only if every group in flight can still be trained within
`max_lag` steps of its lease:

    ready + leased + 1 ≤ B · (max_lag + 1 − plans cut but not published)

so staleness is bounded by what is let in, never by throwing finished work away.
"""

from dataclasses import dataclass

from molt.coordinator.state import State
from molt.data import row_of
from molt.records import TRAIN, Group, Lease, Plan


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


def room(state: State, rules: Rules) -> int:
    """How many more training groups may be leased now."""
    bound = rules.groups * (rules.max_lag + 1 - state.unpublished)
    needed = rules.groups * (rules.steps - state.last_plan)  # what the plans still to cut can use
    cap = rules.cap or bound
    return max(0, min(bound, needed, cap) - state.in_flight)


def train_leases(state: State, rules: Rules, num: int, runner: str, version: int) -> list[Lease]:
    """The next `num` leases for an engine that holds `version`: what came back, then the cursor."""
    again = sorted(state.returned)[:num]
    fresh = range(state.cursor, state.cursor + num - len(again))
    return [
        Lease(
            lease=state.next_lease + i,
            group=group,
            prompt=row_of(rules.seed, group, rules.num_prompts, rules.shuffle),
            runner=runner,
            version=version,
        )
        for i, group in enumerate([*again, *fresh])
    ]


def cut_plan(state: State, rules: Rules) -> Plan | None:
    """The next plan, in lease order, or None while groups are missing.

    A group still being produced is waited for when leaving it to the plan after this one would
    train it beyond the bound.
    """
    if len(state.ready) < rules.groups:
        return None
    trained_after = state.last_plan + 1  # steps in the weights that train the plan after this one
    if rules.wait and any(
        lease.task == TRAIN and state.lag(lease.version, trained_after) > rules.max_lag
        for lease in state.leases.values()
    ):
        return None
    chosen = sorted(state.ready.values(), key=lambda g: g.lease)[: rules.groups]
    return Plan(step=state.last_plan + 1, groups=tuple(g.group for g in chosen))


def groups_of(state: State, plan: Plan) -> tuple[Group, ...]:
    """The records of a plan's groups, in its order."""
    return tuple(state.planned[g] for g in plan.groups)
