# SPDX-License-Identifier: Apache-2.0
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molt.records import ConfigError, StoreError
from molt.store.run import RunDir, append_metrics, publish_file, read_metrics


def test_a_created_run_opens(tmp_path: Path) -> None:
    created = RunDir.create(tmp_path / "runs" / "a", b'{"run": {}}')
    opened = RunDir.open(tmp_path / "runs" / "a")
    assert opened == created
    assert opened.config.read_bytes() == b'{"run": {}}'
    assert stat.S_IMODE(opened.token.stat().st_mode) == 0o600
    assert len(opened.token.read_text()) == 64  # 32 random bytes in hex
    assert opened.checkpoint(12) == tmp_path / "runs/a/checkpoints/step-000012"


def test_a_directory_that_is_no_run_is_refused_in_one_line(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ConfigError, match="is not a run directory") as error:
            RunDir.open(path)
        assert "\n" not in str(error.value)


def test_a_run_is_not_created_over_something_else(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(StoreError, match=r"holds 'thesis\.tex'"):
        RunDir.create(tmp_path, b"{}")
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
    run = RunDir.create(tmp_path / "run", b"{}")
    with pytest.raises(StoreError, match="needs an empty directory"):
        RunDir.create(run.path, b"{}")


def test_an_interrupted_create_is_finished_by_the_next(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", b"{}")
    token = run.token.read_text()
    run.config.unlink()
    (run.path / ".config.json.0123abcd.tmp").touch()
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        RunDir.open(run.path)
    RunDir.create(run.path, b"{}")
    assert RunDir.open(run.path).token.read_text() == token


def test_every_attempt_gets_its_own_logs(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", b"{}")
    assert [run.attempt_dir().name for _ in range(11)] == [f"attempt-{i}" for i in range(1, 12)]


def test_a_published_file_never_changes(tmp_path: Path) -> None:
    publish_file(tmp_path / "a", b"one")
    with pytest.raises(StoreError, match="never changes"):
        publish_file(tmp_path / "a", b"two")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("a", b"one")]


def test_a_refused_publish_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="No such file or directory"):
        publish_file(tmp_path / "absent" / "a", b"one")
    assert list(tmp_path.iterdir()) == []


values = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | st.text()


@settings(max_examples=50)
@given(st.lists(st.dictionaries(st.text(), values, max_size=4), max_size=5), st.integers(0, 400))
def test_metrics_read_back_and_a_torn_tail_is_cut(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], cut: int
) -> None:
    path = tmp_path_factory.mktemp("metrics") / "metrics.jsonl"
    for row in rows:
        append_metrics(path, row)
    assert read_metrics(path) == rows
    if not rows:
        return
    last = len(path.read_bytes().splitlines(keepends=True)[-1])
    os.truncate(path, path.stat().st_size - 1 - cut % last)
    assert read_metrics(path) == rows[:-1]
    append_metrics(path, {"step": 1})
    assert read_metrics(path) == [*rows[:-1], {"step": 1}]


def test_a_metric_without_a_value_is_null(tmp_path: Path) -> None:
    append_metrics(tmp_path / "m", {"reward/mean": float("nan")})
    assert read_metrics(tmp_path / "m") == [{"reward/mean": None}]


def test_a_damaged_line_of_metrics_is_named(tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(b'{"a": 1}\n{"a": \n{"a": 3}\n')
    with pytest.raises(StoreError, match="m:2 is not a JSON object"):
        read_metrics(tmp_path / "m")
