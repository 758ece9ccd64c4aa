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


async def buckets(weights: AsyncIterator[tuple[str, Tensor]], num_bytes: int) -> AsyncIterator[tuple[Bucket, bool]]:
    """Buckets of about this many bytes, one tensor at least, and whether each is the last."""
    bucket: Bucket = {}
    size = 0
    async for name, tensor in weights:
        if bucket and size + tensor.nbytes > num_bytes:
            yield bucket, False
            bucket, size = {}, 0
        data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        bucket[name] = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)
        size += tensor.nbytes
    yield bucket, True


def tensors(bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a bucket by name."""
    for name, (kind, shape, data) in bucket.items():
        yield name, torch.tensor(data).view(getattr(torch, kind)).view(shape)


class WeightUpdate:
    """One update of a model's weights, which comes in buckets and must be of all of them.

    Args:
        model: Model to update in place.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.own = {name: p.data for name, p in model.named_parameters(remove_duplicate=False)}
        self.written: set[int] = set()

    def load(self, bucket: Bucket) -> None:
        """Write these weights.

        Raises:
            ValueError: If the model has no such weight, or one of another shape.
        """
        for name, tensor in tensors(bucket):
            own = self.own.get(name)
            if own is None or own.shape != tensor.shape:
                has = "no weight of this name" if own is None else f"{tuple(own.shape)}"
                raise UserError(
                    f"The actor sent the weight {name!r} of shape {tuple(tensor.shape)}, and the server's model has "
                    f"{has}: both must be of one model, with adapters merged (actor_rollout_ref.model.lora.merge=true)."
                )
            own.copy_(tensor)
            self.written.add(own.data_ptr())

    def finish(self) -> None:
        """Check that no weight is missing.

        Raises:
            ValueError: If one is.
        """
        if missing := [name for name, own in self.own.items() if own.data_ptr() not in self.written]:
            raise UserError(
                f"The actor's update left out {len(missing)} weights of the server's model, the first is "
                f"{missing[0]!r}: it would draw with old and new ones."
            )
