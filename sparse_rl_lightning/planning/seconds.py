"""Seconds of a rollout and of learning from it, if every completion has its full length.

Decoding is the cost model's (:mod:`sparse_rl_lightning.calibration.cost`). The learner takes at least what its matrix
products do: 2 per weight and token forward, as many again for the gradient of what comes in and, where weights are
trained, for theirs; attention computes half of a square. Prompts being read, rewards, the optimizer's step and what the
learner's products with quantized weights or inputs in the host's memory take longer are left out.
"""

from __future__ import annotations

from dataclasses import replace

from sparse_rl_lightning.calibration import CostModel, ModelShape, Work
from sparse_rl_lightning.planning.cards import Card
from sparse_rl_lightning.planning.job import Job
from sparse_rl_lightning.policies.quantized import BLOCK

PACKED = {"int8": 1.0, "nf4": 0.5 + 4 / BLOCK}
"""Bytes of a quantized weight with its scale."""


def seconds_of(job: Job, card: Card, slots: int) -> dict[str, float]:
    """Seconds by part, of one rollout and of all that is learned from it."""
    return {
        "rollout": rollout_seconds(job, card, slots),
        "rescoring": forward_flops(job) * rescored(job) / card.hardware.flops,
        "learner": forward_flops(job) * passes(job) * job.block.num_iterations / card.hardware.flops,
    }


def rollout_seconds(job: Job, card: Card, slots: int) -> float:
    """Decoding all sequences, in turns of as many as there are slots."""
    shape = ModelShape.of(job.blueprint.config, kv_bytes=job.geometry.kv_dtype.itemsize)
    packed, made = PACKED.get(job.blueprint.quantization or ""), job.compute_dtype.itemsize
    shape = replace(shape, weight_bytes=made if packed is None else packed + 2 * made)  # then written and read
    work = Work(slots, job.prompt, job.sampling.max_completion_length)
    method = job.retriever or job.compressor
    tokens = -(-job.sequences // slots) * slots * job.sampling.max_completion_length
    return tokens / CostModel(shape, card.hardware).tokens_per_second(method, work)


def forward_flops(job: Job) -> float:
    """Floating-point operations of a forward pass over all sequences that are trained on."""
    products = 2.0 * ModelShape.of(job.blueprint.config).weights_read * job.length
    return job.block.sequences * products + attention_flops(job)


def attention_flops(job: Job) -> float:
    """Those of attention among them."""
    s = ModelShape.of(job.blueprint.config)
    return job.block.sequences * 2 * s.num_layers * s.num_heads * s.head_dim * job.length**2


def passes(job: Job) -> float:
    """Forward passes that one pass over the rollout costs, backward and what is computed again counted as such."""
    again, how = job.parts > 1, job.learner.gradient_checkpointing
    layers = 1 - attention_flops(job) / forward_flops(job) if how == "selective" else bool(how)
    return (3 if job.blueprint.adapters is None else 2) + again + layers


def rescored(job: Job) -> float:
    """Forward passes without gradient: the sequences of all but the first optimizer step, and the reference policy."""
    steps = job.block.optimizer_steps / job.block.num_iterations
    return max(0.0, 1 - 1 / steps) + (job.beta > 0)
