# SPDX-License-Identifier: Apache-2.0
"""The real coordinator under simulated faults: whatever happens, the invariants of checks.py hold.

A schedule that fails is shrunk and printed by Hypothesis: `run(Schedule(…), print)` plays it again.
A failing seed of the sample is played with `scripts/sim --seed N`.
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from molt.coordinator import pool
from molt.coordinator.commits import Commits
from molt.records import Lease, Record, Void
from molt.store.state import State
from tests.sim import files
from tests.sim.faults import ACTIONS, POINTS, Fault
from tests.sim.schedule import Schedule
from tests.sim.world import failure, run

SAMPLE = 250
ROOT = Path(__file__).parents[2]

faults = st.builds(
    Fault,
    point=st.sampled_from(POINTS),
    nth=st.integers(1, 40),
    action=st.sampled_from(list(ACTIONS)),
    seconds=st.sampled_from([0.5, 8.0, 40.0, 90.0]),
)
schedules = st.builds(
    replace,
    st.integers(0, 1 << 32).map(Schedule.draw),
    faults=st.lists(faults, max_size=8).map(tuple),
)


def test_a_sample_of_seeds_keeps_every_invariant():
    first = Random().randrange(1 << 32)  # another one each time; a failure names its seed
    failed = {s: e for s in range(first, first + SAMPLE) if (e := failure(Schedule.draw(s)))}
    assert not failed


@pytest.mark.timeout(600)  # a failure is shrunk
@settings(
    max_examples=100,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(schedules)
def test_schedules_that_hypothesis_picks_keep_every_invariant(schedule: Schedule):
    run(schedule)


def test_a_seed_plays_the_same_in_every_process():
    traces = {
        subprocess.run(
            [sys.executable, ROOT / "scripts" / "sim", "--seed", "7"],
            env=os.environ | {"PYTHONHASHSEED": str(salt)},
            capture_output=True,
            check=True,
        ).stdout
        for salt in range(2)
    }
    assert len(traces) == 1
    assert traces.pop().count(b"\n") > 20


def test_faults_hit():
    lines: list[str] = []
    fault = Fault("append.written", 3, "kill")
    run(Schedule(seed=1, faults=(fault,)), lines.append)
    assert any("fault at coordinator" in line for line in lines)
    assert any("epoch 2" in line for line in lines)


# ---------------------------------------------------------------- what the simulation would find


def found(*hits: Fault) -> set[str]:
    """What goes wrong in a few schedules, up to the first colon."""
    plays = (replace(Schedule.draw(seed), stale="wait", faults=hits) for seed in range(60))
    return {f.split(": ")[1] for schedule in plays if (f := failure(schedule))}


def test_it_finds_a_plan_that_does_not_wait_for_what_is_late(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pool, "_would_be_late", lambda *_: False)
    assert "beyond the bound" in found()


def test_it_finds_prompts_that_a_void_plan_loses(monkeypatch: pytest.MonkeyPatch):
    def forgetful(state: State, record: Void) -> None:
        State._void(state, record)
        for group in record.groups:
            del state.returned[group]

    monkeypatch.setitem(State._FOLDS, Void, forgetful)
    hits = [Fault("plan", nth, "damage") for nth in range(1, 6)]
    assert "a prompt was skipped, or is in two places" in found(*hits)


def test_it_finds_prompts_in_flight_that_do_not_come_back_first(monkeypatch: pytest.MonkeyPatch):
    leases = pool.train_leases

    def impatient(state: State, rules: pool.Rules, *rest: Any) -> list[Lease]:
        kept, state.returned = state.returned, {}
        try:
            return leases(state, rules, *rest)
        finally:
            state.returned = kept

    monkeypatch.setattr(pool, "train_leases", impatient)
    assert "a new prompt before one that came back" in found(Fault("leased", 2, "runner"))


def test_it_finds_two_coordinators_that_both_succeed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(files.Journal, "superseded", False)
    either = {"answered, but not in the journal", "a version was used again"}
    assert found(Fault("announced", 1, "split", 8.0)) & either


def test_it_finds_an_answer_that_nobody_waits_for_to_be_durable(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Commits, "commit", lambda self, *records: _fold(self, *records))
    assert found(*(Fault("append.begin", nth, "coordinator") for nth in range(3, 9)))


async def _fold(commits: Commits, *records: Record) -> None:
    commits.fold(*records)
