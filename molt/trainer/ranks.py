# SPDX-License-Identifier: Apache-2.0
"""The trainer's ranks: how they find each other, and how they come to know the same.

What one rank alone learns (rank 0 from the coordinator, any rank from the disk) all ranks have to
act on, or they part ways and wait for each other for ever. `first` and `gathered` are the two ways
to share it; both are collective and need no process group on a single rank.
"""

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from threading import Event, Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from molt import control
from molt.records import MoltError

COLLECTIVE_S = 1800.0  # deadline of a collective between ranks
ANNOUNCE_S = 5.0  # between two words of rank 0 about where it is; coordinators may forget
T = TypeVar("T")


def first(work: Callable[[], T]) -> T:
    """What `work` gives on rank 0, where alone it runs; its Molt errors are raised on every rank.

    So all ranks end with the error itself, none with the loss of another rank.
    """
    if not dist.is_initialized():
        return work()
    said: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            said[0] = work()
        except MoltError as error:
            said[1] = error
    dist.broadcast_object_list(said, src=0)
    if said[1] is not None:
        raise said[1]
    return said[0]


def gathered(value: T) -> list[T]:
    """Every rank's value."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def share(items: Sequence[T]) -> Sequence[T]:
    """This rank's part of some work."""
    if not dist.is_initialized():
        return items
    return items[dist.get_rank() :: dist.get_world_size()]


def address() -> str:
    """Where other hosts reach this one: what the launcher says, else the loopback address."""
    return os.environ.get("MOLT_ADDRESS", "127.0.0.1")


def join(run: Path, rank: int, world: int) -> None:
    """Make the default process group; the store's address travels through the coordinator.

    CPU tensors go over gloo and CUDA tensors over NCCL.
    """
    if world == 1:
        return
    client = control.BlockingClient(run)
    timeout = timedelta(seconds=COLLECTIVE_S)
    key = f"trainer {os.environ.get('SLURM_STEP_ID', '0')}"  # ranks that start again meet anew
    met = Event()
    if rank == 0:
        store = dist.TCPStore(
            address(), 0, world, is_master=True, timeout=timeout, wait_for_workers=False
        )
        word = control.Put(key=key, value=f"{address()}:{store.port}")
        client.call(control.PUT, word)
        Thread(target=_repeat, args=(client, word, met), daemon=True).start()
    else:
        host, _, port = _ask(client, key).rpartition(":")
        client.close()
        store = dist.TCPStore(host, int(port), world, is_master=False, timeout=timeout)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    met.set()


def _ask(client: control.BlockingClient, key: str) -> str:
    """Wait for what rank 0 says."""
    deadline = time.monotonic() + COLLECTIVE_S
    while not (where := client.call(control.GET, control.Get(key=key)).value):
        if time.monotonic() > deadline:
            raise MoltError(f"no trainer rank 0 for {COLLECTIVE_S:.0f} s: see its log")
    return where


def _repeat(client: control.BlockingClient, word: control.Put, met: Event) -> None:
    """Say it again until all ranks have met."""
    while not met.wait(ANNOUNCE_S):
        client.call(control.PUT, word)
    client.close()
