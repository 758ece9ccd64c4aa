"""Memory of a job on one GPU, by part and by phase: the rollout, the learner's passes, the optimizer's step.

Nothing that has a shape is priced by hand. Weights, adapters, gradients and the optimizer's state are those of the
model on torch's meta device; slots come from the sampler's own memory plan, the learner's passes from its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from sparse_rl_lightning.cache.compression import Compression
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.learner.forward import LearnerOptions
from sparse_rl_lightning.learner.memory import LearnerBytes, MicroBatch, learner_bytes
from sparse_rl_lightning.planning.blueprint import Blueprint, empty_model
from sparse_rl_lightning.planning.job import CUDA, Job
from sparse_rl_lightning.policies.routing import Routers, RoutingShape
from sparse_rl_lightning.policies.support import check_full_layers, check_length
from sparse_rl_lightning.retrieval.cache import with_pages
from sparse_rl_lightning.rollout.engine.decoders.choice import choose_decoder, decoder_bytes
from sparse_rl_lightning.rollout.engine.memory import SlotBytes, drawing_bytes, plan_slots, record_bytes, slot_bytes
from sparse_rl_lightning.rollout.engine.scheduler import steps_past_end

CONTEXT = 1_000_000_000
"""Bytes taken for CUDA's context, loaded kernels and the workspaces of cuBLAS; not measured here."""

LOST = 0.05
"""Share of all other bytes taken for what the allocator cannot use again; not measured here."""

MOST_PREFILLED = 16384
"""Tokens of prompts that are read at once, the sampler's ``max_prefill_tokens``."""

BLOCK_BYTES = 30
"""Bytes of a rollout per token: ids (8), log-probs (4 each) of up to three policies, masks, weights, advantages."""

LIKELY_BYTES = 8
"""Bytes of one of a token's most likely tokens in the host's memory: id (4) and log-prob (4)."""

COMPARED_BYTES = 36
"""Bytes of one of them in the learner's pass: its id in 64 bits, two log-probs, and five temporaries."""


Phases = tuple[int, int, int]
"""Bytes in the rollout, in the learner's forward and backward passes, and in the optimizer's step."""


@dataclass(frozen=True)
class States:
    """Bytes of one rank between two steps, and what the optimizer's step takes for a moment."""

    weights: float
    gradients: float
    optimizer: float
    temporary: float
    host: float = 0  # in the host's memory

    @property
    def total(self) -> float:
        """What stays."""
        return self.weights + self.gradients + self.optimizer


