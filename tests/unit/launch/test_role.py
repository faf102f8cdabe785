# SPDX-License-Identifier: Apache-2.0
"""The inside of a role process, as its launcher sees it end."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from molt.config import Config, dump

# A thread that waits for ever, as in a collective whose other end is gone.
STUCK = "import threading; threading.Thread(target=threading.Event().wait).start()"
ERRORS = "from molt.records import ConfigError, StoreError"


def play(path: Path, body: str) -> "subprocess.CompletedProcess[str]":
    """A trainer whose `main` is this."""
    (path / "fake.py").write_text(f"def main(run, config):\n    {body}\n")
    (path / "config.json").write_bytes(dump(Config()))
    program = (
        "import sys; from pathlib import Path; from molt.launch import role\n"
        "role.ROLES['trainer'] = 'fake'; sys.exit(role.run_role('trainer', Path()))"
    )
    return subprocess.run(
        [sys.executable, "-c", program], cwd=path, capture_output=True, text=True, timeout=30,
        env=os.environ | {"MOLT_LOGS": str(path), "PYTHONPATH": str(Path(__file__).parents[3])},
        check=False,
    )  # fmt: skip


@pytest.mark.parametrize(("error", "status"), [("StoreError", 3), ("ConfigError", 2)])
def test_an_error_of_molts_own_is_one_line_and_its_status(tmp_path: Path, error: str, status: int):
    done = play(tmp_path, f"{ERRORS}; {STUCK}; raise {error}('disk full: make room')")
    assert done.stderr == "molt trainer: disk full: make room\n"
    assert done.returncode == status


def test_another_error_keeps_its_traceback(tmp_path: Path):
    done = play(tmp_path, f"{STUCK}; raise ValueError('shape')")
    assert done.stderr.startswith("Traceback")
    assert done.stderr.endswith("ValueError: shape\n")
    assert done.returncode == 1


def test_an_error_in_a_task_group_is_one_line_too(tmp_path: Path):
    group = "ExceptionGroup('tasks', [StoreError('disk full')])"
    done = play(tmp_path, f"{ERRORS}; raise {group}")
    assert done.stderr == "molt trainer: disk full\n"
    assert done.returncode == 3


def test_a_role_that_is_done_has_status_0(tmp_path: Path):
    assert play(tmp_path, "pass").returncode == 0
