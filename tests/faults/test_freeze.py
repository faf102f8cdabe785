# SPDX-License-Identifier: Apache-2.0
"""Processes that stand still past their leases and go on, and clocks that jump."""

import signal
import time

import pytest

from molt.records import LeaseEnd
from molt.store.journal import read_journal
from molt.store.run import read_metrics
from tests.faults.conftest import Make
from tests.faults.inject import Fault
from tests.faults.points import CALL, JOURNAL, faults

LEASE_S = 3.0  # pool.lease_s of these runs
STOPS = faults("stop")
RUNNER = ("after lease", "after shard fsync", "before announce", "after partial link")
COORDINATOR = ("after journal fsync", "before announce ack", "after plan ack", "after publish ack")
TRAINER = ("after plan delivery", "before mid-broadcast", "before checkpoint marker")


@pytest.mark.sampled
@pytest.mark.parametrize("point", RUNNER)
def test_a_runner_that_wakes_after_its_leases_lapsed_does_no_harm(point: str, make: Make):
    run = make("engine.runners=2", "trainer.steps=12")
    stopped = run.start(STOPS[f"runner: {point}"]).struck()
    run.until(
        lambda: any(
            isinstance(r, LeaseEnd) for r in read_journal(run.path)
        ) or run.ended
    )  # fmt: skip
    stopped.send_signal(signal.SIGCONT)
    assert run.end().status == 0, run.story
    run.check(steps=12)


@pytest.mark.sampled
@pytest.mark.parametrize("point", COORDINATOR)
def test_a_coordinator_that_wakes_goes_on(point: str, make: Make):
    run = make()
    stopped = run.start(STOPS[f"coordinator: {point}"]).struck()
    until = time.monotonic() + 1.5 * LEASE_S
    run.until(lambda: time.monotonic() > until)
    stopped.send_signal(signal.SIGCONT)
    assert run.end().status == 0, run.story
    run.check()


@pytest.mark.sampled
@pytest.mark.parametrize("point", TRAINER)
def test_a_trainer_that_wakes_goes_on(point: str, make: Make):
    run = make()
    stopped = run.start(STOPS[f"trainer: {point}"]).struck()
    until = time.monotonic() + 1.5 * LEASE_S
    run.until(lambda: time.monotonic() > until)
    stopped.send_signal(signal.SIGCONT)
    assert run.end().status == 0, run.story
    run.check()


@pytest.mark.sampled
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_old_coordinator_that_wakes_beside_the_new_one_ends(when: str, make: Make):
    run = make("trainer.steps=30")
    fault = Fault("coordinator", "os:fsync", "stop", when, JOURNAL, 8, orphan=True)
    old = run.start(fault).struck()
    run.zombies = [old]
    run.signal(signal.SIGKILL)
    run.end()
    rows = len(read_metrics(run.path / "metrics.jsonl"))
    run.start().until(lambda: len(read_metrics(run.path / "metrics.jsonl")) > rows)
    old.send_signal(signal.SIGCONT)
    old.wait(10)
    assert "has begun" in run.logs, run.story
    assert run.end().status == 0, run.story
    run.check(steps=30)


@pytest.mark.sampled
@pytest.mark.parametrize("seconds", [-1e6, 1e6])
@pytest.mark.parametrize("role", ["coordinator", "engine", "runner", "trainer"])
def test_a_clock_that_jumps_decides_nothing(role: str, seconds: float, make: Make):
    run = make()
    route = "^/lease$|^/engine$|^/publish$"
    fault = Fault(role, CALL, f"jump {seconds}", about=route, nth=2)
    if role == "coordinator":
        fault = Fault(role, "os:fsync", f"jump {seconds}", about=JOURNAL, nth=6)
    assert run.train(fault).status == 0, run.story
    run.check()
