# SPDX-License-Identifier: Apache-2.0
"""The run's configuration: frozen pydantic models, one TOML file, `section.key=value` overrides.

`load` resolves it once; `dump` writes RUN/config.json, which every role reads with `load_resolved`.
Whatever is wrong is a `ConfigError` with one line for each problem: where it was said, the key, its
value and what is allowed. What only the machine can tell (files, modules, keys that contradict each
other) is refused by `molt.launch.check`. To add a key, add a field with its default to a section.
"""

import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from molt.records import ConfigError


class Section(BaseModel):
    """A config section: frozen, and a key it does not know is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Restarts(Section):
    """How often a process that died is started again, before the run fails with its status."""

    coordinator: int = Field(default=3, ge=0)
    engine: int = Field(default=3, ge=0)  # of each engine: its vLLM server or its task
    runner: int = Field(default=3, ge=0)  # runners of one engine
    trainer: int = Field(default=3, ge=0)  # all ranks together


class Run(Section):
    """Where the run lives and what makes it reproducible."""

    name: str = ""  # default: the config file's stem
    dir: str = ""  # default: runs/<name>
    seed: int = 0
    stop_s: float = Field(
        default=30.0, gt=0
    )  # a graceful stop may take this long, then processes are killed
    restarts: Restarts = Restarts()


class Data(Section):
    """The prompts: a JSONL, Parquet or Arrow file, or "module:function" returning rows."""

    source: str = ""
    args: dict[str, Any] = {}  # keyword arguments of a Python source
    prompt: str = "prompt"  # column with the user's text or a list of messages
    label: str = "label"  # column handed to the agent beside the prompt; may be absent
    shuffle: bool = True


class Model(Section):
    """The policy: a local HF directory, and how to make it when it is absent."""

    path: str = ""
    recipe: str = ""  # "module:function", builds `path` when it does not exist
    recipe_args: dict[str, Any] = {}
    dtype: Literal["float32", "bfloat16"] = (
        "float32"  # of the computation; masters are always float32
    )
    max_len: int = Field(default=512, gt=0)  # tokens of a segment, prompt included


class Agent(Section):
    """The user's program: "module:Class" of a molt.Env."""

    name: str = ""
    args: dict[str, Any] = {}
    max_turns: int = Field(default=16, gt=0)
    timeout_s: float = Field(default=600.0, gt=0)  # one rollout
    block_s: float = Field(default=60.0, gt=0)  # agents may hold up their runner's event loop
    retries: int = Field(default=2, ge=0)  # of a failed rollout, before its group is dropped
    max_failures: int = Field(default=8, gt=0)  # groups dropped in a row before the run stops


class SamplingSection(Section):
    """How rollouts are sampled. top_p and top_k renormalise μ: they are not offered here."""

    num_samples: int = Field(default=16, gt=0)  # rollouts a group
    temperature: float = Field(default=1.0, gt=0)
    max_tokens: int = Field(default=256, gt=0)  # a completion


class Pool(Section):
    """Groups in flight, staleness and filtering (see coordinator/pool.py)."""

    groups: int = Field(
        default=0, ge=0
    )  # cap on ready + leased groups; 0 = what the lag bound allows
    max_lag: int = Field(default=1, ge=0)
    stale: Literal["wait", "mask", "train"] = "wait"
    filter_constant: bool = (
        False  # groups whose rewards are all equal teach nothing: refill instead
    )
    lease_s: float = Field(default=60.0, gt=0)  # a runner or engine silent for so long is lost


class Session(Section):
    """How rollouts become files, unfinished ones included."""

    flush_s: float = Field(default=1.0, gt=0)  # what open sessions gained is written so often
    chunk_tokens: int = Field(default=4096, ge=0)  # of a completion asked for at once; 0 = all

    shard_bytes: int = Field(default=64 << 20, gt=0)
    shard_age_s: float = Field(default=1.0, gt=0)
    compression: Literal["none", "zstd"] = "none"
    visible_s: float = Field(default=120.0, gt=0)  # network filesystems may hide a file so long


class Engine(Section):
    """The vLLM engines; `vllm` passes through as server arguments (underscores become dashes)."""

    count: int = Field(default=1, gt=0)
    runners: int = Field(default=1, gt=0)  # runner processes an engine
    rollouts: int = Field(default=512, gt=0)  # rollouts a runner holds at once
    start_s: float = Field(default=600.0, gt=0)  # deadline of a start
    request_s: float = Field(default=600.0, gt=0)  # deadline of one completion
    update_s: float = Field(default=600.0, gt=0)  # deadline of one weight update
    stall_s: float = Field(default=120.0, gt=0)  # requests run and no token comes: it hangs
    module: str = "vllm.entrypoints.launchers.api_server.entry"  # what `python -m` starts
    vllm: dict[str, Any] = {}
    env: dict[str, str] = {}


