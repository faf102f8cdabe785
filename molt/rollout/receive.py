# SPDX-License-Identifier: Apache-2.0
"""The engine's end of a weight publication: vLLM's weight transfer backend "molt".

vLLM calls `register` in each of its processes through the entry point group "vllm.general_plugins";
a `Receiver` then lives in every worker. It loads HF-named tensors through the model's own loader,
layer by layer, refuses names the model does not know and parameters that did not come whole, and
repairs what vLLM 0.32.0 leaves stale after a reload. After a failed update the worker's weights are
undefined and it takes no other: restart the server.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)

from molt import transfer
from molt.records import EngineError, Tensor

BACKEND = "molt"


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Where a worker joins a communicator; the ranks of its engine start at `rank_offset`."""

    address: str
    port: int
    name: str
    rank_offset: int
    world: int
    timeout_s: float


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """What will be sent: (name, dtype, shape) in order."""

    tensors: list[tuple[str, str, list[int]]]
    bucket_bytes: int


class Receiver(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Receives publications in one vLLM worker."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False
    _communicator: transfer.Communicator | None = None
    _undefined = False  # whether an update has begun and not ended

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Join a communicator, leaving the one before."""
        self.shutdown()
        parallel = self.parallel_config
        rank = (
            init_info.rank_offset
            + parallel.data_parallel_index * parallel.world_size
            + parallel.rank
        )
        store = transfer.join(init_info.address, init_info.port, init_info.timeout_s)
        self._communicator = transfer.Communicator(
            store, init_info.name, rank, init_info.world, self.device, init_info.timeout_s
        )

    def start_weight_update(self) -> None:
        """Open the model's layers for loading.

        Raises:
            EngineError: the update before failed half-way.
        """
        if self._undefined:
            self.shutdown()
            raise EngineError(
                "an earlier update failed and left the weights undefined: restart the engine"
            )
        self._undefined = True
        for module in self.model.modules():
            method = getattr(module, "quant_method", None)
            if isinstance(method, UnquantizedFusedMoEMethod):
                method.moe_kernel = None  # vLLM packs experts only where there is no kernel yet
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive and load. The base class synchronizes an accelerator, which CPUs lack."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load every announced tensor.

        Raises:
            EngineError: a parameter was not among them, or the transfer failed.
            ValueError: the model knows no parameter of a name.
        """
        assert self._communicator, "init_transfer_engine comes first"
        with ExitStack() as failed:
            failed.callback(
                self.shutdown
            )  # so that the sender does not wait for a worker that gave up
            expected = {name for name, _ in self.model.named_parameters()}
            model: Any = self.model  # every model of vLLM's loads, but not by its type
            loaded = model.load_weights(self._tensors(update_info))
            missing = sorted((expected - loaded - self._tied()) | self._incomplete())
            if missing:
                raise EngineError(
                    f"{len(missing)} parameters of the engine's model were not published whole, "
                    f"first {missing[0]}: the trainer's and the engine's model differ"
                )
            failed.pop_all()

    def finish_weight_update(self) -> None:
        """Close the layers, and pack tied heads again: vLLM keeps their first weights packed."""
        finalize_layerwise_reload(self.model, self.model_config)
        if embedding := self._embedding():
            for head in self._heads().values():
                head.weight = embedding.weight
                head.quant_method.process_weights_after_loading(head)
        self._undefined = False

    def shutdown(self) -> None:
        """Leave the communicator."""
        if self._communicator:
            self._communicator.close()
        self._communicator = None

    def _tensors(self, update_info: UpdateInfo) -> Iterator[tuple[str, torch.Tensor]]:
        tensors = [Tensor(name=n, dtype=d, shape=tuple(s)) for n, d, s in update_info.tensors]
        assert self._communicator
        return self._communicator.receive(tensors, update_info.bucket_bytes)

    def _incomplete(self) -> set[str]:
        """Linear layers that wait for a part: vLLM fuses several HF tensors into one parameter."""
        names = set()
        for name, module in self.model.named_modules():
            info = get_layerwise_info(module)
            if isinstance(module, LinearBase) and info.can_load() and info.load_numel:
                names.add(name)
        return names

    def _embedding(self) -> torch.nn.Module | None:
        """The input embedding of a model whose output head is tied to it."""
        if not getattr(self.model_config.hf_config, "tie_word_embeddings", False):
            return None
        model: Any = self.model
        if hasattr(model, "get_language_model"):
            model = model.get_language_model()
        return getattr(getattr(model, "model", None), "embed_tokens", None)

    def _heads(self) -> dict[str, ParallelLMHead]:
        modules = self.model.named_modules()
        return {name: module for name, module in modules if isinstance(module, ParallelLMHead)}

    def _tied(self) -> set[str]:
        """Parameters that get their values from the embedding and are therefore not published."""
        return {f"{name}.weight" for name in self._heads()} if self._embedding() else set()


def register() -> None:
    """Entry point of the plugin. vLLM may call it several times in a process."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, Receiver)
