# SPDX-License-Identifier: Apache-2.0
"""The policy being trained, behind one flat interface; the only module that names NeMo AutoModel.

`Policy` is what the step, the publication and the checkpoint need. `AutoModelPolicy` fills it with
a NeMo AutoModel under FSDP2, float32 masters and AdamW. Everything outside is packed and ragged:
row i of any [N] tensor is FOR token i, and the shift to next-token prediction happens once, in
here.

Two layouts turn flat tokens into a forward pass. `rows`: right-padded [B, T] without any attention
mask (under causal attention no token sees the padding behind it); best where attention over one
long row would be quadratic, as with sdpa on CPUs. `packed`: one row with position ids that restart
at each sequence, which attention kernels with variable lengths want; best on GPUs. In `rows`,
sequences of similar length belong in one micro-batch.

Another policy is a function `factory(config, rank, world) -> Policy`, named in `trainer.policy`.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from molt.config import Config
from molt.data import resolve

CHUNK_ELEMENTS = 1 << 26  # logits alive at once, float32: 256 MiB
SMALL_BYTES = 4 << 30  # a model up to this size on disk stays gathered between forward and backward


class Policy(Protocol):
    """A causal language model under training. Methods marked collective must run on every rank."""

    device: torch.device
    optimizer: torch.optim.Optimizer  # over float32 masters

    def logprobs(
        self, tokens: Tensor, cu_seqlens: Tensor, temperature: Tensor, needed: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Log-probability of each token given its sequence so far, differentiable. Collective.

        Args:
            tokens: [N] int64, the sequences one after the other; N = 0 on a rank without work.
            cu_seqlens: [S + 1] int64, where each sequence starts, and N.
            temperature: [N] float32, which token i was (or would be) sampled at.
            needed: [N] bool, rows to compute; others are 0 and cost no vocabulary projection.

        Returns:
            [N] float32 log-probabilities in nats (0 for the first token of a sequence), and [N]
            float32 entropies of the distributions they come from, without gradient. On `device`.
        """
        ...

    def accumulate(self, last: bool) -> None:
        """Announce a forward and backward pass; only the `last` one reduces gradients."""
        ...

    def clip(self, max_norm: float, scale: float) -> float:
        """Scale all gradients, clip their global norm, return the norm before clipping. Collective.

        Gradients are averages over ranks; `scale` makes them what the caller wants.
        """
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors in `model.dtype` by HF name, one at a time, tied ones once. Collective."""
        ...

    def save(self, path: Path) -> "Future[Any]":
        """Begin to write weights and optimizer state, as they are now, into a directory.

        Collective. Training may go on at once; the files are whole when the future says so.
        """
        ...

    def load(self, path: Path, optimizer: bool = True) -> None:
        """Continue exactly where `save` was called, on any number of ranks. Collective.

        Hyper-parameters stay those of the config. Without `optimizer` only weights are read.
        """
        ...


def build(config: Config, rank: int, world: int) -> Policy:
    """The policy that `trainer.policy` names, with the weights of `model.path`. Collective.

    Process groups are the caller's: for world > 1 the default group must exist.
    """
    if config.trainer.policy == "automodel":
        return AutoModelPolicy(config, rank, world)
    return resolve(config.trainer.policy)(config, rank, world)


class AutoModelPolicy:
    """NeMo AutoModel, FSDP2 over all ranks (no sharding for one), AdamW over float32 masters."""

    def __init__(self, config: Config, rank: int, world: int) -> None:
        """Load `model.path`; build the optimizer before a forward can leave weights gathered."""
        self.dtype = getattr(torch, config.model.dtype)
        self.device = _device()
        self.model = _load(config, world, self.device)
        self.model.eval()  # no dropout: π_old and π have to be the same function
        self._head = _Head(self.model)
        layout = config.trainer.layout
        if layout == "auto":
            layout = "packed" if self.device.type == "cuda" else "rows"
        self._arrange = {"rows": _rows, "packed": _packed}[layout]
        self._autocast = world == 1 and self.dtype != torch.float32  # FSDP casts where it shards
        self._keep_gathered = _stays_gathered(config)
        self._saving: Any = None  # process group of the checkpoints
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=config.optim.lr,
            betas=config.optim.betas,
            eps=config.optim.eps,
            weight_decay=config.optim.weight_decay,
            fused=True,
        )

    def logprobs(
        self, tokens: Tensor, cu_seqlens: Tensor, temperature: Tensor, needed: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `Policy.logprobs`."""
        num_tokens = len(tokens)
        if num_tokens == 0:  # two dummy tokens, so that every rank runs the same collectives
            tokens, cu_seqlens = torch.zeros(2, dtype=torch.int64), torch.tensor([0, 2])
            temperature, needed = torch.ones(2), None
        tokens, cu_seqlens = tokens.to(self.device), cu_seqlens.to(self.device)
        inputs, positions = self._arrange(tokens, cu_seqlens)
        wanted = torch.ones_like(tokens, dtype=torch.bool)
        if needed is not None:
            wanted &= needed.to(self.device)
        wanted[cu_seqlens[:-1]] = False
        index = wanted.nonzero().squeeze(1)
        self._head.sources = positions[index] - 1  # the token before predicts it, in either layout
        self._head.targets = tokens[index]
        self._head.temperature = temperature.to(self.device)[index]
        with torch.autocast(self.device.type, self.dtype, enabled=self._autocast):
            picked = self.model(**inputs, use_cache=False).logits
        out = picked.new_zeros(2, len(tokens)).index_copy(1, index, picked)
        return out[0, :num_tokens], out[1, :num_tokens].detach()

    def accumulate(self, last: bool) -> None:
        """See `Policy.accumulate`."""
        # Deferred gradients are whole on every rank: only for models that may stay gathered.
        if isinstance(self.model, FSDPModule) and self._keep_gathered:
            self.model.set_is_last_backward(last)
            self.model.set_requires_gradient_sync(last)
            self.model.set_reshard_after_backward(last)

    @torch.no_grad()
    def clip(self, max_norm: float, scale: float) -> float:
        """See `Policy.clip`."""
        trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        grads = [p.grad for p in trained if p.grad is not None]
        shards = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
        square = torch.stack(torch._foreach_norm(shards)).square().sum()
        if isinstance(self.model, FSDPModule):
            dist.all_reduce(square)
        norm = float(square.sqrt()) * abs(scale)
        torch._foreach_mul_(shards, scale * min(1.0, max_norm / (norm + 1e-6)))
        return norm

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `Policy.weights`."""
        adapter = getattr(self.model, "state_dict_adapter", None)
        for name, tensor in self._state().items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            whole = whole.to(self.dtype) if whole.is_floating_point() else whole
            yield from (
                adapter.convert_single_tensor_to_hf(name, whole) if adapter else [(name, whole)]
            )

    def save(self, path: Path) -> "Future[Any]":
        """See `Policy.save`."""
        state = {
            "model": self._state(),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
        }
        if dist.is_initialized() and self._saving is None:  # its collectives run beside the step's
            self._saving = dist.new_group(backend="gloo")
        writing: Any = dcp.async_save(
            state,
            checkpoint_id=path,
            process_group=self._saving,
            no_dist=not dist.is_initialized(),
        )
        return writing

    def load(self, path: Path, optimizer: bool = True) -> None:
        """See `Policy.load`."""
        state: dict[str, Any] = {"model": self._state()}  # dcp reads into the live shards
        if optimizer:
            state["optimizer"] = get_optimizer_state_dict(self.model, self.optimizer)
        dcp.load(state, checkpoint_id=path, no_dist=not dist.is_initialized())
        if optimizer:
            groups = self.optimizer.param_groups
            ours = [{k: v for k, v in g.items() if k != "params"} for g in groups]
            set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])
            for group, own in zip(self.optimizer.param_groups, ours, strict=True):
                group.update(own)

    def _state(self) -> dict[str, Tensor]:
        """State dict of shards without the second name of tied weights."""
        for module in self.model.modules():  # a forward without backward leaves weights gathered
            if isinstance(module, FSDPModule):
                module.reshard()
        once = {name for name, _ in self.model.named_parameters()}
        twice = {name for name, _ in self.model.named_parameters(remove_duplicate=False)} - once
        state = self.model.state_dict()
        wrapped = "_checkpoint_wrapped_module."  # of activation checkpointing
        return {k.replace(wrapped, ""): v for k, v in state.items() if k not in twice}


class _Head:
    """Stands in for the forward of `lm_head`: log-probabilities and entropies instead of logits.

    It runs inside the model's forward, so FSDP has gathered the weight. Logits exist for
    `CHUNK_ELEMENTS` at a time and are computed again in backward: never [N, V] float32 whole.
    """

    sources: Tensor  # [M] int64, flat positions whose hidden states predict
    targets: Tensor  # [M] int64
    temperature: Tensor  # [M] float32

    def __init__(self, model: Any) -> None:
        self.linear: Any = model.get_output_embeddings()
        self.linear.forward = self

    def __call__(self, hidden: Tensor) -> Tensor:
        """[B, T, H] → [2, M] float32: log-probabilities and (without gradient) entropies."""
        hidden = hidden.flatten(0, -2).index_select(0, self.sources)
        rows = max(1, CHUNK_ELEMENTS // self.linear.out_features)
        parts = zip(
            hidden.split(rows), self.targets.split(rows), self.temperature.split(rows), strict=True
        )
        weight, bias = self.linear.weight, self.linear.bias
        if len(hidden) <= rows:
            return _logprobs_of(weight, bias, *next(parts))
        chunks = [checkpoint(_logprobs_of, weight, bias, *p, use_reentrant=False) for p in parts]
        return torch.cat(chunks, dim=1)


def _logprobs_of(
    weight: Tensor, bias: Tensor | None, hidden: Tensor, targets: Tensor, temperature: Tensor
) -> Tensor:
    """[M, H] hidden states → [2, M]: log softmax(logits / temperature)[target], and its entropy."""
    logits = F.linear(hidden, weight, bias).float() / temperature[:, None]
    logs = torch.log_softmax(logits, dim=-1)
    with torch.no_grad():
        entropy = -(logs.exp() * logs).sum(-1)
    return torch.stack([logs.gather(1, targets[:, None]).squeeze(1), entropy])


Arrange = Callable[[Tensor, Tensor], tuple[dict[str, Tensor], Tensor]]


def _rows(tokens: Tensor, cu_seqlens: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """[N] tokens → model inputs [S, T] and each token's flat position in them."""
    lengths = cu_seqlens.diff()
    width = int(lengths.max())
    row = torch.repeat_interleave(torch.arange(len(lengths), device=tokens.device), lengths)
    positions = torch.arange(len(tokens), device=tokens.device) + row * width - cu_seqlens[row]
    ids = tokens.new_zeros(len(lengths) * width).index_copy(0, positions, tokens)
    return {"input_ids": ids.view(-1, width)}, positions


