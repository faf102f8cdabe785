# SPDX-License-Identifier: Apache-2.0
"""What happened in a run, read from its files alone."""
