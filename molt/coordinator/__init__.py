# SPDX-License-Identifier: Apache-2.0
"""The coordinator: the only writer of the journal. `state` folds it, `pool` decides, `server` answers."""
