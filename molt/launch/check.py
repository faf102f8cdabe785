# SPDX-License-Identifier: Apache-2.0
"""What is refused before anything starts: names that lead nowhere, keys that contradict each other.

The type and range of one key are `molt.config`'s business; here is what needs the machine or two
keys. To add a rule, add it to `_conflicts`: what is wrong, the value, the remedy.
"""

import importlib.util
import inspect
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from molt.config import Config
from molt.data import eval_data, load_prompts, resolve
from molt.records import TRAIN, ConfigError

MIN_TEMPERATURE = 0.01  # vLLM raises what lies between 0 and this, silently
UDS = "engines listen on a private unix socket only"
# Server arguments that are said elsewhere, or whose change would break a promise.
OWNED_VLLM = {
    "model": "set model.path",
    "tokenizer": "set model.path",
    "served_model_name": "engines serve one model",
    "dtype": "set model.dtype",
    "max_model_len": "set model.max_len",
    "host": UDS,
    "port": UDS,
    "uds": UDS,
    "logprobs_mode": "log-probabilities are recorded as the policy sampled, so they are processed",
    "weight_transfer_config": "weights arrive through Molt's own backend",
    "enable_scale_out": "the route of token ids needs it",
    "disable_uvicorn_access_log": "engines keep no access log",
}


def check(config: Config) -> None:
    """Refuse a run that cannot work.

    Raises:
        ConfigError: one line for each problem.
    """
    if problems := [*_conflicts(config), *_model(config), *_programs(config)]:
        raise ConfigError("\n".join(problems))


def _conflicts(config: Config) -> Iterator[str]:
    """Keys that are each possible and together are not."""
    yield from _step_conflicts(config)
    sampling, trainer, max_len = config.sampling, config.trainer, config.model.max_len
    if sampling.max_tokens >= max_len:
        yield (
            f"sampling.max_tokens = {sampling.max_tokens} leaves no room for a prompt in "
            f"model.max_len = {max_len}: lower it"
        )
    if trainer.tokens < max_len:
        yield (
            f"trainer.tokens = {trainer.tokens} cannot hold one segment of "
            f"model.max_len = {max_len}: raise it"
        )
    for name in config.eval:
        if name == TRAIN or not re.fullmatch(r"[\w-]+", name):
            yield f'eval."{name}" is no name: use letters, digits, _ and -, and not "{TRAIN}"'
    for name, temperature in [
        ("sampling", sampling.temperature),
        *((f"eval.{key}", section.temperature) for key, section in config.eval.items()),
    ]:
        if 0 < temperature < MIN_TEMPERATURE:
            yield (
                f"{name}.temperature = {temperature} would be sampled at {MIN_TEMPERATURE}: "
                "use 0 (evaluation only) or raise it"
            )
    for key in config.engine.vllm:
        if reason := OWNED_VLLM.get(key.replace("-", "_")):
            yield f"engine.vllm.{key} is not free to set: {reason}"


def _step_conflicts(config: Config) -> Iterator[str]:
    """Sizes that no plan or minibatch can meet."""
    trainer, algo, num_samples = config.trainer, config.algo, config.sampling.num_samples
    if algo.estimator != "reinforce" and num_samples < 2:
        yield (
            f"{algo.estimator} needs at least 2 rollouts per group, got {num_samples}: "
            "raise sampling.num_samples"
        )
    if trainer.minibatches > trainer.groups * num_samples:
        yield (
            f"trainer.minibatches = {trainer.minibatches} is more than the "
            f"{trainer.groups * num_samples} rollouts of a step: lower it"
        )
    if 0 < config.pool.groups < trainer.groups:
        yield (
            f"pool.groups = {config.pool.groups} never fills a plan of trainer.groups = "
            f"{trainer.groups}: raise it, or set 0 for no cap"
        )


def _model(config: Config) -> Iterator[str]:
    """The model's directory, or the recipe that makes it."""
    path, recipe = config.model.path, config.model.recipe
    if not path:
        yield "model.path is not set: name a local Hugging Face model directory"
    elif Path(path).exists() and not Path(path, "config.json").is_file():
        yield f"model.path = {path} holds no config.json: name a Hugging Face model directory"
    elif not Path(path).exists() and not recipe:
        yield f"model.path = {path} does not exist: correct it, or set model.recipe to make it"
    if recipe:
        yield from _unknown("model.recipe", recipe)
    if config.trainer.policy != "automodel":
        yield from _unknown("trainer.policy", config.trainer.policy)


def _programs(config: Config) -> Iterator[str]:
    """The agent and the prompts: light to import, so they are."""
    if not config.agent.name:
        yield 'agent.name is not set: name a molt.Env as "module:Class"'
    if not config.data.source:
        yield "data.source is not set: name a .jsonl, .parquet or .arrow file, or module:function"
    sources = {"data": config.data}
    sources |= {f"eval.{name}": eval_data(config, name) for name in config.eval}
    loads: list[tuple[str, Callable[[], object]]] = [
        (f"{key}.source", partial(load_prompts, data))
        for key, data in sources.items()
        if data.source
    ]
    if config.agent.name:
        loads.append(("agent.name", partial(_bind, config.agent.name, config.agent.args)))
    for key, load in loads:
        try:
            load()
        except (ConfigError, TypeError) as error:  # TypeError: `args` that it does not take
            yield f"{key}: {error}"


def _bind(name: str, args: dict[str, Any]) -> None:
    inspect.signature(resolve(name)).bind(**args)


def _unknown(key: str, name: str) -> Iterator[str]:
    """Whether "module:name" exists, read from its source: importing it may mean importing torch."""
    module, _, attribute = name.partition(":")
    try:
        spec = importlib.util.find_spec(module) if module and attribute else None
    except ImportError:
        spec = None
    if spec is None or not spec.origin:
        yield f'{key} = "{name}" does not exist: write "module:function"'
    elif spec.origin.endswith(".py") and not re.search(
        rf"\b{attribute}\b", Path(spec.origin).read_text(encoding="utf-8")
    ):
        yield f'{key} = "{name}": {module} has no {attribute}'
