# SPDX-License-Identifier: Apache-2.0
"""Python imports this at its start when the directory is on PYTHONPATH: arms a test's faults."""

import os

if "MOLT_FAULTS" in os.environ:
    from tests.faults.inject import install

    install()
