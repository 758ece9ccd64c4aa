"""How long a sequence may be: scaled rotary positions reach further, sliding windows bind only where they cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from closeness import assert_same_logprobs
from transformers import (
    LlamaConfig,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from sparse_rl_lightning.compressors import FullKV, SnapKV
from sparse_rl_lightning.policies.geometry import context_length
from sparse_rl_lightning.records import NEVER
from sparse_rl_lightning.retrievers import Quest
from sparse_rl_lightning.rollout import (
    RolloutSampler,
    RolloutSession,
    SamplingParams,
    forced_rollout,
    replay_logprobs,
    retrieval_logprobs,
)

SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 32, "initializer_range": 0.2, "eos_token_id": None, "pad_token_id": 0, "bos_token_id": None,
}  # fmt: skip
WINDOW = 24


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({}, 128),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}, 400),  # as Qwen's cards say
        ({"rope_type": "yarn", "factor": 4.0}, 512),
        ({"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 32}, 128),  # extended already
        ({"rope_type": "linear", "factor": 2.5}, 320),
        ({"rope_type": "dynamic", "factor": 2.0}, 256),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32,
          "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 128),  # Llama 3.1: 131,072 are written down
        ({"rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 128,
          "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 256),
    ],
)  # fmt: skip
@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_the_limit_is_the_extended_one(key: str, rope: dict[str, Any], longest: int) -> None:
    given = {key: rope | ({"rope_theta": 10000.0} if key == "rope_parameters" else {})} if rope else {}
    assert context_length(LlamaConfig(**SMALL, max_position_embeddings=128, **given)) == longest


def test_what_a_configuration_does_not_say_is_no_limit() -> None:
    class Nothing:
        pass

    assert context_length(Nothing()) is None


def test_a_sequence_beyond_the_original_context_is_that_of_generate() -> None:
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
    model = Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=16, max_position_embeddings=40, rope_parameters=rope)).eval()
    prompt = torch.randint(3, 64, (60,)).tolist()
    greedy = SamplingParams(max_completion_length=40, temperature=0)
    rollout = RolloutSampler(model, FullKV()).generate([prompt], greedy)
    want = model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)
    assert torch.equal(rollout.sequences, want)
    sampler = RolloutSampler(model, SnapKV(budget=30, buffer=6), num_slots=1)
    evicted = sampler.generate([prompt], greedy)
    assert_same_logprobs(replay_logprobs(model, evicted), evicted.sampler_logprobs)
    for generate in (sampler.generate, RolloutSession(sampler, greedy, 100).add):
        with pytest.raises(ValueError, match="exceeds the model's context of 128 tokens"):
            generate([[*prompt, *prompt]], *([greedy] if generate == sampler.generate else [range(1)]))


def test_a_window_in_all_layers_is_refused_only_where_it_binds() -> None:
    """Within it all layers are of full attention; beyond it none is left to evict from or to retrieve in."""
    model = MistralForCausalLM(MistralConfig(**SMALL, head_dim=16, sliding_window=WINDOW)).eval()
    prompt, fits = torch.randint(3, 64, (WINDOW - 12,)).tolist(), SamplingParams(max_completion_length=12, seed=1)
    small, retriever = SnapKV(budget=10, buffer=4, num_sinks=1, window=4), Quest(16, page_size=4, num_dense_layers=0)
    evicted = RolloutSampler(model, small, num_slots=1).generate([prompt], fits)
    assert int(evicted.completion_lengths) == 12
    assert bool((evicted.evictions.death[..., : WINDOW - 4] < NEVER).any(dim=-1).all()), "in all layers"
    assert_same_logprobs(replay_logprobs(model, evicted), evicted.sampler_logprobs)
    forced = forced_rollout(model, evicted, small, seed=1)
    assert_same_logprobs(forced.sampler_logprobs, evicted.sampler_logprobs)
    paged = RolloutSampler(model, FullKV(), retriever=retriever).generate([prompt], fits)
    retrieved = retrieval_logprobs(model, paged, retriever).logprobs
    assert_same_logprobs(retrieved, paged.sampler_logprobs)

    longer, sampler = SamplingParams(max_completion_length=13, seed=1), RolloutSampler(model, small, num_slots=1)
    whole = RolloutSampler(model, FullKV()).generate([prompt], longer)
    for name, use in {
        "SnapKV": lambda: sampler.generate([prompt], longer),
        "SnapKV ": lambda: RolloutSession(sampler, longer, 12).add([prompt], range(1)),
        " SnapKV": lambda: forced_rollout(model, whole, small),
        "Quest": lambda: RolloutSampler(model, FullKV(), retriever=retriever).generate([prompt], longer),
        " Quest": lambda: retrieval_logprobs(model, whole, retriever),
    }.items():
        refused = rf"sliding window in every layer \(sliding_window={WINDOW}\), .* up to 25 tokens .* {name.strip()}"
        with pytest.raises(ValueError, match=refused):
            use()


def test_layers_that_are_neither_full_nor_sliding_are_refused() -> None:
    model = Qwen2ForCausalLM(Qwen2Config(**SMALL))
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ValueError, match=r"layers of type \['linear_attention'\]"):
        RolloutSampler(model)
