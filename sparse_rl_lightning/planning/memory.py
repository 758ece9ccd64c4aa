"""Memory of a job on one GPU, by part and by phase: the rollout, the learner's passes, the optimizer's step.

Nothing that has a shape is priced by hand. Weights, adapters, gradients and the optimizer's state are those of the
model on torch's meta device; slots come from the sampler's own memory plan, the learner's passes from its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from sparse_rl_lightning.cache.compression import Trigger
from sparse_rl_lightning.cache.slots import CacheSize
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.learner.forward import LearnerOptions
from sparse_rl_lightning.learner.memory import LearnerBytes, MicroBatch, learner_bytes
from sparse_rl_lightning.planning.blueprint import Blueprint, empty_model
from sparse_rl_lightning.planning.job import Job
from sparse_rl_lightning.retrieval.cache import with_pages
from sparse_rl_lightning.rollout.engine.decoders.choice import choose_way, decoder_bytes
from sparse_rl_lightning.rollout.engine.memory import SlotBytes, drawing_bytes, plan_slots, slot_bytes
from sparse_rl_lightning.rollout.engine.scheduler import steps_past_end

CONTEXT = 1_000_000_000
"""Bytes taken for CUDA's context, loaded kernels and the workspaces of cuBLAS; not measured here."""

LOST = 0.05
"""Share of all other bytes taken for what the allocator cannot use again; not measured here."""

MOST_PREFILLED = 16384
"""Tokens of prompts that are read at once, the sampler's ``max_prefill_tokens``."""

BLOCK_BYTES = 30
"""Bytes of a rollout per token: ids (8), log-probs (4 each) of up to three policies, masks, weights, advantages."""


@dataclass(frozen=True)
class Part:
    """Bytes of one thing in each phase."""

    name: str
    rollout: int = 0
    passes: int = 0  # the learner's forward and backward passes
    step: int = 0

    @classmethod
    def always(cls, name: str, count: float) -> Part:
        """What stays through all phases."""
        return cls(name, round(count), round(count), round(count))


@dataclass(frozen=True)
class States:
    """Bytes of one rank between two steps, and what the optimizer's step takes for a moment."""

    weights: float
    gradients: float
    optimizer: float
    temporary: float

    @property
    def total(self) -> float:
        """What stays."""
        return self.weights + self.gradients + self.optimizer


def parts_of(job: Job, memory: float) -> tuple[tuple[Part, ...], int]:
    """The parts of a job and its number of slots; they depend on the card if ``memory_limit`` is a share of it."""
    held, reference, shadow, copies = states(job), reference_bytes(job), shadow_bytes(job), copied_bytes(job)
    count = num_slots(job, memory - CONTEXT - held.total - reference - shadow - copies)
    kept = job.rollout.keep_pool

    def of_sampler(name: str, count: int) -> Part:
        return Part(name, count, kept * count, kept * count)

    lora = " and adapters" if job.blueprint.adapters is not None else ""
    found = (
        Part.always(f"weights{lora}", held.weights),
        Part.always("gradients", held.gradients),
        Part.always("optimizer's state", held.optimizer),
        Part.always("reference policy", reference),
        Part.always("the rollout's tokens", BLOCK_BYTES * job.sequences * job.length),
        Part.always("whole copy of sharded weights", shadow),
        of_sampler("copies of weights for decoding", copies),
        of_sampler(f"cache, {count} slots", slot_size(job).of(count)),
        of_sampler("logits of a decode step", 2 * drawing(job, count)),
        Part("prompts being read", rollout=prefill_bytes(job)),
        Part("activations of the learner", passes=learner(job).peak),
        Part("temporaries of the optimizer", step=round(held.temporary)),
    )
    return tuple(part for part in found if max(part.rollout, part.passes, part.step)), count


# ---------------------------------------------------------------- what is trained


