"""A configuration for a model, a card and a length: the first in a stated order of preference that fits.

What is last in :func:`levels` is given up first: what only costs time before what the policy learns from.
"""

from __future__ import annotations

import math
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from jsonargparse import get_loader

from sparse_rl_lightning.compressors import RKV
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.learner.block import BlockPlan
from sparse_rl_lightning.learner.checkpointing import Checkpointing
from sparse_rl_lightning.learner.forward import LearnerOptions
from sparse_rl_lightning.planning.blueprint import Blueprint, known_name
from sparse_rl_lightning.planning.cards import Card
from sparse_rl_lightning.planning.job import MOST_TOKENS, PROMPT, Job
from sparse_rl_lightning.planning.knobs import BITS, FORMS, tell, word
from sparse_rl_lightning.planning.plan import Plan, gigabytes, make_plan
from sparse_rl_lightning.policies.quantized import Quantization
from sparse_rl_lightning.rollout import RolloutOptions, SamplingParams
from sparse_rl_lightning.text import printable

PROMPTS, GENERATIONS, OPTIMIZER_STEPS, BUFFER, ALL_STEPS = 16, 8, 2, 128, 400
"""Prompts of a rollout, samples of each, optimizer steps of a rollout, tokens of the buffer, steps of the run."""
JUDGED = (
    "Right answers were counted for another model and share, Qwen2.5-Coder-0.5B on GSM8K: RKV answered 73 of 256 "
    "questions with 192 + 32 of 381 tokens, 45 with 128 + 32, the full cache 74 (docs, measured/accuracy)."
)
"""What is known of how a budget and answers go together, beside the budget that is proposed."""


