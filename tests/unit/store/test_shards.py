# SPDX-License-Identifier: Apache-2.0
import errno
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molt.records import Sampling, StoreError, Where
from molt.store.schema import SCHEMA, SegmentRow
from molt.store.shards import ShardWriter, ragged, read_group, to_batch, to_rows


def row(turns: list[tuple[int, int]], versions: tuple[int, ...] = (1,), **more: Any) -> SegmentRow:
    """A segment of turns of (context, sampled) tokens whose values can be told apart."""
    ends = np.cumsum(np.array(turns, np.int32).reshape(-1, 2).ravel()).reshape(-1, 2)
    spans = ends.astype(np.int32)
    n = int(spans[-1, 1]) if turns else 0
    logprobs = np.full(n, np.nan, np.float32)
    for start, end in spans:
        logprobs[start:end] = -np.arange(start, end, dtype=np.float32) / 8
    cuts = np.linspace(0, n, len(versions) + 1).astype(np.int64)[1:] if n else np.empty(0, np.int64)
    return SegmentRow(
        **{
            "run": "r",
            "prompt": 7,
            "group": 3,
            "lease": 11,
            "rollout": 0,
            "token_ids": np.arange(100, 100 + n, dtype=np.int32),
            "action_spans": spans,
            "behavior_logprobs": logprobs,
            "version_spans": np.stack([cuts, np.array(versions[: len(cuts)], np.int64)], axis=1),
            "sampling": (Sampling(temperature=0.5, max_tokens=9),) * len(turns),
            "resumed_tokens": 2,
            **more,
        }
    )


def publish(run: Path, *groups: list[SegmentRow], compression: Any = "none") -> list[Where]:
    writer = ShardWriter(run, "w", compression)
    for rows in groups:
        writer.add(to_batch(rows))
    return writer.publish()


def same(a: SegmentRow, b: SegmentRow) -> bool:
    return all(
        np.array_equal(x, y, equal_nan=x.dtype.kind == "f") and x.dtype == y.dtype
        if isinstance(x, np.ndarray)
        else x == y
        for x, y in ((getattr(a, f.name), getattr(b, f.name)) for f in fields(SegmentRow))
    )


texts = st.text(max_size=8)
counts = st.tuples(st.integers(0, 4), st.integers(1, 4))
rows = st.builds(
    row,
    st.lists(counts, max_size=3),
    versions=st.sampled_from([(1,), (2, 5)]).filter(bool),
    rollout=st.integers(0, 2**31 - 1),
    group=st.integers(-(2**63), 2**63 - 1),
    reward=st.none() | st.floats(allow_nan=False),
    score=st.none() | st.floats(allow_nan=False),
    turn_rewards=st.lists(st.floats(allow_nan=False), max_size=3).map(tuple),
    status=st.sampled_from(["finished", "truncated", "error"]),
    reason=texts,
    messages=texts,
    seconds=st.floats(0, 1e6),
).filter(lambda r: len(r.token_ids) != 1 or len(r.version_spans) == 1)


@settings(max_examples=50, deadline=None)  # a file is synced: what that takes is not ours
@given(st.lists(st.lists(rows, min_size=1, max_size=4), min_size=1, max_size=3), st.booleans())
def test_every_group_reads_back_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, groups: list[list[SegmentRow]], zstd: bool
) -> None:
    run = tmp_path_factory.mktemp("run")
    places = publish(run, *groups, compression="zstd" if zstd else "none")
    for group, where in zip(groups, places, strict=True):
        read = to_rows(read_group(run, where))
        assert len(read) == len(group)
        assert all(map(same, read, group))


def test_log_probabilities_off_the_actions_are_null_on_disk(tmp_path: Path) -> None:
    publish(tmp_path, [row([(2, 1)])])
    file = pa.ipc.open_file(str(tmp_path / "shards/w/00000000.arrow"))
    assert file.read_all()["behavior_logprobs"].to_pylist() == [[None, None, -0.25]]  # −2/8


