# SPDX-License-Identifier: Apache-2.0
"""The local launcher over roles that are small shell scripts."""

import asyncio
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from molt.config import Config
from molt.launch import local
from molt.launch.local import Local, Outcome
from tests.processes import left, lives

UP = "until [ -e up-coordinator ] && [ -e up-engine ]; do sleep 0.02; done"  # the others are
TRAINS = "until [ -e stop ]; do sleep 0.02; done"  # until it is asked to stop


def serves(name: str, leaving: str = "exit 0") -> str:
    """A role that is there until it is told to leave."""
    return f"trap 'kill $!; {leaving}' TERM; sleep 60 & touch up-{name}; wait"


class Stage:
    """A run directory whose roles are scripts: `say` what a role does, then `play`."""

    def __init__(self, path: Path) -> None:
        self.path, self.logs = path, path / "logs/attempt-1"
        self.logs.mkdir(parents=True)
        self.say(coordinator=serves("coordinator"), engine=serves("engine"), trainer=UP)
        self.asked: list[str] = []  # addresses that were asked to stop
        self.seconds = 0.0

    def say(self, **scripts: str) -> None:
        for name, script in scripts.items():
            (self.path / f"{name}.sh").write_text(f"cd {self.path}\n{script}\n")

    def stop(self, address: str) -> None:
        self.asked.append(address)
        (self.path / "stop").touch()

    def play(self, *signals: int, ranks: int = 2, engines: int = 1, stop_s: float = 30) -> Outcome:
        """Run; once every trainer rank has made a file `ready-<rank>`, send ourselves `signals`."""
        config = Config.model_validate(
            {"run": {"stop_s": stop_s}, "trainer": {"ranks": ranks}, "engine": {"count": engines}}
        )

        async def send() -> None:
            while len(list(self.path.glob("ready-*"))) < ranks:
                await asyncio.sleep(0.01)
            for number in signals:
                os.kill(os.getpid(), number)
                await asyncio.sleep(0.1)

        async def run() -> Outcome:
            sending = asyncio.ensure_future(send()) if signals else None
            outcome = await Local(self.path, config, self.logs, self.stop).run()
            if sending:
                await sending
            return outcome

        began = time.monotonic()
        outcome = asyncio.run(run())
        self.seconds = time.monotonic() - began
        assert not left(self.path, 1.0)
        return outcome


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setattr(local, "command", lambda name, run: ["/bin/sh", str(run / f"{name}.sh")])
    return Stage(tmp_path)


def test_a_run_is_done_when_every_trainer_rank_is(stage: Stage):
    stage.say(trainer=f"{UP}; sleep 0.$SLURM_PROCID; echo rank $SLURM_PROCID")
    assert stage.play(ranks=3) == Outcome(0)
    assert [stage.logs.joinpath(f"trainer-{i}.log").read_text() for i in range(3)] == [
        "rank 0\n",
        "rank 1\n",
        "rank 2\n",
    ]
    assert stage.seconds < 5


def test_everyone_is_asked_to_leave_engines_before_the_coordinator(stage: Stage):
    for name in ("engine", "coordinator"):
        stage.say(**{name: serves(name, f"[ -e stop ] && echo {name} >> order; exit 0")})
    assert stage.play() == Outcome(0)
    assert (stage.path / "order").read_text().split() == ["engine", "coordinator"]


def test_roles_get_the_environment_that_srun_would_give(stage: Stage):
    script = "echo $SLURM_PROCID of $SLURM_NTASKS at $MOLT_COORDINATOR under $MOLT_PARENT"
    stage.say(trainer=script, engine=f"{script}; {serves('engine')}")
    stage.play(engines=2)
    said = [path.read_text().split() for path in sorted(stage.logs.glob("*-?.log"))]
    assert [line[:3] for line in said] == [["0", "of", "2"], ["1", "of", "2"]] * 2
    assert {line[4] for line in said} == {stage.asked[0]}
    assert {line[6] for line in said} == {str(os.getpid())}


