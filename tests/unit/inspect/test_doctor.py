# SPDX-License-Identifier: Apache-2.0
import errno
import os
import tempfile
from pathlib import Path

import pytest

from molt.inspect import doctor as module
from molt.inspect.doctor import Finding, doctor
from molt.records import ConfigError


def measured(directory: Path) -> dict[str, Finding]:
    return {finding.name: finding for finding in doctor(directory)}


def test_a_good_directory_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    temporary = set(Path(tempfile.gettempdir()).glob("molt-????????"))
    found = measured(tmp_path)
    names = ("fsync", "publish", "rename", "lock", "visibility", "sockets", "loopback")
    assert {found[name].verdict for name in names} <= {"ok", "slow"}
    assert {"space", "inodes", "throughput", "GPUs", "torch", "vllm", "pyarrow"} <= found.keys()
    assert not list(tmp_path.iterdir())
    assert set(Path(tempfile.gettempdir()).glob("molt-????????")) <= temporary


def test_a_directory_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no directory"):
        list(doctor(tmp_path / "nowhere"))


def test_a_directory_that_cannot_be_written_is_bad_and_the_machine_still_measured() -> None:
    found = measured(Path("/proc/self"))  # nobody writes there, root included
    assert found["write"].verdict == "bad"
    assert "loopback" in found


def test_a_filesystem_without_links_is_bad_and_the_rest_still_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    found = measured(tmp_path)
    assert found["publish"].verdict == "bad"
    assert "Operation not permitted" in found["publish"].text
    assert found["rename"].verdict != "bad"


def test_a_link_that_replaces_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", lambda old, new: Path(new).write_bytes(Path(old).read_bytes()))
    assert module._publish(tmp_path).verdict == "bad"


def test_a_lock_that_does_not_exclude_is_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fcntl.flock", lambda *_: None)
    assert module._lock(tmp_path).verdict == "bad"


def test_a_file_that_does_not_appear_is_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "VISIBLE_S", 0.2)
    monkeypatch.setattr(module, "publish_file", lambda *_: None)
    assert module._visibility(tmp_path).verdict == "bad"


def test_what_takes_longer_than_a_run_likes_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SLOW_MS", 0.0)
    assert module._fsync(tmp_path).verdict == "slow"


@pytest.mark.parametrize(("amount", "verdict"), [(0.5, "bad"), (1, "slow"), (20, "ok")])
def test_little_space_is_slow_and_none_is_bad(amount: float, verdict: str) -> None:
    assert module._enough(amount, (1, 20)) == verdict


# 107 bytes are what the kernel allows, 60 of them are below TMPDIR
@pytest.mark.parametrize(("length", "verdict"), [(47, "ok"), (48, "bad")])
def test_a_long_tmpdir_is_bad(length: int, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        long = Path(short) / ("x" * (length - len(short) - 1))
        long.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(long))
        assert module._sockets(long).verdict == verdict


@pytest.mark.parametrize(
    ("script", "verdict", "says"),
    [
        ("echo 'H200, 141 GiB, 580'; echo 'H200, 141 GiB, 580'", "ok", "2: H200, 141 GiB, 580"),
        ("echo 'No devices were found'; exit 6", "bad", "No devices were found"),
    ],
)
def test_gpus_are_what_nvidia_smi_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, verdict: str, says: str
) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = module._gpus(tmp_path)
    assert found.verdict == verdict
    assert says in found.text


def test_another_version_is_slow_and_a_missing_part_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_pins", lambda: {"torch": "2.13.0", "nemo-automodel": "0.7.0"})
    installed = {"torch": "2.13.0+cu130", "nemo-automodel": "0.8.0", "pyarrow": "26.0.1"}
    monkeypatch.setattr(module, "_version", installed.get)
    verdicts = {finding.name: finding.verdict for finding in module._versions()}
    assert verdicts == {"torch": "ok", "automodel": "slow", "pyarrow": "ok", "vllm": "bad"}