def test_lists_are_never_null_and_offsets_have_64_bits(tmp_path: Path) -> None:
    (where,) = publish(tmp_path, [row([], status="error", reason="no token")])
    batch = read_group(tmp_path, where)
    assert batch.schema.metadata == {b"molt.schema": b"1"}
    for field in SCHEMA:
        assert batch.column(field.name).null_count == (field.name in ("reward", "score"))
        assert not pa.types.is_list(field.type)


def test_ragged_gives_flat_values_and_offsets(tmp_path: Path) -> None:
    (where,) = publish(tmp_path, [row([(2, 1), (0, 2)]), row([]), row([(1, 1)])])
    batch = read_group(tmp_path, where)
    tokens, offsets = ragged(batch, "token_ids")
    assert tokens.tolist() == [100, 101, 102, 103, 104, 100, 101]
    assert offsets.tolist() == [0, 5, 5, 7]
    spans, offsets = ragged(batch, "action_spans")
    assert spans["start"].tolist() == [2, 3, 1]
    assert spans["end"].tolist() == [3, 5, 2]
    assert offsets.tolist() == [0, 2, 2, 3]
    logprobs, _ = ragged(batch, "behavior_logprobs")
    assert np.isnan(logprobs).tolist() == [True, True, False, False, False, True, False]
    assert logprobs.dtype == np.float32


def test_ragged_respects_a_slice() -> None:
    batch = to_batch([row([(2, 1)]), row([(1, 1)]), row([(0, 1)])]).slice(1, 2)
    tokens, offsets = ragged(batch, "token_ids")
    assert (tokens.tolist(), offsets.tolist()) == ([100, 101, 100], [0, 2, 3])
    spans, offsets = ragged(batch, "action_spans")
    assert (spans["start"].tolist(), offsets.tolist()) == ([1, 0], [0, 1, 2])


def test_tokens_are_not_copied_on_their_way_out(tmp_path: Path) -> None:
    (where,) = publish(tmp_path, [row([(50, 50)])])
    batch = read_group(tmp_path, where)
    column: Any = batch.column("token_ids")
    buffer = np.frombuffer(column.values.buffers()[1], np.int32)
    assert np.shares_memory(ragged(batch, "token_ids")[0], buffer)


# ---------------------------------------------------------------- damage


def test_every_bit_flip_in_a_group_is_caught(tmp_path: Path) -> None:
    (where,) = publish(tmp_path, [row([(1, 2)])])
    path = tmp_path / where.path
    whole = path.read_bytes()
    end = where.offset + where.length
    with path.open("r+b", buffering=0) as file:
        for position in range(where.offset, end):
            for bit in range(8):
                os.pwrite(file.fileno(), bytes([whole[position] ^ 1 << bit]), position)
                with pytest.raises(StoreError, match="changed or cut"):
                    read_group(tmp_path, where)
            os.pwrite(file.fileno(), whole[position : position + 1], position)
    read_group(tmp_path, where)


def test_every_truncation_that_reaches_a_group_is_caught(tmp_path: Path) -> None:
    first, second = publish(tmp_path, [row([(1, 2)])], [row([(2, 1)])])
    path = tmp_path / first.path
    whole = read_group(tmp_path, first)
    for size in range(second.offset + second.length - 1, -1, -1):
        os.truncate(path, size)
        with pytest.raises(StoreError, match="changed or cut"):
            read_group(tmp_path, second)
        if size >= first.offset + first.length:
            assert read_group(tmp_path, first).equals(whole)
        else:
            with pytest.raises(StoreError, match="changed or cut"):
                read_group(tmp_path, first)


def test_a_damaged_schema_is_a_store_error_or_harmless(tmp_path: Path) -> None:
    (where,) = publish(tmp_path, [row([(1, 2)])])
    path = tmp_path / where.path
    whole, group = path.read_bytes(), read_group(tmp_path, where)
    errors = 0
    with path.open("r+b", buffering=0) as file:
        for position in range(8, where.offset, 3):
            os.pwrite(file.fileno(), bytes([whole[position] ^ 0x55]), position)
            try:
                damaged = read_group(tmp_path, where)
            except StoreError:
                errors += 1
            else:
                assert all(damaged.column(f.name).equals(group.column(f.name)) for f in SCHEMA)
            os.pwrite(file.fileno(), whole[position : position + 1], position)
    assert errors


