"""Plan: a job on a card, as a table, whether it fits, and how long it takes if every completion has its full length.

Decoding is the cost model's (:mod:`sparse_rl_lightning.calibration.cost`). The learner takes at least what its matrix
products do: 2 per weight and token forward, as many again for the gradient of what comes in and, where weights are
trained, for theirs; attention computes half of a square. Prompts being read, rewards, the optimizer's step and what the
learner's products with quantized weights or inputs in the host's memory take longer are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from sparse_rl_lightning.calibration import CostModel, ModelShape, Work
from sparse_rl_lightning.compressors import FullKV
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.planning.cards import Card
from sparse_rl_lightning.planning.job import Job
from sparse_rl_lightning.planning.memory import (
    CONTEXT,
    LOST,
    Phases,
    learner,
    likely_bytes,
    parts_of,
    slot_size,
    states,
)
from sparse_rl_lightning.policies.quantized import BLOCK
from sparse_rl_lightning.text import duration, table

PHASES = ("rollout", "forward and backward", "optimizer's step")
PACKED = {"int8": 1.0, "nf4": 0.5 + 4 / BLOCK}
"""Bytes of a quantized weight with its scale."""


@dataclass(frozen=True)
class Plan:
    """What a job is predicted to take on every GPU."""

    job: Job
    card: Card
    parts: dict[str, Phases]
    slots: int  # sequences decoded at the same time

    @cached_property
    def phases(self) -> dict[str, float]:
        """Bytes of each phase, with what CUDA and the allocator take."""
        counts = map(sum, zip(*self.parts.values(), strict=True))
        return {phase: CONTEXT + (1 + LOST) * count for phase, count in zip(PHASES, counts, strict=True)}

    @property
    def peak(self) -> float:
        """Bytes of the largest phase."""
        return max(self.phases.values())

    @property
    def fits(self) -> bool:
        """Whether the card holds the largest phase."""
        return self.peak <= self.card.memory

    def of(self, name: str) -> int:
        """The most bytes in any phase of the parts whose name begins so."""
        return sum(max(phases) for title, phases in self.parts.items() if title.startswith(name))

    @property
    def full_cache(self) -> int:
        """Bytes of the cache if as many sequences kept all of their tokens, and nothing beside."""
        return slot_size(replace(self.job, compressor=FullKV(), retriever=None)).of(self.slots)

    @property
    def host(self) -> float:
        """Bytes in the host's memory: what the optimizer, the weights, the learner's layers or rollouts keep there."""
        return states(self.job).host + learner(self.job).host + likely_bytes(self.job)

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Seconds by part of a rollout and all that is learned from it; a UserError for layers without a price."""
        job, flops = self.job, self.card.hardware.flops
        return {
            "rollout": rollout_seconds(job, self.card, self.slots),
            "rescoring": forward_flops(job) * rescored(job) / flops,
            "learner": forward_flops(job) * passes(job) * job.block.num_iterations / flops,
        }

    @property
    def verdict(self) -> str:
        """One line: whether it fits."""
        share = self.peak / self.card.memory
        return (
            f"{'Fits' if self.fits else 'Does not fit'}: {gigabytes(self.peak)} GB of the "
            f"{gigabytes(self.card.memory)} GB of {self.card.name}, {share:.0%}."
        )

    @property
    def text(self) -> str:
        """The table of memory, the time, and the verdict."""
        lost = [CONTEXT + LOST / (1 + LOST) * (count - CONTEXT) for count in self.phases.values()]
        counts: dict[str, Iterable[float]] = {
            **self.parts, "CUDA context and fragmentation": lost, "total": self.phases.values()
        }  # fmt: skip
        rows = [(name, *map(gigabytes, phases)) for name, phases in counts.items()]
        host = f"In the host's memory besides: {gigabytes(self.host)} GB per GPU.\n" if self.host else ""
        memory = table([("GB per GPU", *PHASES), *rows], "lrrr")
        return f"{memory}\n{host}{self.caches}\n{self.timing}\n{self.verdict}"

    @property
    def caches(self) -> str:
        """One line: the cache, and what as many sequences would take that keep everything."""
        return (
            f"The cache of {self.slots} sequences of {self.job.length} tokens takes {gigabytes(self.of('cache'))} GB, "
            f"a full cache would take {gigabytes(self.full_cache)} GB."
        )

    @property
    def timing(self) -> str:
        """Two lines: the time, or why none is predicted."""
        try:
            seconds = self.seconds
        except UserError as error:
            return f"No time is predicted. {error}"
        times = ", ".join(f"{name} {duration(count)}" for name, count in seconds.items())
        steps = self.job.block.optimizer_steps
        per_step, count = sum(seconds.values()) / steps, self.job.num_steps
        whole = ""
        if count is not None:
            hours, rollouts = per_step * count / 3600, math.ceil(count / steps)
            whole = f", {hours:.1f} hours for all {count}, in {rollouts:,} rollout(s)"
        return (
            f"If all {self.job.sequences} completions of a rollout have "
            f"{self.job.sampling.max_completion_length} tokens: {times};\n"
            f"{duration(per_step)} for each of {steps} optimizer steps{whole}. Predicted, not measured."
        )


def make_plan(job: Job, card: Card) -> Plan:
    """Predict a job on a card."""
    return Plan(job, card, *parts_of(job, card.memory))


def gigabytes(count: float) -> str:
    """Bytes as gigabytes (1e9) with one digit."""
    return f"{count / 1e9:.1f}"


def rollout_seconds(job: Job, card: Card, slots: int) -> float:
    """Decoding all sequences, in turns of as many as there are slots."""
    shape = ModelShape.of(job.blueprint.config, kv_bytes=job.geometry.kv_dtype.itemsize)
    packed, computed = PACKED.get(job.blueprint.quantization or ""), job.compute_dtype.itemsize
    shape = replace(shape, weight_bytes=computed if packed is None else packed + 2 * computed)  # then written and read
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
