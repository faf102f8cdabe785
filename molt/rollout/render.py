# SPDX-License-Identifier: Apache-2.0
"""From messages to tokens, and from sampled tokens to the agent's text, which never comes back.

`start` renders the opening of a conversation with its chat template. `follow` renders only what
comes after a completion: the template's own text between an assistant's content and the next
generation prompt, found by rendering a placeholder in the assistant's place.
"""

import json
from functools import lru_cache
from typing import Any

import numpy as np

from molt.agents import Message
from molt.records import ConfigError
from molt.rollout.session import Ids

_PLACEHOLDER = "\u2063molt\u2063"  # invisible separators: no conversation contains it


class Renderer:
    """The chat template and tokenizer of one model directory."""

    def __init__(self, model_path: str) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(model_path)
        if not self._tokenizer.chat_template:
            raise ConfigError(
                f"{model_path} has no chat template: agents need one in the tokenizer"
            )
        self.start = lru_cache(maxsize=4096)(self._start)
        self.follow = lru_cache(maxsize=4096)(self._follow)

    def text(self, ids: Ids) -> str:
        """What the policy wrote, without special tokens."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def _start(self, messages: str) -> Ids:
        """Tokens of the opening `messages` (see `canonical`) and generation prompt; read-only."""
        return self._encode(self._template(json.loads(messages), True))

    def _follow(self, messages: str, ended: bool) -> Ids:
        """Tokens between a completion and the next one, which answers `messages`.

        Args:
            messages: what the agent said, as `canonical` gives it.
            ended: the completion has its stop token already, so it is not rendered again.
        """
        before = [{"role": "user", "content": ""}, {"role": "assistant", "content": _PLACEHOLDER}]
        rendered = self._template(before + json.loads(messages), True)
        after = rendered[rendered.rindex(_PLACEHOLDER) + len(_PLACEHOLDER) :]
        end = self._tokenizer.eos_token
        return self._encode(after[len(end) :] if ended and after.startswith(end) else after)

    def _template(self, messages: list[Message], generate: bool) -> str:
        return self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generate
        )

    def _encode(self, text: str) -> Ids:
        ids = np.array(self._tokenizer.encode(text, add_special_tokens=False), np.int32)
        ids.flags.writeable = False
        return ids


def canonical(observation: str | list[Message]) -> str:
    """Messages as one hashable string; a plain text is a user message."""
    if isinstance(observation, str):
        observation = [{"role": "user", "content": observation}]
    return json.dumps(observation, ensure_ascii=False, sort_keys=True)
