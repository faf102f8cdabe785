# SPDX-License-Identifier: Apache-2.0
"""What is refused before anything starts."""

import sys
from pathlib import Path

import pytest

from molt.config import load
from molt.launch.check import check
from molt.records import ConfigError

CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("*.toml"))


@pytest.fixture
def toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config that passes, with its own prompts, agent and model directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("m").mkdir()
    Path("m/config.json").write_text("{}")
    Path("rows.jsonl").write_text('{"question": "1+1=", "label": 2}\n')
    Path("programs.py").write_text(
        "class Agent:\n    def __init__(self, depth=1): ...\n"
        'def rows(n=1): return [{"prompt": "x"}] * n\n'
    )
    path = Path("c.toml")
    path.write_text(
        '[model]\npath = "m"\n[agent]\nname = "programs:Agent"\n'
        '[data]\nsource = "rows.jsonl"\nprompt = "question"\n'
    )
    return path


def problems(path: Path, *overrides: str) -> str:
    config = load(path, overrides)
    with pytest.raises(ConfigError) as caught:
        check(config)
    return str(caught.value)


def test_a_config_whose_names_exist_passes(toml: Path) -> None:
    check(load(toml, ["agent.args.depth=2"]))
    check(load(toml, ["data.source=programs:rows", "data.args.n=2", "data.prompt=prompt"]))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_of_the_repo_passes_without_torch(path: Path) -> None:
    before = "torch" in sys.modules
    check(load(path))
    assert ("torch" in sys.modules) == before


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (
            "sampling.num_samples=1",
            "dr_grpo needs at least 2 rollouts per group, got 1: raise sampling.num_samples",
        ),
        # 32 groups of 16 rollouts
        (
            "trainer.minibatches=513",
            "trainer.minibatches = 513 is more than the 512 rollouts of a step: lower it",
        ),
        (
            "pool.groups=31",
            "pool.groups = 31 never fills a plan of trainer.groups = 32: raise it, "
            "or set 0 for no cap",
        ),
        (
            "sampling.max_tokens=512",
            "sampling.max_tokens = 512 leaves no room for a prompt in model.max_len = 512: lower",
        ),
        (
            "trainer.tokens=511",
            "trainer.tokens = 511 cannot hold one segment of model.max_len = 512: raise it",
        ),
        ("eval.train.every=1", 'eval."train" is no name: use letters, digits, _ and -'),
        ("engine.vllm.max-model-len=9", "max-model-len is not free to set: set model.max_len"),
        ("engine.vllm.port=80", "engine.vllm.port is not free to set: engines listen on a private"),
        ("model.path=nowhere", "does not exist: correct it, or set model.recipe to make it"),
        ("model.path=", "model.path is not set"),
        ("model.path=.", "holds no config.json: name a Hugging Face model directory"),
        ("model.recipe=programs:build", 'model.recipe = "programs:build": programs has no build'),
        ("model.recipe=nomodule:build", 'model.recipe = "nomodule:build" does not exist'),
        ("model.recipe=programs", 'model.recipe = "programs" does not exist: write'),
        ("trainer.policy=programs:make", 'trainer.policy = "programs:make": programs has no make'),
        ("agent.name=", "agent.name is not set"),
        ("agent.name=programs:Agnet", "agent.name: "),
        ("agent.name=nomodule:Agent", "No module named 'nomodule'"),
        ("agent.args.deph=2", "agent.name: got an unexpected keyword argument 'deph'"),
        ("data.source=", "data.source is not set"),
        ("data.source=nowhere.jsonl", "data.source: no prompts at"),
        ("data.prompt=text", 'has no column "text"'),
        ("data.source=programs:row", "data.source: "),
        ("eval.held.source=nowhere.jsonl", "eval.held.source: no prompts at"),
    ],
)
def test_what_cannot_run_is_one_line_with_its_remedy(toml: Path, override: str, says: str) -> None:
    said = problems(toml, override)
    assert says in said
    assert "\n" not in said


def test_arguments_that_a_source_does_not_take_are_refused(toml: Path) -> None:
    said = problems(toml, "data.source=programs:rows", "data.prompt=prompt", "data.args.m=2")
    assert said == "data.source: rows() got an unexpected keyword argument 'm'"


def test_every_problem_is_said_at_once(toml: Path) -> None:
    said = problems(toml, "sampling.num_samples=1", "agent.name=", "model.path=nowhere")
    assert len(said.splitlines()) == 3


def test_the_smallest_allowed_values_pass(toml: Path) -> None:
    check(load(toml, ["sampling.num_samples=2", "pool.groups=32", "trainer.minibatches=64"]))
    check(load(toml, ["sampling.num_samples=1", "algo.estimator=reinforce"]))
    check(load(toml, ["trainer.tokens=512", "sampling.max_tokens=511"]))


def test_a_run_may_be_shorter_than_its_warmup(toml: Path) -> None:
    check(load(toml, ["trainer.steps=5", "optim.warmup=10"]))
