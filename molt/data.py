# SPDX-License-Identifier: Apache-2.0
"""Prompts: rows with a prompt and perhaps a label, from a file or Python, in a reproducible order.

The order is a pure function of (seed, epoch, index), so the data cursor of a run is one integer:
prompt g of the endless stream is row `row_of(seed, g, n)`.
"""

import importlib
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from molt.config import Config, Data
from molt.records import ConfigError

Row = dict[str, Any]


def resolve(name: str) -> Any:
    """The object that "module:attribute" names.

    Raises:
        ConfigError: the module or its attribute does not exist.
    """
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as e:
        raise ConfigError(f'cannot load "{name}": {e}; write "module:name"') from e


def load_prompts(data: Data) -> list[Row]:
    """All rows of `data`: {"prompt": text or messages, "label": anything}.

    Raises:
        ConfigError: no such file or source, no prompt column, or no row at all.
    """
    made = ":" in data.source
    rows = list(resolve(data.source)(**data.args)) if made else _read(Path(data.source))
    if not rows:
        raise ConfigError(f"{data.source} holds no prompts: data.source needs at least one row")
    if data.prompt not in rows[0]:
        raise ConfigError(
            f'{data.source} has no column "{data.prompt}" (it has {", ".join(rows[0])}): '
            "set data.prompt"
        )
    return [{"prompt": r[data.prompt], "label": r.get(data.label)} for r in rows]


def eval_data(config: Config, task: str) -> Data:
    """Where an evaluation's prompts come from: its own source, else the training one."""
    section = config.eval[task]
    if not section.source:
        return config.data
    return config.data.model_copy(update={"source": section.source, "args": section.args})


def _read(path: Path) -> list[Row]:
    if not path.exists():
        raise ConfigError(f'no prompts at {path}: data.source is a file or "module:function"')
    if path.suffix == ".jsonl":
        lines = path.read_text(encoding="utf-8").splitlines()
        try:
            return [json.loads(line) for line in lines if line.strip()]
        except json.JSONDecodeError as e:
            raise ConfigError(f"{path} is not JSON lines: {e}") from e
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if path.suffix == ".parquet":
            return pq.read_table(path).to_pylist()
        with pa.OSFile(str(path), "r") as f:
            return pa.ipc.open_file(f).read_all().to_pylist()
    except pa.ArrowInvalid as e:
        raise ConfigError(f"{path} is neither JSONL, Parquet nor an Arrow file: {e}") from e


@lru_cache(maxsize=8)
def _order(seed: int, epoch: int, num_rows: int) -> Any:
    import numpy as np

    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(num_rows)


def row_of(seed: int, group: int, num_rows: int, shuffle: bool = True) -> int:
    """The row that is prompt `group` of the stream: a new permutation each epoch."""
    epoch, index = divmod(group, num_rows)
    return int(_order(seed, epoch, num_rows)[index]) if shuffle else index