class Trainer(Section):
    """The trainer ranks; `automodel` passes through to `from_pretrained`."""

    steps: int = Field(default=100, ge=0)  # the run's total
    groups: int = Field(default=32, gt=0)  # groups a plan
    ranks: int = Field(default=2, gt=0)
    minibatches: int = Field(default=1, gt=0)  # optimizer updates a step
    tokens: int = Field(default=16384, gt=0)  # token budget of a micro-batch on one rank
    layout: Literal["auto", "rows", "packed"] = "auto"  # auto: rows on CPU, packed on GPU
    policy: str = "automodel"  # or "module:factory"
    bucket_bytes: int = Field(default=0, ge=0)  # of a publication; 0 = 16 MiB on CPU, else 256
    publish_retries: int = Field(default=5, ge=0)  # of one that failed, in a row
    automodel: dict[str, Any] = {}
    gate: bool = True  # the start-up checks of agreement
    # bfloat16: mean |Δ| of log-probabilities may be this; float32: the largest one a 20th of it
    gate_tolerance: float = Field(default=0.02, gt=0)


class Algo(Section):
    """Estimator, loss and corrections: names of functions in molt/algo."""

    estimator: Literal["grpo", "dr_grpo", "rloo", "reinforce"] = "dr_grpo"
    advantage_scale: float = Field(
        default=1.0, gt=0
    )  # multiplies advantages (dr_grpo with rewards of 0 and 1: 2)
    loss: Literal["ppo"] = "ppo"
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    clip_high: float = Field(default=0.28, gt=0)
    correction: Literal["none", "truncate"] = "truncate"  # of π_old/μ, per token
    correction_max: float = Field(default=2.0, gt=0)
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"


class Optim(Section):
    """AdamW, its schedule and clipping."""

    lr: float = Field(default=1e-6, gt=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup: int = Field(default=0, ge=0)  # steps
    lr_final: float = Field(default=0.1, ge=0, le=1)  # fraction of lr at the last step
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    clip_norm: float = Field(default=1.0, gt=0)


class CheckpointSection(Section):
    """When the trainer saves, and what else is kept."""

    every: int = Field(default=50, ge=0)  # steps; 0 = only at the end and when stopped
    keep: int = Field(default=2, gt=0)
    # Shards that no kept checkpoint can need: all stay, lose their routing, or are deleted.
    shards: Literal["all", "slim", "none"] = "all"


class Eval(Section):
    """Evaluation of one set of prompts; in TOML: [eval.NAME]."""

    source: str = ""  # default: data.source
    args: dict[str, Any] = {}
    every: int = Field(default=0, ge=0)  # steps; 0 = only before the first step and after the last
    num_prompts: int = Field(default=0, ge=0)  # 0 = all
    num_samples: int = Field(default=1, gt=0)
    temperature: float = Field(default=0.0, ge=0)  # 0 = greedy
    hold: bool = False  # delay the next publication until done


class Log(Section):
    """What is shown while the run goes."""

    level: Literal["debug", "info", "warning"] = "info"


class Slurm(Section):
    """The header of the heterogeneous job."""


class Config(Section):
    """The whole configuration. Field names are the TOML sections."""

    run: Run = Run()
    data: Data = Data()
    model: Model = Model()
    agent: Agent = Agent()
    sampling: SamplingSection = SamplingSection()
    pool: Pool = Pool()
    session: Session = Session()
    engine: Engine = Engine()
    trainer: Trainer = Trainer()
    algo: Algo = Algo()
    optim: Optim = Optim()
    checkpoint: CheckpointSection = CheckpointSection()
    eval: dict[str, Eval] = {}
    log: Log = Log()
    slurm: Slurm = Slurm()


def load(path: str | Path, overrides: Iterable[str] = (), run_dir: str | None = None) -> Config:
    """Read a TOML file, apply overrides, validate, and resolve every default and relative path.

    Args:
        path: the TOML file.
        overrides: `section.key=value`, deeper for tables; a value is TOML, or else a string.
        run_dir: replaces `run.dir`.

    Raises:
        ConfigError: one line for each problem.
    """
    path = Path(path)
    tree = _read_toml(path)
    overridden = [_override(tree, text) for text in overrides]
    try:
        # Strictly: "5" is no 5. As JSON, since strict objects take no list where a tuple is wanted.
        config = Config.model_validate_json(json.dumps(tree, default=str), strict=True)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(error, str(path), overridden))) from None
    return _resolve(config, path.stem, run_dir)


