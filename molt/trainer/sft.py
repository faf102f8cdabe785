# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning on conversations: `molt sft CONFIG`, and the last part of a recipe.

`data.source` gives rows with `messages` (a JSONL, Parquet or Arrow file, or "module:function");
what the assistant said is learned, everything else is context. A step takes `trainer.groups`
conversations, there are `trainer.steps` of them, and `optim`, `model` and `trainer.tokens` mean
what they mean in RL. The loss is the mean negative log-likelihood over the learned tokens of a
step. One process, one policy, the same adapter as in RL.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from molt.agents.env import Message
from molt.config import Config
from molt.data import load_prompts, row_of
from molt.records import ConfigError
from molt.trainer.export import refuse_existing, write
from molt.trainer.policy import Policy, build
from molt.trainer.step import lr_at

log = logging.getLogger("molt.sft")


@dataclass(frozen=True)
class Example:
    """One conversation as tokens."""

    tokens: np.ndarray  # [n] int64
    action_mask: np.ndarray  # [n] bool, the assistant's tokens with their end of turn


def run(config: Config) -> Path:
    """Train `model.path` on `data.source`, write RUN/model, return where that is.

    Raises:
        ConfigError: no model, no conversations, or the result is there already.
    """
    to = Path(config.run.dir) / "model"
    refuse_existing(to)
    policy = train(config, load_examples(config))
    return write(policy.weights(), Path(config.model.path), to)


def load_examples(config: Config) -> list[Example]:
    """The conversations of `data.source` as `encode` leaves them."""
    rows = load_prompts(config.data.model_copy(update={"prompt": "messages"}))
    return encode(config, [row["prompt"] for row in rows])


def encode(config: Config, conversations: Iterable[Sequence[Message]]) -> list[Example]:
    """Tokenize conversations with the model's tokenizer; those beyond `model.max_len` are left out.

    Raises:
        ConfigError: there is no model, nothing is left, or a conversation cannot be learned from.
    """
    from transformers import AutoTokenizer

    if not Path(config.model.path, "config.json").is_file():
        raise ConfigError(
            f"no model at model.path = {config.model.path}: name a Hugging Face directory"
        )
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    examples = [tokenize(tokenizer, messages) for messages in conversations]
    fit = [e for e in examples if len(e.tokens) <= config.model.max_len]
    if not fit:
        raise ConfigError(
            f"none of {len(examples)} conversations fits into model.max_len = "
            f"{config.model.max_len}: raise it"
        )
    if len(fit) < len(examples):
        log.warning("%d of %d conversations are too long", len(examples) - len(fit), len(examples))
    return fit


def tokenize(tokenizer: Any, messages: Sequence[Message]) -> Example:
    """Render a conversation with the model's own template and mark what the assistant says.

    A turn begins where the generation prompt ends and reaches to its end-of-turn token, without the
    white space a template puts behind it. Turns and what lies between are tokenized apart, as in a
    rollout.

    Raises:
        ConfigError: no assistant message, or a template that renders earlier turns anew.
    """
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    pieces, end = [], 0
    for k, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = tokenizer.apply_chat_template(
            messages[:k], tokenize=False, add_generation_prompt=True
        )
        turn = tokenizer.apply_chat_template(messages[: k + 1], tokenize=False).rstrip()
        if not (text.startswith(turn) and turn.startswith(before)):
            raise ConfigError(
                f"the template of {tokenizer.name_or_path} renders turn {k} of {messages!r} anew "
                "when the conversation goes on: split the conversation there"
            )
        pieces += [(text[end : len(before)], False), (text[len(before) : len(turn)], True)]
        end = len(turn)
    if not pieces:
        raise ConfigError(f"nothing to learn in {messages!r}: it needs an assistant message")
    ids = [tokenizer.encode(piece, add_special_tokens=False) for piece, _ in pieces]
    mask = np.repeat([learned for _, learned in pieces], [len(piece) for piece in ids])
    return Example(np.concatenate(ids).astype(np.int64), mask)


def train(config: Config, examples: Sequence[Example]) -> Policy:
    """`trainer.steps` steps from the weights at `model.path`."""
    policy = build(config, rank=0, world=1)
    steps, size = config.trainer.steps, config.trainer.groups
    for step in range(1, steps + 1):
        for group in policy.optimizer.param_groups:
            group["lr"] = lr_at(step, config.optim, steps)
        cursor = range((step - 1) * size, step * size)
        shuffle = config.data.shuffle
        rows = [row_of(config.run.seed, i, len(examples), shuffle) for i in cursor]
        loss = _step(policy, [examples[row] for row in rows], config)
        if step % max(1, steps // 10) == 0:
            log.info("step %d of %d: loss %.3f", step, steps, loss)
    return policy


def _step(policy: Policy, examples: list[Example], config: Config) -> float:
    """One optimizer update; the mean loss before it."""
    parts = _microbatches(examples, config.trainer.tokens)
    count = sum(int(e.action_mask.sum()) for e in examples)
    total = torch.zeros((), device=policy.device)
    for i, part in enumerate(parts):
        policy.accumulate(last=i == len(parts) - 1)
        tokens, cu_seqlens, learned = _pack(part)
        logprobs, _ = policy.logprobs(tokens, cu_seqlens, torch.ones(len(tokens)), learned)
        loss = -logprobs.sum()  # 0 where nothing is learned
        loss.backward()
        total += loss.detach()
    policy.clip(config.optim.clip_norm, 1.0 / count)
    policy.optimizer.step()
    policy.optimizer.zero_grad()
    return float(total) / count


def _microbatches(examples: Iterable[Example], num_tokens: int) -> list[list[Example]]:
    """Parts of at most `num_tokens` tokens counted as a rectangle, similar lengths together."""
    parts: list[list[Example]] = []
    for example in sorted(examples, key=lambda e: len(e.tokens), reverse=True):
        if not parts or len(parts[-1][0].tokens) * (len(parts[-1]) + 1) > num_tokens:
            parts.append([])
        parts[-1].append(example)
    return parts


def _pack(examples: Sequence[Example]) -> tuple[Tensor, Tensor, Tensor]:
    """[N] int64 tokens, [S + 1] int64 starts, [N] bool learned."""
    lengths = [0] + [len(e.tokens) for e in examples]
    tokens = torch.from_numpy(np.concatenate([e.tokens for e in examples]))
    learned = torch.from_numpy(np.concatenate([e.action_mask for e in examples]))
    return tokens, torch.tensor(lengths).cumsum(0), learned
