"""Logits that a model scales or caps: log-probabilities and gradients are those of the model's own forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    RecurrentGemmaConfig,
)

from sparse_rl_lightning.logprobs import logprobs_at, sequence_logprobs
from sparse_rl_lightning.output_head import LogitScaling

SIZES: dict[str, Any] = {
    "vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "initializer_range": 0.5, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip
MODELS: dict[str, Callable[[], Any]] = {
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=3.0, attn_logit_softcapping=2.0)
    ),
    "granite": lambda: GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=6.0, embedding_multiplier=3.0)),
    "cohere": lambda: CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.25)),
    "falcon_h1": lambda: FalconH1ForCausalLM(
        FalconH1Config(
            **SIZES, lm_head_multiplier=0.4, mamba_d_ssm=16, mamba_n_heads=2, mamba_d_head=8, mamba_d_state=4
        )
    ),
}


def plain(model: Any, sequences: Tensor, mask: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """By the model's own forward: all log-probabilities, those of the tokens, entropies."""
    logs = (model(sequences).logits[:, :-1] / temperature).log_softmax(-1)
    own = logs.gather(-1, sequences[:, 1:, None]).squeeze(-1)
    shown = mask[:, 1:]
    return logs, own * shown, -(logs.exp() * logs).sum(-1) * shown


@pytest.mark.parametrize("by_product", [True, False])
@pytest.mark.parametrize("family", MODELS)
def test_scores_and_gradients_are_those_of_the_models_own_forward(family: str, by_product: bool) -> None:
    model = MODELS[family]().double().eval()
    if not by_product:  # any head but a plain linear layer is called and differentiated by torch
        model.get_output_embeddings().register_forward_hook(lambda *_: None)
    sequences = torch.randint(2, 31, (2, 7))
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[:, :2] = False
    weights = torch.randn(2, 2, 6, dtype=torch.float64)

    logs, logprobs, entropy = plain(model, sequences, mask, 0.7)
    (weights[0] * logprobs + weights[1] * entropy).sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    own, uncertain = sequence_logprobs(model, sequences, mask, 0.7, chunk_size=3)
    (weights[0] * own[:, 1:] + weights[1] * uncertain[:, 1:]).sum().backward()

    torch.testing.assert_close(own[:, 1:], logprobs, rtol=0, atol=1e-12)
    torch.testing.assert_close(uncertain[:, 1:], entropy, rtol=0, atol=1e-12)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=0, atol=1e-11, msg=name)
    ids = torch.randint(31, (2, 7, 3))
    found = logprobs_at(model, sequences, ids, mask, 0.7, chunk_size=4)
    torch.testing.assert_close(
        found[:, 1:], logs.detach().gather(-1, ids[:, 1:]) * mask[:, 1:, None], rtol=0, atol=1e-12
    )


def test_only_what_the_class_declares_counts() -> None:
    stray = LlamaForCausalLM(LlamaConfig(**SIZES, logits_scaling=8.0)).eval()
    assert stray.config.logits_scaling == 8.0
    sequences, mask = torch.randint(2, 31, (1, 5)), torch.tensor([[False, True, True, True, True]])
    with torch.no_grad():
        torch.testing.assert_close(
            sequence_logprobs(stray, sequences, mask)[0][:, 1:], plain(stray, sequences, mask, 1.0)[1]
        )
    assert LogitScaling.of(stray.config).is_plain


def test_what_is_not_known_to_be_right_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'recurrent_gemma' has logits_soft_cap=30.0.*it knows final_logit_soft"):
        LogitScaling.of(RecurrentGemmaConfig())

    class Width(PreTrainedConfig):
        model_type = "width"
        logit_multiplier: float = 1.0

    assert LogitScaling.of(Width()).is_plain
    with pytest.raises(ValueError, match=r"'width' has logit_multiplier=0.5"):
        LogitScaling.of(Width(logit_multiplier=0.5))
