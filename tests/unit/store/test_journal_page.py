# SPDX-License-Identifier: Apache-2.0
"""The page about the journal says what the code does."""

import re
from pathlib import Path
from typing import get_args

import msgspec

import molt.store
from molt.records import Checkpoint, Group, Plan, Record, Restore, Retire, Void
from molt.store.state import State

PAGE = Path(molt.store.__file__).with_name("JOURNAL.md").read_text(encoding="utf-8")


def story() -> list[Record]:
    (block,) = re.findall(r"```jsonl\n(.*?)```", PAGE, re.DOTALL)
    lines = [line for line in block.splitlines() if not line.startswith("//")]
    return [msgspec.json.decode(line, type=Record) for line in lines]


def test_every_record_is_explained_and_told_and_no_other():
    tags = {record.__struct_config__.tag for record in get_args(Record)}
    assert set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)) == tags
    assert {record.__struct_config__.tag for record in story()} == tags


def test_the_story_folds_to_the_end_that_is_told():
    state = State()
    for record in story():
        state.apply(record)
    assert state.ready.keys() == {7}
    assert state.leases.keys() == {4, 6}
    assert state.cursor == 8
    assert state.plans == {}  # both are inside the only checkpoint that is kept
    assert (state.step, state.version, state.lineage) == (2, 7, 3)


def test_at_every_moment_every_group_is_in_one_place_and_trained_once():
    state, trained, saved = State(), {}, {}
    dropped: set[int] = set()
    for record in story():
        if isinstance(record, Retire):
            assert record.paths == state.spent
        state.apply(record)
        match record:
            case Group() if record.status != "ready":
                assert record.reason
                dropped.add(record.group)
            case Plan():
                trained[record.step] = record.groups
            case Void():
                del trained[record.step]
            case Checkpoint():
                saved = {s: g for s, g in trained.items() if s <= record.step}
            case Restore():  # what was not saved is forgotten, and its plans come again
                assert {s: state.plans[s].groups for s in trained if s > record.step} == {
                    s: g for s, g in trained.items() if s > record.step
                }
            case _:
                pass
        planned = [g for groups in trained.values() for g in groups]
        places = [*planned, *state.ready, *state.leases, *state.returned, *dropped]
        assert sorted(places) == [*range(state.cursor)]
    assert saved == {1: (0, 1), 2: (3, 5)}
