# SPDX-License-Identifier: Apache-2.0
"""The trainer: one policy over all ranks of the group. `loop` is the place to start reading."""
