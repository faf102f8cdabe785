# SPDX-License-Identifier: Apache-2.0
import resource
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

from molt.config import Config, dump
from molt.records import ConfigError, StoreError
from molt.store.run import RunDir
from molt.trainer import checkpoint, recipe
from molt.trainer.checkpoint import Marker, Saving
from molt.trainer.export import export, write
from molt.trainer.policy import Policy, build
from tests.unit.trainer import toy


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
    saving = begin(run, step, policy)
    saving.finish(keep)
    return saving.path


def begin(run: Path, step: int, policy: Policy) -> Saving:
    return Saving(run, Marker(step=step, version=step + 1, lineage=3), policy)


def newest(run: Path) -> tuple[Path, Marker] | None:
    return max(checkpoint.complete(run).items(), default=None, key=lambda item: item[1].step)


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
    assert newest(run) is None
    save(run, 9, policy)
    saved = {name: tensor.clone() for name, tensor in policy.weights()}
    change(policy)
    path = save(run, 10, policy)
    assert path == run / "checkpoints/step-000010"
    found = newest(run)
    assert found is not None and found[0] == path
    assert (found[1].step, found[1].version, found[1].lineage) == (10, 11, 3)
    policy.load(run / "checkpoints/step-000009")
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
    found = newest(run)
    assert found is not None and found[1].step == 6
    marker_of_6 = checkpoint.restore(run, policy)
    assert marker_of_6 == found[1]
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
    found = newest(run)
    assert found is not None and found[1].step == 1
    policy.load(save(run, 2, policy))
    assert steps(run) == ["step-000001", "step-000002"]


def test_training_goes_on_while_a_checkpoint_is_written(run: Path, policy: Policy) -> None:
    saved = {name: tensor.clone() for name, tensor in policy.weights()}
    saving = begin(run, 1, policy)
    change(policy)  # before it is on the disk, in all likelihood
    saving.finish(keep=1)
    policy.load(saving.path)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in policy.weights())


def test_the_older_checkpoint_stays_until_the_newer_one_is_complete(
    run: Path, policy: Policy
) -> None:
    save(run, 1, policy, keep=1)
    saving = begin(run, 2, policy)
    found = newest(run)
    assert found is not None and found[1].step == 1
    assert saving.finish(keep=1) == [2]


def test_a_write_that_fails_is_named_and_keeps_the_older_checkpoint(
    run: Path, policy: Policy
) -> None:
    save(run, 1, policy)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # of a file; the model has 1.2 MB
    try:
        with pytest.raises(
            StoreError, match=r"step-000002 was not written, rank 0: \w+Error: .* GiB"
        ):
            save(run, 2, policy)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert [marker.step for marker in checkpoint.complete(run).values()] == [1]
    save(run, 2, policy)
    assert [marker.step for marker in checkpoint.complete(run).values()] == [1, 2]


def test_a_changed_or_cut_file_makes_the_one_before_the_newest(
    run: Path, policy: Policy, caplog: pytest.LogCaptureFixture
) -> None:
    save(run, 1, policy, keep=3)
    flipped = save(run, 2, policy, keep=3) / "__0_0.distcp"
    cut = save(run, 3, policy, keep=3) / "__0_0.distcp"
    data = bytearray(flipped.read_bytes())
    data[len(data) // 2] ^= 16
    flipped.write_bytes(data)
    cut.write_bytes(cut.read_bytes()[:-1])
    marker = checkpoint.restore(run, policy)
    assert marker is not None and marker.step == 1
    assert "step-000003: __0_0.distcp was cut or changed" in caplog.text
    assert "step-000002: __0_0.distcp was cut or changed" in caplog.text


def test_a_damaged_checkpoint_that_was_passed_over_never_comes_back(
    run: Path, policy: Policy
) -> None:
    save(run, 1, policy, keep=3)
    file = save(run, 2, policy, keep=3) / "__0_0.distcp"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    marker = checkpoint.restore(run, policy)
    assert marker is not None and marker.step == 1
    checkpoint.abandon(run, marker.step)
    file.write_bytes(whole)  # a disk that only failed for a while
    marker = checkpoint.restore(run, policy)
    assert marker is not None and marker.step == 1
    save(run, 2, policy)
    marker = checkpoint.restore(run, policy)
    assert marker is not None and marker.step == 2


def test_ranks_share_the_files_and_all_take_the_same_checkpoint(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", b"").path
    restored = toy.on_ranks(2, save_damage_restore, tmp_path, run)
    assert restored == [(2, ["0", "1"], 20), (2, ["0", "1"], 20)]


def save_damage_restore(rank: int, world: int, run: Path) -> tuple[int, list[str], int]:
    """Three checkpoints; of the newest, the file that is rank 1's to check is damaged."""
    policy: Any = OneNumber()
    for step in (1, 2, 3):
        policy.number = 10 * step
        saving = begin(run, step, policy)
        while not saving.done():
            pass
        assert saving.finish(keep=2) == [1, 2, 3][max(0, step - 2) : step]
    (run / "checkpoints/step-000003/1").write_text("31")
    dist.barrier()
    marker = checkpoint.restore(run, policy)
    assert marker is not None
    return marker.step, sorted(marker.files), policy.number


class OneNumber:
    """A policy as far as checkpoints see one: each rank writes a file."""

    number = 0

    def save(self, path: Path) -> "Future[None]":
        (path / str(dist.get_rank())).write_text(str(self.number))
        written: Future[None] = Future()
        written.set_result(None)
        return written

    def load(self, path: Path) -> None:
        self.number = int((path / str(dist.get_rank())).read_text())


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_from_nothing(
    run: Path, policy: Policy
) -> None:
    assert checkpoint.restore(run, policy) is None
    file = save(run, 1, policy) / "__0_0.distcp"
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(StoreError, match="none of the 1 complete checkpoints"):
        checkpoint.restore(run, policy)


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
