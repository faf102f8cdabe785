# SPDX-License-Identifier: Apache-2.0
"""Filesystems that are full, fail, lie about what they did, or show names late."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.conftest import Make
from tests.faults.inject import Fault, struck

PLACES = {
    "shard": ("runner", r"/shards/[^/]+/\."),
    "shard directory": ("runner", r"/shards/[^/.]+$"),
    "partial": ("runner", r"/partials/[^/]+/\."),
    "journal": ("coordinator", r"/journal/\d+\.jsonl$"),
    "epoch": ("coordinator", r"/journal/\.\d+\.jsonl"),
    "marker": ("trainer", r"/\.complete\.json"),
    "checkpoint": ("trainer", r"/policy\.pt"),
}
CALLS = {"fsync": ("os:fsync", "before"), "close": ("molt.store.files:open", "close"),
         "link": ("os:link", "after")}  # fmt: skip
FAULTS = {
    f"{code} at {call} of {place}": Fault(role, *CALLS[call][:1], code, CALLS[call][1], about, 2)
    for place, (role, about) in PLACES.items()
    for call, code in (("fsync", "EIO"), ("fsync", "EDQUOT"), ("close", "EIO"), ("link", "EIO"))
    if not (call == "close" and place in ("shard directory", "journal", "checkpoint"))
    if not (call == "link" and place in ("shard directory", "journal", "checkpoint"))
}
pytestmark = pytest.mark.sampled
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")


@pytest.mark.parametrize("name", FAULTS)
def test_a_filesystem_that_fails_once_costs_at_most_a_restart(name: str, make: Make):
    run = make("checkpoint.every=1")
    fault = FAULTS[name]
    if fault.about == PLACES["epoch"][1]:
        fault = Fault(**{**vars(fault), "nth": 1})
    ended = run.train(fault)
    assert struck(run.faults), f"never came to this point\n{run.story}"
    if ended.status:
        assert ended.status == 3, run.story
        assert "Input/output error" in ended.output or "quota" in ended.output, run.story
        run.finish()
    run.check()


@pytest.mark.parametrize("times", [3, 6])
def test_a_runner_asks_a_filesystem_that_refuses_again(times: int, make: Make):
    run = make()
    fault = Fault("runner", "os:fsync", "EDQUOT", about=PLACES["shard"][1], nth=2, times=times)
    assert run.train(fault).status == 0, run.story
    assert "nothing is lost" in run.logs
    run.check()


@pytest.fixture
def mounted() -> Iterator[list[Path]]:
    """Mount points that are unmounted behind the test."""
    points: list[Path] = []
    try:
        yield points
    finally:
        for point in reversed(points):
            subprocess.run(["umount", "-l", str(point)], check=False)


@needs_root
@pytest.mark.parametrize("left_kib", [48, 160, 320])
def test_a_full_disk_loses_nothing(left_kib: int, make: Make, tmp_path: Path, mounted: list[Path]):
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1M", "tmpfs", str(small)], check=True)
    mounted.append(small)
    filler = small / "filler"
    filler.write_bytes(bytes((1024 - left_kib) << 10))
    run = make("trainer.steps=24", path=small / "run")
    run.start().until(lambda: "No space left" in run.output + run.logs or run.ended)
    filler.unlink()
    ended = run.end()
    assert ended.status in (0, 3), run.story
    if ended.status:
        assert "No space left" in ended.output, run.story
        run.finish(overrides=["checkpoint.keep=1"])
    run.check(steps=24)


@needs_root
@pytest.mark.skipif(shutil.which("bindfs") is None, reason="bindfs is not installed")
@pytest.mark.parametrize("roles", [("trainer",), ("coordinator", "trainer", "runner")])
def test_names_that_are_seen_late_cost_no_time(
    roles: tuple[str, ...], make: Make, tmp_path: Path, mounted: list[Path]
):
    options = "negative_timeout=120,entry_timeout=120,attr_timeout=120"
    real = tmp_path / "real"
    real.mkdir()
    faults = []
    for role in roles:
        view = tmp_path / role
        view.mkdir()
        subprocess.run(["bindfs", "-o", options, str(real), str(view)], check=True)
        mounted.append(view)
        faults.append(Fault(role, "molt.launch.role:run_role", f"mount {view / 'run'}"))
    run = make(path=real / "run")
    assert run.train(*faults).status == 0, run.story
    assert len(struck(run.faults)) == len(roles)
    run.check()
