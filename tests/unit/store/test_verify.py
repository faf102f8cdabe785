# SPDX-License-Identifier: Apache-2.0
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
import xxhash

import molt.store
from molt.records import (
    Checkpoint,
    ConfigError,
    Epoch,
    Group,
    Lease,
    Plan,
    Record,
    Retire,
    Sampling,
    Segment,
    Void,
    Where,
)
from molt.store import journal as journal_module
from molt.store.journal import Journal, read_journal
from molt.store.partials import Origin, Part, PartialWriter
from molt.store.run import RunDir, append_metrics
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


def append(path: Path, *records: Record) -> None:
    """What a new coordinator does before it ends."""
    journal, _ = Journal.start(path, "r", 1)
    journal.append(records)
    journal.compress_previous()
    journal.close()


def lease(number: int) -> Lease:
    return Lease(lease=number, group=number, prompt=7, runner="w")


def run(path: Path, **wrong: Any) -> Path:
    """A run of two groups in one shard; the journal is wrong about the second."""
    directory = RunDir.create(path / "run", b"{}").path
    writer = ShardWriter(directory, "w")
    for number in (1, 2):
        writer.add(to_batch([row(number)]))
    first, second = writer.publish()
    append(directory, lease(1), lease(2), record(1, first), record(2, second, **wrong))
    return directory


def checkpoint(path: Path, step: int, told: bool = True) -> Path:
    """A complete checkpoint of one file, and its record."""
    directory = RunDir(path).checkpoint(step)
    (directory / "model").mkdir(parents=True)
    (directory / "model/data").write_bytes(b"weights")
    files = {"model/data": (7, xxhash.xxh3_128_hexdigest(b"weights"))}
    (directory / "complete.json").write_text(json.dumps({"step": step, "files": files}))
    if told:
        append(path, Checkpoint(step=step, path="", version=1, oldest=step))
    return directory


def problems(path: Path) -> list[str]:
    return [text for kind, text in verify(path) if kind == "problem"]


def leftovers(path: Path) -> list[str]:
    return [text for kind, text in verify(path) if kind == "leftover"]


def test_a_whole_run_has_neither_problems_nor_leftovers(tmp_path: Path) -> None:
    path = run(tmp_path)
    checkpoint(path, 5)
    append_metrics(path / "metrics.jsonl", {"step": 1})
    assert [tuple(finding) for finding in verify(path)] == [
        ("checked", "journal: 2 epochs, 7 records"),
        ("checked", "groups: 2 in 1 shards"),
        ("checked", "partials: 0 sampled tokens in 0 files"),
        ("checked", "checkpoints: 1, 0.0 MiB"),
        ("checked", "metrics: 1 lines"),
    ]


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
    (problem,) = problems(run(tmp_path, **wrong))
    assert problem.startswith(f"group 2: {field} is ")


def test_each_damaged_group_is_named_and_the_others_are_still_checked(tmp_path: Path) -> None:
    path = run(tmp_path, version_max=5)
    damage(path)
    first, second = problems(path)
    assert "group 1: " in first
    assert "changed or cut" in first
    assert second.startswith("group 2: version_max is 5")


