# SPDX-License-Identifier: Apache-2.0
import errno
import os
import threading
from pathlib import Path
from typing import Any

import msgspec
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
from molt.store import journal as journal_module
from molt.store.journal import Journal, read_journal, read_state
from molt.store.run import RunDir
from molt.store.state import State

EPOCH_1 = "journal/00000001.jsonl"


def run(path: Path) -> Path:
    return RunDir.create(path / "run", b"{}").path


def start(path: Path, attempt: int = 1) -> Journal:
    return Journal.start(path, "name", attempt)[0]


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
@given(st.lists(st.integers(0, 3), max_size=2), st.lists(st.lists(records, max_size=4), max_size=3))
def test_replay_gives_what_was_appended(
    tmp_path_factory: pytest.TempPathFactory, before: list[int], appends: list[list[Record]]
) -> None:
    path = run(tmp_path_factory.mktemp("journal"))
    expected: list[Record] = []
    for epoch, count in enumerate(before):  # earlier epochs are folded, so they must make sense
        batch = leases(*range(10 * epoch + 1, 10 * epoch + 1 + count))
        start(path).append(batch)
        expected += batch
    journal = start(path)
    for batch in appends:
        journal.append(batch)
        expected += batch
    read = list(read_journal(path))
    heads = [r for r in read if isinstance(r, Epoch)]
    assert [(h.epoch, h.run) for h in heads] == [(i + 1, "name") for i in range(len(before) + 1)]
    assert [r for r in read if not isinstance(r, Epoch)] == expected


def test_a_tail_torn_at_any_byte_is_cut_and_told(tmp_path: Path) -> None:
    path = run(tmp_path)
    journal = start(path)
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
    start(path).append(leases(1))
    file = path / EPOCH_1
    whole = file.read_bytes()
    for tail in (bytes(100), bytes(60) + b'"group":2}\n'):
        file.write_bytes(whole + tail)
        assert replayed(path) == leases(1)


def test_the_next_epoch_goes_on_behind_a_torn_tail(tmp_path: Path) -> None:
    path = run(tmp_path)
    start(path).append(leases(1, 2))
    file = path / EPOCH_1
    os.truncate(file, file.stat().st_size - 1)
    journal = start(path)
    assert journal.first.epoch == 2
    journal.append(leases(3))
    assert replayed(path) == leases(1, 3)


def test_a_flipped_bit_names_its_line_and_hides_nothing(tmp_path: Path) -> None:
    path = run(tmp_path)
    start(path).append(leases(1, 2))
    file = path / EPOCH_1
    whole = file.read_bytes()
    second = whole.index(b"\n") + 1
    third = whole.index(b"\n", second) + 1
    for position in range(second, len(whole) - 1):  # without the last newline it is a torn tail
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[position] ^= 1 << bit
            file.write_bytes(damaged)
            number = 2 if position < third else 3
            with pytest.raises(StoreError, match=f"{EPOCH_1}:{number} is damaged"):
                list(read_journal(path))


def test_a_damaged_epoch_record_is_never_taken_for_a_torn_tail(tmp_path: Path) -> None:
    path = run(tmp_path)
    start(path)
    file = path / EPOCH_1
    whole = file.read_bytes()
    for size in range(len(whole)):
        file.write_bytes(whole[:size])
        with pytest.raises(StoreError, match=EPOCH_1):
            list(read_journal(path))


def test_a_missing_epoch_file_is_an_error(tmp_path: Path) -> None:
    path = run(tmp_path)
    for _ in range(3):
        start(path)
    (path / "journal/00000002.jsonl").unlink()
    with pytest.raises(StoreError, match=r"lacks 00000002\.jsonl"):
        list(read_journal(path))


def test_a_missing_newest_file_is_an_error_and_not_an_older_run(tmp_path: Path) -> None:
    path = run(tmp_path)
    start(path)
    start(path).compress_previous()
    (path / "journal/00000002.jsonl").unlink()
    for use in (lambda: list(read_journal(path)), lambda: read_state(path), lambda: start(path)):
        with pytest.raises(StoreError, match=r"lacks the file after 00000001\.jsonl\.zst"):
            use()


