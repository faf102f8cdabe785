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
from molt.launch import child, local
from molt.launch.local import Local, Outcome
from molt.records import MoltError
from tests.processes import left, lives

UP = "until [ -e up-coordinator ] && [ -e up-engine ]; do sleep 0.02; done"  # the others are
TRAINS = "until [ -e stop ]; do sleep 0.02; done"  # until it is asked to stop
HANGS = "exec sleep 60"


def serves(name: str, leaving: str = "exit 0") -> str:
    """A role that is there until it is told to leave."""
    return f"trap 'kill $!; {leaving}' TERM; sleep 60 & touch up-{name}; wait"


def first(script: str, then: str) -> str:
    """A role that does one thing, and another when it is started again."""
    mark = "began-$MOLT_KIND-$SLURM_PROCID"
    return f"if mkdir {mark} 2>/dev/null; then {script}; exit; fi\n{then}"


def noted(name: str, text: str) -> str:
    """A role that waits for a line in another one's log."""
    return f"until grep -qs '{text}' logs/attempt-7/{name}.log; do sleep 0.02; done"


class Stage:
    """A run directory whose roles are scripts: `say` what a role does, then `play`."""

    def __init__(self, path: Path) -> None:
        self.path, self.logs = path, path / "logs/attempt-7"
        self.logs.mkdir(parents=True)
        self.say(coordinator=serves("coordinator"), engine=serves("engine"), trainer=UP)
        self.asked: list[str] = []  # addresses that were asked to stop
        self.seconds = 0.0

    def say(self, **scripts: str) -> None:
        for name, script in scripts.items():
            (self.path / f"{name}.sh").write_text(f"cd {self.path}\nMOLT_KIND={name}\n{script}\n")

    def stop(self, address: str) -> None:
        self.asked.append(address)
        (self.path / "stop").touch()

    def log(self, name: str) -> str:
        return (self.logs / f"{name}.log").read_text()

    def play(
        self, *signals: int, ranks: int = 2, engines: int = 1, stop_s: float = 30, budget: int = 0
    ) -> Outcome:
        """Run; once every trainer rank has made a file `ready-<rank>`, send ourselves `signals`."""
        kinds = ("coordinator", "engine", "trainer")
        run = {"stop_s": stop_s, "restarts": dict.fromkeys(kinds, budget)}
        config = Config.model_validate(
            {"run": run, "trainer": {"ranks": ranks}, "engine": {"count": engines}}
        )

        async def send() -> None:
            while len(list(self.path.glob("ready-*"))) < ranks:
                await asyncio.sleep(0.01)
            for number in signals:
                os.kill(os.getpid(), number)
                await asyncio.sleep(0.1)

        async def play() -> Outcome:
            sending = asyncio.ensure_future(send()) if signals else None
            outcome = await Local(self.path, config, self.logs, self.stop).run()
            if sending:
                await sending
            return outcome

        began = time.monotonic()
        outcome = asyncio.run(play())
        self.seconds = time.monotonic() - began
        assert not left(self.path, 1.0)
        return outcome


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setattr(child, "command", lambda name, run: ["/bin/sh", str(run / f"{name}.sh")])
    monkeypatch.setattr(local, "SETTLE_S", 0.5)
    monkeypatch.setattr(local, "KILL_S", 0.5)
    return Stage(tmp_path)


# ---------------------------------------------------------------- without a failure


def test_a_run_is_done_when_every_trainer_rank_is(stage: Stage):
    stage.say(trainer=f"{UP}; sleep 0.$SLURM_PROCID; echo rank $SLURM_PROCID")
    assert stage.play(ranks=3) == Outcome(0)
    assert [stage.log(f"trainer-{i}") for i in range(3)] == ["rank 0\n", "rank 1\n", "rank 2\n"]
    assert stage.seconds < 5


def test_everyone_is_asked_to_leave_engines_before_the_coordinator(stage: Stage):
    for name in ("engine", "coordinator"):
        stage.say(**{name: serves(name, f"[ -e stop ] && echo {name} >> order; exit 0")})
    assert stage.play() == Outcome(0)
    assert (stage.path / "order").read_text().split() == ["engine", "coordinator"]