def dump(config: Config) -> bytes:
    """The bytes of RUN/config.json."""
    return config.model_dump_json(indent=2).encode() + b"\n"


def load_resolved(path: str | Path) -> Config:
    """Read a RUN/config.json back, exactly as `dump` wrote it.

    Raises:
        ConfigError: it is missing, or was written by another version of Molt.
    """
    path = Path(path)
    try:
        return Config.model_validate_json(path.read_bytes())
    except OSError:
        raise ConfigError(f"no {path}: {path.parent} is not a run directory") from None
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(error, str(path), []))) from None


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        near = difflib.get_close_matches(str(path), map(str, path.parent.glob("*.toml")), 1, 0.7)
        hint = f": did you mean {near[0]}?" if near else ""
        raise ConfigError(f"no config file {path}{hint}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as TOML: {error}") from None


def _override(tree: dict[str, Any], text: str) -> str:
    """Set `section.key=value` in the tree; returns the dotted key."""
    dotted, equals, value = text.partition("=")
    *tables, key = dotted.strip().split(".")
    if not equals or not tables or not key:
        raise ConfigError(f'override "{text}" must read section.key=value')
    table = tree
    for name in tables:
        inner: Any = table.setdefault(name, {})
        if not isinstance(inner, dict):
            raise ConfigError(f'override "{text}": {name} is not a table')
        table = cast(dict[str, Any], inner)
    table[key] = _parse(value.strip(), _fields(tables).get(key))
    return dotted.strip()


def _parse(value: str, wanted: Any) -> Any:
    """A TOML value if it is one, but text where the key wants text: `run.name=7` names a run."""
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return value
    return value if wanted is str and not isinstance(parsed, str) else parsed


def _resolve(config: Config, stem: str, run_dir: str | None) -> Config:
    """Defaults that depend on other keys, and absolute paths: a role may start elsewhere."""
    name = config.run.name or stem
    directory = _absolute(run_dir or config.run.dir or f"runs/{name}")
    evals = {
        key: section.model_copy(update={"source": _absolute(section.source)})
        for key, section in config.eval.items()
    }
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"name": name, "dir": directory}),
            "model": config.model.model_copy(update={"path": _absolute(config.model.path)}),
            "data": config.data.model_copy(update={"source": _absolute(config.data.source)}),
            "eval": evals,
        }
    )


def _absolute(path: str) -> str:
    """The path from the root; "" is unset and "module:name" is no path."""
    return path if not path or ":" in path else str(Path(path).absolute())


def _fields(keys: Iterable[str | int]) -> dict[str, Any]:
    """Names and types of what may stand under a dotted prefix; {} where anything may."""
    model: Any = Config
    for key in keys:
        if model == dict[str, Eval]:
            model = Eval
        elif _is_section(model) and key in model.model_fields:
            model = model.model_fields[key].annotation
        else:
            return {}
    fields = model.model_fields.items() if _is_section(model) else ()
    return {name: field.annotation for name, field in fields}


def _is_section(model: Any) -> bool:
    return isinstance(model, type) and issubclass(model, Section)


def _explain(error: ValidationError, origin: str, overridden: list[str]) -> Iterator[str]:
    """One line for each problem: where it was said, the key, its value and what is allowed."""
    for problem in error.errors(include_url=False):
        dotted = ".".join(map(str, problem["loc"]))
        said = any(
            f"{dotted}.".startswith(f"{key}.") or key.startswith(f"{dotted}.") for key in overridden
        )
        where = "command line" if said else origin
        if problem["type"] == "extra_forbidden":
            yield f"{where}: unknown key {dotted}: {_nearest(problem['loc'])}"
            continue
        value = json.dumps(problem.get("input"), default=str)
        must = re.sub("an object|a valid dictionary", "a table", problem["msg"])
        must = must.replace("Input should be", "must be")
        yield f"{where}: {dotted} = {value if len(value) < 60 else value[:56] + '...'}: {must}"


def _nearest(loc: tuple[str | int, ...]) -> str:
    """The key that was probably meant: this name elsewhere, a similar one here, or all of them."""
    *section, leaf = map(str, loc)
    here = _fields(section)
    elsewhere = [f"{name}.{leaf}" for name in Config.model_fields if leaf in _fields([name])]
    near = [".".join([*section, name]) for name in difflib.get_close_matches(leaf, here, 1)]
    if found := elsewhere or near:
        return f"did you mean {' or '.join(found)}?"
    return f"there are {', '.join(here)}"
