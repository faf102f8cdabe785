# SPDX-License-Identifier: Apache-2.0
"""The weight communicator over gloo, one thread a rank."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Timer

import pytest
import torch

from molt import records, transfer
from molt.records import EngineError

CPU = torch.device("cpu")
Weights = list[tuple[str, torch.Tensor]]


def weights() -> Weights:
    """Odd sizes and mixed dtypes: 6-byte, 28-byte, empty, scalar and non-contiguous tensors."""
    generator = torch.Generator().manual_seed(0)
    return [
        ("a", torch.randn(3, generator=generator).bfloat16()),
        ("b", torch.randn(7, generator=generator)),
        ("empty", torch.zeros(0, 4)),
        ("big", torch.randn(33, 17, generator=generator)),
        ("scalar", torch.tensor(2.5, dtype=torch.float16)),
        ("transposed", torch.randn(5, 6, generator=generator).T),
    ]


def meet(
    world: int, run: Callable[[transfer.Communicator], object], timeout_s: float = 20.0
) -> list:
    """Run `run` on every rank of a new communicator and return what each gave or raised."""
    store = transfer.host("127.0.0.1", timeout_s)

    def rank(index: int) -> object:
        at = store if index == 0 else transfer.join("127.0.0.1", store.port, timeout_s)
        communicator = transfer.Communicator(
            at, name="test", rank=index, world=world, device=CPU, timeout_s=timeout_s
        )
        try:
            return run(communicator)
        except EngineError as error:
            return error
        finally:
            communicator.close()

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(rank, range(world)))


def send_and_receive(
    sent: Weights, announced: tuple[records.Tensor, ...], bucket_bytes: int
) -> list:
    """One publication to two receivers."""

    def run(communicator: transfer.Communicator) -> object:
        if communicator.rank == 0:
            return communicator.send(iter(sent), bucket_bytes)
        return list(communicator.receive(announced, bucket_bytes))

    return meet(3, run)


@pytest.mark.parametrize("bucket_bytes", [1, 16, 48, 1000, 1 << 20])
def test_every_receiver_gets_the_bytes_that_were_sent(bucket_bytes: int) -> None:
    # 16 and 48 bytes split "big" (2,244 bytes) over many buckets and share none or a few with its
    # neighbours; 1 rounds up to 16; 1 MiB holds everything.
    sent = weights()
    _, *received = send_and_receive(sent, transfer.describe(sent), bucket_bytes)
    for got in received:
        assert [name for name, _ in got] == [name for name, _ in sent]
        for (_, mine), (_, theirs) in zip(got, sent, strict=True):
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine, theirs)


def test_received_tensors_stay_valid_after_the_next_bucket() -> None:
    # vLLM holds tensors back until a layer is complete: no two may share the bucket's memory.
    sent = weights()
    _, got, _ = send_and_receive(sent, transfer.describe(sent), 64)
    addresses = [tensor.untyped_storage().data_ptr() for _, tensor in got if tensor.numel()]
    assert len(set(addresses)) == len(addresses)


def test_a_tensor_that_differs_from_what_was_sent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = [("one", torch.ones(4)), ("two", torch.zeros(4))]
    real = transfer.Communicator.broadcast

    def corrupt(self: transfer.Communicator, tensor: torch.Tensor) -> None:
        real(self, tensor)
        if self.rank == 2 and tensor.dtype == torch.uint8:
            tensor[17] ^= 1  # one bit of the second tensor

    monkeypatch.setattr(transfer.Communicator, "broadcast", corrupt)
    sender, good, bad = send_and_receive(sent, transfer.describe(sent), 1 << 10)
    assert sender is None
    assert len(good) == 2
    assert isinstance(bad, EngineError)
    assert "1 of 2 tensors arrived changed, first two" in str(bad)


def test_tensors_in_another_order_than_announced_are_named() -> None:
    # Of one size and dtype, so that every byte arrives, under the wrong name.
    one, two = ("one", torch.ones(4)), ("two", torch.zeros(4))
    _, *received = send_and_receive([one, two], transfer.describe([two, one]), 1 << 10)
    for error in received:
        assert "2 of 2 tensors arrived changed, first two" in str(error)


@pytest.mark.parametrize("checksum", [transfer.checksum, transfer._sum])
def test_the_checksum_sees_a_changed_word_and_a_swap(
    checksum: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    # Over three chunks of 2^18 words, so that the mix between chunks counts too.
    words = torch.arange(3 * transfer.CHUNK, dtype=torch.int64)
    whole = checksum(words.view(torch.uint8))
    swapped = words.clone()
    swapped[0], swapped[transfer.CHUNK] = (
        words[transfer.CHUNK],
        words[0],
    )  # same place of two chunks
    changed = words.clone()
    changed[-1] += 1
    near = words.clone()
    near[5], near[6] = words[6], words[5]
    for other in (swapped, changed, near):
        assert checksum(other.view(torch.uint8)) != whole
    assert checksum(words.clone().view(torch.uint8)) == whole


def test_the_checksum_is_the_weighted_sum_it_says() -> None:
    # 3·1 + 5·3 + 7·5 = 53
    words = torch.tensor([3, 5, 7], dtype=torch.int64)
    assert transfer._sum(words.view(torch.uint8)).item() == 53


def test_a_rank_that_does_not_come_is_an_error_after_the_deadline() -> None:
    store = transfer.host("127.0.0.1", 0.5)
    began = time.monotonic()
    with pytest.raises(
        EngineError, match=r"not all 2 ranks of communicator alone met within 0\.5 s"
    ):
        transfer.Communicator(store, name="alone", rank=0, world=2, device=CPU, timeout_s=0.5)
    assert time.monotonic() - began < 5


def test_no_store_is_an_error_after_the_deadline() -> None:
    store = transfer.host("127.0.0.1", 1.0)
    port = store.port
    del store
    with pytest.raises(EngineError, match=f"no trainer at 127.0.0.1:{port}"):
        transfer.join("127.0.0.1", port, 0.5)


def test_a_receiver_that_stalls_fails_the_sender_at_the_deadline() -> None:
    def run(communicator: transfer.Communicator) -> object:
        if communicator.rank == 0:
            return communicator.send(weights(), 16)
        time.sleep(2.5)
        return None

    sender, _ = meet(2, run, timeout_s=1.0)
    assert isinstance(sender, EngineError)
    assert str(sender).startswith("a weight broadcast failed on rank 0: ")
    assert "pair.cc" not in str(sender)


def test_giving_up_ends_a_send_between_two_buckets() -> None:
    def run(communicator: transfer.Communicator) -> object:
        if communicator.rank == 0:
            communicator.broadcast(torch.zeros(1))
            communicator.give_up()
            return communicator.send(weights(), 16)
        communicator.broadcast(torch.zeros(1))
        return None

    sender, _ = meet(2, run)
    assert str(sender) == "the publication was given up"


def test_giving_up_ends_the_wait_for_ranks_that_do_not_come() -> None:
    store = transfer.host("127.0.0.1", 30.0)
    given_up = Event()
    Timer(0.1, given_up.set).start()
    with pytest.raises(EngineError, match="given up"):
        transfer.Communicator(store, "alone", 0, 2, CPU, 30.0, given_up.is_set)


def test_a_sender_that_dies_fails_the_receiver() -> None:
    announced = transfer.describe(weights())

    def run(communicator: transfer.Communicator) -> object:
        if communicator.rank == 0:
            return None  # leaves without a word
        return list(communicator.receive(announced, 64))

    _, receiver = meet(2, run, timeout_s=2.0)
    assert isinstance(receiver, EngineError)


def test_names_separate_communicators_of_one_store() -> None:
    store = transfer.host("127.0.0.1", 10.0)

    def rank(index: int) -> list[float]:
        at = store if index == 0 else transfer.join("127.0.0.1", store.port, 10.0)
        got = []
        for name in ("first", "second"):
            communicator = transfer.Communicator(
                at, name=name, rank=index, world=2, device=CPU, timeout_s=10.0
            )
            value = torch.full((1,), float(len(name)) if index == 0 else 0.0)
            communicator.broadcast(value)
            got.append(value.item())
            communicator.close()
        return got

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(rank, range(2))) == [[5.0, 6.0], [5.0, 6.0]]
