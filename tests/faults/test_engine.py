# SPDX-License-Identifier: Apache-2.0
"""Engines that die, hang, fail or answer late, at every stage of what they do; the run goes on."""

import signal

import pytest

from molt.store.run import read_metrics
from tests.faults.conftest import Make

DIES = ("start", "health", "join", "begin", "receive", "midway", "finish", "reset", "resume",
        "generate", "token")  # fmt: skip
HANGS = ("pause", "join", "receive", "midway", "finish", "generate", "token")
FREEZES = ("health", "receive", "token")
FAILS = ("pause", "join", "receive", "finish", "reset", "resume", "generate")
LATE = ("pause", "receive", "resume", "generate")
NTH = {"health": 3, "midway": 2, "receive": 2, "begin": 2, "finish": 2, "reset": 2, "resume": 2,
       "pause": 2, "generate": 5, "token": 40}  # fmt: skip
DOES = [
    *((stage, "die") for stage in DIES),
    *((stage, "hang") for stage in HANGS),
    *((stage, "freeze") for stage in FREEZES),
    *((stage, "fail") for stage in FAILS),
    *((stage, 1.5) for stage in LATE),
]


def rule(stage: str, do: str | float) -> dict[str, object]:
    return {"stage": stage, "do": do, "nth": NTH.get(stage, 1)}


@pytest.mark.sampled
@pytest.mark.parametrize(("stage", "do"), DOES)
def test_an_engine_that_misbehaves_does_not_end_the_run(stage: str, do: str | float, make: Make):
    run = make("engine.update_s=4", "engine.request_s=6")
    ended = run.train(script=[rule(stage, do)], within_s=90)
    assert run.faults.with_suffix(".0").exists(), f"never came to this stage\n{run.story}"
    assert ended.status == 0, run.story
    if do in ("die", "freeze"):
        rows = read_metrics(run.path / "metrics.jsonl")
        assert rows[-1]["failures/engine_restarts"] >= 1, run.story
    run.check()


@pytest.mark.sampled
@pytest.mark.parametrize("stage", ["receive", "midway", "token"])
def test_of_two_engines_one_may_die(stage: str, make: Make):
    run = make("engine.count=2")
    ended = run.train(script=[rule(stage, "die")], within_s=90)
    assert ended.status == 0, run.story
    run.check()


@pytest.mark.sampled
def test_an_engine_that_dies_too_often_ends_the_run_with_its_last_lines(make: Make):
    run = make("run.restarts.engine=1")
    ended = run.train(script=[rule("generate", "die"), rule("generate", "die")], within_s=90)
    assert ended.status == 3, run.story
    assert "1 restarts were not enough" in ended.output, run.story
    run.finish()
    run.check()


def test_a_stop_with_grace_loses_no_token(make: Make):
    run = make("trainer.steps=40")
    run.start().until(lambda: len(read_metrics(run.path / "metrics.jsonl")) >= 3)
    run.signal(signal.SIGINT)
    ended = run.end()
    assert ended.status == 130, run.story
    assert ended.seconds < 5, run.story
    held = run.tokens_held()
    sampled = [line.split()[1] for line in run.logs.splitlines() if line.startswith("sampled ")]
    assert held == sum(map(int, sampled)), run.story
    run.finish(overrides=["trainer.steps=12"])
    run.check(steps=12)