def test_a_wrong_place_is_caught(tmp_path: Path) -> None:
    first, second = publish(tmp_path, [row([(1, 2)])], [row([(2, 1)])])
    wrong = Where(path=first.path, offset=second.offset, length=first.length, hash=first.hash)
    with pytest.raises(StoreError, match=r"00000000\.arrow"):
        read_group(tmp_path, wrong)


# ---------------------------------------------------------------- publishing


def test_the_groups_of_a_shard_lie_where_arrow_says(tmp_path: Path) -> None:
    groups = [[row([(i, 1)], rollout=i)] for i in range(4)]
    places = publish(tmp_path, *groups)
    file = pa.ipc.open_file(str(tmp_path / places[0].path))
    assert file.num_record_batches == 4
    for i, where in enumerate(places):
        assert file.get_batch(i).equals(read_group(tmp_path, where))
    assert all(a.offset + a.length == b.offset for a, b in pairwise(places))


def test_a_name_is_never_reused(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "w")
    assert writer.publish() == []
    names: list[str] = []
    for _ in range(3):
        writer.add(to_batch([row([(1, 1)])]))
        names += [where.path for where in writer.publish()]
    assert names == [f"shards/w/{i:08d}.arrow" for i in range(3)]
    with pytest.raises(StoreError, match="needs a new name"):
        ShardWriter(tmp_path, "w")


def test_a_taken_name_is_left_alone(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "w")
    taken = tmp_path / "shards/w/00000000.arrow"
    taken.write_bytes(b"of somebody else")
    writer.add(to_batch([row([(1, 1)])]))
    with pytest.raises(StoreError, match="exists"):
        writer.publish()
    assert taken.read_bytes() == b"of somebody else"
    (where,) = writer.publish()
    assert where.path == "shards/w/00000001.arrow"


def test_a_writer_knows_what_it_holds(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "w")
    assert (writer.num_batches, writer.bytes, writer.age_s) == (0, 0, 0.0)
    batch = to_batch([row([(1, 1)])])
    writer.add(batch)
    writer.add(batch)
    assert (writer.num_batches, writer.bytes) == (2, 2 * batch.nbytes)
    assert writer.age_s > 0
    writer.publish()
    assert (writer.num_batches, writer.bytes, writer.age_s) == (0, 0, 0.0)


@pytest.fixture
def full_disk() -> Iterator[int]:
    """No file can grow past this many bytes: the kernel refuses as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    yield 20_000
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_refused_write_leaves_nothing_and_can_be_repeated(tmp_path: Path, full_disk: int) -> None:
    writer = ShardWriter(tmp_path, "w")
    group = [row([(1, 10_000)])]
    writer.add(to_batch(group))
    with pytest.raises(StoreError, match="make room"):
        writer.publish()
    assert list((tmp_path / "shards/w").iterdir()) == []
    assert writer.num_batches == 1
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    (where,) = writer.publish()
    assert where.path == "shards/w/00000001.arrow"
    assert same(to_rows(read_group(tmp_path, where))[0], group[0])


FULL = """
import errno, sys
from pathlib import Path
import numpy as np
from molt.records import StoreError
from molt.store.shards import ShardWriter, to_batch
from test_shards import row
run = Path(sys.argv[1])
writer = ShardWriter(run, "w")
for _ in range(20):
    writer.add(to_batch([row([(1, 10_000)])]))
try:
    writer.publish()
except StoreError as error:
    assert error.__cause__.errno == errno.ENOSPC, error
    assert list((run / "shards/w").iterdir()) == []
    print("refused")