def damage(path: Path) -> None:
    """Change the bytes of group 1."""
    with (path / "shards/w/00000000.arrow").open("r+b") as file:
        where = next(r.where for r in read_journal(path) if isinstance(r, Group))
        os.pwrite(file.fileno(), b"\xff\xff", where.offset + where.length // 2)


def test_a_damaged_group_that_was_produced_again_is_a_leftover(tmp_path: Path) -> None:
    path = run(tmp_path)
    damage(path)
    append(path, Plan(step=1, groups=(1, 2)), Void(step=1, groups=(1,), reason="changed"))
    assert not problems(path)
    (leftover,) = leftovers(path)
    assert leftover.startswith("group 1: ")
    assert leftover.endswith("(produced again)")


def test_a_retired_shard_may_be_gone(tmp_path: Path) -> None:
    path = run(tmp_path)
    append(path, Retire(paths=("shards/w/00000000.arrow",)))
    assert leftovers(path) == ["shards/w/00000000.arrow: retired and not yet deleted"]
    (path / "shards/w/00000000.arrow").unlink()
    assert [f.kind for f in verify(path)] == ["checked"] * 5


def test_a_deleted_shard_is_a_problem(tmp_path: Path) -> None:
    path = run(tmp_path)
    (path / "shards/w/00000000.arrow").unlink()
    assert [p.split(":")[0] for p in problems(path)] == ["group 1", "group 2"]


def test_a_damaged_journal_is_a_problem_and_says_no_more_than_it_knows(tmp_path: Path) -> None:
    path = run(tmp_path)
    with (path / "journal/00000001.jsonl").open("r+b") as file:
        file.write(b"x")
    assert ["00000001.jsonl:1 is damaged" in text for text in problems(path)] == [True]
    assert not leftovers(path)  # that a shard was announced is not known


def test_a_state_that_its_history_does_not_lead_to_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run(tmp_path)
    fold = journal_module._fold

    def wrong(*args: Any) -> Any:
        state, content = fold(*args)
        state.next_lease += 1
        return state, content

    monkeypatch.setattr(journal_module, "_fold", wrong)
    append(path)
    monkeypatch.undo()
    append(path)
    (problem,) = problems(path)
    assert problem.startswith("epoch 2 starts from another state than epoch 1 ended in (next_lease")


def part(tokens: int) -> Part:
    return Part(
        node=0,
        parent=-1,
        part=0,
        context=np.array([1], np.int32),
        token_ids=np.arange(tokens, dtype=np.int32),
        logprobs=np.zeros(tokens, np.float32),
        version_spans=np.array([[tokens, 1]]),
        sampling=Sampling(),
        finish_reason="",
    )


def test_a_flipped_bit_in_a_partial_is_a_problem(tmp_path: Path) -> None:
    path = run(tmp_path)
    writer = PartialWriter(path, "w")
    writer.add(Origin(group=3, lease=3, rollout=0, attempt=0), part(1000))
    writer.flush()
    assert ("checked", "partials: 1000 sampled tokens in 1 files") in list(verify(path))
    file = path / "partials/w/00000000.arrow"
    data = bytearray(file.read_bytes())
    data[data.index(np.arange(1000, dtype=np.int32).tobytes()) + 400] ^= 4
    file.write_bytes(data)
    (problem,) = problems(path)
    assert "00000000.arrow row 0 is damaged" in problem


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda p: (p / "model/data").write_bytes(b"weightz"), "model/data: 7 bytes with hash"),
        (lambda p: (p / "model/data").write_bytes(b"weight"), "model/data: 6 bytes with hash"),
        (lambda p: (p / "model/data").unlink(), "cannot read"),
        (lambda p: (p / "complete.json").write_text("{"), "complete.json is damaged"),
        (lambda p: (p / "complete.json").unlink(), "is in the journal and not here"),
    ],
)
def test_a_checkpoint_that_is_not_what_its_marker_says_is_a_problem(
    tmp_path: Path, harm: Callable[[Path], object], says: str
) -> None:
    path = run(tmp_path)
    directory = checkpoint(path, 5)
    harm(directory)
    assert says in problems(path)[0]
    assert str(directory) in problems(path)[0]


def test_what_a_crash_leaves_is_told_and_is_no_problem(tmp_path: Path) -> None:
    path = run(tmp_path)
    (path / "checkpoints/step-000003").mkdir()
    (path / "journal/00000002.claim").touch()
    append(path)
    with (path / "journal/00000003.jsonl").open("ab") as file:
        file.write(b"0123456789abcdef {")
    Journal.start(path, "r", 1)
    with (path / "journal/00000004.jsonl").open("ab") as file:
        file.write(b"0123")
    loser = (path / "journal/00000004.jsonl").read_bytes().replace(b'"epoch":4', b'"epoch":2')
    (path / "journal/00000002.jsonl").write_bytes(loser)
    (path / "journal/00000005.claim").touch()
    writer = ShardWriter(path, "x")
    writer.add(to_batch([row(3)]))
    writer.publish()
    (path / "shards/x/.00000001.arrow.0a0a0a0a.tmp").touch()
    (path / "metrics.jsonl").write_bytes(b'{"step":1}\n{"st')
    assert not problems(path)
    assert [text.replace(str(path), "RUN") for text in leftovers(path)] == [
        "RUN/journal/00000004.jsonl:2: cut 4 bytes of an unfinished record",
        "journal/00000002.jsonl: an epoch that lost against another coordinator",
        "journal/00000003.jsonl: 18 bytes behind its seal",
        "journal/00000005.claim: a start that did not come to its epoch",
        "shards/x/00000000.arrow: its groups were not announced, or their leases had ended",
        "checkpoints/step-000003: a checkpoint that was not finished",
        "metrics.jsonl: an unfinished last line",
        "shards/x/.00000001.arrow.0a0a0a0a.tmp: a temporary file",
    ]
    assert [r.epoch for r in read_journal(path) if isinstance(r, Epoch)] == [1, 3, 4]


def test_a_checkpoint_that_went_before_the_journal_heard_of_the_newer_one_is_no_problem(
    tmp_path: Path,
) -> None:
    path = run(tmp_path)
    checkpoint(path, 5)
    newer = checkpoint(path, 7, told=False)
    shutil.rmtree(RunDir(path).checkpoint(5))
    assert not problems(path)
    gone = "checkpoints/step-000005: removed for a newer one that the journal does not know yet"
    assert leftovers(path) == [gone]
    shutil.rmtree(newer)
    assert len(problems(path)) == 1


def test_verifying_something_else_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run directory"):
        list(verify(tmp_path))


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
    append(path, lease(3), record(3, where))
    assert molt.store.read(path)["colour"].to_pylist() == [None, None, "red"]