def test_roles_get_the_environment_that_srun_would_give(stage: Stage):
    script = "echo $SLURM_PROCID of $SLURM_NTASKS at $MOLT_COORDINATOR under $MOLT_PARENT"
    stage.say(trainer=f"{script} in $MOLT_ATTEMPT", engine=f"{script}; {serves('engine')}")
    stage.play(engines=2)
    said = [path.read_text().split() for path in sorted(stage.logs.glob("*-?.log"))]
    assert [line[:3] for line in said] == [["0", "of", "2"], ["1", "of", "2"]] * 2
    assert {line[4] for line in said} == {stage.asked[0]}
    assert {line[6] for line in said} == {str(os.getpid())}
    assert said[-1][8] == "7"  # of attempt-7


# ---------------------------------------------------------------- failures that end the run


def test_a_failure_shows_the_culprit_its_status_and_its_last_lines(stage: Stage):
    stage.say(trainer=f"[ $SLURM_PROCID = 0 ] && {HANGS}; seq 20; echo broken >&2; exit 7")
    outcome = stage.play()
    assert outcome.status == 7
    headline, *lines = outcome.message.splitlines()
    assert headline == (
        f"trainer 1 ended with status 7; the last lines of {stage.logs / 'trainer-1.log'}:"
    )
    assert lines == [*map(str, range(7, 21)), "broken"]  # 15 lines: 14 of 20 numbers, and the last


def test_a_role_ended_by_a_signal_gives_128_plus_its_number(stage: Stage):
    stage.say(trainer=f"[ $SLURM_PROCID = 1 ] && {HANGS}; kill -KILL $$")
    outcome = stage.play()
    assert outcome.status == 137  # 128 + 9
    assert outcome.message.startswith("trainer 0 ended with signal SIGKILL")


@pytest.mark.parametrize("name", ["coordinator", "engine"])
def test_a_role_that_leaves_before_the_trainer_has_failed_with_status_3(stage: Stage, name: str):
    stage.say(trainer=HANGS, **{name: "exit 0"})
    outcome = stage.play()
    assert outcome.status == 3
    assert outcome.message.startswith(f"{name} ended with status 0")


def test_a_failure_on_the_way_out_is_one_too(stage: Stage):
    stage.say(coordinator=serves("coordinator", "echo journal lost; exit 4"))
    outcome = stage.play()
    assert outcome.status == 4
    assert outcome.message.startswith("coordinator ended with status 4")
    assert outcome.message.endswith("journal lost")


def test_a_role_that_will_not_leave_is_killed_with_its_children(stage: Stage):
    stage.say(
        engine="trap '' TERM; sleep 60 & echo $! > child; touch up-engine; wait",
        trainer=f"{UP}; exit 5",
    )
    assert stage.play().status == 5
    grandchild = int((stage.path / "child").read_text())
    assert not psutil.pid_exists(grandchild) or not lives(psutil.Process(grandchild))
    assert stage.seconds < 5


# ---------------------------------------------------------------- the culprit


def test_the_first_to_fail_is_the_culprit(stage: Stage):
    # The others fail too, because of it and on their way out.
    stage.say(
        trainer=f"{UP}; [ $SLURM_PROCID = 0 ] && exit 5; sleep 0.2; exit 6",
        engine=serves("engine", "exit 9"),
    )
    outcome = stage.play()
    assert outcome.status == 5
    assert outcome.message.startswith("trainer 0 ended with status 5")


@pytest.mark.parametrize("end", ["exit 3", "kill -ABRT $$"])
def test_who_was_killed_is_the_culprit_also_when_others_end_before_it(stage: Stage, end: str):
    # As when the kernel needs longer to clear away the killed rank than its peer to notice.
    stage.say(trainer=f"ulimit -c 0; [ $SLURM_PROCID = 0 ] && {end}; sleep 0.2; kill -KILL $$")
    outcome = stage.play()
    assert outcome.status == 137
    assert outcome.message.startswith("trainer 1 ended with signal SIGKILL")