def levels(length: int) -> dict[str, tuple[Any, ...]]:
    """The arguments of :func:`job_of` with their values, most preferred first; the last argument is given up first.

    Budgets are at most an eighth of the length.
    """
    largest = 1 << (length // 8).bit_length() - 1
    return {
        "trains_all": (True, False),
        "budget": tuple(b for b in (largest, largest // 2, largest // 4) if b >= 256) or (256,),
        "quantization": BITS,
        "slots": (128, 64, 32, 16),
        "checkpointing": FORMS,
        "rows": (4, 2, 1),
        "chunk": (512, 128),
        "foreach": (None, False),
        "keep_pool": (True, False),
    }


def job_of(
    model: str, length: int, *, trains_all: bool, budget: int, quantization: Quantization | None, slots: int,
    checkpointing: Checkpointing, rows: int, chunk: int, foreach: bool | None, keep_pool: bool,
) -> Job:  # fmt: skip
    """The job of a model with sequences of up to ``length`` tokens, ``rows`` of them in a micro-batch."""
    adapters = () if quantization is None else (("quantization", quantization),)
    slots = slots if quantization is None else max(slots, 32)  # whose every step makes whole weights of the packed ones
    steps = PROMPTS * GENERATIONS // rows
    return Job(
        Blueprint(model, "float32") if trains_all else Blueprint(model, "bfloat16", adapters),
        RKV(budget=budget, buffer=BUFFER),
        SamplingParams(num_generations=GENERATIONS, max_completion_length=length - PROMPT),
        RolloutOptions(num_slots=slots, keep_pool=keep_pool),
        LearnerOptions(rows * length, chunk, gradient_checkpointing=checkpointing),
        partial(torch.optim.AdamW, weight_decay=0.0, foreach=foreach),
        BlockPlan(PROMPTS, GENERATIONS, steps, 1, steps // OPTIMIZER_STEPS, packs=True), precision="bf16-mixed",
        num_steps=ALL_STEPS,
    )  # fmt: skip


def propose(model: str, card: Card, length: int) -> Plan:
    """The plan of the first choice that fits.

    Level by level it takes the first value with which the job fits while all later levels are at their leanest.

    Args:
        model: Hub name or folder.
        card: What it is to fit.
        length: Tokens of the longest sequence, prompt included.

    Raises:
        ValueError: If nothing fits, with the leanest choice and the length that would.
    """
    if not 2 * PROMPT <= length <= MOST_TOKENS:
        raise UserError(
            f"--length must be at least {2 * PROMPT}, prompt of {PROMPT} included, and at most {MOST_TOKENS}, "
            f"got {length}."
        )
    tell("what takes least memory")
    best, chosen = _leanest(model, card, length)
    if not best.fits:
        raise UserError(_nearest_miss(best))
    for name, options in levels(length).items():
        for value in options[:-1]:
            tell(f"{name}: {word(value)}")
            plan = _tried(job_of(model, length, **(chosen | {name: value})), card)
            if plan is not None and plan.fits:
                best, chosen[name] = plan, value
                break
    return best


def _tried(job: Job, card: Card) -> Plan | None:
    """The plan of a job, None if its form cannot be counted, such as experts in float32: then it is not proposed."""
    try:
        return make_plan(job, card)
    except UserError:
        return None


def _leanest(model: str, card: Card, length: int) -> tuple[Plan, dict[str, Any]]:
    chosen = {name: options[-1] for name, options in levels(length).items()}
    return make_plan(job_of(model, length, **chosen), card), chosen


def _nearest_miss(plan: Plan) -> str:
    """What to say of the leanest choice if it does not fit."""
    job, card = plan.job, plan.card
    shorter = job.length // 2
    while shorter >= 2 * PROMPT:
        tell(f"--length {shorter}, since {job.length} does not fit")
        if _leanest(job.blueprint.path, card, shorter)[0].fits:
            break
        shorter //= 2
    remedy = f"--length {shorter} fits. Or give" if shorter >= 2 * PROMPT else "No shorter length fits. Give"
    return (
        f"{job.blueprint.path} does not fit {card.memory / 1e9:g} GB at --length {job.length}. The leanest choice "
        f"takes {gigabytes(plan.peak)} GB: adapters on weights in {job.blueprint.quantization}, {plan.slots} slots "
        f"with a budget of {job.compressor.schedule.plain}, one sequence at a time in the learner, what its "
        "layers keep in the host's memory. "
        f"{remedy} a larger --memory or a smaller model."
    )


def configuration(plan: Plan, output: Path) -> str:
    """The YAML of a proposal for this file, the prediction and the command that writes it again at its head."""
    job, path = plan.job, plan.job.blueprint.path
    full, bits, learner = job.blueprint.adapters is None, job.blueprint.quantization, job.learner
    policy = f"{{class_path: PretrainedPolicy, init_args: {{path: {_scalar(path)}, dtype: {job.blueprint.dtype}}}}}"
    if not full:
        policy = f"{{class_path: LoraPolicy, init_args: {{policy: {policy}, r: 16, quantization: {word(bits)}}}}}"
    what = "All weights" if full else f"Adapters on weights in {bits}" if bits else "Adapters"
    size = f"{plan.card.memory / 1e9:g}"
    again = ["plan", "--model", path, "--memory", f"{size}GB", "--length", str(job.length), "--output", str(output)]
    head = [
        f"{what} of {path} on a card of {size} GB, sequences of up to {job.length} tokens.",
        f"Written by `sparse-rl {shlex.join(again)}`.",
        f"  sparse-rl fit --config {shlex.quote(str(output))}",
        f"The budget is {job.compressor.schedule.plain} of {job.length} tokens. {JUDGED}",
        "Data: GSM8K's training problems as published, or others. All figures are predicted, none measured on a GPU:",
        *plan.text.splitlines(),
    ]
    body = _YAML.format(
        policy=policy, budget=job.compressor.schedule.plain, buffer=BUFFER, generations=GENERATIONS,
        completion=job.sampling.max_completion_length, slots=job.rollout.num_slots, prompts=PROMPTS,
        folder=_scalar(f"runs/{output.stem}"),
        ends='end_tokens: ["<|im_end|>"], ' if (known_name(path) or "").startswith("qwen") else "",
        keep=word(job.rollout.keep_pool), micro_batches=job.block.steps_per_generation,
        tokens=learner.micro_batch_tokens, chunk=learner.head_chunk_size, accumulate=job.block.accumulate,
        checkpointing=word(learner.gradient_checkpointing), rate="1.0e-6" if full else "1.0e-5",
        steps=job.num_steps, foreach=word(job.optimizer.keywords["foreach"]),  # type: ignore[attr-defined]  # a partial, which its type does not say
    )  # fmt: skip
    return "".join(f"# {printable(line)}".rstrip() + "\n" for line in head) + body


def _scalar(text: str) -> str:
    """Text as a value in YAML: as it is where it reads as itself between others, else in quotes."""
    try:
        is_plain = get_loader("yaml")(f"{{value: {text}, next: 0}}") == {"value": text, "next": 0}
    except yaml.YAMLError:
        is_plain = False
    return text if is_plain else yaml.safe_dump(text, default_style='"', width=math.inf, allow_unicode=True).rstrip()


_YAML = """\
seed_everything: 0
model:
  class_path: SparseGRPO
  init_args:
    policy: {policy}
    compressor: {{class_path: RKV, init_args: {{budget: {budget}, buffer: {buffer}}}}}
    reward_funcs: sparse_rl_lightning.rewards.boxed_math_reward
    sampling: {{num_generations: {generations}, max_completion_length: {completion}}}
    rollout: {{{ends}num_slots: {slots}, keep_pool: {keep}}}
    steps_per_generation: {micro_batches}
    learner: {{micro_batch_tokens: {tokens}, head_chunk_size: {chunk}, gradient_checkpointing: {checkpointing}}}
    optimizer: {{class_path: torch.optim.AdamW, init_args: {{lr: {rate}, weight_decay: 0.0, foreach: {foreach}}}}}
data:
  class_path: JsonlPrompts
  init_args:
    path: train.jsonl
    prompt_column: question
    answer_pattern: gsm8k
    prompt_template: "{{prompt}}\\nPlease reason step by step, and put your final answer within \\\\boxed{{{{}}}}."
    as_chat: true
    prompts_per_rollout: {prompts}
trainer:
  accelerator: gpu
  devices: 1
  precision: bf16-mixed
  default_root_dir: {folder}
  max_steps: {steps}
  accumulate_grad_batches: {accumulate}
  gradient_clip_val: 1.0
  log_every_n_steps: 1
  callbacks:
    - {{class_path: ImportanceReweighting, init_args: {{clip_max: 1.5}}}}
    - {{class_path: RolloutProgress}}
    - {{class_path: RolloutCheckpoint}}
"""
