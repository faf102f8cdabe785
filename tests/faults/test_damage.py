# SPDX-License-Identifier: Apache-2.0
"""Files that were cut, flipped, deleted or never belonged here.

What can be produced again is; anything else is refused with one line, and nothing is touched. All
tests start from copies of one run that was killed after it told of the checkpoint of step 4: plan 5
is trained, since checkpoints are written beside the next step, and groups are ready and under way.
"""

import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash

from molt.records import Group, Void
from molt.store.journal import read_journal, read_state
from molt.store.verify import verify
from tests.faults.conftest import SEED, Make
from tests.faults.harness import Run
from tests.faults.inject import Fault
from tests.faults.points import CALL

MESSAGE = 8  # bytes: Arrow aligns its messages so


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """The run that is copied."""
    run = Run(tmp_path_factory.mktemp("killed"))
    try:
        run.train(Fault("trainer", CALL, "kill all", "after", "^/checkpoint ", nth=2))
        yield run
    finally:
        run.close()


@pytest.fixture
def copy(killed: Run, make: Make) -> Run:
    """A run of the test's own."""
    run = make(f"model.path={killed.root / 'model'}")
    shutil.copytree(killed.path, run.path)
    return run


def flip(path: Path, at: int | None = None) -> None:
    """Flip a bit."""
    data = bytearray(path.read_bytes())
    draw = random.Random(f"{SEED} {path.name}")
    data[draw.randrange(len(data)) if at is None else at] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def cut(path: Path, to: int) -> None:
    """Shorten a file."""
    path.write_bytes(path.read_bytes()[:to])


def needed(run: Path) -> list[Group]:
    """The groups of the plans that are trained again."""
    state = read_state(run)
    return [state.planned[g] for step in sorted(state.plans) if step > 4
            for g in state.plans[step].groups]  # fmt: skip


def content(run: Path) -> dict[str, str]:
    """Hashes of everything but what an attempt logs."""
    files = [p for p in run.rglob("*") if p.is_file() and "logs" not in p.relative_to(run).parts]
    return {str(p): xxhash.xxh3_64_hexdigest(p.read_bytes()) for p in files}


def refused(run: Run, pattern: str) -> None:
    """The command ends with one line, and the directory is what it was."""
    before = content(run.path)
    ended = run.train()
    assert ended.status in (2, 3), run.story
    lines = [line for line in ended.output.splitlines() if re.search(pattern, line)]
    assert lines, run.story
    assert "Traceback" not in ended.output, run.story
    claims = {p for p in content(run.path) if p.endswith(".claim")}
    assert content(run.path).keys() - claims == before.keys() - claims, run.story
    assert content(run.path).items() >= before.items(), run.story


# ---------------------------------------------------------------- produced again


@pytest.mark.sampled
@pytest.mark.parametrize("how", ["flip 0", "flip 1", "flip 2", "cut 0", "cut 1", "cut 2", "gone"])
def test_a_shard_that_a_plan_needs_is_produced_again(how: str, copy: Run):
    group = needed(copy.path)[0]
    path = copy.path / group.where.path
    kind, _, _ = how.partition(" ")
    draw = random.Random(f"{SEED} {how}")
    if kind == "gone":
        path.unlink()
    elif kind == "flip":
        flip(path, group.where.offset + draw.randrange(group.where.length))
    else:
        end = (group.where.offset + group.where.length) // MESSAGE
        cut(path, MESSAGE * draw.randrange(end))
    copy.finish()
    voids = [r for r in read_journal(copy.path) if isinstance(r, Void)]
    assert voids and min(v.step for v in voids) == 5, copy.story  # other groups may lie in it
    assert group.group in voids[0].groups
    copy.check()


@pytest.mark.sampled
@pytest.mark.parametrize("how", ["half a line", "zeros", "half a line and zeros"])
def test_a_torn_tail_of_the_journal_does_not_exist(how: str, copy: Run):
    (path,) = (copy.path / "journal").glob("*.jsonl")
    tail = {"half a line": b'0123456789abcdef {"type":"le', "zeros": bytes(512)}
    with path.open("ab") as file:
        file.write(tail.get(how, tail["half a line"] + tail["zeros"]))
    copy.finish()
    copy.check()


@pytest.mark.sampled
@pytest.mark.parametrize("how", ["flip", "cut", "gone", "marker", "no marker"])
def test_a_damaged_checkpoint_is_skipped_with_the_reason(how: str, copy: Run):
    newest = copy.path / "checkpoints/step-000004"
    if how == "flip":
        flip(newest / "policy.pt")
    elif how == "cut":
        cut(newest / "policy.pt", 1000)
    elif how == "gone":
        (newest / "policy.pt").unlink()
    elif how == "marker":
        cut(newest / "complete.json", 20)
    else:
        (newest / "complete.json").unlink()
    copy.finish()
    assert "skipping" in copy.output + copy.logs
    assert "step-000004" in copy.output + copy.logs
    copy.check()


