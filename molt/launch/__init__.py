# SPDX-License-Identifier: Apache-2.0
"""Launchers: the same roles as local processes, or as steps of a Slurm job."""
