# SPDX-License-Identifier: Apache-2.0
"""The weight communicator: one broadcast group of the trainer's rank 0 and every engine worker.

Both ends run this file. The trainer opens a store (`host`), tells everyone its address and port in
a `Publication`, and both ends build a `Communicator`: gloo on CPUs, NCCL on GPUs. Weights cross it
as one byte stream in the order of the publication's tensors: each tensor starts at a multiple of
`ALIGN`, and the stream is cut into buckets, so small tensors share one broadcast and large ones
span several. After the data comes one checksum a tensor, of its bytes, name, dtype and shape; a
difference names the tensor.

Every wait has the communicator's deadline. After a failure a communicator is unusable: build a new
one under a new name. Who has learned that the others will not come can `give_up` from another
thread.
"""

import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from molt import records
from molt.records import EngineError

ALIGN = 16  # bytes: a multiple of every dtype's size
CHUNK = 1 << 18  # int64 words summed at once by the checksum: bounds its temporaries to 2 MiB
MIX = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, so multiplying by it loses nothing
CONNECT_S = 30.0  # for ranks that have all arrived to connect to each other


def host(address: str, timeout_s: float) -> dist.TCPStore:
    """Open the store that the ranks meet in, on a free port (`.port`) of `address`."""
    return dist.TCPStore(
        address, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )


def join(address: str, port: int, timeout_s: float) -> dist.TCPStore:
    """Reach the trainer's store."""
    timeout = timedelta(seconds=timeout_s)
    try:
        return dist.TCPStore(
            address, port, is_master=False, wait_for_workers=False, timeout=timeout
        )
    except RuntimeError as error:
        raise EngineError(
            f"no trainer at {address}:{port} for {timeout_s:g} s: {_line(error)}"
        ) from error


def describe(weights: Iterable[tuple[str, torch.Tensor]]) -> tuple[records.Tensor, ...]:
    """The tensors of a publication, as its record lists them."""
    return tuple(_describe(name, tensor) for name, tensor in weights)


def stream_bytes(tensors: Iterable[records.Tensor]) -> int:
    """Bytes of a whole publication: no bucket needs to be larger."""
    return sum(map(_padded_bytes, tensors))


def checksum(flat: torch.Tensor) -> torch.Tensor:
    """xxh3_64 on CPUs; elsewhere Σ wordᵢ·(2i+1) mod 2⁶⁴, which sees every changed word, and swaps.

    Both ends of a communicator have the same kind of device.

    Args:
        flat: [n] uint8, n a multiple of 8.

    Returns:
        A scalar int64 tensor on the same device.
    """
    if flat.device.type == "cpu":
        data: Any = flat.numpy()
        return torch.tensor(xxhash.xxh3_64_intdigest(data) - (1 << 63), dtype=torch.int64)
    return _sum(flat)


def _sum(flat: torch.Tensor) -> torch.Tensor:
    words = flat.view(torch.int64)
    num_odd = min(CHUNK, words.numel())
    odd = torch.arange(1, 2 * num_odd + 1, 2, dtype=torch.int64, device=flat.device)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for chunk in words.split(CHUNK):
        total = total * MIX + (chunk * odd[: chunk.numel()]).sum()
    return total