def parts_of(job: Job, memory: float) -> tuple[dict[str, Phases], int]:
    """The parts of a job and its number of slots; they depend on the card if ``memory_limit`` is a share of it."""
    model, g, of_head = job.model, job.geometry, job.rollout.head_in_float32
    copies = decoder_bytes(model, g, job.length, choose_decoder(model, job.rollout.decoder), of_head)
    shadow = nbytes(model.parameters()) if job.sharding.stage == 3 else 0  # read by rollouts
    state, reference, slot = states(job), reference_bytes(job), slot_size(job)
    count = num_slots(job, slot, memory - CONTEXT - state.total - reference - shadow - copies)
    logits = torch.promote_types(g.dtype, torch.float32) if of_head else g.dtype
    drawing = 2 * drawing_bytes(count, model.config.vocab_size, job.sampling, logits)
    record = record_bytes(g, job.sequences, job.length) if job.compressor.evicts else 0
    kept, routed = job.rollout.keep_pool, routing(job)
    compared = job.micro_batch.rows * job.length * job.sampling.top_logprobs * COMPARED_BYTES
    choices = 0 if routed is None else routed.num_layers * routed.top_k * routed.dtype.itemsize
    parts = {
        "weights" if job.blueprint.adapters is None else "weights and adapters": _always(state.weights),
        "gradients": _always(state.gradients),
        "optimizer's state": _always(state.optimizer),
        "reference policy": _always(reference),
        "token buffers": _always(job.sequences * job.length * (BLOCK_BYTES + choices)),
        "the most likely tokens": (0, compared, 0),
        "eviction record": (record, record // 2, record // 2 * job.keeps_evictions),
        "whole copy of sharded weights": _always(shadow),
        "copies of weights for decoding": _always(copies, kept),
        f"cache, {count} slots": _always(slot.of(count), kept),
        "logits of a decode step": _always(drawing, kept),
        "prefill": (prefill_bytes(job), 0, 0),
        "activations of the learner": (0, learner(job).peak, 0),
        "temporaries of the optimizer": (0, 0, round(state.temporary)),
    }
    return {name: phases for name, phases in parts.items() if any(phases)}, count


def likely_bytes(job: Job) -> int:
    """The sampler's most likely tokens of a rollout, in the host's memory; ids, then log-probs are joined there."""
    return job.sequences * job.length * job.sampling.top_logprobs * LIKELY_BYTES * 3 // 2


def _always(count: float, kept: bool = True) -> Phases:
    """The same bytes in the rollout and, if they are kept, in the other phases."""
    return round(count), round(count * kept), round(count * kept)


# ---------------------------------------------------------------- what is trained


def states(job: Job) -> States:
    """Weights, gradients and the optimizer's state of one rank.

    DeepSpeed's optimizer has float32 weights of its own beside those in 16 bits and, in its step, float32 gradients.
    Stage 1 shares what belongs to the optimizer, stage 2 the gradients too, stage 3 the weights too.
    """
    model, shard = job.model, job.sharding
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    weights, buffers, gradients = nbytes(model.parameters()), nbytes(model.buffers()), nbytes(trained)
    if shard.stage == 0:
        both = 2 if shard.ranks > 1 else 1  # DDP's buckets are a second copy
        return States(weights + buffers, both * gradients, *optimizer_bytes(job, trained))
    master = [nn.Parameter(parameter.detach().float()) for parameter in trained]
    copies = 0 if job.dtype == torch.float32 else 2 * nbytes(master)
    state, temporary = optimizer_bytes(job, master)
    share = [1 / shard.ranks if shard.stage >= stage else 1.0 for stage in (1, 2, 3)]
    sharded = States(
        weights * share[2] + buffers, gradients * share[1], (state + copies) * share[0], temporary * share[0]
    )
    if shard.offloads_optimizer:
        sharded = replace(sharded, optimizer=0, temporary=0, host=sharded.optimizer)
    if shard.offloads_weights:
        sharded = replace(sharded, weights=buffers, host=sharded.host + sharded.weights - buffers)
    return sharded


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
    copies = [nn.Parameter(parameter.detach()) for parameter in parameters]
    try:
        optimizer = job.optimizer(copies)
    except RuntimeError as error:
        raise UserError(
            f"model.optimizer cannot be made on tensors without memory: {error} Plan with fused: null, whose state is "
            "as large."
        ) from error
    for parameter in copies:
        parameter.grad = torch.empty_like(parameter)
    with contextlib.suppress(RuntimeError):  # one that reads a number in its step has made its state by then
        optimizer.step()
    state = nbytes(
        value for owned in optimizer.state.values() for value in owned.values()
        if isinstance(value, Tensor) and value.is_meta
    )  # fmt: skip
    group: dict[str, Any] = optimizer.param_groups[0]
    if group.get("fused"):
        return state, 0
    at_once = "foreach" in group and group["foreach"] is not False
    return state, nbytes(copies) if at_once else 3 * max(parameter.nbytes for parameter in copies)


def reference_bytes(job: Job) -> int:
    """The whole reference policy of the KL penalty on every rank, in a type no wider than the policy's.

    LoRA's is the policy itself.
    """
    if job.beta == 0 or job.blueprint.adapters is not None:
        return 0
    dtype = min(job.dtype, job.blueprint.stored_dtype, key=lambda candidate: candidate.itemsize)
    return nbytes(empty_model(job.blueprint, dtype).parameters())


# ---------------------------------------------------------------- the rollout


def slot_size(job: Job) -> SlotBytes:
    """The memory of the sampler's slots, without copies of weights and logits.

    Raises:
        ValueError: If windows leave no layer to evict from, or positions do not reach this far.
    """
    g, model, length = job.geometry, job.model, job.length + steps_past_end(CUDA)
    check_length(model, job.length)
    if job.compressor.evicts or job.retriever is not None:
        check_full_layers(model, job.length, type(job.retriever or job.compressor).__name__)
    size = Compression(job.compressor, g.num_layers).cache_size(g, 1, job.prompt, length)
    if job.retriever is not None:
        size = with_pages(size, job.retriever)
    return slot_bytes(g, size, job.sampling, routed=routing(job))


def routing(job: Job) -> RoutingShape | None:
    """The sizes of the record of experts, None without one."""
    return Routers(job.model).shape if job.rollout.record_routing else None


def num_slots(job: Job, slot: SlotBytes, free: float) -> int:
    """Sequences decoded at the same time, as many as the rollout's ``memory_limit`` allows of ``free`` bytes."""
    most, limit = min(job.rollout.num_slots or job.sequences, job.sequences), job.rollout.memory_limit
    if limit is None:
        return most
    allowed = limit if limit > 1 else max(2, round(limit * free))  # up to 1 it would be a share again
    return plan_slots(slot, allowed, most).num_slots


def prefill_bytes(job: Job) -> int:
    """Reading prompts: the widest activations of a layer, and the keys and values that are staged.

    Of a pack of prompts they are those of one layer. Of a prompt that is read in chunks they are those of all layers,
    and all its tokens, or as many as a window has.
    """
    config, g, count = job.blueprint.config, job.geometry, min(MOST_PREFILLED, job.block.prompts * job.prompt)
    dense: int = getattr(config, "intermediate_size", 0)
    routed: int = getattr(config, "moe_intermediate_size", dense) * (getattr(config, "num_experts_per_tok", 0) or 0)
    shared: int = getattr(config, "shared_expert_intermediate_size", 0)
    width = max(dense, routed + shared)
    in_chunks = g.num_layers * job.prompt + len(g.window_layers) * min(job.prompt, g.window)
    staged = in_chunks if job.prompt > MOST_PREFILLED else count
    entry = 2 * g.num_kv_heads * g.head_dim
    return int(count * (3 * width + 4 * config.hidden_size) + staged * entry) * g.dtype.itemsize


# ---------------------------------------------------------------- the learner


def learner(job: Job) -> LearnerBytes:
    """The learner's largest forward and backward pass, with what is there for all parts of a micro-batch.

    Autograd keeps a sum of the parts' gradients until it has the last; checkpointing keeps what it keeps of each part.

    Raises:
        ValueError: If the pass needs more than shapes, or windows need masks.
    """
    if any(0 < window <= job.length for window in job.geometry.windows):
        raise UserError(
            f"sparse-rl plan does not know what sliding windows (of {job.blueprint.config.model_type!r}) take in the "
            f"learner: their masks of {job.length} x {job.length} depend on the attention's kernel. DryRun measures it."
        )
    types = (job.dtype, job.autocast, job.is_of_one_type)
    one_pass = _learner(job.blueprint, job.micro_batch, job.learner, *types)
    if job.parts == 1:
        return one_pass
    parameters, kept = job.model.parameters(), 0
    if job.learner.gradient_checkpointing == "selective":
        plain = replace(job.learner, gradient_checkpointing=True)
        kept = one_pass.kept - _learner(job.blueprint, job.micro_batch, plain, *types).kept
    summed = nbytes(parameter for parameter in parameters if parameter.requires_grad)
    return LearnerBytes(one_pass.kept, one_pass.peak + summed + (job.parts - 1) * kept, one_pass.host * job.parts)


@lru_cache(maxsize=256)
def _learner(
    blueprint: Blueprint, micro_batch: MicroBatch, options: LearnerOptions, dtype: torch.dtype,
    autocast: torch.dtype | None, of_one_type: bool,
) -> LearnerBytes:  # fmt: skip
    adapt = partial(blueprint.adapt, of_one_type=of_one_type)
    try:
        return learner_bytes(blueprint.config, micro_batch, options, dtype, autocast, adapt)
    except RuntimeError as error:
        raise UserError(
            f"The learner's pass over {blueprint.config.model_type!r} cannot be counted without numbers in {dtype}: "
            f"{error} Experts can in 16 bits: give the policy dtype: bfloat16."
        ) from error
