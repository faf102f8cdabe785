# SPDX-License-Identifier: Apache-2.0
"""Rollouts: the vLLM engine, the session of every completion, and the runner that holds both."""
