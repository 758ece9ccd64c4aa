"""Weights in buckets: every bit arrives, and an update that is not of the whole model is an error."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator

import pytest
import torch
from torch import Tensor

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.integrations.verl.weights import Bucket, WeightUpdate, buckets, tensors
from sparse_rl_lightning.testing import tiny_model


def packed(weights: dict[str, Tensor], num_bytes: int = 10_000) -> list[tuple[Bucket, bool]]:
    async def each() -> AsyncIterator[tuple[str, Tensor]]:
        for item in weights.items():
            yield item

    async def collect() -> list[tuple[Bucket, bool]]:
        return [pickle.loads(pickle.dumps(one)) async for one in buckets(each(), num_bytes)]

    return asyncio.run(collect())


def test_tensors_come_back_bit_by_bit() -> None:
    weights = {
        "a": torch.randn(5, 7).bfloat16(), "b": torch.randn(30, 40)[:, ::2], "c": torch.tensor(3.5),
        "d": torch.arange(6, dtype=torch.float16).view(2, 3).T, "e": torch.zeros(0, 4), "f": torch.randn(9000),
    }  # fmt: skip
    sent = packed(weights)
    assert [is_last for _, is_last in sent] == [False] * (len(sent) - 1) + [True]
    assert [list(bucket) for bucket, _ in sent] == [["a", "b", "c", "d", "e"], ["f"]]
    back = dict(item for bucket, _ in sent for item in tensors(bucket))
    for name, tensor in weights.items():
        assert back[name].dtype == tensor.dtype
        torch.testing.assert_close(back[name], tensor, rtol=0, atol=0)


def test_an_update_is_of_the_whole_model() -> None:
    own, other = tiny_model("llama"), tiny_model("llama", seed=1)
    weights = {name: p.detach().bfloat16() for name, p in other.named_parameters()}  # the head is the embedding
    assert "lm_head.weight" not in weights
    update = WeightUpdate(own)
    for bucket, _ in packed(weights):
        update.load(bucket)
    update.finish()
    for name, parameter in own.named_parameters():
        torch.testing.assert_close(parameter.detach(), weights[name].float(), rtol=0, atol=0)
    both = WeightUpdate(own)
    for bucket, _ in packed(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}):
        both.load(bucket)
    both.finish()


def test_what_does_not_fit_is_an_error() -> None:
    weights = {name: p.detach() for name, p in tiny_model("llama").named_parameters()}
    for name, tensor, says in (
        ("model.adapter.weight", torch.zeros(2), "no weight of this name: .*lora.merge=true"),
        ("model.norm.weight", torch.zeros(2), r"shape \(2,\), and the server's model has \(64,\)"),
    ):
        with pytest.raises(UserError, match=says):
            WeightUpdate(tiny_model("llama")).load(packed({name: tensor})[0][0])
    del weights["model.norm.weight"]
    update = WeightUpdate(tiny_model("llama"))
    for bucket, _ in packed(weights):
        update.load(bucket)
    with pytest.raises(UserError, match=r"left out 1 weights .* 'model.norm.weight'"):
        update.finish()
