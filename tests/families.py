"""Tiny random models of every family that is tested."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "max_position_embeddings": 512, "initializer_range": 0.2, "pad_token_id": 0,
    "eos_token_id": 1, "bos_token_id": None,
}  # fmt: skip
HEAD: dict[str, Any] = {"head_dim": 16}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
HYBRID: dict[str, Any] = {
    "head_dim": 16, "layer_types": ["linear_attention", "full_attention"] * 2, "num_hidden_layers": 4,
    "initializer_range": 0.1,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
}  # fmt: skip
YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0 + i for i in range(6)], "long_factor": [9.0] * 6,
    "original_max_position_embeddings": 100, "partial_rotary_factor": 0.75,
}  # fmt: skip
HYBRIDS = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
TWO_ROPES: dict[str, Any] = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
WINDOWED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
WALKED = ("llama", "mistral", "qwen2", "qwen3")
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": HEAD,
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0]},
    "olmo2": {},
    "olmo3": {"num_hidden_layers": 4, "layer_types": WINDOWED, "sliding_window": 8},
    "ministral3": {**HEAD, "rope_parameters": YARN},
    "granite": {"logits_scaling": 3.0, "embedding_multiplier": 4.0, "residual_multiplier": 0.3,
                "attention_multiplier": 0.4},
    "gemma": {"head_dim": 32},
    "gemma3_text": {"head_dim": 32, "num_hidden_layers": 4, "query_pre_attn_scalar": 24, "layer_types": WINDOWED,
                    "sliding_window": 8, "rope_parameters": TWO_ROPES},
    # as Phi-4-mini
    "phi3": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 100, "sliding_window": None},
    "glm4": HEAD,
    "qwen3_moe": {**HEAD, **EXPERTS, "num_experts": 8},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "glm4_moe": {**HEAD, **EXPERTS, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1,
                 "n_group": 1, "topk_group": 1},
    "gpt_oss": {**HEAD, "num_hidden_layers": 4, "layer_types": WINDOWED, "sliding_window": 8, "num_local_experts": 8,
                "num_experts_per_tok": 2, "initializer_range": 0.1,
                "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 32.0,
                                    "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 128}},
    "qwen3_5_text": {**HYBRID, "head_dim": 256, "num_hidden_layers": 6,
                     "layer_types": ["linear_attention"] * 2 + ["linear_attention", "full_attention"] * 2},
    "qwen3_5_moe_text": {**HYBRID, **EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 48},
    "qwen3_next": {**HYBRID, **EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 48},
}  # fmt: skip


def family(name: str, **changed: Any) -> PreTrainedModel:
    """A model of this type with other random norms and biases than ones and zeros."""
    config = AutoConfig.for_model(name, **copy.deepcopy({**SIZES, **FAMILIES.get(name, {}), **changed}))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            parameter.data += 0.03 * torch.randn_like(parameter)
        for module in model.modules():
            if isinstance(bias := getattr(module, "dt_bias", None), torch.nn.Parameter):
                _remember(bias)
    return model.eval()


def _remember(bias: torch.nn.Parameter) -> None:
    """Let linear layers forget in tens of tokens, as before training (arXiv 2312.00752), and not in one.

    transformers makes all these biases 1. A state is then gone with the next token, and its chunks of tokens multiply
    numbers that fell by a factor of e^1000, which costs three digits.
    """
    step = torch.empty_like(bias).uniform_(math.log(0.001), math.log(0.1)).exp()
    bias.data = step + torch.log(-torch.expm1(-step))
