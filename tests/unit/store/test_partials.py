# SPDX-License-Identifier: Apache-2.0
"""Parts of unfinished sessions: what is read back is what was sampled, in the order it was."""

import dataclasses
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from molt.records import Sampling, StoreError
from molt.store import partials
from molt.store.partials import Origin, Part, PartialWriter, groups_of, read_partials, read_parts


def part(*token_ids: int, after: Part | None = None, goes_on: bool = False, **changes: int) -> Part:
    """A node below `after` (None: a root), or with `goes_on` the next part of that node."""
    place = {"node": 0, "parent": -1, "part": 0}
    if after and goes_on:
        place = {"node": after.node, "parent": after.parent, "part": after.part + 1}
    elif after:
        place = {"node": after.node + 1, "parent": after.node, "part": 0}
    return Part(
        **(place | changes),
        follows=after.hash if after else 0,
        context=np.array([] if goes_on else [1, 2], np.int32),
        token_ids=np.array(token_ids, np.int32),
        logprobs=-np.array(token_ids, np.float32),
        version_spans=np.array([[len(token_ids), 7]], np.int64),
        sampling=Sampling(temperature=0.7, max_tokens=99, stop=("é",)),
        finish_reason="stop",
    )


def write(run: Path, name: str, *rows: tuple[Origin, Part]) -> str:
    writer = PartialWriter(run, name)
    for origin, row in rows:
        writer.add(origin, row)
    writer.flush()
    return f"partials/{name}/00000000.arrow"


def under(lease: int, *parts: Part, attempt: int = 0) -> list[tuple[Origin, Part]]:
    return [(Origin(3, lease, 0, attempt), p) for p in parts]


def session(run: Path, *paths: str) -> list[list[list[int]]]:
    """The tokens of rollout 0 of group 3: nodes of parts."""
    nodes = read_partials(run, paths, 3).get(0, [])
    return [[p.token_ids.tolist() for p in node.parts] for node in nodes]


def test_a_part_comes_back_as_it_was(tmp_path: Path):
    written = part(5, 6)
    path = write(tmp_path, "w", (Origin(3, 1, 0, 2), written), (Origin(4, 9, 1, 0), part(8)))
    ((origin, read), _) = read_parts(tmp_path, path)
    assert origin == Origin(3, 1, 0, 2)
    for field in dataclasses.fields(Part):
        assert np.array_equal(getattr(read, field.name), getattr(written, field.name)), field.name
    assert groups_of(tmp_path, path) == [3, 4]
    (node,) = read_partials(tmp_path, [path], 3)[0]
    assert (node.attempt, node.version_min) == (2, 7)


def test_a_flipped_bit_or_a_cut_is_never_resumed_from(tmp_path: Path):
    name = write(tmp_path, "w", *under(1, part(5, 6, 7)))
    whole, path = (tmp_path / name).read_bytes(), tmp_path / name
    for position in range(0, len(whole), 7):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        assert session(tmp_path, name) in ([], [[[5, 6, 7]]])  # padding holds nothing
    for size in range(0, len(whole), 11):
        path.write_bytes(whole[:size])
        assert session(tmp_path, name) == []


def test_what_is_no_file_of_parts_is_named(tmp_path: Path):
    empty, other = tmp_path / "empty.arrow", tmp_path / "other.arrow"
    for path, schema in ((empty, partials.SCHEMA), (other, pa.schema([("group", pa.int64())]))):
        with pa.ipc.new_file(str(path), schema):
            pass  # where a bit of a footer is flipped, the batch may be gone
    with pytest.raises(StoreError, match=r"cannot read .*empty.arrow"):
        groups_of(tmp_path, "empty.arrow")
    with pytest.raises(StoreError, match=r"other.arrow has other columns"):
        groups_of(tmp_path, "other.arrow")


