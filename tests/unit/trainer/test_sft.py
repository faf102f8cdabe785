# SPDX-License-Identifier: Apache-2.0
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from molt.agents.add import demonstrations
from molt.config import Config
from molt.records import ConfigError
from molt.trainer import recipe, sft

MESSAGES = [
    {"role": "user", "content": "1-6?"},
    {"role": "assistant", "content": "3 "},
    {"role": "user", "content": "higher"},
    {"role": "assistant", "content": "5"},
]
TEXT = (
    "<|im_start|>user\n1-6?<|im_end|>\n<|im_start|>assistant\n3 <|im_end|>\n"
    "<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n5<|im_end|>"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    recipe.toy_tokenizer(path)
    recipe.toy_model(path)
    return path


@pytest.fixture
def tokenizer(model: Path) -> Any:
    return AutoTokenizer.from_pretrained(model)


def config(path: Path, run: Path, max_len: int = 64, **sections: dict[str, Any]) -> Config:
    base = {"model": {"path": str(path), "max_len": max_len}, "run": {"dir": str(run)}}
    return Config.model_validate(base | sections)


def test_the_assistants_words_and_end_of_turn_are_learned_and_nothing_else(tokenizer: Any) -> None:
    example = sft.tokenize(tokenizer, MESSAGES)
    assert tokenizer.decode(example.tokens) == TEXT
    assert example.tokens.tolist() == tokenizer.encode(TEXT)
    assert tokenizer.decode(example.tokens[example.action_mask]) == "3 <|im_end|>5<|im_end|>"


def test_a_conversation_without_an_assistant_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="needs an assistant message"):
        sft.tokenize(tokenizer, MESSAGES[:1])


def test_a_template_that_forgets_earlier_turns_is_refused(tokenizer: Any) -> None:
    tokenizer.chat_template = recipe.CHATML.replace("in messages", "in messages[-2:]")
    sft.tokenize(tokenizer, MESSAGES[:2])
    with pytest.raises(ConfigError, match="the template of"):
        sft.tokenize(tokenizer, MESSAGES)


def test_the_tokenizer_knows_every_id_of_the_model(tokenizer: Any, model: Path) -> None:
    assert len(tokenizer) == json.loads((model / "config.json").read_text())["vocab_size"] == 128
    assert tokenizer.convert_ids_to_tokens([102, 103, 127]) == [
        "\n",
        "<|unused_0|>",
        "<|unused_24|>",
    ]
    assert "<|unused_3|>" in tokenizer.decode([106])


@pytest.mark.parametrize("tokens", [4096, 40])
def test_the_loss_is_the_mean_over_learned_tokens_however_it_is_split(
    model: Path, tokenizer: Any, tmp_path: Path, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [MESSAGES, *(row["messages"] for row in demonstrations(0, 3))]
    examples = [sft.tokenize(tokenizer, messages) for messages in rows]
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    losses = []
    for example in examples:
        labels = torch.from_numpy(example.tokens).masked_fill(
            ~torch.from_numpy(example.action_mask), -100
        )
        logits = reference(input_ids=torch.from_numpy(example.tokens)[None]).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits, labels[1:], reduction="none"))
    count = sum(int(example.action_mask.sum()) for example in examples)
    wanted = torch.cat(losses).sum() / count
    wanted.backward()
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1e9)
    settings = config(model, tmp_path, trainer={"tokens": tokens}, optim={"clip_norm": 1e9})
    policy = sft.build(settings, 0, 1)
    norms, clip = [], policy.clip
    monkeypatch.setattr(policy, "clip", lambda bound, scale: norms.append(clip(bound, scale)))
    assert sft._step(policy, examples, settings) == pytest.approx(float(wanted.detach()), rel=1e-5)
    assert norms == [pytest.approx(float(norm), rel=1e-5)]


def test_a_run_learns_from_a_file_and_leaves_a_model(model: Path, tmp_path: Path) -> None:
    data = tmp_path / "demos.jsonl"
    too_long = MESSAGES * 9
    data.write_text("\n".join(json.dumps({"messages": m}) for m in (MESSAGES[:2], too_long)))
    settings = config(
        model,
        tmp_path / "run",
        data={"source": str(data)},
        trainer={"steps": 30, "groups": 2},
        optim={"lr": 1e-2},
    )
    out = sft.run(settings)
    assert out == tmp_path / "run/model"
    tokenizer = AutoTokenizer.from_pretrained(out)
    example = sft.tokenize(tokenizer, MESSAGES[:2])
    tokens, learned = torch.from_numpy(example.tokens), torch.from_numpy(example.action_mask)

    def surprise(path: Path) -> float:
        logits = AutoModelForCausalLM.from_pretrained(path)(input_ids=tokens[None]).logits[0]
        logs = logits.log_softmax(-1)[:-1].gather(1, tokens[1:, None]).squeeze(1)
        return float(-logs[learned[1:]].detach().mean())

    assert surprise(model) > math.log(128) - 0.5  # it began knowing nothing
    assert surprise(out) < 0.05
    with pytest.raises(ConfigError, match="exists"):
        sft.run(settings)


def test_a_run_without_anything_to_learn_says_so(model: Path, tmp_path: Path) -> None:
    data = tmp_path / "demos.jsonl"
    data.write_text(json.dumps({"messages": MESSAGES}))
    section = {"source": str(data)}
    with pytest.raises(ConfigError, match="none of 1 conversations fits"):
        sft.run(config(model, tmp_path, max_len=8, data=section))
    with pytest.raises(ConfigError, match="no model at"):
        sft.run(config(tmp_path, tmp_path, data=section))


def test_the_toy_recipe_gives_the_same_model_for_the_same_seed(tmp_path: Path) -> None:
    made = []
    for name, seed in [("a", 1), ("b", 1), ("c", 2)]:
        demos = "molt.agents.add:demonstrations"
        recipe.toy(tmp_path / name, demos, seed=seed, steps=2, num_demos=80)
        made.append((tmp_path / name / "model.safetensors").read_bytes())
    assert made[0] == made[1] != made[2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]


@pytest.mark.slow
def test_the_toy_of_add_is_a_beginner(tmp_path: Path) -> None:
    # The demonstrator is right in 0.4 of its answers: that is the most there is to learn.
    recipe.toy(tmp_path / "toy", "molt.agents.add:demonstrations")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "toy")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "toy").eval()
    right = 0.0
    for a, b in [(a, b) for a in range(10) for b in range(10)]:
        question = {"role": "user", "content": f"{a}+{b}="}
        answer = {"role": "assistant", "content": str(a + b)}
        example = sft.tokenize(tokenizer, [question, answer])
        tokens, learned = torch.from_numpy(example.tokens), torch.from_numpy(example.action_mask)
        logits = model(input_ids=tokens[None]).logits[0, :-1]
        logs = logits.log_softmax(-1).gather(1, tokens[1:, None]).squeeze(1)
        right += float(logs[learned[1:]].sum().exp().detach()) / 100
    assert 0.25 < right < 0.45
