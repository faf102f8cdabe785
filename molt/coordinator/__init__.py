# SPDX-License-Identifier: Apache-2.0
"""The coordinator writes the journal: `state` folds it, `pool` decides, `server` answers."""
