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


class WeightUpdates:
    """The updates of a model's weights: each comes in buckets, is kept in the host's memory, and is checked whole.

    Args:
        model: Model to update in place.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._new: dict[str, Tensor] | None = None  # of the update that is coming, by name

    def take(self, bucket: Bucket, is_first: bool) -> None:
        """Keep these weights; the first bucket of an update forgets one that was not completed.

        Raises:
            ValueError: If the model has no such weight, or one of another shape, or no update has begun; what has come
                of the update is forgotten.
        """
        if is_first:
            self._new = {}
        if self._new is None:
            raise UserError(
                "No update of the weights has begun, or it was given up: send all from the first bucket on."
            )
        new, weights = self._new, self.model.state_dict()
        self.drop()
        for name, tensor in tensors(bucket):
            weight = weights.get(name)
            if weight is None or weight.shape != tensor.shape:
                has = "no weight of this name" if weight is None else f"{tuple(weight.shape)}"
                raise UserError(
                    f"The actor sent the weight {name!r} of shape {tuple(tensor.shape)}, and the server's model has "
                    f"{has}: both must be of one model, with adapters merged (actor_rollout_ref.model.lora.merge=true)."
                )
            new[name] = tensor.to(weight.dtype)
        self._new = new

    def drop(self) -> None:
        """Forget an update."""
        self._new = None

    def whole(self) -> dict[str, Tensor]:
        """The weights of the update, which is over; none is kept here.

        Raises:
            ValueError: If one is missing.
        """
        weights, new = self.model.state_dict(), self._new or {}
        self.drop()
        sent = {weights[name].data_ptr() for name in new}  # of tied weights one is enough
        if missing := [name for name, weight in weights.items() if weight.data_ptr() not in sent]:
            raise UserError(
                f"The actor's update left out {len(missing)} weights of the server's model, the first is "
                f"{missing[0]!r}: it would draw with old and new ones."
            )
        return new

    def write(self, new: dict[str, Tensor]) -> None:
        """Copy the weights of a whole update into the model."""
        weights = self.model.state_dict()
        for name, tensor in new.items():
            weights[name].copy_(tensor)