def test_a_failure_shows_the_culprit_its_status_and_its_last_lines(stage: Stage):
    stage.say(trainer="[ $SLURM_PROCID = 0 ] && sleep 60; seq 20; echo broken >&2; exit 7")
    outcome = stage.play()
    assert outcome.status == 7
    headline, *lines = outcome.message.splitlines()
    assert headline == (
        f"trainer 1 ended with status 7; the last lines of {stage.logs / 'trainer-1.log'}:"
    )
    assert lines == [*map(str, range(7, 21)), "broken"]  # 15 lines: 14 of 20 numbers, and the last


def test_a_role_ended_by_a_signal_gives_128_plus_its_number(stage: Stage):
    stage.say(trainer="[ $SLURM_PROCID = 1 ] && sleep 60; kill -KILL $$")
    outcome = stage.play()
    assert outcome.status == 137  # 128 + 9
    assert outcome.message.startswith("trainer 0 ended with signal SIGKILL")


@pytest.mark.parametrize("name", ["coordinator", "engine"])
def test_a_role_that_leaves_before_the_trainer_has_failed_with_status_3(stage: Stage, name: str):
    stage.say(trainer="sleep 60", **{name: "exit 0"})
    outcome = stage.play()
    assert outcome.status == 3
    assert outcome.message.startswith(f"{name} ended with status 0")


def test_the_first_to_fail_is_the_culprit(stage: Stage):
    # The others fail too, because of it and on their way out.
    stage.say(
        trainer=f"{UP}; [ $SLURM_PROCID = 0 ] && exit 5; sleep 0.3; exit 6",
        engine=serves("engine", "exit 9"),
    )
    outcome = stage.play()
    assert outcome.status == 5
    assert outcome.message.startswith("trainer 0 ended with status 5")


def test_a_failure_on_the_way_out_is_one_too(stage: Stage):
    stage.say(coordinator=serves("coordinator", "echo journal lost; exit 4"))
    outcome = stage.play()
    assert outcome.status == 4
    assert outcome.message.startswith("coordinator ended with status 4")
    assert outcome.message.endswith("journal lost")


def test_the_first_interrupt_lets_the_trainer_finish(stage: Stage, capfd):
    stage.say(trainer=f"{UP}; touch ready-$SLURM_PROCID; {TRAINS}; echo saved")
    assert stage.play(signal.SIGINT) == Outcome(130)
    assert (stage.logs / "trainer-0.log").read_text() == "saved\n"
    assert "Ctrl-C again to kill" in capfd.readouterr().err


def test_a_termination_stops_as_gracefully_as_an_interrupt(stage: Stage):
    stage.say(trainer=f"{UP}; touch ready-$SLURM_PROCID; {TRAINS}; echo saved")
    assert stage.play(signal.SIGTERM) == Outcome(130)
    assert (stage.logs / "trainer-1.log").read_text() == "saved\n"


def test_the_second_interrupt_kills(stage: Stage):
    stage.say(trainer="touch ready-$SLURM_PROCID; exec sleep 60")
    assert stage.play(signal.SIGINT, signal.SIGINT) == Outcome(130)
    assert stage.seconds < 5


def test_a_stop_that_takes_too_long_ends_all_the_same(stage: Stage):
    stage.say(trainer="touch ready-$SLURM_PROCID; exec sleep 60")
    assert stage.play(signal.SIGINT, stop_s=0.5) == Outcome(130)
    assert 0.5 <= stage.seconds < 5


def test_a_failure_during_a_stop_is_told(stage: Stage):
    stage.say(trainer=f"{UP}; touch ready-$SLURM_PROCID; {TRAINS}; echo disk full; exit 3")
    outcome = stage.play(signal.SIGINT)
    assert outcome.status == 3
    assert outcome.message.endswith("disk full")


def test_a_role_that_will_not_leave_is_killed_with_its_children(stage: Stage):
    stage.say(
        engine="trap '' TERM; sleep 60 & echo $! > child; touch up-engine; wait",
        trainer=f"{UP}; exit 5",
    )
    assert stage.play().status == 5
    child = int((stage.path / "child").read_text())
    assert not psutil.pid_exists(child) or not lives(psutil.Process(child))
    assert stage.seconds < 10
