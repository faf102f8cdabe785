# SPDX-License-Identifier: Apache-2.0
import errno
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molt.records import (
    Checkpoint,
    Epoch,
    Fenced,
    Group,
    Lease,
    LeaseEnd,
    Plan,
    PublishBegin,
    PublishEnd,
    Record,
    Restore,
    Segment,
    StoreError,
    Where,
)
from molt.store.journal import Journal, read_journal
from molt.store.run import RunDir

EPOCH_1 = "journal/00000001.jsonl"


def run(path: Path) -> Path:
    return RunDir.create(path / "run", b"{}").path


def leases(*numbers: int) -> list[Record]:
    return [Lease(lease=n, group=n, prompt=n) for n in numbers]


def replayed(path: Path) -> list[Record]:
    """All records but the epochs' own."""
    return [r for r in read_journal(path) if not isinstance(r, Epoch)]


ints = st.integers(-(2**63), 2**63 - 1)
texts = st.text(max_size=20)
wheres = st.builds(Where, path=texts, offset=ints, length=ints, hash=texts)
segments = st.builds(Segment, rollout=ints, tokens=ints, actions=ints)
groups = st.builds(
    Group,
    lease=ints,
    group=ints,
    prompt=ints,
    where=wheres,
    task=texts,
    status=st.sampled_from(["ready", "filtered", "failed"]),
    reason=texts,
    rewards=st.lists(st.none() | st.floats(allow_nan=False, allow_infinity=False)).map(tuple),
    segments=st.lists(segments, max_size=3).map(tuple),
)
records = (
    groups
    | st.builds(Lease, lease=ints, group=ints, prompt=ints, runner=texts)
    | st.builds(LeaseEnd, lease=ints, group=ints, reason=texts)
    | st.builds(Plan, step=ints, groups=st.lists(ints, max_size=4).map(tuple))
    | st.builds(PublishBegin, version=ints, step=ints, lineage=ints)
    | st.builds(PublishEnd, version=ints, ok=st.booleans(), reason=texts)
    | st.builds(Checkpoint, step=ints, path=texts, version=ints)
    | st.builds(Restore, step=ints, lineage=ints, version=ints)
)


@settings(max_examples=50)
@given(st.lists(st.lists(st.lists(records, max_size=4), max_size=3), min_size=1, max_size=3))
def test_replay_gives_what_was_appended(
    tmp_path_factory: pytest.TempPathFactory, epochs: list[list[list[Record]]]
) -> None:
    path = run(tmp_path_factory.mktemp("journal"))
    for appends in epochs:
        journal = Journal.start(path, "name")
        for batch in appends:
            journal.append(batch)
        journal.close()
    read = list(read_journal(path))
    heads = [r for r in read if isinstance(r, Epoch)]
    assert [(h.epoch, h.run) for h in heads] == [(i + 1, "name") for i in range(len(epochs))]
    flat = [record for appends in epochs for batch in appends for record in batch]
    assert [r for r in read if not isinstance(r, Epoch)] == flat


def test_a_tail_torn_at_any_byte_is_cut_and_told(tmp_path: Path) -> None:
    path = run(tmp_path)
    journal = Journal.start(path, "name")
    journal.append(leases(1, 2))
    file = path / EPOCH_1
    before = file.stat().st_size
    journal.append(leases(3))
    whole = file.read_bytes()
    for size in range(before, len(whole)):
        file.write_bytes(whole[:size])
        told: list[str] = []
        read = list(read_journal(path, told.append))
        assert read[1:] == leases(1, 2)
        assert len(told) == (size > before)
        assert all(f"{EPOCH_1}:4: cut {size - before} bytes" in line for line in told)
    file.write_bytes(whole)
    assert replayed(path) == leases(1, 2, 3)


def test_a_tail_whose_bytes_were_never_written_is_cut(tmp_path: Path) -> None:
    path = run(tmp_path)
    Journal.start(path, "name").append(leases(1))
    file = path / EPOCH_1
    whole = file.read_bytes()
    for tail in (bytes(100), bytes(60) + b'"group":2}\n'):
        file.write_bytes(whole + tail)
        assert replayed(path) == leases(1)


def test_the_next_epoch_goes_on_behind_a_torn_tail(tmp_path: Path) -> None:
    path = run(tmp_path)
    Journal.start(path, "name").append(leases(1, 2))
    file = path / EPOCH_1
    os.truncate(file, file.stat().st_size - 1)
    journal = Journal.start(path, "name")
    assert journal.epoch == 2
    journal.append(leases(3))
    assert replayed(path) == leases(1, 3)