def test_a_rank_that_was_killed_is_blamed_at_once(stage: Stage, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(local, "SETTLE_S", 30.0)
    stage.say(trainer=f"[ $SLURM_PROCID = 0 ] && {HANGS}; kill -KILL $$")
    assert stage.play().status == 137
    assert stage.seconds < 5


# ---------------------------------------------------------------- restarts


@pytest.mark.parametrize("name", ["coordinator", "engine"])
@pytest.mark.parametrize("end", ["kill -KILL $$", "echo ValueError; exit 1", "exit 0"])
def test_who_dies_is_started_again_alone_at_the_same_address(
    stage: Stage, name: str, end: str, capfd: pytest.CaptureFixture[str]
):
    told = "echo at $MOLT_COORDINATOR"
    script = first(f"{told}; {end}", f"{told}; {serves(name)}")
    stage.say(trainer=f"echo once; {UP}", **{name: script})
    assert stage.play(budget=1) == Outcome(0)
    assert stage.log("trainer-0") == "once\n"
    lines = stage.log(name).splitlines()
    (again,) = [line for line in lines if "started again (1 of 1)" in line]
    assert again.startswith(f"{name} ended with s")
    assert [line for line in lines if line.startswith("at ")] == [f"at {stage.asked[0]}"] * 2
    said = capfd.readouterr().err
    assert again in said
    assert ("; ValueError; " in said) == ("ValueError" in end)


def test_a_dead_rank_takes_all_ranks_along_and_all_start_again(stage: Stage):
    # Rank 1 hangs, deaf to SIGTERM, in what it has begun with rank 0.
    hangs = "[ $SLURM_PROCID = 1 ] && trap '' TERM && touch hangs && exec sleep 60"
    dies = "until [ -e hangs ]; do sleep 0.02; done; kill -KILL $$"
    stage.say(trainer=first(f"{hangs}; {dies}", f"{UP}; echo again in $SLURM_STEP_ID"))
    assert stage.play(budget=1) == Outcome(0)
    assert stage.log("trainer-0").splitlines()[-1] == "again in 1"
    assert stage.log("trainer-1") == "again in 1\n"
    assert stage.seconds < 5


def test_what_a_dead_role_left_behind_is_gone_before_it_starts_again(stage: Stage):
    leaves = "sleep 600 & echo $! > left; kill -KILL $$"
    gone = "while grep -qs sleep /proc/$(cat left)/cmdline; do sleep 0.02; done; echo gone"
    stage.say(engine=first(leaves, f"{gone}; {serves('engine')}"))
    assert stage.play(budget=1) == Outcome(0)
    assert stage.log("engine").splitlines()[-1] == "gone"


def test_a_spent_budget_ends_the_run_with_the_culprits_status(stage: Stage):
    stage.say(trainer=f"echo began; [ $SLURM_PROCID = 1 ] && kill -SEGV $$; {HANGS}")
    outcome = stage.play(budget=2)
    assert outcome.status == 139  # 128 + 11
    assert outcome.message.startswith("trainer 1 ended with signal SIGSEGV after 2 restarts; ")
    assert stage.log("trainer-1").count("began") == 3


@pytest.mark.parametrize("status", [2, 3])
@pytest.mark.parametrize("name", ["coordinator", "engine", "trainer"])
def test_an_error_that_a_person_has_to_read_is_not_tried_again(
    stage: Stage, name: str, status: int
):
    stage.say(**{"trainer": HANGS, name: f"echo disk full; exit {status}"})
    outcome = stage.play(ranks=1, budget=3)
    assert outcome.status == status
    assert outcome.message.startswith(f"{name} ended with status {status}; ")
    assert outcome.message.endswith("disk full")


def test_an_engine_of_several_is_lost_without_the_run(
    stage: Stage, capfd: pytest.CaptureFixture[str]
):
    dies = "[ $SLURM_PROCID = 1 ] && echo began && kill -KILL $$"
    stage.say(engine=f"{dies}; {serves('engine')}", trainer=noted("engine-1", "is lost"))
    assert stage.play(engines=2, budget=1) == Outcome(0)
    assert stage.log("engine-1").count("began") == 2
    assert "engine 1 ended with signal SIGKILL and is lost, 1 left" in capfd.readouterr().err


def test_the_run_ends_with_its_last_engine(stage: Stage):
    stage.say(trainer=HANGS, engine="sleep 0.$SLURM_PROCID; exit 3")
    outcome = stage.play(engines=2, budget=1)
    assert outcome.status == 3
    assert outcome.message.startswith("engine 1 ended with status 3; ")


def test_each_engine_has_a_budget_of_its_own(stage: Stage):
    stage.say(engine=first("exit 1", serves("engine-$SLURM_PROCID")))
    stage.say(trainer="until [ -e up-engine-0 ] && [ -e up-engine-1 ]; do sleep 0.02; done")
    assert stage.play(engines=2, budget=1) == Outcome(0)


# ---------------------------------------------------------------- stopping


def test_the_first_interrupt_lets_the_trainer_finish(
    stage: Stage, capfd: pytest.CaptureFixture[str]
):
    stage.say(trainer=f"{UP}; touch ready-$SLURM_PROCID; {TRAINS}; echo saved")
    assert stage.play(signal.SIGINT) == Outcome(130)
    assert stage.log("trainer-0") == "saved\n"
    assert "Ctrl-C again to kill" in capfd.readouterr().err


def test_a_termination_stops_as_gracefully_as_an_interrupt(stage: Stage):
    stage.say(trainer=f"{UP}; touch ready-$SLURM_PROCID; {TRAINS}; echo saved")
    assert stage.play(signal.SIGTERM) == Outcome(130)
    assert stage.log("trainer-1") == "saved\n"


def test_the_second_interrupt_kills(stage: Stage):
    stage.say(trainer="touch ready-$SLURM_PROCID; exec sleep 60")
    assert stage.play(signal.SIGINT, signal.SIGINT) == Outcome(130)
    assert stage.seconds < 5


def test_a_stop_that_takes_too_long_ends_all_the_same(stage: Stage):
    stage.say(trainer="touch ready-$SLURM_PROCID; exec sleep 60")
    assert stage.play(signal.SIGINT, stop_s=0.5) == Outcome(130)
    assert 0.5 <= stage.seconds < 5


def test_engines_have_what_the_trainer_left_of_the_time_to_stop(stage: Stage):
    leaves = "sleep 0.5; echo flushed; exit 0"
    stage.say(
        engine=serves("engine", leaves),
        trainer=f"{UP}; touch ready-$SLURM_PROCID; {TRAINS}; sleep 0.5",
    )
    assert stage.play(signal.SIGINT, stop_s=10) == Outcome(130)
    assert stage.log("engine") == "flushed\n"


def test_without_a_coordinator_to_ask_a_stop_kills(stage: Stage, monkeypatch: pytest.MonkeyPatch):
    def refuse(address: str) -> None:
        raise MoltError(f"coordinator at {address} not reached")

    monkeypatch.setattr(stage, "stop", refuse)
    stage.say(trainer="touch ready-$SLURM_PROCID; exec sleep 60")
    assert stage.play(signal.SIGINT) == Outcome(130)
    assert stage.seconds < 5


def test_a_failure_during_a_stop_is_told_and_not_mended(stage: Stage):
    stage.say(trainer=f"{UP}; touch ready-$SLURM_PROCID; {TRAINS}; echo overflow; exit 1")
    outcome = stage.play(signal.SIGINT, budget=3)
    assert outcome.status == 1
    assert outcome.message.endswith("overflow")


def test_an_engine_that_dies_during_a_stop_lets_the_trainer_finish(
    stage: Stage, capfd: pytest.CaptureFixture[str]
):
    stage.say(
        engine="touch up-engine; until [ -e stop ]; do sleep 0.02; done; exit 1",
        trainer=f"{UP}; touch ready-$SLURM_PROCID; {noted('engine', 'while')}; echo saved",
    )
    assert stage.play(signal.SIGINT, budget=3) == Outcome(130)
    assert stage.log("trainer-0") == "saved\n"
    assert "engine ended with status 1 while the run stops" in capfd.readouterr().err


def test_a_coordinator_that_is_started_again_during_a_stop_is_told_to_stop(stage: Stage):
    dies = "touch up-coordinator; until [ -e stop ]; do sleep 0.02; done; rm stop; exit 1"
    stage.say(
        coordinator=first(dies, serves("coordinator")),
        trainer=f"{UP}; touch ready-$SLURM_PROCID; sleep 0.2; {TRAINS}; echo saved",
    )
    assert stage.play(signal.SIGINT, budget=1) == Outcome(130)
    assert stage.log("trainer-0") == "saved\n"
    assert len(stage.asked) == 3  # the first, the second, and when the trainer was done
