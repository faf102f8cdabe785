# SPDX-License-Identifier: Apache-2.0
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest

import molt.store
from molt.records import ConfigError, Group, Sampling, Segment, Where
from molt.store.journal import Journal, read_journal
from molt.store.run import RunDir
from molt.store.schema import SCHEMA, SegmentRow
from molt.store.shards import ShardWriter, to_batch
from molt.store.verify import verify


def row(group: int) -> SegmentRow:
    """Two tokens of context and one sampled by version 4."""
    return SegmentRow(
        run="r",
        prompt=7,
        group=group,
        rollout=0,
        token_ids=np.array([1, 2, 3], np.int32),
        action_spans=np.array([[2, 3]], np.int32),
        behavior_logprobs=np.array([np.nan, np.nan, -1], np.float32),
        version_spans=np.array([[3, 4]]),
        sampling=(Sampling(),),
        reward=0.5,
    )


def record(group: int, where: Where, **wrong: Any) -> Group:
    right = Group(
        lease=group,
        group=group,
        prompt=7,
        where=where,
        rewards=(0.5,),
        segments=(Segment(rollout=0, tokens=3, actions=1),),
        version_min=4,
        version_max=4,
    )
    return msgspec.structs.replace(right, **wrong)


def run(path: Path, **wrong: Any) -> Path:
    """A run of two groups in one shard; the journal is wrong about the second."""
    directory = RunDir.create(path / "run", b"{}").path
    writer = ShardWriter(directory, "w")
    for number in (1, 2):
        writer.add(to_batch([row(number)]))
    first, second = writer.publish()
    Journal.start(directory, "r").append([record(1, first), record(2, second, **wrong)])
    return directory


def test_a_whole_run_has_no_problems(tmp_path: Path) -> None:
    assert list(verify(run(tmp_path))) == []


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"rewards": (1.0,)}, "rewards"),
        ({"rewards": (0.5, 0.5)}, "rewards"),
        ({"segments": (Segment(rollout=0, tokens=3, actions=2),)}, "segments"),
        ({"version_min": 3}, "version_min"),
        ({"prompt": 8}, "prompt"),
        ({"task": "greedy"}, "task"),
    ],
)
def test_a_record_that_differs_from_its_shard_is_named(
    tmp_path: Path, wrong: dict[str, Any], field: str
) -> None:
    (problem,) = verify(run(tmp_path, **wrong))
    assert problem.startswith(f"group 2: {field} is ")


def test_each_damaged_group_is_named_and_the_others_are_still_checked(tmp_path: Path) -> None:
    path = run(tmp_path, version_max=5)
    with (path / "shards/w/00000000.arrow").open("r+b") as file:
        where = next(r.where for r in read_journal(path) if isinstance(r, Group))
        os.pwrite(file.fileno(), b"\xff\xff", where.offset + where.length // 2)
    first, second = verify(path)
    assert "group 1: " in first
    assert "changed or cut" in first
    assert second.startswith("group 2: version_max is 5")


def test_a_damaged_journal_is_a_problem(tmp_path: Path) -> None:
    path = run(tmp_path)
    with (path / "journal/00000001.jsonl").open("r+b") as file:
        file.write(b"x")
    (problem,) = verify(path)
    assert "00000001.jsonl:1 is damaged" in problem


def test_read_gives_one_table_of_all_groups(tmp_path: Path) -> None:
    table = molt.store.read(run(tmp_path))
    assert table.schema.names == SCHEMA.names
    assert table["group"].to_pylist() == [1, 2]
    assert table["token_ids"].to_pylist() == [[1, 2, 3]] * 2


def test_read_of_a_run_without_groups_is_an_empty_table(tmp_path: Path) -> None:
    directory = RunDir.create(tmp_path / "run", b"{}")
    assert molt.store.read(directory.path).schema.equals(SCHEMA)


def test_read_of_something_else_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run directory"):
        molt.store.read(tmp_path)


def test_a_column_that_older_shards_lack_is_null_in_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run(tmp_path)
    batch = to_batch([row(3)]).append_column("colour", pa.array(["red"]))
    monkeypatch.setattr("molt.store.shards.SCHEMA", batch.schema)
    writer = ShardWriter(path, "newer")
    writer.add(batch)
    (where,) = writer.publish()
    monkeypatch.undo()
    Journal.start(path, "r").append([record(3, where)])
    assert molt.store.read(path)["colour"].to_pylist() == [None, None, "red"]
