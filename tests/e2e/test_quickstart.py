# SPDX-License-Identifier: Apache-2.0
"""The newcomer's command, shortened to a few steps."""

import json
import os
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_the_quickstart_ends_with_the_reward_and_the_command_to_look_further(tmp_path: Path):
    run = tmp_path / "run"
    result = subprocess.run(
        ["scripts/quickstart", "trainer.steps=3", "--run-dir", str(run)],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert result.returncode == 0, result.stderr
    said = result.stderr.splitlines()
    assert sum(line.startswith("step ") for line in said) == 3
    assert any(line.startswith("eval/greedy/reward") and "before" in line for line in said)
    assert said[-1].startswith("what happened: molt inspect ")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(
        row["eval/greedy/version"] == row["eval/greedy/step"] + 1 for row in (rows[0], rows[-1])
    )
