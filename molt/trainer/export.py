# SPDX-License-Identifier: Apache-2.0
"""Trained weights as a Hugging Face directory that transformers and vLLM load.

Everything but the weights (config, tokenizer, template) is copied from the model the run began
with.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from molt.config import load_resolved
from molt.records import ConfigError, StoreError
from molt.store.files import sync_directory
from molt.store.run import RunDir
from molt.trainer import checkpoint
from molt.trainer.policy import build

SHARD_BYTES = 4 << 30


def export(run_dir: Path, step: int | None, to: Path) -> Path:
    """Write the checkpoint of `step` (None = the newest) of a run to a new directory.

    Raises:
        StoreError: `run_dir` has no complete checkpoint of that step.
        ConfigError: `run_dir` is no run, or `to` exists.
    """
    refuse_existing(to)
    config = load_resolved(RunDir.open(run_dir).config)
    by_step = {marker.step: path for path, marker in checkpoint.complete(run_dir).items()}
    if not by_step:
        raise StoreError(f"{run_dir} has no complete checkpoint: let it train to its first one")
    step = max(by_step) if step is None else step
    if step not in by_step:
        steps = ", ".join(map(str, sorted(by_step)))
        raise StoreError(
            f"{run_dir} has no complete checkpoint of step {step}: choose one of {steps}"
        )
    policy = build(config, rank=0, world=1)
    policy.load(by_step[step], optimizer=False)
    return write(policy.weights(), Path(config.model.path), to)


def write(weights: Iterable[tuple[str, Tensor]], source: Path, to: Path) -> Path:
    """Publish a model directory: `weights` under their HF names, everything else as in `source`."""
    with appearing(to) as temp:
        for file in source.iterdir():
            if file.is_file() and not file.name.endswith(
                (".safetensors", ".safetensors.index.json")
            ):
                shutil.copyfile(file, temp / file.name)
        dtype = _write_weights(weights, temp)
        config = json.loads((temp / "config.json").read_text())
        config["dtype"] = str(dtype).removeprefix("torch.")
        (temp / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return to


def refuse_existing(path: Path) -> None:
    """A directory that is written whole must not be there yet."""
    if path.exists():
        raise ConfigError(f"{path} exists: name a directory that does not")


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """A temporary directory that becomes `path` if the block ends well, and vanishes if not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent))
    try:
        yield temp
        for file in temp.iterdir():
            with file.open("rb") as f:
                os.fsync(f.fileno())
        temp.chmod(0o755)
        sync_directory(temp)
        temp.rename(path)
        sync_directory(path.parent)
    finally:
        shutil.rmtree(temp, ignore_errors=True)


def _write_weights(weights: Iterable[tuple[str, Tensor]], to: Path) -> torch.dtype:
    """Files of at most `SHARD_BYTES` and, if there are several, their index. Returns the dtype."""
    from safetensors.torch import save_file

    files: dict[str, str] = {}
    total, dtype = 0, torch.float32
    for number, shard in enumerate(_shards(weights), 1):
        name = f"model-{number:05d}.safetensors"
        save_file(shard, to / name, metadata={"format": "pt"})
        files |= dict.fromkeys(shard, name)
        total += sum(t.nbytes for t in shard.values())
        dtype = next((t.dtype for t in shard.values() if t.is_floating_point()), dtype)
    if len(set(files.values())) == 1:
        (to / "model-00001.safetensors").rename(to / "model.safetensors")
    else:
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (to / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return dtype


def _shards(weights: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    for name, tensor in weights:
        if shard and sum(t.nbytes for t in shard.values()) + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard = {}
        shard[name] = tensor.detach().cpu().contiguous()
    yield shard