class Communicator:
    """One rank of the group that weights are broadcast over, from rank 0.

    Building it waits for all ranks.

    Args:
        store: what `host` or `join` returned.
        name: of this communicator; never reused on one store.
        rank: 0 for the trainer, engine workers from 1.
        world: ranks in all.
        device: where the weights lie: "cpu" (gloo) or a CUDA device (NCCL).
        timeout_s: deadline of the meeting and of every broadcast.
        given_up: on rank 0, whether the others will not come any more.

    Raises:
        EngineError: not every rank came in time.
    """

    def __init__(
        self,
        store: dist.TCPStore,
        name: str,
        rank: int,
        world: int,
        device: torch.device,
        timeout_s: float,
        given_up: Callable[[], bool] = lambda: False,
    ) -> None:
        self.name = name
        self.rank = rank
        self.device = device
        self.timeout_s = timeout_s
        self._store = store
        self._given_up = False
        connect_s = timeout_s
        if rank:
            store.set(_arrival(name, rank), "")
        else:
            _await_arrivals(store, name, world, timeout_s, given_up)
            connect_s = min(timeout_s, CONNECT_S)
        try:
            self._group = _group(store, name, rank, world, device, connect_s)
        except RuntimeError as error:
            raise EngineError(
                f"not all {world} ranks of communicator {name} met within {timeout_s:g} s "
                f"(rank {rank} did): {_line(error)}"
            ) from error

    def send(self, weights: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int) -> None:
        """Broadcast `weights` (full tensors, HF names), in the order of the publication.

        Raises:
            EngineError: a broadcast failed or did not end in time.
        """
        bucket = torch.empty(_bucket_size(bucket_bytes), dtype=torch.uint8, device=self.device)
        used, sums = 0, []
        for name, tensor in weights:
            flat = _padded(tensor.detach().to(self.device))
            sums.append(checksum(flat) + _label(_describe(name, tensor)))
            while len(flat):
                part, flat = flat[: len(bucket) - used], flat[len(bucket) - used :]
                bucket[used : used + len(part)] = part
                used += len(part)
                if used == len(bucket):
                    self.broadcast(bucket)
                    used = 0
        if used:
            self.broadcast(bucket[:used])
        self.broadcast(_stack(sums, self.device))

    def receive(
        self, tensors: Sequence[records.Tensor], bucket_bytes: int
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that rank 0 sends, each in memory of its own; then compare checksums.

        Raises:
            EngineError: a broadcast failed or was late, or a tensor is not what was sent.
        """
        left = stream_bytes(tensors)
        bucket = torch.empty(_bucket_size(bucket_bytes), dtype=torch.uint8, device=self.device)
        full, used, sums = 0, 0, []
        for tensor in tensors:
            flat = torch.empty(_padded_bytes(tensor), dtype=torch.uint8, device=self.device)
            filled = 0
            while filled < len(flat):
                if used == full:
                    full, used = min(len(bucket), left), 0
                    left -= full
                    self.broadcast(bucket[:full])
                part = min(len(flat) - filled, full - used)
                flat[filled : filled + part] = bucket[used : used + part]
                filled, used = filled + part, used + part
            sums.append(checksum(flat) + _label(tensor))
            yield tensor.name, _shaped(flat, tensor)
        self._compare(tensors, _stack(sums, self.device))

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Fill `tensor` with rank 0's, within the deadline.

        Raises:
            EngineError: it failed or did not end in time; the communicator is then unusable.
        """
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=self.timeout_s)
        if self._given_up:
            raise EngineError("the publication was given up")
        work: Any = None
        try:
            work = self._group.broadcast([tensor], options)
            if self.device.type == "cpu":
                work.wait()
            else:
                self._wait(work)
        except RuntimeError as error:
            work = None  # a traceback that kept it would keep the connections after `close`
            raise EngineError(
                f"a weight broadcast failed on rank {self.rank}: {_line(error)}"
            ) from error

    def give_up(self) -> None:
        """End what another thread is at: its broadcasts fail from now on.

        One that is under way ends too over NCCL; gloo cannot be interrupted, and it ends when a
        process at its other end does, or at the deadline.
        """
        self._given_up = True

    def close(self) -> None:
        """Leave the group: a rank that waits for this one fails now. Safe after a failure."""
        self._group.abort()
        del self._group  # gloo closes its connections here, NCCL closed its own above

    def _wait(self, work: dist.Work) -> None:
        """Wait on the host: a NCCL kernel whose peer died never ends, nor would `work.wait`."""
        deadline = time.monotonic() + self.timeout_s
        while not work.is_completed():
            if self._given_up or time.monotonic() > deadline:
                self._group.abort()
                late = f"no answer for {self.timeout_s:g} s"
                raise RuntimeError("the publication was given up" if self._given_up else late)
            time.sleep(0.0005)

    def _compare(self, tensors: Sequence[records.Tensor], mine: torch.Tensor) -> None:
        """Receive rank 0's checksums and name the first tensor that differs."""
        sent = torch.empty_like(mine)
        self.broadcast(sent)
        wrong = (sent != mine).nonzero().flatten().tolist()
        if wrong:
            raise EngineError(
                f"{len(wrong)} of {len(tensors)} tensors arrived changed, first "
                f"{tensors[wrong[0]].name}: the trainer sent other tensors than it announced, "
                "or the network corrupts data"
            )