"""


def test_a_full_filesystem_leaves_no_temporary_file(tmp_path: Path) -> None:
    run = f"exec {sys.executable} -c '{FULL}' {tmp_path}"
    mount = f"mount -t tmpfs -o size=1m tmpfs {tmp_path} && {run}"
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip("this user may not mount a filesystem of its own")
    assert done.stdout == "refused\n", done.stderr


# ---------------------------------------------------------------- visibility


def test_a_file_that_becomes_visible_late_is_awaited(tmp_path: Path) -> None:
    (where,) = publish(tmp_path, [row([(1, 1)])])
    path, hidden = tmp_path / where.path, tmp_path / "hidden"
    path.parent.rename(hidden)
    timer = threading.Timer(0.05, lambda: hidden.rename(path.parent))
    timer.start()
    read_group(tmp_path, where, deadline_s=30)
    timer.join()


def test_a_file_that_never_appears_is_an_error_after_the_deadline(tmp_path: Path) -> None:
    where = Where(path="shards/w/00000000.arrow", offset=8, length=8, hash="")
    start = time.monotonic()
    with pytest.raises(StoreError, match="was it removed") as error:
        read_group(tmp_path, where, deadline_s=0.05)
    assert isinstance(error.value.__cause__, OSError)
    assert error.value.__cause__.errno == errno.ENOENT
    assert 0.05 <= time.monotonic() - start < 5


# ---------------------------------------------------------------- rows that do not fit


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"status": "done"}, "status 'done' is none of"),
        ({"action_spans": np.array([[1, 4]], np.int32)}, "action_spans"),
        ({"action_spans": np.array([[2, 2]], np.int32)}, "action_spans"),
        ({"action_spans": np.array([[-1, 3]], np.int32)}, "action_spans"),
        ({"version_spans": np.array([[2, 1]])}, "do not cover 3 tokens"),
        ({"version_spans": np.array([[2, 1], [2, 1], [3, 1]])}, "do not cover 3 tokens"),
        ({"version_spans": np.empty((0, 2), np.int64)}, "do not cover 3 tokens"),
        ({"sampling": ()}, "0 sampling parameters for 1 actions"),
        ({"behavior_logprobs": np.zeros(2, np.float32)}, "2 log-probabilities for 3 tokens"),
        ({"behavior_logprobs": np.zeros(3, np.float32)}, "was not sampled"),
        (
            {"behavior_logprobs": np.array([np.nan, -np.inf, 0], np.float32)},
            "an infinite log-probability",
        ),
    ],
)
def test_a_row_whose_parts_do_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"group 3 rollout 0: .*{message}"):
        to_batch([replace(row([(1, 2)]), **change)])


def test_a_token_that_needs_more_than_32_bits_is_refused() -> None:
    with pytest.raises(pa.ArrowInvalid):
        to_batch([replace(row([(0, 1)]), token_ids=np.array([2**31]))])


# ---------------------------------------------------------------- other readers


READERS = {
    "polars": "import polars as t; f = t.read_ipc(p).to_dicts()",
    "duckdb": (
        "import duckdb, pyarrow as pa; t = pa.ipc.open_file(p).read_all()\n"
        "c = duckdb.sql('select * from t'); f = [dict(zip(c.columns, r)) for r in c.fetchall()]"
    ),
    "pandas": "import pandas as t; f = t.read_feather(p).to_dict('records')",
}


@pytest.mark.parametrize("reader", READERS)
def test_other_readers_need_nothing_from_us(tmp_path: Path, reader: str) -> None:
    publish(tmp_path, [row([(1, 2)], reward=0.5), row([], status="error")], [row([(2, 1)])])
    script = f"""
import sys
p = sys.argv[1]
{READERS[reader]}
assert "molt" not in sys.modules
print([(list(r["token_ids"]), [dict(s) for s in r["action_spans"]], r["status"]) for r in f])
print(f[0]["reward"], len(f), [bool(x is None or x != x) for x in f[0]["behavior_logprobs"]])
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, str(tmp_path / "shards/w/00000000.arrow")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1] == "0.5 3 [True, False, False]"
    first = done.stdout.splitlines()[0]
    assert first.count("'start'") == 2
    assert "error" in first
