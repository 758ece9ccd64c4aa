"""Weights on their way to a server: buckets of bytes, which Ray sends without copies, and their place in the model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sparse_rl_lightning.errors import UserError

Bucket = dict[str, tuple[str, tuple[int, ...], Any]]
"""Name of a type, shape and bytes (n,) of each tensor, by name: numpy has no bfloat16."""


async def buckets(
    weights: AsyncIterator[tuple[str, Tensor]], num_bytes: int
) -> AsyncIterator[tuple[Bucket, bool, bool]]:
    """Buckets of about this many bytes, one tensor at least, and whether each is the first and the last."""
    bucket: Bucket = {}
    size, is_first = 0, True
    async for name, tensor in weights:
        if bucket and size + tensor.nbytes > num_bytes:
            yield bucket, is_first, False
            bucket, size, is_first = {}, 0, False
        data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        bucket[name] = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)
        size += tensor.nbytes
    yield bucket, is_first, True


def tensors(bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a bucket by name."""
    for name, (dtype, shape, data) in bucket.items():
        yield name, torch.tensor(data).view(getattr(torch, dtype)).view(shape)


def check_names(model: PreTrainedModel) -> None:
    """Refuse a model whose weights verl sends under other names than its own.

    Raises:
        ValueError: If it has packed experts.
    """
    packed = [name for name, p in model.named_parameters() if ".mlp.experts." in name and p.dim() == 3]
    if packed and model.config.model_type != "gpt_oss":  # as verl's unfuse_moe_params
        raise UserError(
            f"The model packs its experts ({packed[0]!r}), and verl's actor sends each alone, which this rollout "
            "cannot load. Train a mixture of experts with another rollout of verl (vllm, sglang), or with SparseGRPO."
        )
