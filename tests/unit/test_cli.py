# SPDX-License-Identifier: Apache-2.0
"""Bad input through the real command line: one line on stderr, status 2, and nothing started."""

import subprocess
import sys
from pathlib import Path

import pytest

from molt.store.journal import Journal
from molt.store.run import RunDir

CONFIG = """
[data]
source = "rows.jsonl"
[model]
path = "model"
[agent]
name = "molt.agents.add:Add"
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "label": 2}\n')
    (tmp_path / "run.toml").write_text(CONFIG)
    return tmp_path


def molt(home: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "molt.cli", *arguments],
        cwd=home,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("trainer.stpes=5", "unknown key trainer.stpes: did you mean trainer.steps?"),
        ("sampling.max_lag=1", "unknown key sampling.max_lag: did you mean pool.max_lag?"),
        ("data.source=nowhere.jsonl", "nowhere.jsonl"),
        ("data.prompt=question", 'has no column "question" (it has prompt, label)'),
        ("model.path=nowhere", "nowhere does not exist"),
        ("agent.name=molt.agents.add:Ad", "has no attribute 'Ad'"),
        ("agent.name=nowhere:Add", "No module named 'nowhere'"),
        ("optim.lr=-1", "optim.lr = -1: must be greater than 0"),
        ("algo.estimator=gpro", "'grpo'"),
        ("trainer.steps", 'override "trainer.steps" must read section.key=value'),
    ],
)
def test_a_bad_value_is_one_line_and_status_2(home: Path, override: str, says: str):
    result = molt(home, "train", "run.toml", override, "--run-dir", "run")
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("molt: ")
    assert says in line
    assert not result.stdout
    assert not (home / "run").exists()


def test_a_missing_config_file_names_its_neighbour(home: Path):
    result = molt(home, "train", "rum.toml")
    assert result.returncode == 2
    assert result.stderr == "molt: no config file rum.toml: did you mean run.toml?\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", "nowhere"),
        ("inspect", "model"),
        ("inspect", "model", "--group", "1"),
        ("verify", "nowhere"),
        ("verify", "model"),
        ("export", "nowhere", "--to", "out"),
        ("train", "run.toml", "--run-dir", "model"),
    ],
    ids=" ".join,
)
def test_a_directory_that_is_no_run_is_one_line(home: Path, arguments: tuple[str, ...]):
    # A model's directory has a config.json, as a run has.
    result = molt(home, *arguments)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("molt: ")
    assert "is not a run directory" in line


def test_verify_says_whether_a_run_is_whole_also_by_its_status(home: Path):
    run = RunDir.create(home / "run", b"{}")
    Journal.start(run.path, "r")
    whole = molt(home, "verify", "run")
    assert whole.returncode == 0
    assert whole.stdout.splitlines()[0] == "checked  journal: 1 epochs, 1 records"
    assert whole.stdout.splitlines()[-1] == "run is whole"
    (run.journal / "00000001.jsonl").write_bytes(b"x")
    damaged = molt(home, "verify", "run")
    assert damaged.returncode == 1
    assert damaged.stdout.splitlines()[-1] == "run is not whole: 1 problems"
    assert not damaged.stderr


def test_doctor_measures_a_directory(home: Path):
    before = sorted(home.iterdir())
    result = molt(home, "doctor", ".")
    assert result.returncode == 0, result.stdout
    assert "fsync" in result.stdout
    assert sorted(home.iterdir()) == before


def test_doctor_of_nothing_is_one_line(home: Path):
    result = molt(home, "doctor", "nowhere")
    assert result.returncode == 2
    assert result.stderr == "molt: nowhere is no directory: name the one that runs will lie in\n"
