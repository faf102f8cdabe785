# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from molt.config import Config, dump
from molt.records import ConfigError, StoreError
from molt.store.run import RunDir
from molt.trainer import checkpoint, recipe
from molt.trainer.checkpoint import Marker
from molt.trainer.export import export, write
from molt.trainer.policy import Policy, build


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    recipe.toy_tokenizer(path)
    recipe.toy_model(path)
    return path


@pytest.fixture
def config(model: Path) -> Config:
    return Config.model_validate({"model": {"path": str(model)}})


@pytest.fixture
def run(tmp_path: Path, config: Config) -> Path:
    return RunDir.create(tmp_path / "run", dump(config)).path


@pytest.fixture
def policy(config: Config) -> Policy:
    return build(config, rank=0, world=1)


def save(run: Path, step: int, policy: Policy, keep: int = 2) -> Path:
    return checkpoint.save(run, Marker(step=step, version=step + 1, lineage=3), policy, 0, keep)


def steps(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def change(policy: Policy) -> None:
    """Add 1 to all weights."""
    for group in policy.optimizer.param_groups:
        for parameter in group["params"]:
            parameter.data.add_(1.0)


def test_the_newest_checkpoint_is_found_with_its_cursor_and_loads(
    run: Path, policy: Policy
) -> None:
    assert checkpoint.newest(run) is None
    save(run, 9, policy)
    saved = {name: tensor.clone() for name, tensor in policy.weights()}
    change(policy)
    path = save(run, 10, policy)
    assert path == run / "checkpoints/step-000010"
    assert checkpoint.newest(run) == (path, Marker(step=10, version=11, lineage=3))
    checkpoint.load(run / "checkpoints/step-000009", policy)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in policy.weights())


def test_only_the_newest_are_kept(run: Path, policy: Policy) -> None:
    for step in (1, 2, 3, 4):
        save(run, step, policy, keep=2)
    assert steps(run) == ["step-000003", "step-000004"]


@pytest.mark.parametrize("marker", [None, b"", b'{"step": 7'])
def test_without_a_whole_marker_it_is_no_checkpoint(
    run: Path, policy: Policy, marker: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    save(run, 6, policy)
    half = save(run, 7, policy) / checkpoint.MARKER
    half.unlink()
    if marker is not None:
        half.write_bytes(marker)
    found = checkpoint.newest(run)
    assert found is not None and found[1].step == 6
    assert "step-000007, which is not complete" in caplog.text


def test_a_save_that_died_leaves_the_one_before_and_is_done_again(
    run: Path, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Died(BaseException):
        pass

    def die(path: Path) -> None:
        Path(path, "__0_0.distcp").write_bytes(b"half of it")
        raise Died

    save(run, 1, policy)
    with monkeypatch.context() as patch, pytest.raises(Died):
        patch.setattr(policy, "save", die)
        save(run, 2, policy)
    found = checkpoint.newest(run)
    assert found is not None and found[1].step == 1
    checkpoint.load(save(run, 2, policy), policy)
    assert steps(run) == ["step-000001", "step-000002"]


def test_an_exported_checkpoint_is_a_hugging_face_directory(
    run: Path, policy: Policy, tmp_path: Path
) -> None:
    change(policy)
    saved = {name: tensor.clone() for name, tensor in policy.weights()}
    save(run, 1, policy)
    change(policy)
    save(run, 2, policy)
    to = export(run, 1, tmp_path / "exported")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(to), AutoTokenizer.from_pretrained(to)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in saved.items())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert tokenizer.decode(tokenizer.encode("1+2=")) == "1+2="
    newest = AutoModelForCausalLM.from_pretrained(export(run, None, tmp_path / "newest"))
    assert torch.equal(newest.model.norm.weight, saved["model.norm.weight"] + 1)


def test_export_names_what_it_cannot_do(run: Path, policy: Policy, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run directory"):
        export(tmp_path, None, tmp_path / "to")
    with pytest.raises(StoreError, match="no complete checkpoint: let it train"):
        export(run, None, tmp_path / "to")
    save(run, 1, policy)
    save(run, 2, policy)
    with pytest.raises(StoreError, match="of step 3: choose one of 1, 2"):
        export(run, 3, tmp_path / "to")
    with pytest.raises(ConfigError, match="exists: name a directory that does not"):
        export(run, 1, run)


def test_weights_of_several_files_load_as_one(
    model: Path, policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("molt.trainer.export.SHARD_BYTES", 300_000)
    to = write(policy.weights(), model, tmp_path / "to")
    assert len(list(to.glob("*.safetensors"))) > 2
    loaded = AutoModelForCausalLM.from_pretrained(to).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in policy.weights())


def test_an_export_that_fails_leaves_nothing(model: Path, tmp_path: Path) -> None:
    def broken() -> object:
        yield "model.norm.weight", torch.ones(2)
        raise RuntimeError("the rest is lost")

    with pytest.raises(RuntimeError):
        write(broken(), model, tmp_path / "to")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
