# SPDX-License-Identifier: Apache-2.0
"""Loading, overrides, and the one clear line for everything that can be wrong."""

from pathlib import Path

import pytest

from molt.config import Config, dump, load, load_resolved
from molt.records import ConfigError

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))


@pytest.fixture
def toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small config file, called by its relative name."""
    monkeypatch.chdir(tmp_path)
    path = Path("small.toml")
    path.write_text('[trainer]\nsteps = 7\n[model]\npath = "models/m"\n[eval.greedy]\nevery = 2\n')
    return path


def message(path: Path | str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    return str(caught.value)


def test_defaults_that_depend_on_the_file_are_resolved(toml: Path, tmp_path: Path) -> None:
    config = load(toml)
    assert config.run.name == "small"
    assert config.run.dir == str(tmp_path / "runs/small")
    assert config.model.path == str(tmp_path / "models/m")
    assert (config.trainer.steps, config.trainer.groups) == (7, 32)


def test_a_run_dir_from_the_command_line_wins(toml: Path, tmp_path: Path) -> None:
    config = load(toml, ["run.name=x", "run.dir=a"], run_dir="b")
    assert (config.run.name, config.run.dir) == ("x", str(tmp_path / "b"))
    assert load(toml, ["run.name=x"]).run.dir == str(tmp_path / "runs/x")


def test_a_python_source_is_no_path_and_a_file_is(toml: Path, tmp_path: Path) -> None:
    config = load(toml, ["data.source=tasks:rows", "eval.greedy.source=held_out.jsonl"])
    assert config.data.source == "tasks:rows"
    assert config.eval["greedy"].source == str(tmp_path / "held_out.jsonl")


def test_overrides_are_toml_values_or_else_text(toml: Path) -> None:
    config = load(
        toml,
        [
            "optim.lr=3e-4",
            "optim.betas=[0.8, 0.9]",
            "pool.filter_constant=true",
            "model.dtype=bfloat16",
            'pool.stale="mask"',
            "run.name=7",  # a number, but this key wants text
        ],
    )
    assert config.optim.lr == 3e-4
    assert config.optim.betas == (0.8, 0.9)
    assert config.pool.filter_constant is True
    assert (config.model.dtype, config.pool.stale, config.run.name) == ("bfloat16", "mask", "7")


def test_overrides_reach_into_tables_and_keep_their_neighbours(toml: Path) -> None:
    config = load(
        toml,
        [
            "engine.vllm.max_num_seqs=64",
            "engine.vllm.compilation_config.level=0",
            "engine.env.A=b",
            "eval.greedy.num_samples=3",
            "eval.other.every=5",
        ],
    )
    assert config.engine.vllm == {"max_num_seqs": 64, "compilation_config": {"level": 0}}
    assert config.engine.env == {"A": "b"}
    assert config.eval["greedy"].every == 2
    assert config.eval["greedy"].num_samples == 3
    assert config.eval["other"].every == 5


def test_the_resolved_file_reads_back_as_the_same_config(toml: Path, tmp_path: Path) -> None:
    config = load(toml, ["optim.betas=[0.8, 0.9]", "engine.vllm.a.b=1", "data.args.n=3"])
    (tmp_path / "config.json").write_bytes(dump(config))
    assert load_resolved(tmp_path / "config.json") == config


def test_a_config_cannot_be_changed(toml: Path) -> None:
    with pytest.raises(ValueError, match="frozen"):
        load(toml).trainer.steps = 8  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("trainer.stpes=3", "command line: unknown key trainer.stpes: did you mean trainer.steps?"),
        (
            "trainer.num_samples=3",
            "command line: unknown key trainer.num_samples: did you mean sampling.num_samples?",
        ),
        ("steps.x=3", "command line: unknown key steps: did you mean trainer.steps?"),
        ("smapling.temperature=1", "command line: unknown key smapling: did you mean sampling?"),
        (
            "eval.greedy.evry=1",
            "command line: unknown key eval.greedy.evry: did you mean eval.greedy.every?",
        ),
        ("log.zzz=1", "command line: unknown key log.zzz: there are level"),
        (
            "trainer.steps=-1",
            "command line: trainer.steps = -1: must be greater than or equal to 0",
        ),
        ("trainer.steps=many", 'command line: trainer.steps = "many": must be a valid integer'),
        ("trainer.steps=true", "command line: trainer.steps = true: must be a valid integer"),
        ('trainer.steps="3"', 'command line: trainer.steps = "3": must be a valid integer'),
        ("trainer.gate=1", "command line: trainer.gate = 1: must be a valid boolean"),
        ("optim.lr=nan", "command line: optim.lr = NaN: must be a finite number"),
        ("optim.betas=[1.0]", "command line: optim.betas.1 = [1.0]: Field required"),
        (
            "pool.stale=never",
            "command line: pool.stale = \"never\": must be 'wait', 'mask' or 'train'",
        ),
        ("engine.vllm=3", "command line: engine.vllm = 3: must be a table"),
        ("trainer=3", 'override "trainer=3" must read section.key=value'),
        ("trainer.steps", 'override "trainer.steps" must read section.key=value'),
        ("trainer.=3", 'override "trainer.=3" must read section.key=value'),
        ("trainer.steps.x=3", 'override "trainer.steps.x=3": steps is not a table'),
    ],
)
def test_a_bad_override_is_one_line_that_says_what_is_allowed(
    toml: Path, override: str, line: str
) -> None:
    assert message(toml, override) == line


def test_a_mistake_in_the_file_names_the_file(toml: Path) -> None:
    toml.write_text("[trainer]\nstep = 3\n[sampling]\ntemperature = 0\n")
    assert message(toml).splitlines() == [
        "small.toml: sampling.temperature = 0: must be greater than 0",
        "small.toml: unknown key trainer.step: did you mean trainer.steps?",
    ]


def test_a_section_that_is_no_table_is_refused(toml: Path) -> None:
    toml.write_text("trainer = 3\n")
    assert message(toml) == "small.toml: trainer = 3: must be a table"


def test_a_file_that_is_not_toml_says_where(toml: Path) -> None:
    toml.write_text("[trainer]\nsteps 3\n")
    said = message(toml)
    assert said.startswith("small.toml cannot be read as TOML: ")
    assert "line 2" in said


def test_a_missing_file_names_the_nearest_one(toml: Path) -> None:
    assert message("smal.toml") == "no config file smal.toml: did you mean small.toml?"
    assert message("other.toml") == "no config file other.toml"
    assert "cannot be read" in message(".")


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run directory"):
        load_resolved(tmp_path / "config.json")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_of_the_repo_says_first_what_it_should_reach(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert lines[0].startswith("# ")
    assert lines[1].startswith("# Should reach: ")
    assert isinstance(load(path), Config)
