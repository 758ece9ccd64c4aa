"""SparseReplica: verl's replica of a rollout server, one actor on the device of one of verl's workers."""

from __future__ import annotations

from typing import Any

import ray
from verl.plugin.platform import get_platform
from verl.utils.device import get_resource_name
from verl.workers.rollout.replica import RolloutReplica

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.integrations.verl.options import NAME, sampler_options
from sparse_rl_lightning.integrations.verl.server import SparseServer


class SparseReplica(RolloutReplica):  # type: ignore[misc]  # verl has no types that mypy knows
    """One server on the GPU of one of verl's workers.

    Raises:
        ValueError: As :func:`~sparse_rl_lightning.integrations.verl.options.sampler_options`, or for the server of a
            reward model or a teacher.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.is_reward_model or self.is_teacher_model:
            raise UserError(
                "This rollout draws the actor's completions: serve reward models and teachers with another."
            )
        sampler_options(self.config)  # refused here, and not in an actor's log

    async def launch_servers(self) -> None:
        """Start the server where the worker is, on the device that it has."""
        node, devices = await self.workers[0].__ray_call__.remote(_place)
        unset = {name: "1" for name in get_platform().ray_noset_envvars()}  # else Ray hides the worker's device
        server = ray.remote(SparseServer).options(
            scheduling_strategy=ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False),
            runtime_env={"env_vars": {**unset, get_platform().visible_devices_envvar(): ",".join(devices)}},
            name=server_name(self.replica_rank),
            max_concurrency=self.max_concurrency,
        )
        self.servers = [server.remote(self.config, self.model_config)]
        await self.servers[0].__ray_ready__.remote()  # an error of its start is raised here
        self._server_handle, self._server_address = self.servers[0], server_name(self.replica_rank)


def server_name(replica_rank: int) -> str:
    """The name of a server's actor."""
    return f"{NAME}_server_{replica_rank}_0"


def _place(worker: Any) -> tuple[str, list[str]]:
    """The node and the devices of the worker in which this runs."""
    context = ray.get_runtime_context()
    return context.get_node_id(), list(context.get_accelerator_ids().get(get_resource_name(), []))
