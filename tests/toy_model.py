# SPDX-License-Identifier: Apache-2.0
"""A small model directory with random weights and a character tokenizer, made on the spot."""

from pathlib import Path

VOCABULARY = 128
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def make_model(path: Path, seed: int, positions: int = 512, std: float = 0.1) -> Path:
    """Write a tied Qwen3 of 312 thousand parameters and its character tokenizer.

    The weights are wide enough for log-probabilities to differ by several nats between tokens, and
    two seeds disagree everywhere: weights that did not arrive cannot pass for those that did.
    """
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=64, bos_token_id=None,
        eos_token_id=2, pad_token_id=0, max_position_embeddings=positions, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).float()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=std)
        else:
            torch.nn.init.uniform_(parameter, 0.8, 1.2)
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0)
    model.save_pretrained(path)
    save_tokenizer(path)
    return path


def save_tokenizer(path: Path, chat_template: str | None = None) -> None:
    """A character tokenizer, filled with unused tokens to the model's vocabulary."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = [*map(chr, range(32, 127)), "\n"]
    tokens = [*SPECIAL, *characters]
    tokens += [f"<|unused_{i}|>" for i in range(VOCABULARY - len(tokens))]
    tokenizer = Tokenizer(models.WordLevel({t: i for i, t in enumerate(tokens)}, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([t for t in tokens if t.startswith("<|")])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=chat_template,
    ).save_pretrained(path)