def _arrival(name: str, rank: int) -> str:
    return f"{name}/arrived/{rank}"


def _await_arrivals(
    store: dist.TCPStore, name: str, world: int, timeout_s: float, given_up: Callable[[], bool]
) -> None:
    """Wait until every other rank is about to connect, which cannot be interrupted."""
    deadline, rank = time.monotonic() + timeout_s, 1
    while rank < world:
        if store.check([_arrival(name, rank)]):
            rank += 1
        elif given_up():
            raise EngineError("the publication was given up")
        elif time.monotonic() > deadline:
            raise EngineError(
                f"not all {world} ranks of communicator {name} met within {timeout_s:g} s: rank "
                f"{rank} is missing"
            )
        else:
            time.sleep(0.002)


def _group(
    store: dist.TCPStore, name: str, rank: int, world: int, device: torch.device, timeout_s: float
) -> Any:
    """Build the process group, whose classes torch's stubs know only in part."""
    prefix, timeout = dist.PrefixStore(name, store), timedelta(seconds=timeout_s)
    if device.type == "cpu":
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        # The address that routes to the trainer: a host's own name often does not resolve.
        options._devices = [gloo.create_device(hostname=_own_address(store))]
        options._timeout = timeout
        return gloo(prefix, rank, world, options)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = (
        2 * timeout
    )  # torch's watchdog ends the process: let our own deadline come first
    with torch.cuda.device(device):
        return dist.ProcessGroupNCCL(prefix, rank, world, options)


def _own_address(store: dist.TCPStore) -> str:
    """Address of the interface through which this host reaches the store."""
    # Connecting a UDP socket chooses a route and sends nothing.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((store.host, store.port))
        return probe.getsockname()[0]


def _describe(name: str, tensor: torch.Tensor) -> records.Tensor:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return records.Tensor(name=name, dtype=dtype, shape=tuple(tensor.shape))


def _label(tensor: records.Tensor) -> int:
    """An int64 of what a tensor is called and how its bytes are read."""
    text = f"{tensor.name} {tensor.dtype} {tensor.shape}"
    return int.from_bytes(xxhash.xxh3_64_digest(text.encode()), "big", signed=True)


def _bucket_size(bucket_bytes: int) -> int:
    return max(bucket_bytes // ALIGN, 1) * ALIGN


def _numel(tensor: records.Tensor) -> int:
    return torch.Size(tensor.shape).numel()


def _padded_bytes(tensor: records.Tensor) -> int:
    size = _numel(tensor) * getattr(torch, tensor.dtype).itemsize
    return -(-size // ALIGN) * ALIGN


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of `tensor`, [n] uint8, then zeros up to a multiple of `ALIGN`."""
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    missing = -len(flat) % ALIGN
    return torch.nn.functional.pad(flat, (0, missing)) if missing else flat


def _shaped(flat: torch.Tensor, tensor: records.Tensor) -> torch.Tensor:
    dtype = getattr(torch, tensor.dtype)
    return flat.view(dtype)[: _numel(tensor)].view(tensor.shape)


def _stack(sums: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64, device=device)


def _line(error: BaseException) -> str:
    """What a torch error says, without where in torch, the C++ stack and the good wishes."""
    first = str(error).partition("\n")[0]
    return re.sub(r"^\[\S+\] |\. This is typically.*", "", first) or type(error).__name__