@pytest.mark.sampled
@pytest.mark.parametrize("how", ["flip 0", "flip 1", "cut 0", "cut 1", "gone"])
def test_damaged_partials_are_sampled_again(how: str, copy: Run):
    for path in sorted((copy.path / "partials").glob("*/*.arrow")):
        if how == "gone":
            path.unlink()
        elif how.startswith("flip"):
            flip(path)
        else:
            cut(path, MESSAGE * random.Random(how).randrange(path.stat().st_size // MESSAGE))
    copy.finish()
    copy.check()


def test_a_shard_that_nobody_needs_any_more_is_named_by_verify(copy: Run):
    groups = [r for r in read_journal(copy.path) if isinstance(r, Group)]
    needs = {g.where.path for g in needed(copy.path)} | {
        g.where.path for g in read_state(copy.path).ready.values()
    }
    group = next(g for g in groups if g.where.path not in needs)
    flip(copy.path / group.where.path, group.where.offset + group.where.length // 2)
    copy.finish()
    problems = [f.text for f in verify(copy.path) if f.kind == "problem"]
    assert len(problems) >= 1
    assert all(group.where.path in p for p in problems), problems


def test_a_sealed_journal_that_was_changed_is_named_by_verify(copy: Run):
    copy.finish()
    sealed = copy.path / "journal/00000001.jsonl.zst"
    flip(sealed, sealed.stat().st_size // 2)
    problems = [f.text for f in verify(copy.path) if f.kind == "problem"]
    assert len(problems) == 1
    assert sealed.name in problems[0]


# ---------------------------------------------------------------- refused


@pytest.mark.sampled
@pytest.mark.parametrize("where", [0.02, 0.3, 0.6, 0.95])
def test_a_journal_with_a_damaged_middle_is_refused(where: float, copy: Run):
    (path,) = (copy.path / "journal").glob("*.jsonl")
    whole = path.read_bytes()
    flip(path, int(where * len(whole)))
    refused(copy, r"is damaged|does not know")
    path.write_bytes(whole)
    copy.finish()
    copy.check()


def test_without_any_checkpoint_that_can_be_read_the_run_is_refused(copy: Run):
    for path in (copy.path / "checkpoints").glob("*/policy.pt"):
        flip(path)
    before = content(copy.path)
    ended = copy.train()
    assert ended.status == 3, copy.story
    assert "restore one from a backup" in ended.output, copy.story
    after = content(copy.path)
    assert {p: h for p, h in after.items() if "checkpoints" in p} == {
        p: h for p, h in before.items() if "checkpoints" in p
    }


def test_a_newer_schema_is_refused(copy: Run):
    (path,) = (copy.path / "journal").glob("*.jsonl")
    first, _, rest = path.read_bytes().partition(b"\n")
    record = first[17:].replace(b'"run":', b'"schema":99,"run":')
    line = b"%016x %b\n" % (xxhash.xxh3_64_intdigest(record), record)
    path.write_bytes(line + rest)
    refused(copy, "newer Molt")


def test_a_missing_epoch_file_is_refused(copy: Run):
    copy.finish()
    newest = max((copy.path / "journal").glob("*.jsonl"))
    newest.unlink()
    before = content(copy.path)
    ended = copy.train(overrides=["trainer.steps=8"])
    assert ended.status in (2, 3), copy.story
    assert re.search("restore it from a backup", ended.output), copy.story
    assert content(copy.path).items() >= before.items()


def test_the_directory_of_another_project_is_refused(make: Make):
    run = make()
    run.path.mkdir()
    (run.path / "config.json").write_text('{"model_type": "llama"}')
    refused(run, "is not a run directory")


def test_a_directory_with_other_files_is_refused(make: Make):
    run = make()
    run.path.mkdir()
    (run.path / "thesis.tex").write_text("years of work")
    refused(run, "thesis.tex")


def test_two_commands_on_one_directory_do_not_meet(make: Make):
    run = make()
    run.start().until(lambda: list(run.path.glob("logs/attempt-1/address")))
    second = make(f"model.path={run.root / 'model'}", path=run.path)
    ended = second.train(alone=False)
    assert ended.status == 2
    assert "another molt train works on" in ended.output
    assert run.end().status == 0, run.story
    run.check()


@pytest.mark.parametrize(
    ("override", "name"),
    [("trainer.groups=2", "trainer.groups"), ("run.seed=3", "run.seed"),
     ("sampling.num_samples=4", "sampling.num_samples")],
)  # fmt: skip
def test_another_config_that_would_change_what_groups_mean_is_refused(
    override: str, name: str, copy: Run
):
    before = content(copy.path)
    ended = copy.train(overrides=[override])
    assert ended.status == 2, copy.story
    assert name in ended.output
    assert content(copy.path) == before


def test_another_config_that_does_not_is_journalled(copy: Run):
    copy.finish(overrides=["optim.lr=0.1"])
    assert "changed: optim.lr = 0.1, was 0.2" in copy.output
