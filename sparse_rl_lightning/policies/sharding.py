"""Whole weights of a policy that is sharded over ranks (DeepSpeed's ZeRO-3, FSDP2), one layer at a time.

All functions that gather are collective: all ranks must call them at the same point.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.policies.patched import is_patched, refusal

_LAYER = re.compile(r".*?\blayers\.\d+\.")


def is_sharded(model: nn.Module) -> bool:
    """Whether a rank has only parts of the weights."""
    return any(hasattr(parameter, "ds_id") or isinstance(parameter, DTensor) for parameter in model.parameters())


def whole_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every weight by name, whole and valid until the next one; iterate to the end on all ranks."""
    for unit in _units(model):
        with gathered([parameter for _, parameter in unit]):
            for name, parameter in unit:
                yield name, parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()


def gathered(parameters: list[nn.Parameter], modifier: int | None = None) -> AbstractContextManager[Any]:
    """Keep ZeRO-3 parameters whole inside the context, and afterwards share what rank ``modifier`` wrote into them."""
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):
        return nullcontext()
    from deepspeed import zero

    context: AbstractContextManager[Any] = zero.GatheredParameters(parameters, modifier_rank=modifier)
    return context


def write_whole(parameter: nn.Parameter, value: Tensor) -> None:
    """Write a whole weight, the same on all ranks, into a parameter of which a rank may have a part. Collective."""
    if isinstance(parameter, DTensor):
        layout = (parameter.device_mesh, parameter.placements)
        parameter.copy_(distribute_tensor(value.to(parameter.dtype), *layout, src_data_rank=None))
        return
    with gathered([parameter], modifier=0):
        if parameter.numel():
            parameter.copy_(value)


def of_all_ranks(value: Any) -> list[Any]:
    """Every rank's value on all ranks, in rank order; only its own without a process group. Collective."""
    if not torch.distributed.is_initialized():
        return [value]
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def shard_fully(module: nn.Module, policy: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Shard a module's policy with FSDP2: decoder layers one by one, everything else when a step of the module runs.

    The mesh is one-dimensional, of the ranks that share the weights.
    """
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    decoder: Any = policy.get_decoder()
    for layer in decoder.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    for step in ("training_step", "validation_step", "test_step", "predict_step"):
        register_fsdp_forward_method(module, step)


def own_bytes(model: nn.Module) -> int:
    """The number of bytes of weights that this rank keeps between two steps."""
    return sum(part_of(parameter).nbytes for parameter in model.parameters())


def part_of(tensor: Tensor) -> Tensor:
    """What this rank keeps of a weight, or of an optimizer's state, between two steps."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    shard: Tensor | None = getattr(tensor, "ds_tensor", None)
    return tensor if shard is None else shard


class ShadowPolicy:
    """A whole copy of a sharded policy that rollouts read, filled once per rollout.

    Filling goes layer by layer, so that besides the copy at most one layer is whole. The copy keeps its memory
    addresses, on which CUDA graphs and weights packed for decoding rely, unless it is released in between.

    Args:
        policy: Sharded policy. All ranks must create the shadow at the same point.
        dtype: Type of the copy, None for the policy's type.

    Raises:
        ValueError: If the policy has adapters, or modules with a replaced ``forward``, which a copy would lack.
    """

    def __init__(self, policy: PreTrainedModel, dtype: torch.dtype | None = None) -> None:
        if getattr(policy, "peft_config", None):
            raise UserError(
                "LoraPolicy is not supported where weights are sharded (ZeRO-3, FSDP2): few weights are trained, so "
                "ZeRO-2 shards all that is large. Use --trainer.strategy=sparse_rl_deepspeed_stage_2."
            )
        for module in policy.modules():
            if is_patched(module):
                raise UserError(f"{refusal(module)} Where weights are sharded no module's forward may be replaced.")
        self.policy = policy
        self.version: int | None = None  # version of the weights inside, None without any
        self.model = _twin(policy, dtype)
        self._shapes = {name: parameter.shape for name, parameter in self.model.named_parameters()}

    @property
    def nbytes(self) -> int:
        """The number of bytes of the copy's weights."""
        return sum(parameter.nbytes for parameter in self.model.parameters())

    @torch.no_grad()
    def fill(self, version: int) -> None:
        """Copy the policy's weights; does nothing if ``version`` is inside already."""
        if self.version == version:
            return
        targets = dict(self.model.named_parameters())
        for name, value in whole_weights(self.policy):
            target = targets[name]
            if target.shape != self._shapes[name]:  # released
                target.data = torch.empty(self._shapes[name], dtype=target.dtype, device=target.device)
            target.copy_(value)
        self.version = version

    def release(self) -> None:
        """Free the weights' memory."""
        self.version = None
        for parameter in self.model.parameters():
            parameter.data = parameter.data.new_empty(0)


def _twin(policy: PreTrainedModel, dtype: torch.dtype | None) -> PreTrainedModel:
    """A frozen model of the same kind with uninitialized weights."""
    with torch.device("meta"):
        twin: PreTrainedModel = type(policy)(copy.deepcopy(policy.config))
    first = next(policy.parameters())
    nn.Module.to(twin, dtype or first.dtype)  # transformers' wrapper hides the signature
    twin.to_empty(device=first.device)
    twin.tie_weights()
    buffers = dict(policy.named_buffers())
    for name, _ in list(twin.named_buffers()):
        owner, _, short = name.rpartition(".")
        setattr(twin.get_submodule(owner), short, buffers[name].clone())
    twin.requires_grad_(False)
    twin.eval()
    return twin


def _units(model: nn.Module) -> list[list[tuple[str, nn.Parameter]]]:
    """Named parameters, grouped by decoder layer."""
    units: dict[str, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in model.named_parameters():
        layer = _LAYER.match(name)
        units.setdefault(layer[0] if layer else name, []).append((name, parameter))
    return list(units.values())
