# SPDX-License-Identifier: Apache-2.0
"""Skips what this machine cannot run, without importing torch: collection stays instant."""

import shutil
from pathlib import Path

import pytest

HAVE = {
    "gpu": Path("/dev/nvidia0").exists(),
    "slurm": shutil.which("slurmctld", path="/usr/sbin:/usr/local/sbin:/usr/bin") is not None,
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked with something this machine has not."""
    for item in items:
        for marker, here in HAVE.items():
            if item.get_closest_marker(marker) and not here:
                item.add_marker(pytest.mark.skip(reason=f"no {marker} on this machine"))
