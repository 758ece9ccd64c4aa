"""Weights in buckets: every bit arrives, and an update that is not of the whole model is an error."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator

import pytest
import torch
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.integrations.verl.weights import Bucket, WeightUpdates, buckets, check_names, tensors
from sparse_rl_lightning.testing import tiny_model


def packed(weights: dict[str, Tensor], num_bytes: int = 10_000) -> list[tuple[Bucket, bool, bool]]:
    async def each() -> AsyncIterator[tuple[str, Tensor]]:
        for item in weights.items():
            yield item

    async def collect() -> list[tuple[Bucket, bool, bool]]:
        return [pickle.loads(pickle.dumps(one)) async for one in buckets(each(), num_bytes)]

    return asyncio.run(collect())


def test_tensors_come_back_bit_by_bit() -> None:
    weights = {
        "a": torch.randn(5, 7).bfloat16(), "b": torch.randn(30, 40)[:, ::2], "c": torch.tensor(3.5),
        "d": torch.arange(6, dtype=torch.float16).view(2, 3).T, "e": torch.zeros(0, 4), "f": torch.randn(9000),
    }  # fmt: skip
    sent = packed(weights)
    assert [flags for _, *flags in sent] == [[True, False], [False, True]]
    assert [list(bucket) for bucket, *_ in sent] == [["a", "b", "c", "d", "e"], ["f"]]
    back = dict(item for bucket, *_ in sent for item in tensors(bucket))
    for name, tensor in weights.items():
        assert back[name].dtype == tensor.dtype
        torch.testing.assert_close(back[name], tensor, rtol=0, atol=0)


def test_an_update_is_of_the_whole_model() -> None:
    own, other = tiny_model("llama"), tiny_model("llama", seed=1)
    weights = {name: p.detach().bfloat16() for name, p in other.named_parameters()}  # the head is the embedding
    assert "lm_head.weight" not in weights
    updates = WeightUpdates(own)
    for one in packed(weights):
        updates.load(*one)
    assert updates.is_whole
    for name, parameter in own.named_parameters():
        torch.testing.assert_close(parameter.detach(), weights[name].float(), rtol=0, atol=0)
    for one in packed(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}):
        updates.load(*one)
    assert updates.is_whole


def test_buffers_that_are_saved_are_weights() -> None:
    own, other = tiny_model("llama"), tiny_model("llama", seed=1)
    for number, model in enumerate((own, other)):
        model.model.register_buffer("bias", torch.full((3,), float(number)))
        model.model.register_buffer("unsaved", torch.full((3,), float(number)), persistent=False)
    updates = WeightUpdates(own)
    for one in packed(other.state_dict()):
        updates.load(*one)
    assert updates.is_whole
    assert (own.model.bias.tolist(), own.model.unsaved.tolist()) == ([1.0] * 3, [0.0] * 3)


@pytest.mark.parametrize(
    ("name", "tensor", "says"),
    [
        ("model.adapter.weight", torch.zeros(2), "no weight of this name: .*lora.merge=true"),
        ("model.norm.weight", torch.zeros(2), r"shape \(2,\), and the server's model has \(64,\)"),
    ],
)
def test_what_does_not_fit_is_an_error(name: str, tensor: Tensor, says: str) -> None:
    updates = WeightUpdates(tiny_model("llama"))
    with pytest.raises(UserError, match=says):
        updates.load(*packed({name: tensor})[0])
    assert updates.is_whole  # nothing was written
    with pytest.raises(UserError, match=says):
        updates.load(*packed({"model.embed_tokens.weight": updates.model.lm_head.weight, name: tensor}, 10**9)[0])
    assert not updates.is_whole


def test_after_an_update_that_was_not_completed_the_next_starts_afresh() -> None:
    own = tiny_model("llama")
    weights, updates = own.state_dict(), WeightUpdates(own)
    norm = weights.pop("model.norm.weight")
    with pytest.raises(UserError, match=r"left out 1 weights .* 'model.norm.weight'"):
        [updates.load(*one) for one in packed(weights)]
    assert not updates.is_whole
    with pytest.raises(UserError, match=r"left out \d\d weights"):  # what the first has written does not count
        updates.load(*packed({"model.norm.weight": norm})[0])
    assert not updates.is_whole
    [updates.load(*one) for one in packed(own.state_dict())]
    assert updates.is_whole


def test_packed_experts_are_refused() -> None:
    config = {
        "vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 4, "intermediate_size": 8, "moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2,
    }  # fmt: skip
    with pytest.raises(UserError, match=r"packs its experts \('model.layers.0.mlp.experts.gate_up_proj'\)"):
        check_names(Qwen3MoeForCausalLM(Qwen3MoeConfig(**config)))
    check_names(tiny_model("llama"))
