"""Tokens that end a completion: the model's and the tokenizer's, in rollouts and in what a warm-up teaches."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_grpo import ALPHABET
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from sparse_rl_lightning import RolloutSampler, SamplingParams
from sparse_rl_lightning.compressors import FullKV
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.modules import SparseGRPO, SupervisedWarmup
from sparse_rl_lightning.policies import LoadedPolicy, PretrainedPolicy
from sparse_rl_lightning.rollout import RolloutOptions
from sparse_rl_lightning.rollout.prompts import default_end_token_ids
from sparse_rl_lightning.testing import character_tokenizer, tiny_model


def both(model: int | list[int] | None, tokenizer: str | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model and a tokenizer that end with these tokens; ``a`` is token 13."""
    tok = character_tokenizer(ALPHABET)
    tok.eos_token = tokenizer
    return tiny_model(vocab_size=len(tok), hidden_size=32, eos_token_id=model), tok


def said(call: Callable[[], Any], *words: str) -> list[str]:
    """Warnings of a call that hold all of these words."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    texts = [str(one.message) for one in found]
    return [text for text in texts if all(word in text for word in words)]


@pytest.mark.parametrize(
    ("model", "tokenizer", "ends", "told"),
    [
        (1, "a", [1, 13], "<eos> (1), its tokenizer with a (13)"),
        ([1, 2], "a", [1, 2, 13], "<eos> (1), <unk> (2), its tokenizer with a (13)"),
        ([1, 13], "a", [1, 13], None),
        (1, "<eos>", [1], None),
        (1, None, [1], None),
        (None, "a", [13], None),
        (None, None, [], None),
    ],
)
def test_both_ends_count_and_a_difference_is_told(model: Any, tokenizer: Any, ends: list[int], told: Any) -> None:
    policy, tok = both(model, tokenizer)
    texts = said(lambda: RolloutSampler(policy, tokenizer=tok), "its tokenizer with")
    assert len(texts) == bool(told)
    assert not told or told in texts[0]
    assert RolloutSampler(policy, tokenizer=tok).end_token_ids == ends
    assert RolloutSampler(policy, tokenizer=tok, end_token_ids=[5]).end_token_ids == [5]
    assert RolloutOptions(end_tokens=("b",)).sampler(policy, tok, FullKV()).end_token_ids == sorted([*ends, 14])


@pytest.mark.parametrize(
    ("model", "tokenizer", "end"), [(1, "a", 13), (1, None, 1), (None, "a", 13), ([2, 13], "a", 13)]
)
def test_a_warm_up_teaches_an_end_that_ends_a_rollout(model: Any, tokenizer: Any, end: int) -> None:
    policy, tok = both(model, tokenizer)
    warmup = SupervisedWarmup(LoadedPolicy(policy, tok))
    assert len(said(warmup.configure_model, "its tokenizer with")) == (model == 1 and tokenizer == "a")
    ids, targets = warmup._encode([{"prompt": "01", "solution": "23"}])
    assert ids[0].tolist() == [*tok("0123")["input_ids"], end]
    assert targets[0, -1] == end
    assert end in default_end_token_ids(policy, tok)


def test_a_warm_up_without_any_end_is_refused() -> None:
    with pytest.raises(UserError, match=r"SupervisedWarmup: neither the tokenizer nor the model's generation_config"):
        SupervisedWarmup(LoadedPolicy(*both(None, None))).configure_model()


def test_a_rollout_ends_at_the_tokenizers_end() -> None:
    """A policy that can draw nothing else: its completions end at once, and are finished."""
    model, tok = both(1, "a")
    model.config.tie_word_embeddings = False
    model.lm_head = torch.nn.Linear(32, len(tok), bias=True)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.bias.copy_(50.0 * torch.nn.functional.one_hot(torch.tensor(13), len(tok)))
    grpo = SparseGRPO(
        LoadedPolicy(model, tok), FullKV(), lambda completions, **_: [0.0] * len(completions),
        sampling=SamplingParams(num_generations=2, max_completion_length=9),
    )  # fmt: skip
    grpo.configure_model()
    rollout = grpo.generator.generate([{"prompt": "01"}]).rollout
    assert rollout.completion_ids == [[13], [13]]
    assert rollout.finished.tolist() == [True, True]


@pytest.mark.parametrize("ends", [999, "x", [1, 999], [1.5], -1, True])
def test_a_model_end_that_cannot_be_drawn_is_named(ends: Any) -> None:
    policy, tok = both(1, "a")
    policy.generation_config.eos_token_id = ends
    if ends is True:  # transformers' own numbers are whole ones
        assert default_end_token_ids(policy, tok) == [1, 13]
        return
    with pytest.raises(UserError, match=r"eos_token_id of the model's generation_config holds .* can never draw"):
        RolloutSampler(policy, tokenizer=tok)


# ---------------------------------------------------------------- the rest of generation_config.json


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model, tokenizer = both(1, "<eos>")
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "text", ["{", "", "[]", "5", "null", '"x"', '{"eos_token_id": 1,}', '{"cache_implementation": 7}', "\x00"]
)
def test_a_generation_config_that_cannot_be_read_is_refused_by_name(folder: Path, text: str) -> None:
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(UserError, match=r"has a generation_config\.json that cannot be read \(.*\)\. Repair or remove"):
        PretrainedPolicy(str(folder)).load()


def test_a_folder_without_one_is_loaded(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    assert default_end_token_ids(*PretrainedPolicy(str(folder)).load()) == [1]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("suppress_tokens", [5, 6]), ("begin_suppress_tokens", [5]), ("forced_eos_token_id", 1),
        ("forced_bos_token_id", 3), ("min_new_tokens", 4), ("min_length", 4), ("bad_words_ids", [[5]]),
        ("no_repeat_ngram_size", 3), ("stop_strings", ["0"]), ("sequence_bias", [[[5], -10.0]]),
        ("exponential_decay_length_penalty", [5, 1.2]),
    ],
)  # fmt: skip
def test_what_rollouts_do_not_follow_is_named(folder: Path, name: str, value: Any) -> None:
    stored = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(stored | {name: value}))
    policy, tok = PretrainedPolicy(str(folder)).load()
    texts = said(
        lambda: RolloutSampler(policy, tokenizer=tok), "of the model's generation_config: rollouts draw without"
    )
    assert len(texts) == 1
    assert texts[0].startswith(f"{name} of the model's")
    if name in ("min_new_tokens", "min_length"):
        assert "is sampling.min_completion_length here" in texts[0]


def test_recommended_settings_of_drawing_need_no_word(folder: Path) -> None:
    config = GenerationConfig(
        do_sample=True, temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.1, eos_token_id=1
    )
    config.save_pretrained(folder)
    policy, tok = PretrainedPolicy(str(folder)).load()
    assert not said(lambda: RolloutSampler(policy, tokenizer=tok))
