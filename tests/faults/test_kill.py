# SPDX-License-Identifier: Apache-2.0
"""SIGKILL at named points: of one process, which is started again, or of everything at once.

After a kill of everything, and where no restart is allowed, the same command goes on. The run that
comes of it is one that nobody touched, as far as its files can tell.
"""

import signal

import pytest

from tests.faults.conftest import Make
from tests.faults.inject import struck
from tests.faults.points import faults

NO_RESTARTS = [f"run.restarts.{role}=0" for role in ("coordinator", "engine", "runner", "trainer")]
SPENT = (
    "coordinator: after announce ack",
    "runner: after shard link",
    "trainer: after optimizer step",
    "engine: before update",
    "server: before mid-broadcast",
)
VARIANTS = {
    "two ranks": ["trainer.ranks=2"],
    "two engines": ["engine.count=2"],
    "two runners": ["engine.runners=2"],
    "on policy": ["pool.max_lag=0"],
    "evaluations": ["eval.some={every = 2, num_prompts = 3, temperature = 1.0, hold = true}"],
    "retention": ["checkpoint.shards=none", "checkpoint.keep=1"],
}
ESSENTIAL = (
    "runner: after shard link",
    "coordinator: after plan ack",
    "trainer: after optimizer step",
    "trainer: before checkpoint removal",
    "server: before mid-broadcast",
)
ALONE = {name: fault for name, fault in faults("kill").items() if fault.do == "kill"}
ALONE = {name: fault for name, fault in ALONE.items() if fault.role != "launcher"}


def test_a_run_that_nobody_touches_is_whole(make: Make):
    run = make()
    ended = run.train()
    assert ended.status == 0, run.story
    run.check()


@pytest.mark.sampled
@pytest.mark.parametrize("name", faults("kill all"))
def test_after_a_kill_of_everything_the_same_command_goes_on(name: str, make: Make):
    run = make()
    ended = run.train(faults("kill all")[name])
    assert struck(run.faults), f"never came to this point\n{run.story}"
    assert ended.status == -signal.SIGKILL, run.story
    run.finish()
    run.check()


@pytest.mark.sampled
@pytest.mark.parametrize("name", ALONE)
def test_a_process_that_is_killed_is_started_again(name: str, make: Make):
    run = make()
    ended = run.train(ALONE[name])
    assert struck(run.faults), f"never came to this point\n{run.story}"
    assert ended.status == 0, run.story
    run.check()


@pytest.mark.sampled
@pytest.mark.parametrize("name", SPENT)
def test_without_a_restart_left_the_run_ends_cleanly_and_goes_on_later(name: str, make: Make):
    run = make()
    ended = run.train(ALONE[name], overrides=NO_RESTARTS)
    assert struck(run.faults), f"never came to this point\n{run.story}"
    assert ended.status in (3, 128 + signal.SIGKILL), run.story
    run.finish()
    run.check()


@pytest.mark.sampled
@pytest.mark.parametrize("do", ["kill", "kill all"])
@pytest.mark.parametrize("name", ESSENTIAL)
@pytest.mark.parametrize("variant", VARIANTS)
def test_other_shapes_of_a_run_survive_as_well(variant: str, name: str, do: str, make: Make):
    run = make(*VARIANTS[variant])
    ended = run.train(faults(do)[name], within_s=90)
    assert struck(run.faults), f"never came to this point\n{run.story}"
    if do == "kill all":
        run.finish()
    else:
        assert ended.status == 0, run.story
    run.check()
