# SPDX-License-Identifier: Apache-2.0
"""One run through every way an attempt can end, each attempt resuming what the one before left.

    Ctrl-C ─▶ resumed to its end ─▶ extended, then SIGKILL ─▶ resumed, its server killed, which may
    not be started again ─▶ resumed, one process after the other killed and started again, until a
    trainer rank is killed once too often

Nothing may be left of any attempt, and in the end the journal must tell one story.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from molt.records import TRAIN, Group, LeaseEnd, Plan, PublishBegin, Record
from molt.store.journal import read_journal
from molt.store.shards import read_group, to_rows
from molt.store.verify import verify
from tests.e2e.attempt import SERVER, Attempt

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

GROUPS = 8
OVERRIDES = (
    f"trainer.groups={GROUPS}", "sampling.num_samples=8", "trainer.minibatches=1",
    "checkpoint.every=10", "eval.greedy.num_prompts=10", "eval.sampled.num_prompts=10",
)  # fmt: skip
STEPS, MORE = 24, 1000  # what is trained to the end, and what is never reached

Start = Callable[..., Attempt]


def late(step: int) -> bool:
    """Some steps after the checkpoint of step STEPS and before the next: a kill loses them."""
    return step >= STEPS + 3


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    attempts: list[Attempt] = []
    run = tmp_path_factory.mktemp("ends") / "add"

    def start(steps: int, *more: str) -> Attempt:
        attempts.append(Attempt(run, "add", *OVERRIDES, f"trainer.steps={steps}", *more))
        return attempts[-1]

    yield start
    for attempt in attempts:
        attempt.close()


@pytest.fixture(scope="module")
def interrupted(start: Start) -> Attempt:
    return start(STEPS).until().interrupt().end()


@pytest.fixture(scope="module")
def resumed(start: Start, interrupted: Attempt) -> Attempt:
    assert interrupted.status == 130, interrupted.output
    return start(STEPS).end()


@pytest.fixture(scope="module")
def killed(start: Start, resumed: Attempt) -> Attempt:
    assert resumed.status == 0, resumed.output
    return start(MORE).until(late).kill().end()


@pytest.fixture(scope="module")
def without_server(start: Start, killed: Attempt) -> Attempt:
    assert killed.status == -9
    attempt = start(MORE, "run.restarts.engine=0").until(late)
    return attempt.kill(attempt.child(SERVER)).end()


@pytest.fixture(scope="module")
def mended(start: Start, without_server: Attempt) -> Attempt:
    """Each process is killed once and a rank twice; a silent runner is lost after `lease_s`."""
    assert without_server.status > 0
    attempt = start(MORE, "run.restarts.trainer=1", "pool.lease_s=20").until(late)
    for name in (SERVER, "role runner", "role coordinator", "role engine"):
        go_on(attempt.kill(attempt.child(name)))
    go_on(attempt.kill(attempt.child("role trainer", SLURM_PROCID="1")))
    return attempt.kill(attempt.child("role trainer", SLURM_PROCID="1")).end()


def go_on(attempt: Attempt, steps: int = 5) -> None:
    """Wait until some more steps are trained: more than what was generated before."""
    attempt.before = len(attempt.rows)
    attempt.until(lambda _: len(attempt.rows) >= attempt.before + steps)


@pytest.fixture(scope="module")
def journal(mended: Attempt) -> list[Record]:
    return list(read_journal(mended.run))


def steps_of(attempt: Attempt, lines: slice) -> list[int]:
    return [row["step"] for row in attempt.rows[lines]]


def test_an_interrupt_ends_the_run_in_time_with_a_checkpoint(interrupted: Attempt):
    assert interrupted.status == 130
    assert interrupted.seconds < 30  # run.stop_s
    assert interrupted.output.splitlines()[-1] == "stopped; the same command resumes"
    newest = max(interrupted.run.glob("checkpoints/step-*/complete.json"))
    trained = interrupted.rows[-1]["step"]
    assert trained < STEPS
    assert newest.parent.name == f"step-{trained:06d}"


def test_an_interrupt_leaves_nothing(interrupted: Attempt):
    assert interrupted.left(5.0) == []


def test_the_same_command_finishes_and_trains_every_group_once(resumed: Attempt):
    assert resumed.status == 0
    assert steps_of(resumed, slice(STEPS)) == [*range(1, STEPS + 1)]
    records = [r for r in read_journal(resumed.run) if isinstance(r, Plan) and r.step <= STEPS]
    assert [plan.step for plan in records] == [*range(1, STEPS + 1)]
    trained = sorted(group for plan in records for group in plan.groups)
    assert trained == [*range(STEPS * GROUPS)]
    assert resumed.left(5.0) == []


def test_what_an_interrupted_attempt_held_was_given_back(resumed: Attempt):
    # Ctrl-C came while groups were in flight: they are trained all the same, under a newer lease.
    ends = [r for r in read_journal(resumed.run) if isinstance(r, LeaseEnd)]
    assert {end.group for end in ends} < set(range(STEPS * GROUPS))


def test_a_finished_run_says_so(start: Start, resumed: Attempt):
    logs = len(list(resumed.run.glob("logs/attempt-*")))
    again = start(STEPS).end()
    assert again.status == 0
    assert f"has trained {STEPS} steps already" in again.output
    assert len(list(resumed.run.glob("logs/attempt-*"))) == logs


def test_another_seed_is_refused(start: Start, resumed: Attempt):
    other = start(MORE, "run.seed=1").end()
    assert other.status == 2
    (line,) = other.output.splitlines()
    assert "run.seed = 0, not 1" in line


def test_a_larger_total_extends_a_finished_run(killed: Attempt):
    assert steps_of(killed, slice(STEPS, None))[0] == STEPS + 1


def test_nothing_outlives_a_killed_supervisor(killed: Attempt):
    assert killed.left(15.0) == []


def test_a_resumed_run_says_where_it_starts(without_server: Attempt):
    (line,) = [x for x in without_server.output.splitlines() if x.startswith("resuming after")]
    words = line.split()
    step, plans = int(words[3].rstrip(":")), int(words[4])
    assert step == STEPS
    assert plans >= 3  # late() was reached, and at the least the steps up to it had plans


def test_a_dead_server_ends_the_run_by_its_name_when_none_may_follow(without_server: Attempt):
    assert without_server.status == 3
    output = without_server.output
    assert "engine ended with status 3; the last lines of" in output
    assert "the vLLM server of engine 0 ended with status 137" in output  # 128 + SIGKILL
    assert without_server.seconds < 30
    assert without_server.left(5.0) == []


def test_who_dies_is_started_again_and_the_others_go_on(mended: Attempt):
    said = [line for line in mended.output.splitlines() if "is started again" in line]
    assert [line.partition(";")[0] for line in said] == [
        "coordinator ended with signal SIGKILL and is started again (1 of 3)",
        "engine ended with signal SIGKILL and is started again (1 of 3)",
        "trainer 1 ended with signal SIGKILL and is started again (1 of 1)",
    ]
    newest = max(mended.run.glob("logs/attempt-*"), key=lambda p: int(p.name.split("-")[1]))
    log = (newest / "engine.log").read_text()
    assert "the vLLM server of engine 0 ended with status 137" in log
    assert re.search(r"runner-0-0-\w+ ended with status 137", log)


def test_a_rank_that_dies_once_too_often_ends_the_run_by_its_name(mended: Attempt):
    assert mended.status == 137
    assert "trainer 1 ended with signal SIGKILL after 1 restart; the last lines" in mended.output
    assert mended.seconds < 30
    assert mended.left(5.0) == []


def test_no_version_was_used_twice(journal: list[Record]):
    versions = [record.version for record in journal if isinstance(record, PublishBegin)]
    assert versions == [*range(1, len(versions) + 1)]


def test_every_group_is_in_one_plan_and_every_step_has_one(journal: list[Record]):
    plans = [record for record in journal if isinstance(record, Plan)]
    assert [plan.step for plan in plans] == [*range(1, len(plans) + 1)]
    planned = Counter(group for plan in plans for group in plan.groups)
    assert set(planned.values()) == {1}
    assert all(len(plan.groups) == GROUPS for plan in plans)


def test_replayed_steps_come_out_as_they_did(mended: Attempt):
    # The same groups into the same weights: whatever was trained twice shows in the numbers.
    seen = defaultdict(list)
    for row in mended.rows:
        seen[row["step"]].append(row)
    replayed = [rows for rows in seen.values() if len(rows) > 1]
    assert len(replayed) >= 3
    for first, *others in replayed:
        for name in ("reward/mean", "loss/policy", "grad_norm", "mismatch/kl", "entropy"):
            assert [r[name] for r in others] == pytest.approx([first[name]] * len(others), abs=1e-5)


def test_no_trained_token_is_older_than_one_step(journal: list[Record], mended: Attempt):
    steps: dict[int, int] = {}
    groups: dict[int, Group] = {}
    lags: Counter[int] = Counter()
    for record in journal:
        match record:
            case PublishBegin():
                steps[record.version] = record.step
            case Group() if record.task == TRAIN:
                groups[record.group] = record
            case Plan():
                for number in record.groups:
                    lags.update(lags_of(mended.run, groups[number], record.step, steps))
            case _:
                pass
    assert set(lags) == {0, 1}


def lags_of(run: Path, group: Group, step: int, steps: dict[int, int]) -> Iterator[int]:
    """Steps between the weights that sampled each token and those that are trained on it."""
    for row in to_rows(read_group(run, group.where, 0.0)):
        for version in row.versions[row.action_mask].tolist():
            yield step - 1 - steps[version]


def test_every_group_of_all_attempts_verifies(mended: Attempt):
    assert [f for f in verify(mended.run) if f.kind == "problem"] == []


def test_the_gate_refuses_to_start_a_wrong_policy(tmp_path: Path):
    policy = "trainer.policy=tests.e2e.wrong:Temperature"
    attempt = Attempt(tmp_path / "add", "add", *OVERRIDES, policy, "trainer.ranks=1")
    try:
        assert attempt.end().status == 3
        assert attempt.left(5.0) == []
    finally:
        attempt.close()
    assert "start-up gate, check of agreement between μ and π_old" in attempt.output
    assert "the recorded temperature is multiplied by 0.8" in attempt.output
    assert "trainer ended with status 3" in attempt.output
    assert attempt.rows == []