def _packed(tokens: Tensor, cu_seqlens: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """[N] tokens → one row [1, N] whose position ids restart at each sequence."""
    positions = torch.arange(len(tokens), device=tokens.device)
    start = torch.repeat_interleave(cu_seqlens[:-1], cu_seqlens.diff())
    return {"input_ids": tokens[None], "position_ids": (positions - start)[None]}, positions


# ---------------------------------------------------------------- NeMo AutoModel


def _device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _stays_gathered(config: Config) -> bool:
    """Whether ranks keep whole weights between passes: less traffic, for models that fit easily."""
    chosen = config.trainer.automodel.get("fsdp2", {}).get("reshard_after_forward")
    if chosen is not None:
        return not chosen
    files = Path(config.model.path).glob("*.safetensors")
    return sum(f.stat().st_size for f in files) <= SMALL_BYTES


def _load(config: Config, world: int, device: torch.device) -> Any:
    """`model.path` as a float32 AutoModel, sharded over all ranks.

    Keys of `trainer.automodel` are arguments of `from_pretrained`, but for its table `fsdp2`, whose
    keys are those of AutoModel's FSDP2Config.
    """
    if device.type == "cpu":  # compiling a norm takes 15 s and a C++ compiler, and gains nothing
        torch._dynamo.config.disable = True  # before the import that decorates it
    from nemo_automodel import NeMoAutoModelForCausalLM
    from nemo_automodel.components.distributed import DistributedSetup, FSDP2Config

    options = {"use_liger_kernel": False, **config.trainer.automodel}
    strategy = options.pop("fsdp2", {})
    if device.type == "cpu":
        options.setdefault("attn_implementation", "sdpa")
    if world > 1:
        precision = MixedPrecisionPolicy(
            param_dtype=getattr(torch, config.model.dtype),
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        )
        gathered = {"reshard_after_forward": False} if _stays_gathered(config) else {}
        fsdp = FSDP2Config(**{"mp_policy": precision, **gathered, **strategy})
        options["distributed_setup"] = DistributedSetup.build(
            strategy=fsdp, activation_checkpointing=fsdp.activation_checkpointing
        )
    with _runs_without_cuda():
        return NeMoAutoModelForCausalLM.from_pretrained(
            config.model.path, dtype=torch.float32, **options
        )


@contextmanager
def _runs_without_cuda() -> Iterator[None]:
    """AutoModel 0.7 asks for the current CUDA device even where none is: answer with the CPU."""
    if torch.cuda.is_available():
        yield
        return
    from nemo_automodel._transformers import auto_model

    place, current = auto_model.apply_model_infrastructure, torch.cuda.current_device

    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        model = place(*args, **{**kwargs, "device": torch.device("cpu")})
        for module in model.modules():  # rotary embeddings of some models remember their device
            if "device" in vars(module):
                vars(module)["device"] = torch.device("cpu")
        return model

    auto_model.apply_model_infrastructure, torch.cuda.current_device = on_cpu, lambda: 0
    try:
        yield
    finally:
        auto_model.apply_model_infrastructure, torch.cuda.current_device = place, current
