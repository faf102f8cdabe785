# SPDX-License-Identifier: Apache-2.0
"""What the fault tests share: the marks, a run, and the sample that a seed chooses.

A test that is marked `sampled` is one of many of its kind; those that are not chosen count as slow.
"""

import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.harness import Run

Make = Callable[..., Run]
SAMPLE = 24  # of the tests that are marked so
SEED = int(os.environ.get("MOLT_SEED", time.strftime("%Y%m%d")))
TIMEOUT_S = 300  # of a test, on a machine that is busy
SAID = pytest.StashKey[str]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is here, and choose the sample by MOLT_SEED or the date."""
    mine = [item for item in items if item.path.is_relative_to(Path(__file__).parent)]
    for item in mine:
        item.add_marker("faults")
        item.add_marker(pytest.mark.timeout(TIMEOUT_S))
    many = [item for item in mine if item.get_closest_marker("sampled")]
    if not many:
        return
    chosen = random.Random(SEED).sample(many, min(SAMPLE, len(many)))
    for item in many:
        if item not in chosen:
            item.add_marker("slow")
    config.stash[SAID] = f"faults: seed {SEED} chose {len(chosen)} of {len(many)} (MOLT_SEED)"


def pytest_report_collectionfinish(config: pytest.Config) -> str:
    """Say what was chosen."""
    return config.stash.get(SAID, "")


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes the runs of a test, and clears up behind them."""
    runs: list[Run] = []

    def make(*overrides: str, path: Path | None = None) -> Run:
        root = tmp_path / str(len(runs))
        root.mkdir()
        runs.append(Run(root, *overrides, path=path))
        return runs[-1]

    try:
        yield make
    finally:
        for run in runs:
            run.close()
