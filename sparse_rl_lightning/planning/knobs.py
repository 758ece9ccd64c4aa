"""Settings that save memory, each tried by predicting the job with it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.learner.checkpointing import Checkpointing
from sparse_rl_lightning.planning.blueprint import Blueprint
from sparse_rl_lightning.planning.job import Job
from sparse_rl_lightning.planning.plan import Plan, gigabytes, make_plan
from sparse_rl_lightning.policies.quantized import Quantization
from sparse_rl_lightning.text import say

FORMS: tuple[Checkpointing, ...] = (False, "selective", True, "offload")
"""Forms of checkpointing, those that cost least first."""
BITS: tuple[Quantization | None, ...] = (None, "int8", "nf4") if find_spec("bitsandbytes") else (None, "int8")
"""Forms of frozen weights that can be had here, the most exact first."""


def tell(what: str) -> None:
    """Say what is tried next, beside the answer: a prediction takes seconds."""
    say(f"Trying {what}", sys.stderr)


@dataclass(frozen=True)
class Change:
    """A setting that differs."""

    setting: str  # as on the command line, or in words where it is more than one key
    job: Job


def changes(job: Job) -> Iterator[Change]:
    """Settings that save memory, those that cost least first, and of each its mildest change first."""
    yield from _for_time(job)
    yield from _for_what_is_learned(job)


def _for_time(job: Job) -> Iterator[Change]:
    """The slots' memory for the learner; parameters one by one; fewer sequences, logits and activations at a time."""
    if job.rollout.keep_pool and job.rollout.partial_rollout_steps is None:
        yield _set(job, "rollout", "keep_pool", False)
    optimizer = job.optimizer
    if (
        isinstance(optimizer, partial)
        and optimizer.keywords.get("foreach", False) is not False
        and not optimizer.keywords.get("fused")
    ):
        yield Change(
            "model.optimizer.init_args.foreach=false", replace(job, optimizer=partial(optimizer, foreach=False))
        )
    rows = 1 if job.sharding.stage == 3 else job.micro_batch.rows
    while rows > 1:
        rows //= 2
        yield _set(job, "learner", "micro_batch_tokens", rows * job.length)
    if job.learner.head_chunk_size > 128:
        yield _set(job, "learner", "head_chunk_size", 128)
    for form in FORMS[1 + FORMS.index(job.learner.gradient_checkpointing) :]:
        yield _set(job, "learner", "gradient_checkpointing", form)
    count = min(job.rollout.num_slots or job.sequences, job.sequences)
    while count > 8:
        count //= 2
        yield _set(job, "rollout", "num_slots", count)


def _for_what_is_learned(job: Job) -> Iterator[Change]:
    """Budgets as far as the compressor allows, ranks that share, no reference policy, adapters, fewer bits."""
    budget = job.compressor.schedule.plain
    while job.compressor.evicts and isinstance(budget, int) and budget >= 512:
        budget //= 2
        try:
            smaller = job.compressor.with_budget(budget)
        except UserError:
            break
        yield Change(f"model.compressor.init_args.budget={budget}", replace(job, compressor=smaller))
    last = 2 if job.learner.packs or job.blueprint.adapters is not None else 3
    for stage in range(job.sharding.stage + 1, last + 1 if job.sharding.ranks > 1 else 0):
        shared = replace(job, sharding=replace(job.sharding, stage=stage))
        yield Change(f"trainer.strategy=sparse_rl_deepspeed_stage_{stage}", shared)
    if job.beta:
        yield Change("model.loss.beta=0", replace(job, beta=0.0))
    base = job.blueprint
    if base.adapters is None and job.sharding.stage < 3:
        base, words = replace(base, dtype="bfloat16", adapters=()), "model.policy of LoraPolicy, its base of bfloat16"
        yield Change(words, replace(job, blueprint=base))
        yield from (Change(f"{words} and quantization: {bits}", j) for bits, j in _quantized(job, base))
    elif base.adapters is not None:
        yield from (Change(f"model.policy.init_args.quantization={bits}", j) for bits, j in _quantized(job, base))


def _quantized(job: Job, base: Blueprint) -> Iterator[tuple[str, Job]]:
    """The job on a base of fewer bits than this one has."""
    for bits in BITS[1 + BITS.index(base.quantization) :]:
        adapters = {**dict(base.adapters or ()), "quantization": bits}
        yield str(bits), replace(job, blueprint=replace(base, adapters=(*adapters.items(),)))


def _set(job: Job, group: str, name: str, value: Any) -> Change:
    options: Any = replace(getattr(job, group), **{name: value})
    return Change(f"model.{group}.{name}={word(value)}", replace(job, **{group: options}))


def word(value: object) -> str:
    """A value as YAML has it."""
    return "null" if value is None else str(value).lower()


def best_knob(plan: Plan) -> tuple[Change, Plan] | None:
    """The first change that makes the job fit, or else the one that saves most; None if none does."""
    tried: list[tuple[Change, Plan]] = []
    for change in changes(plan.job):
        tell(change.setting)
        changed = make_plan(change.job, plan.card)
        if changed.fits:
            return change, changed
        tried.append((change, changed))
    best = min(tried, key=lambda pair: pair[1].peak, default=None)
    return best if best is not None and best[1].peak < plan.peak else None


def advice(plan: Plan) -> str:
    """The sentence for a plan that does not fit."""
    best = best_knob(plan)
    if best is None:
        return "No setting known here saves memory: use a larger card, more of them, or a smaller model."
    change, changed = best
    after = "fits" if changed.fits else "alone does not fit either"
    return f"What helps most: {change.setting}, with which it takes {gigabytes(changed.peak)} GB and {after}."