def test_a_file_that_is_gone_takes_with_it_only_what_follows_it(tmp_path: Path, caplog):
    first = part(5)
    second = part(6, after=first)
    third, other = part(7, after=second), part(8, after=first, node=3)
    names = [
        write(tmp_path, f"w{i}", *under(1, p)) for i, p in enumerate((first, second, third, other))
    ]
    assert session(tmp_path, *names) == [[[5]], [[6]], [[7]], [[8]]]
    (tmp_path / names[1]).unlink()
    assert session(tmp_path, *names) == [[[5]], [[8]]]
    assert "not resumed: cannot read" in caplog.text and names[1] in caplog.text


def test_a_part_goes_on_only_what_it_was_sampled_after(tmp_path: Path):
    # Lease 2 began anew, since it could not read what lease 1 had; then its own file is damaged.
    old, new = part(5), part(6)
    theirs = write(tmp_path, "old", *under(1, old))
    lost = write(tmp_path, "lost", *under(2, new))
    tail = write(tmp_path, "tail", *under(2, part(7, after=new, goes_on=True)))
    assert session(tmp_path, theirs, lost, tail) == [[[6], [7]]]
    (tmp_path / lost).unlink()
    assert session(tmp_path, theirs, lost, tail) == [[[5]]]


def test_what_a_zombie_wrote_after_its_lease_gives_way_to_the_next_lease(tmp_path: Path):
    first = part(5)
    known = write(tmp_path, "known", *under(1, first))
    zombie = part(6, after=first, goes_on=True)
    late = write(tmp_path, "late", *under(1, zombie, part(7, after=zombie)))
    heir = part(8, after=first, goes_on=True)
    assert session(tmp_path, known, late) == [[[5], [6]], [[7]]]
    next_ = write(tmp_path, "next", *under(2, heir, part(9, after=heir)))
    assert session(tmp_path, known, next_, late) == [[[5], [8]], [[9]]]


def test_the_attempt_of_the_newest_lease_is_resumed(tmp_path: Path):
    failed = write(tmp_path, "failed", *under(1, part(5)), *under(1, part(6), attempt=1))
    assert session(tmp_path, failed) == [[[6]]]
    anew = write(tmp_path, "anew", *under(2, part(7)))  # it knew nothing of them
    assert session(tmp_path, failed, anew) == [[[7]]]


def test_files_go_when_the_last_group_in_them_is_finished(tmp_path: Path):
    writer = PartialWriter(tmp_path, "w")
    writer.add(Origin(1, 1, 0, 0), part(5))
    writer.add(Origin(2, 2, 0, 0), part(5, 6))
    assert writer.flush() == 3
    writer.add(Origin(3, 3, 0, 0), part(5))
    writer.forget(3)
    assert writer.flush() == 0  # nobody needs it any more
    writer.forget(1)
    assert len(list(tmp_path.glob("partials/w/*"))) == 1
    writer.drop(2)  # finished, and not announced yet
    assert len(list(tmp_path.glob("partials/w/*"))) == 1
    writer.forget(2)
    assert list(tmp_path.glob("partials/w/*")) == []


def test_what_happens_during_a_flush_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    writer = PartialWriter(tmp_path, "w")
    batch = partials._batch

    def meanwhile(held):
        monkeypatch.undo()
        writer.add(Origin(2, 2, 0, 0), part(6))
        writer.forget(1)
        return batch(held)

    writer.add(Origin(1, 1, 0, 0), part(5))
    monkeypatch.setattr(partials, "_batch", meanwhile)
    writer.flush()
    assert list(tmp_path.glob("partials/w/*")) == []  # group 1 needs none
    assert writer.flush() == 1
    assert [o.group for o, _ in read_parts(tmp_path, "partials/w/00000001.arrow")] == [2]


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    writer = PartialWriter(tmp_path, "w")
    writer.add(Origin(3, 1, 0, 0), part(5))

    def refuse(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", refuse)
        with pytest.raises(StoreError, match="No space left"):
            writer.flush()
    assert list(tmp_path.glob("partials/w/*")) == []
    assert writer.flush() == 1
    assert session(tmp_path, "partials/w/00000001.arrow") == [[[5]]]


def test_a_name_is_never_used_again(tmp_path: Path):
    PartialWriter(tmp_path, "w")
    with pytest.raises(StoreError, match="every start of a writer needs a new name"):
        PartialWriter(tmp_path, "w")
