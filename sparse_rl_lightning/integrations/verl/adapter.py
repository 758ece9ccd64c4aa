"""SparseAdapter: the part of a rollout in verl's training workers, which hands weights to the server."""

from __future__ import annotations

import os
from typing import Any

import ray
import torch
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.utils import ensure_async_iterator

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.integrations.verl.replica import server_name
from sparse_rl_lightning.integrations.verl.weights import buckets


class SparseAdapter(BaseRollout):  # type: ignore[misc]  # verl has no types that mypy knows
    """Sends the weights of a worker, which has them whole, to the server of its rank."""

    is_leader_rank = True  # a replica is one worker

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank

    @property
    def server(self) -> Any:
        """The actor, which starts after this."""
        return ray.get_actor(server_name(self.replica_rank))

    async def resume(self, tags: list[str]) -> None:
        """Bring back what the server gave up: ``weights`` or ``kv_cache``."""
        await self.server.wake_up.remote(tags=tags)

    async def release(self) -> None:
        """Let the server give up its memory."""
        await self.server.sleep.remote()

    @torch.no_grad()
    async def update_weights(
        self, weights: Any, wire_format: str = "named_tensors", global_steps: int | None = None, **kwargs: Any
    ) -> None:
        """Send all weights through the host's memory, bucket by bucket.

        Raises:
            ValueError: If they are an adapter's, or differences to the last ones.
        """
        if wire_format != "named_tensors" or kwargs.get("peft_config") is not None:
            raise UserError(
                "This rollout takes whole weights: set actor_rollout_ref.model.lora.merge=true with adapters, and no "
                "checkpoint_engine.backend=delta_sharded."
            )
        num_bytes = int(self.config.checkpoint_engine.update_weights_bucket_megabytes) << 20
        async for bucket, is_first, is_last in buckets(ensure_async_iterator(weights), num_bytes):
            await self.server.load_weights.remote(bucket, is_first, is_last)
        if global_steps is not None:
            await self.server.set_global_steps.remote(global_steps)