def test_a_copied_epoch_file_is_an_error(tmp_path: Path) -> None:
    path = run(tmp_path)
    start(path)
    (path / "journal/00000002.jsonl").write_bytes((path / EPOCH_1).read_bytes())
    with pytest.raises(StoreError, match="was it copied"):
        list(read_journal(path))


def test_of_many_starters_at_once_no_two_share_a_number_and_the_last_one_goes_on(
    tmp_path: Path,
) -> None:
    path = run(tmp_path)
    barrier = threading.Barrier(8)
    won: dict[int, Journal] = {}
    lost: list[Fenced] = []

    def begin() -> None:
        barrier.wait()
        try:
            journal = start(path)
            won[journal.first.epoch] = journal
        except Fenced as error:
            lost.append(error)

    threads = [threading.Thread(target=begin) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) + len(lost) == 8  # no number was taken twice
    for epoch, journal in sorted(won.items()):
        if epoch == max(won):
            journal.append(leases(epoch))
        else:
            with pytest.raises(Fenced):
                journal.append(leases(epoch))
    assert replayed(path)[-1:] == leases(max(won))
    assert [r.epoch for r in read_journal(path) if isinstance(r, Epoch)][-1] == max(won)


def test_an_old_coordinator_is_fenced_at_its_next_append_and_changes_nothing(
    tmp_path: Path,
) -> None:
    path = run(tmp_path)
    old = start(path)
    old.append(leases(1))
    new = start(path)
    with pytest.raises(Fenced, match="epoch 2 has begun"):
        old.append(leases(2))
    new.append(leases(3))
    assert replayed(path) == leases(1, 3)
    assert read_state(path).leases.keys() == {1, 3}
    with pytest.raises(StoreError, match="is closed"):
        old.append(leases(4))


def test_whatever_was_answered_before_a_claim_is_inside_the_seal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The old coordinator appends between the new one's claim and its reading: it must not answer,
    # and whether its record exists is for the seal to say.
    path = run(tmp_path)
    old = start(path)
    fenced: list[Fenced] = []
    fold = journal_module._fold

    def late(*args: Any) -> Any:
        monkeypatch.undo()
        try:
            old.append(leases(1))
        except Fenced as error:
            fenced.append(error)
        return fold(*args)

    monkeypatch.setattr(journal_module, "_fold", late)
    _, state = Journal.start(path, "name", 1)
    assert len(fenced) == 1
    assert replayed(path) == leases(1)
    assert state.leases.keys() == {1}


def test_of_two_that_start_together_the_older_one_ends_before_it_touches_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run(tmp_path)
    start(path).append(leases(1))
    fold, late = journal_module._fold, []

    def overtaken(*args: Any) -> Any:  # epoch 3 starts while epoch 2 folds
        monkeypatch.undo()
        late.append(start(path))
        return fold(*args)

    monkeypatch.setattr(journal_module, "_fold", overtaken)
    with pytest.raises(Fenced, match="epoch 3 has begun"):
        start(path)
    (winner,) = late
    winner.append(leases(2))
    assert replayed(path) == leases(1, 2)
    assert [r.epoch for r in read_journal(path) if isinstance(r, Epoch)] == [1, 3]
    start(path).append(leases(3))
    assert replayed(path) == leases(1, 2, 3)


def test_what_a_start_has_read_is_durable_before_it_builds_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run(tmp_path)
    start(path).append(leases(1))
    synced: list[str] = []

    def record(fd: int) -> None:
        synced.append(Path(f"/proc/self/fd/{fd}").readlink().name)

    monkeypatch.setattr(os, "fsync", record)
    start(path)
    seal = next(i for i, name in enumerate(synced) if "00000002.jsonl" in name)
    assert "00000001.jsonl" in synced[:seal]


def test_a_record_that_contradicts_those_before_is_named(tmp_path: Path) -> None:
    path = run(tmp_path)
    start(path).append([LeaseEnd(lease=7, group=7, reason="stopped")])
    with pytest.raises(StoreError, match=f"{EPOCH_1} contradicts itself .lease 7 of group 7"):
        read_state(path)


