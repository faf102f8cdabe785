# SPDX-License-Identifier: Apache-2.0
"""The README says what the code says."""

import re
from pathlib import Path

from molt.metrics import METRICS

REPOSITORY = Path(__file__).parents[2]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


def test_the_readme_explains_exactly_the_metrics_of_the_code():
    section = README.split("## Metrics")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \|(.*)\|$", section, re.MULTILINE)
    assert [name for name, _ in rows] == list(METRICS)
    for name, row in rows:
        assert METRICS[name].meaning in row


def test_the_reading_order_names_real_files_and_their_length():
    section = README.split("## Reading order")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`molt/[^|]+) \| (\d+) \|", section, re.MULTILINE)
    assert len(rows) > 10
    for names, said in rows:
        files = [REPOSITORY / name for name in re.findall(r"`([^`]+)`", names)]
        lines = sum(len(f.read_text(encoding="utf-8").splitlines()) for f in files)
        assert abs(lines - int(said)) <= 0.1 * lines, (
            f"{names}: {lines} lines, the README says {said}"
        )


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 230