def states(job: Job) -> States:
    """Weights, gradients and the optimizer's state of one rank.

    DeepSpeed's optimizer has float32 weights of its own beside those in 16 bits and, in its step, float32 gradients.
    Stage 1 shares what belongs to the optimizer, stage 2 the gradients too, stage 3 the weights too.
    """
    model, shard = empty_model(job.blueprint, job.dtype), job.sharding
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    weights, gradients = nbytes(model.parameters()), nbytes(trained)
    if shard.stage == 0:
        both = 2 if shard.ranks > 1 else 1  # DDP's buckets are a second copy
        return States(weights, both * gradients, *optimizer_bytes(job, trained))
    master = [nn.Parameter(parameter.detach().float()) for parameter in trained]
    own = 0 if job.dtype == torch.float32 else 2 * nbytes(master)
    state, temporary = optimizer_bytes(job, master)
    share = [1 / shard.ranks if shard.stage >= stage else 1.0 for stage in (1, 2, 3)]
    if shard.offloads_optimizer:
        state = own = temporary = 0
    return States(
        0 if shard.offloads_weights else weights * share[2], gradients * share[1], (state + own) * share[0],
        temporary * share[0],
    )  # fmt: skip


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors, as they are stored: the one place where the size of a weight is taken from its type."""
    return sum(tensor.nbytes for tensor in tensors)


def optimizer_bytes(job: Job, parameters: list[nn.Parameter]) -> tuple[int, int]:
    """Bytes of the state after a step on these parameters of the meta device, and of the step's temporaries.

    Torch's optimizers that go over all parameters at once (``foreach``, on GPUs the default) need as much again as the
    parameters for a moment; those that go one by one, up to three times the largest.

    Raises:
        ValueError: If the optimizer cannot be made without a GPU.
    """
    own = [nn.Parameter(parameter.detach()) for parameter in parameters]
    try:
        made = job.optimizer(own)
    except RuntimeError as error:
        raise UserError(
            f"model.optimizer cannot be made on tensors without memory: {error} Plan with fused: null, whose state is "
            "as large."
        ) from error
    for parameter in own:
        parameter.grad = torch.empty_like(parameter)
    with contextlib.suppress(RuntimeError):  # one that reads a number in its step has made its state by then
        made.step()
    state = nbytes(
        value for owned in made.state.values() for value in owned.values()
        if isinstance(value, Tensor) and value.is_meta
    )  # fmt: skip
    group: dict[str, Any] = made.param_groups[0]
    if group.get("fused"):
        return state, 0
    at_once = "foreach" in group and group["foreach"] is not False
    return state, nbytes(own) if at_once else 3 * max(parameter.nbytes for parameter in own)


def reference_bytes(job: Job) -> int:
    """The whole reference policy of the KL penalty on every rank, as it is loaded; LoRA's is the policy itself."""
    if job.beta == 0 or job.blueprint.adapters is not None:
        return 0
    return nbytes(empty_model(job.blueprint, job.blueprint.loaded_dtype).parameters())


# ---------------------------------------------------------------- the rollout


def slot_size(job: Job) -> SlotBytes:
    """The memory of the sampler's slots, without copies of weights and logits."""
    g, length = job.geometry, job.length + steps_past_end(job.geometry.device)
    capacities = Trigger(job.compressor, g.num_layers).capacities(job.prompt, length)
    size = CacheSize.of(job.compressor, g, 1, capacities, length)
    if job.retriever is not None:
        size = with_pages(size, job.retriever)
    return slot_bytes(g, size, job.sampling)


def num_slots(job: Job, free: float) -> int:
    """Sequences decoded at the same time, as many as the rollout's ``memory_limit`` allows of ``free`` bytes."""
    most, limit = min(job.rollout.num_slots or job.sequences, job.sequences), job.rollout.memory_limit
    if limit is None:
        return most
    given = limit if isinstance(limit, int) else max(1, round(limit * free))
    return plan_slots(slot_size(job), given, most).num_slots


def drawing(job: Job, count: int) -> int:
    """Logits of a decode step, and what a draw makes of them."""
    kind = torch.promote_types(job.compute_dtype, torch.float32) if job.rollout.head_in_float32 else job.compute_dtype
    return drawing_bytes(count, job.blueprint.shape.vocab_size, job.sampling, kind)


def copied_bytes(job: Job) -> int:
    """Copies of weights that the sampler's decoder makes."""
    model = empty_model(job.blueprint, job.dtype)
    way = choose_way(model, job.rollout.decoder)
    return decoder_bytes(model, job.geometry, job.length, way, job.rollout.head_in_float32)


def shadow_bytes(job: Job) -> int:
    """The whole copy that rollouts read where ranks share the weights (stage 3)."""
    return nbytes(empty_model(job.blueprint, job.dtype).parameters()) if job.sharding.stage == 3 else 0


def prefill_bytes(job: Job) -> int:
    """Reading prompts: the widest activations of a layer, and the keys and values that it stages, for a pack."""
    s, count = job.blueprint.shape, min(MOST_PREFILLED, job.prompts * job.prompt)
    per_token = 3 * s.intermediate_size + 4 * s.hidden_size + 2 * s.num_kv_heads * s.head_dim
    return count * per_token * job.compute_dtype.itemsize


# ---------------------------------------------------------------- the learner


def learner(job: Job) -> LearnerBytes:
    """The learner's largest forward and backward pass."""
    return _learner(job.blueprint, job.micro_batch, job.learner, job.dtype, job.autocast)


@lru_cache(maxsize=256)
def _learner(
    blueprint: Blueprint, part: MicroBatch, options: LearnerOptions, dtype: torch.dtype, autocast: torch.dtype | None
) -> LearnerBytes:
    adapt = None if blueprint.adapters is None else blueprint.adapt
    return learner_bytes(blueprint.config, part, options, dtype, autocast, adapt)