def test_the_newest_file_holds_the_state_of_everything_before(tmp_path: Path) -> None:
    path = run(tmp_path)
    for n in range(1, 5):
        start(path, attempt=n).append(leases(n))
    folded = State()
    for record in read_journal(path):
        if isinstance(record, Epoch) and record.previous:
            assert msgspec.json.decode(record.state, type=State) == folded
        folded.apply(record)
    for epoch in (1, 2, 3):
        (path / f"journal/{epoch:08d}.jsonl").unlink()
    assert read_state(path) == folded


def test_sealed_files_are_compressed_and_read_as_before(tmp_path: Path) -> None:
    path = run(tmp_path)
    many = leases(*range(1, 20_000))
    start(path).append(many)
    start(path).append(leases(20_000))  # died before it compressed
    journal = start(path)
    size = (path / EPOCH_1).stat().st_size
    journal.compress_previous()
    journal.compress_previous()
    names = sorted(p.name for p in (path / "journal").glob("*.jsonl*"))
    assert names == ["00000001.jsonl.zst", "00000002.jsonl.zst", "00000003.jsonl"]
    assert (path / f"{EPOCH_1}.zst").stat().st_size < size / 3
    assert replayed(path) == [*many, *leases(20_000)]


def test_a_crash_while_compressing_leaves_a_whole_history_and_is_made_up_for(
    tmp_path: Path,
) -> None:
    path = run(tmp_path)
    start(path).append(leases(1))
    start(path)
    file = path / EPOCH_1
    journal_module._compress(file.read_bytes(), file.with_name(f"{file.name}.zst"))  # and dies
    names = sorted(p.name for p in (path / "journal").glob("00000001.jsonl*"))
    assert names == ["00000001.jsonl", "00000001.jsonl.zst"]
    assert replayed(path) == leases(1)
    start(path).compress_previous()
    assert sorted(p.name for p in (path / "journal").glob("*.jsonl*")) == [
        "00000001.jsonl.zst",
        "00000002.jsonl.zst",
        "00000003.jsonl",
    ]
    assert replayed(path) == leases(1)


def test_a_cut_or_changed_compressed_file_is_noticed(tmp_path: Path) -> None:
    path = run(tmp_path)
    start(path).append(leases(*range(1, 30_000)))
    start(path).compress_previous()
    file = path / "journal/00000001.jsonl.zst"
    whole = file.read_bytes()
    frames = [i for i in range(len(whole)) if whole.startswith(b"\x28\xb5\x2f\xfd", i)]
    assert len(frames) > 1
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    cuts = (frames[1], frames[1] + 9, frames[-1], len(whole) - 9)
    for damaged in (*(whole[:cut] for cut in cuts), bytes(flipped), b""):
        file.write_bytes(damaged)
        with pytest.raises(StoreError, match=r"00000001\.jsonl\.zst"):
            list(read_journal(path))
    assert read_state(path).leases  # the run itself needs the newest file alone


def test_bytes_behind_a_seal_do_not_exist(tmp_path: Path) -> None:
    path = run(tmp_path)
    start(path).append(leases(1))
    start(path)
    with (path / EPOCH_1).open("ab") as file:
        file.write(b"0123456789abcdef garbage\n")
    assert replayed(path) == leases(1)


def test_a_refused_append_closes_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run(tmp_path)
    journal = start(path)

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
    start(path)
    file = path / EPOCH_1
    data = file.read_bytes()[17:-1].replace(b'"epoch","epoch"', b'"epoch","schema":2,"epoch"')
    import xxhash

    file.write_bytes(b"%016x %b\n" % (xxhash.xxh3_64_intdigest(data), data))
    with pytest.raises(StoreError, match="newer Molt"):
        list(read_journal(path))


def test_reading_while_writing_sees_whole_records(tmp_path: Path) -> None:
    path = run(tmp_path)
    journal = start(path)
    for n in range(1, 4):
        journal.append(leases(n))
        assert replayed(path) == leases(*range(1, n + 1))
