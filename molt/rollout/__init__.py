# SPDX-License-Identifier: Apache-2.0
"""Rollouts: the vLLM engine, the session every completion goes through, and the runner that holds them."""
