# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from molt.config import Config
from molt.trainer import policy as policies
from molt.trainer.policy import AutoModelPolicy, build
from tests.unit.trainer.toy import on_ranks

VOCABULARY = 96


@dataclass
class Documents:
    """What `logprobs` takes."""

    tokens: Tensor
    cu_seqlens: Tensor
    temperature: Tensor

    @property
    def weight(self) -> Tensor:
        """Any weights, for a loss in which every token counts differently."""
        return torch.arange(len(self.tokens)) / 7.0


def documents(lengths: list[int], seed: int = 0) -> Documents:
    random = torch.Generator().manual_seed(seed)
    return Documents(
        torch.randint(3, VOCABULARY, (sum(lengths),), generator=random),
        torch.tensor([0, *lengths]).cumsum(0),
        0.5 + torch.rand(sum(lengths), generator=random),
    )


DOCUMENTS = documents([7, 1, 9, 2, 5])


def make_model(path: Path, tied: bool = True) -> Path:
    """A Qwen3 whose weights are large enough that each of them matters."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).float()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.15)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tied"))


def settings(path: Path, dtype: str = "float32", **sections: dict[str, Any]) -> Config:
    return Config.model_validate({"model": {"path": str(path), "dtype": dtype}, **sections})


def policy(path: Path, dtype: str = "float32", **sections: dict[str, Any]) -> AutoModelPolicy:
    return AutoModelPolicy(settings(path, dtype, **sections), rank=0, world=1)


class Reference:
    """Plain transformers, one document at a time."""

    def __init__(self, model: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def logprobs(self, d: Documents) -> tuple[Tensor, Tensor]:
        parts = []
        for start, end in d.cu_seqlens.unfold(0, 2, 1).tolist():
            logits = self.model(input_ids=d.tokens[None, start:end]).logits[0, :-1]
            logs = (logits / d.temperature[start + 1 : end, None]).log_softmax(-1)
            picked = logs.gather(1, d.tokens[start + 1 : end, None]).squeeze(1)
            entropy = torch.distributions.Categorical(logits=logs).entropy()
            parts.append(torch.nn.functional.pad(torch.stack([picked, entropy]), (1, 0)))
        out = torch.cat(parts, 1)
        return out[0], out[1]

    def gradients(self, *batches: Documents) -> dict[str, Tensor]:
        self.model.zero_grad()
        for d in batches:
            (self.logprobs(d)[0] * d.weight).sum().backward()
        return {name: p.grad for name, p in self.model.named_parameters()}


def gradients(policy: AutoModelPolicy) -> dict[str, Tensor]:
    names = [name for name, _ in policy.model.named_parameters()]
    shards = [p.grad for group in policy.optimizer.param_groups for p in group["params"]]
    whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in shards]
    return dict(zip(names, whole, strict=True))


def assert_gradients_close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        tolerance = 1e-5 * float(gradient.abs().max())
        torch.testing.assert_close(found[name], gradient, atol=tolerance, rtol=0)


def train(policy: AutoModelPolicy, d: Documents) -> float:
    """One update; the loss before it."""
    logprobs, _ = policy.logprobs(d.tokens, d.cu_seqlens, d.temperature)
    loss = -logprobs.sum()
    loss.backward()
    policy.clip(1.0, 1 / len(d.tokens))
    for group in policy.optimizer.param_groups:
        group["lr"] = 0.01
    policy.optimizer.step()
    policy.optimizer.zero_grad()
    return float(loss.detach())


@pytest.mark.parametrize("chunk", [policies.CHUNK_ELEMENTS, 4 * VOCABULARY])
@pytest.mark.parametrize("layout", ["rows", "packed"])
def test_logprobs_entropies_and_gradients_equal_those_of_transformers(
    model: Path, layout: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policies, "CHUNK_ELEMENTS", chunk)  # all rows at once, or 4 at a time
    ours, d = policy(model, trainer={"layout": layout}), DOCUMENTS
    logprobs, entropy = ours.logprobs(d.tokens, d.cu_seqlens, d.temperature)
    wanted, wanted_entropy = Reference(model).logprobs(d)
    torch.testing.assert_close(logprobs, wanted, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy, wanted_entropy, atol=1e-5, rtol=0)
    assert not entropy.requires_grad
    (logprobs * d.weight).sum().backward()
    assert_gradients_close(gradients(ours), Reference(model).gradients(d))


def test_only_needed_rows_are_projected_onto_the_vocabulary(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, d = policy(model), DOCUMENTS
    everything, _ = ours.logprobs(d.tokens, d.cu_seqlens, d.temperature)
    rows, project = [], policies._logprobs_of

    def count(weight: Tensor, bias: Tensor | None, hidden: Tensor, *rest: Tensor) -> Tensor:
        rows.append(len(hidden))
        return project(weight, bias, hidden, *rest)

    monkeypatch.setattr(policies, "_logprobs_of", count)
    needed = torch.zeros(len(d.tokens), dtype=torch.bool)
    needed[[0, 3, 4, 12, 23]] = True  # 0 begins a sequence: nothing predicts it
    logprobs, _ = ours.logprobs(d.tokens, d.cu_seqlens, d.temperature, needed)
    assert rows == [4]
    torch.testing.assert_close(logprobs, everything * needed)


def test_no_tokens_give_nothing_and_a_gradient_of_zero(model: Path) -> None:
    ours, none = policy(model), torch.empty(0)
    logprobs, entropy = ours.logprobs(none.long(), torch.tensor([0]), none, none.bool())
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()
    assert all(g is not None and not g.any() for g in gradients(ours).values())


def test_rows_need_no_attention_mask(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A mask would cost memory and the fast kernel; position ids that are given may bring one.
    calls, attend = [], torch.nn.functional.scaled_dot_product_attention

    def record(*args: Any, **kwargs: Any) -> Tensor:
        calls.append((kwargs["attn_mask"], kwargs["is_causal"]))
        return attend(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
    d = documents([5])
    policy(model, trainer={"layout": "rows"}).logprobs(d.tokens, d.cu_seqlens, d.temperature)
    assert calls == [(None, True)] * 3  # one a layer


def test_clip_scales_then_bounds_the_norm_and_returns_it_unbounded(model: Path) -> None:
    ours, d = policy(model), DOCUMENTS
    (ours.logprobs(d.tokens, d.cu_seqlens, d.temperature)[0] * d.weight).sum().backward()
    before = gradients(ours)["model.norm.weight"].clone()
    norm = float(torch.cat([g.flatten() for g in gradients(ours).values()]).norm())
    assert ours.clip(1e9, scale=0.5) == pytest.approx(norm / 2, rel=1e-5)
    torch.testing.assert_close(gradients(ours)["model.norm.weight"], before / 2)
    ours.clip(norm / 8, scale=1.0)  # the norm is norm / 2, so a quarter of it is left
    torch.testing.assert_close(gradients(ours)["model.norm.weight"], before / 8)


@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_what_the_model_directory_holds(tmp_path: Path, tied: bool) -> None:
    make_model(tmp_path, tied)
    ours = policy(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert dict(ours.weights()).keys() == stored.keys()
    assert ("lm_head.weight" in stored) is not tied
    for name, tensor in ours.weights():
        assert torch.equal(tensor, stored[name])


def test_weights_leave_in_the_dtype_of_the_computation_and_masters_stay(model: Path) -> None:
    ours = policy(model, "bfloat16")
    assert {tensor.dtype for _, tensor in ours.weights()} == {torch.bfloat16}
    assert {p.dtype for p in ours.model.parameters()} == {torch.float32}
    d = DOCUMENTS
    logprobs, _ = ours.logprobs(d.tokens, d.cu_seqlens, d.temperature)
    error = (logprobs - Reference(model).logprobs(d)[0]).abs()
    assert 1e-4 < error.max() < 0.5  # bfloat16 keeps 8 bits
    assert logprobs.dtype == torch.float32


def test_a_loaded_policy_goes_on_as_if_it_had_never_stopped(model: Path, tmp_path: Path) -> None:
    batches = [documents([6, 8], seed) for seed in range(6)]
    first = policy(model)
    for d in batches[:3]:
        train(first, d)
    first.save(tmp_path).result()
    losses = [train(first, d) for d in batches[3:]]
    second = policy(model, optim={"betas": [0.5, 0.95]})
    train(second, batches[0])  # what it did before must not matter
    second.load(tmp_path)
    assert second.optimizer.param_groups[0]["betas"] == (0.5, 0.95)  # of the config, always
    second.optimizer.param_groups[0]["betas"] = (0.9, 0.95)
    assert [train(second, d) for d in batches[3:]] == losses


LENGTHS = [[[7, 1, 9], [6, 6]], [[4, 11], []]]  # of two micro-batches on two ranks


def two_ranks(rank: int, world: int, model: Path, path: Path) -> dict[str, dict[str, Any]]:
    """What one of two ranks finds; the second has nothing to do in the second micro-batch."""
    torch.set_num_threads(1)
    batches = [documents(lengths, seed=rank) for lengths in LENGTHS[rank]]
    found = {}
    for layout in ("rows", "packed"):
        config = settings(model, trainer={"layout": layout})
        ours = AutoModelPolicy(config, rank, world)
        weights = dict(ours.weights())
        with torch.no_grad():  # leaves weights gathered
            before, _ = ours.logprobs(*vars(batches[0]).values())
        for i, d in enumerate(batches):
            ours.accumulate(last=i == 1)
            logprobs, _ = ours.logprobs(d.tokens, d.cu_seqlens, d.temperature)
            (logprobs * d.weight).sum().backward()
        found[layout] = {"weights": weights, "logprobs": before, "gradients": gradients(ours)}
        found[layout]["norm"] = ours.clip(1e9, scale=world)  # FSDP averages over ranks
        train(ours, batches[0])
        ours.save(path / layout).result()
        found[layout]["saved"] = dict(ours.weights())
        found[layout]["losses"] = [train(ours, batches[0]) for _ in range(3)]
        again = AutoModelPolicy(config, rank, world)
        again.load(path / layout)
        found[layout]["again"] = [train(again, batches[0]) for _ in range(3)]
    half = AutoModelPolicy(settings(model, "bfloat16"), rank, world)
    found["bfloat16"] = {"logprobs": half.logprobs(*vars(batches[0]).values())[0].detach()}
    return found


Ranks = tuple[Path, list[dict[str, dict[str, Any]]]]


@pytest.fixture(scope="module")
def ranks(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    path = tmp_path_factory.mktemp("ranks")
    return path, on_ranks(2, two_ranks, path, model, path)


@pytest.mark.parametrize("layout", ["rows", "packed"])
def test_two_ranks_together_compute_what_one_does(ranks: Ranks, model: Path, layout: str) -> None:
    reference, stored = Reference(model), load_file(model / "model.safetensors")
    batches = [[documents(n, seed=rank) for n in LENGTHS[rank]] for rank in range(2)]
    wanted = reference.gradients(batches[0][0], batches[0][1], batches[1][0])
    norm = float(torch.cat([g.flatten() for g in wanted.values()]).norm())
    for rank in range(2):
        found = ranks[1][rank][layout]
        logprobs = reference.logprobs(batches[rank][0])[0].detach()
        torch.testing.assert_close(found["logprobs"], logprobs, atol=1e-5, rtol=0)
        assert found["weights"].keys() == stored.keys()
        assert all(torch.equal(found["weights"][name], stored[name]) for name in stored)
        summed = {name: 2 * g for name, g in found["gradients"].items()}  # they are averages
        assert_gradients_close(summed, wanted)
        assert found["norm"] == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("layout", ["rows", "packed"])
def test_two_ranks_resume_exactly_and_one_rank_reads_what_they_saved(
    ranks: Ranks, model: Path, layout: str
) -> None:
    path, found = ranks
    for rank in range(2):
        assert found[rank][layout]["again"] == found[rank][layout]["losses"]
        assert found[rank][layout]["losses"][0] > found[rank][layout]["losses"][2]
    alone = policy(model)
    alone.load(path / layout, optimizer=False)
    for name, tensor in alone.weights():
        assert torch.equal(tensor, found[0][layout]["saved"][name])


def test_two_ranks_can_compute_in_bfloat16(ranks: Ranks, model: Path) -> None:
    for rank in range(2):
        logprobs = ranks[1][rank]["bfloat16"]["logprobs"]
        wanted, _ = Reference(model).logprobs(documents(LENGTHS[rank][0], seed=rank))
        assert logprobs.dtype == torch.float32
        assert 1e-4 < (logprobs - wanted).abs().max() < 0.5


def made_elsewhere(config: Config, rank: int, world: int) -> Any:
    return config.run.seed, rank, world


def test_another_policy_is_a_function_named_in_the_config(model: Path) -> None:
    config = settings(model, trainer={"policy": f"{__name__}:made_elsewhere"}, run={"seed": 5})
    assert build(config, 1, 2) == (5, 1, 2)
