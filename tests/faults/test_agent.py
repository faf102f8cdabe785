# SPDX-License-Identifier: Apache-2.0
"""Agents that block, hang or raise: each has a bound, a name in the log and a count."""

import re
from pathlib import Path

import pytest

from molt.records import Group
from molt.store.journal import read_journal
from molt.store.run import read_metrics
from tests.faults.conftest import Make
from tests.faults.points import faults

pytestmark = pytest.mark.sampled


def breaks(how: str, root: Path) -> tuple[str, str]:
    arguments = f'{{mark = "{root / "mark"}", how = "{how}"}}'
    return "agent.name=tests.faults.task:Breaks", f"agent.args={arguments}"


def test_an_agent_that_blocks_its_event_loop_is_named_and_ended(make: Make, tmp_path: Path):
    run = make(*breaks("blocks", tmp_path), "agent.block_s=1.5")
    assert run.train().status == 0, run.story
    assert re.search(r'task.py", line \d+ in step', run.logs), run.story
    assert read_metrics(run.path / "metrics.jsonl")[-1]["failures/runner_restarts"] == 1
    run.check()


def test_an_agent_that_never_returns_is_played_again(make: Make, tmp_path: Path):
    run = make(*breaks("waits", tmp_path), "agent.timeout_s=2")
    assert run.train().status == 0, run.story
    assert sum(r.retries for r in read_journal(run.path) if isinstance(r, Group)) == 1
    run.check()


def test_a_tool_that_raises_once_costs_one_retry(make: Make, tmp_path: Path):
    run = make(*breaks("raises", tmp_path))
    assert run.train().status == 0, run.story
    assert sum(r.retries for r in read_journal(run.path) if isinstance(r, Group)) == 1
    run.check()


def test_a_tool_that_always_raises_drops_its_groups_with_the_reason(make: Make):
    run = make("agent.name=tests.faults.task:Broken")
    assert run.train().status == 0, run.story
    failed = [r for r in read_journal(run.path) if isinstance(r, Group) and r.status == "failed"]
    assert failed
    assert all("the tool broke" in r.reason for r in failed)
    run.check()


def test_an_agent_that_cannot_be_repeated_starts_over(make: Make):
    run = make("agent.name=tests.faults.task:Unrepeatable")
    run.train(faults("kill all")["runner: after partial link"])
    assert run.train().status == 0, run.story
    groups = [r for r in read_journal(run.path) if isinstance(r, Group)]
    assert sum(r.dead for r in groups) > 0
    assert all(r.resumed == 0 for r in groups)
    run.check()
