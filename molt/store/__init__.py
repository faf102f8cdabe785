# SPDX-License-Identifier: Apache-2.0
"""The store: the run directory, its journal and its shards. Reading it needs no other part of Molt.

`molt.store.read(run)` gives everything that was generated as one Arrow table.
"""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["read"]


def read(run: str | Path) -> "pa.Table":
    """All groups of a run, evaluations and dropped ones included, in the order they were finished.

    Returns:
        A table with one row a segment (columns: `molt.store.schema`); a column that older shards
        lack is null there.

    Raises:
        ConfigError: not a run directory.
        StoreError: a group is not what the journal says.
    """
    import pyarrow as pa

    from molt.records import Group
    from molt.store.journal import read_journal
    from molt.store.run import RunDir
    from molt.store.schema import SCHEMA
    from molt.store.shards import read_group

    path = RunDir.open(Path(run)).path
    groups = (record for record in read_journal(path) if isinstance(record, Group))
    batches = [read_group(path, group.where, deadline_s=0) for group in groups]
    tables = [SCHEMA.empty_table(), *(pa.Table.from_batches([batch]) for batch in batches)]
    return pa.concat_tables(tables, promote_options="permissive")
