# SPDX-License-Identifier: Apache-2.0
"""What the end-to-end tests share: two small models."""

from pathlib import Path

import pytest

from tests.toy_model import make_model


@pytest.fixture(scope="session")
def toy_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models of one architecture with different weights."""
    root = tmp_path_factory.mktemp("models")
    return make_model(root / "a", seed=0), make_model(root / "b", seed=1)