def test_a_flipped_bit_names_its_line_and_hides_nothing(tmp_path: Path) -> None:
    path = run(tmp_path)
    Journal.start(path, "name").append(leases(1, 2))
    file = path / EPOCH_1
    whole = file.read_bytes()
    start = whole.index(b"\n") + 1
    third = whole.index(b"\n", start) + 1
    for position in range(start, len(whole) - 1):  # without the last newline it is a torn tail
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[position] ^= 1 << bit
            file.write_bytes(damaged)
            number = 2 if position < third else 3
            with pytest.raises(StoreError, match=f"{EPOCH_1}:{number} is damaged"):
                list(read_journal(path))


def test_a_damaged_epoch_record_is_never_taken_for_a_torn_tail(tmp_path: Path) -> None:
    path = run(tmp_path)
    Journal.start(path, "name")
    file = path / EPOCH_1
    whole = file.read_bytes()
    for size in range(len(whole)):
        file.write_bytes(whole[:size])
        with pytest.raises(StoreError, match=EPOCH_1):
            list(read_journal(path))


def test_a_missing_epoch_file_is_an_error(tmp_path: Path) -> None:
    path = run(tmp_path)
    for _ in range(3):
        Journal.start(path, "name")
    (path / "journal/00000002.jsonl").unlink()
    with pytest.raises(StoreError, match=r"lacks 00000002\.jsonl"):
        list(read_journal(path))


def test_a_copied_epoch_file_is_an_error(tmp_path: Path) -> None:
    path = run(tmp_path)
    Journal.start(path, "name")
    (path / "journal/00000002.jsonl").write_bytes((path / EPOCH_1).read_bytes())
    with pytest.raises(StoreError, match="was it copied"):
        list(read_journal(path))


def test_of_many_starters_of_one_epoch_exactly_one_wins(tmp_path: Path) -> None:
    path = run(tmp_path)
    barrier = threading.Barrier(8)
    won: list[int] = []
    lost: list[Fenced] = []

    def start() -> None:
        barrier.wait()
        try:
            won.append(Journal.start(path, "name").epoch)
        except Fenced as error:
            lost.append(error)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # a late starter may see the winner's file and take the next epoch: never the same one
    assert sorted(won) == list(range(1, len(won) + 1))
    assert len(won) + len(lost) == 8
    files = sorted(p.name for p in (path / "journal").iterdir())
    assert files == [f"{epoch:08d}.jsonl" for epoch in sorted(won)]


def test_two_starters_that_saw_the_same_journal_do_not_both_win(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run(tmp_path)
    Journal.start(path, "name").append(leases(1))
    monkeypatch.setattr("molt.store.journal._files", lambda run_dir: {})  # what a stale cache shows
    with pytest.raises(Fenced, match="another coordinator took epoch 1"):
        Journal.start(path, "name")
    monkeypatch.undo()
    assert replayed(path) == leases(1)
    assert [p.name for p in (path / "journal").iterdir()] == ["00000001.jsonl"]


def test_a_refused_append_closes_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run(tmp_path)
    journal = Journal.start(path, "name")

    def refuse(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(StoreError, match="make room"):
        journal.append(leases(1))
    monkeypatch.undo()
    with pytest.raises(StoreError, match="is closed"):
        journal.append(leases(2))
    assert 2 not in [r.lease for r in read_journal(path) if isinstance(r, Lease)]


def test_a_record_of_a_newer_molt_is_named(tmp_path: Path) -> None:
    path = run(tmp_path)
    Journal.start(path, "name")
    file = path / EPOCH_1
    data = file.read_bytes()[17:-1].replace(b'"epoch","epoch"', b'"epoch","schema":2,"epoch"')
    import xxhash

    file.write_bytes(b"%016x %b\n" % (xxhash.xxh3_64_intdigest(data), data))
    with pytest.raises(StoreError, match="newer Molt"):
        list(read_journal(path))


def test_reading_while_writing_sees_whole_records(tmp_path: Path) -> None:
    path = run(tmp_path)
    journal = Journal.start(path, "name")
    for n in range(1, 4):
        journal.append(leases(n))
        assert replayed(path) == leases(*range(1, n + 1))
