"""Settings that save memory, each tried by predicting the job with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.planning.job import Job
from sparse_rl_lightning.planning.plan import Plan, gigabytes, make_plan

LORA: tuple[tuple[str, object], ...] = (
    ("target_modules", "all-linear"), ("r", 16), ("lora_alpha", 32.0), ("lora_dropout", 0.0),
)  # fmt: skip
"""Adapters as ``LoraPolicy`` adds them by default."""


@dataclass(frozen=True)
class Change:
    """A setting that differs."""

    setting: str  # as on the command line, or in words where it is more than one key
    job: Job


Knob = Callable[[Job], Iterator[Change]]
"""What one setting can be changed to, the mildest change first."""


def free_the_pool(job: Job) -> Iterator[Change]:
    """The slots' memory is the learner's while it works."""
    if job.rollout.keep_pool and job.rollout.partial_rollout_steps is None:
        yield Change("model.rollout.keep_pool=false", _rollout(job, keep_pool=False))


def step_one_by_one(job: Job) -> Iterator[Change]:
    """The optimizer goes over parameters one by one."""
    if isinstance(job.optimizer, partial) and "foreach" in job.optimizer.keywords:
        if job.optimizer.keywords["foreach"] is not False and not job.optimizer.keywords.get("fused"):
            yield Change(
                "model.optimizer.init_args.foreach=false",
                replace(job, optimizer=partial(job.optimizer, foreach=False)),
            )


def shorter_passes(job: Job) -> Iterator[Change]:
    """Fewer sequences in a forward pass, down to one."""
    rows = job.micro_batch.rows
    while rows > 1 and (job.sharding.stage < 3):
        rows //= 2
        tokens = rows * job.length
        yield Change(f"model.learner.micro_batch_tokens={tokens}", _learner(job, micro_batch_tokens=tokens))


def fewer_logits(job: Job) -> Iterator[Change]:
    """Logits of fewer tokens at once."""
    if job.learner.head_chunk_size > 128:
        yield Change("model.learner.head_chunk_size=128", _learner(job, head_chunk_size=128))


def checkpoint(job: Job) -> Iterator[Change]:
    """Layers are computed again in the backward pass."""
    if not job.learner.gradient_checkpointing:
        yield Change("model.learner.gradient_checkpointing=true", _learner(job, gradient_checkpointing=True))


def fewer_slots(job: Job) -> Iterator[Change]:
    """Half as many sequences at a time, down to 8."""
    count = min(job.rollout.num_slots or job.sequences, job.sequences)
    while count > 8:
        count //= 2
        yield Change(f"model.rollout.num_slots={count}", _rollout(job, num_slots=count))


def smaller_budget(job: Job) -> Iterator[Change]:
    """Half the budget, as far as the compressor allows, down to 256 tokens."""
    budget = job.compressor.schedule.plain
    while job.compressor.evicts and isinstance(budget, int) and budget >= 512:
        budget //= 2
        try:
            smaller = job.compressor.with_budget(budget)
        except UserError:
            return
        yield Change(f"model.compressor.init_args.budget={budget}", replace(job, compressor=smaller))


def no_reference(job: Job) -> Iterator[Change]:
    """No penalty, so no reference policy."""
    if job.beta:
        yield Change("model.loss.beta=0", replace(job, beta=0.0))


def share_more(job: Job) -> Iterator[Change]:
    """The next stages of ZeRO, where there are ranks to share with."""
    last = 2 if job.learner.packs or job.blueprint.adapters is not None else 3
    for stage in range(job.sharding.stage + 1, last + 1 if job.sharding.ranks > 1 else 0):
        yield Change(
            f"trainer.strategy=sparse_rl_deepspeed_stage_{stage}",
            replace(job, sharding=replace(job.sharding, stage=stage)),
        )


def adapters(job: Job) -> Iterator[Change]:
    """Adapters on frozen weights in 16 bits, in place of training all weights."""
    if job.blueprint.adapters is None and job.sharding.stage < 3:
        lora = replace(job.blueprint, dtype="bfloat16", adapters=LORA)
        yield Change("model.policy of LoraPolicy, its base with dtype bfloat16", replace(job, blueprint=lora))


KNOBS: tuple[Knob, ...] = (
    free_the_pool, step_one_by_one, shorter_passes, fewer_logits, checkpoint, fewer_slots, smaller_budget, share_more,
    no_reference, adapters,
)  # fmt: skip
"""Knobs, those that cost least first."""


def best_knob(plan: Plan) -> tuple[Change, Plan] | None:
    """The change that helps most: the first that makes the job fit, or else the one that saves most; None if none does.

    Of a knob the mildest change that fits counts, else its furthest.
    """
    found: list[tuple[Change, Plan]] = []
    for knob in KNOBS:
        for change in knob(plan.job):
            other = make_plan(change.job, plan.card)
            if other.fits:
                return change, other
            found.append((change, other))
    best = min(found, key=lambda pair: pair[1].peak, default=None)
    return best if best is not None and best[1].peak < plan.peak else None


def advice(plan: Plan) -> str:
    """The sentence for a plan that does not fit."""
    best = best_knob(plan)
    if best is None:
        return "No setting known here saves memory: use a larger card, more of them, or a smaller model."
    change, other = best
    after = "fits" if other.fits else "alone does not fit either"
    return f"What helps most: {change.setting}, with which it takes {gigabytes(other.peak)} GB and {after}."


def _rollout(job: Job, **changes: object) -> Job:
    return replace(job, rollout=replace(job.rollout, **changes))  # type: ignore[arg-type]


def _learner(job: Job, **changes: object) -> Job:
    return replace(job, learner=replace(job.learner, **changes))  # type: ignore[arg-type]
