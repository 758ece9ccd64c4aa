"""The claim itself: the same KV memory for the full and for compressed caches, on a real model with long completions.

    python -m benchmarks.equal_memory [--threads 2] [--rounds 2] [--save benchmarks/results]

The memory is what the full cache fills with eight sequences. Every cache has as many slots as fit, and draws twice
as many sequences: slots are refilled as sequences end. Prompts are the task of ``make real`` as chats, completions may
end from 1,500 tokens on and do at 2,500. Caches take turns; numbers are medians over the rounds, ratios those of the
rounds' ratios. The second table is of training steps: a rollout of as many sequences as a step draws, which fill
fewer slots than there are, and what the learner takes for such sequences, one at a time: old log-probs, forward and
backward pass. From that follow the steps of an hour, with all samples learned from and with a part of them
(down-sampling).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from benchmarks import REAL
from benchmarks.common import options
from benchmarks.common.pages import machine, save, say
from benchmarks.common.tables import Table, median_ratio
from examples.stories import Stories
from sparse_rl_lightning import RolloutSampler, SamplingParams
from sparse_rl_lightning.compressors import RKV, Compressor, FullKV
from sparse_rl_lightning.logprobs import sequence_logprobs
from sparse_rl_lightning.policies.pretrained import load_pretrained
from sparse_rl_lightning.rollout.prompts import encode_prompts

TITLE = "Equal memory"
HEADER = (
    "cache", "sequences in flight", "times as many", "tokens/s", "times as fast", "sequences per hour",
    "tokens of a completion", "KV MiB",
)  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """How long completions are, and how many of them."""

    least: int
    most: int
    full_slots: int
    waves: int
    drawn: int  # samples of a training step
    budget: int
    buffer: int


USUAL = Sizes(1500, 2500, full_slots=8, waves=2, drawn=32, budget=128, buffer=32)
QUICK = Sizes(40, 60, full_slots=2, waves=2, drawn=4, budget=24, buffer=8)


STEPS_TITLE = "Training steps per hour"
STEPS_HEADER = ("cache", "rollout, s", "learned", "learner, s", "steps per hour", "times as many")
ONE_OF = (1, 4)
"""Of so many samples one is learned from."""


@dataclass(frozen=True)
class Run:
    """One rollout."""

    slots: int
    sequences: int
    tokens: int
    seconds: float
    kv_bytes: int

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def caches(sizes: Sizes) -> dict[str, Compressor]:
    """Caches by their names."""
    return {"FullKV": FullKV(), f"RKV {sizes.budget} + {sizes.buffer}": RKV(sizes.budget, buffer=sizes.buffer)}


def rolled_out(sampler: RolloutSampler, prompts: list[list[int]], sizes: Sizes, seed: int, drawn: int = 0) -> Run:
    """So many sequences, or as many as keep all slots busy for some waves."""
    params = SamplingParams(max_completion_length=sizes.most, min_completion_length=sizes.least, seed=seed)
    longest = max(map(len, prompts))
    slots = sampler.engine_key(params, drawn or 10**6, longest, before=sampler.memory_plan).size.num_slots
    count = drawn or sizes.waves * slots
    repeated = (prompts * (count // len(prompts) + 1))[:count]
    start = time.perf_counter()
    rollout = sampler.generate(repeated, params)
    seconds = time.perf_counter() - start
    assert rollout.kv is not None
    return Run(slots, count, int(rollout.completion_lengths.sum()), seconds, rollout.kv.peak_bytes)


def full_bytes(model: PreTrainedModel, prompts: list[list[int]], sizes: Sizes) -> int:
    """Bytes of the slots of the full cache."""
    params = SamplingParams(max_completion_length=sizes.most, min_completion_length=sizes.least)
    sampler = RolloutSampler(model, memory_limit=2**50)
    plan = sampler.engine_key(params, sizes.full_slots, max(map(len, prompts))).memory_plan
    assert plan is not None
    return plan.total_bytes


def measured(model: PreTrainedModel, prompts: list[list[int]], sizes: Sizes, rounds: int) -> Iterator[list[Table]]:
    """All caches in turns; the tables after every round."""
    limit, longest = full_bytes(model, prompts, sizes), max(map(len, prompts))
    learner: list[float] = []
    whole, steps = ({name: list[Run]() for name in caches(sizes)} for _ in range(2))
    for turn in range(rounds):
        for name, compressor in list(caches(sizes).items())[:: 1 if turn % 2 == 0 else -1]:
            sampler = RolloutSampler(model, compressor, memory_limit=limit + 1)
            whole[name].append(rolled_out(sampler, prompts, sizes, seed=turn))
            steps[name].append(rolled_out(sampler, prompts, sizes, turn, sizes.drawn))
            say(f"round {turn + 1}, {name}: {whole[name][-1]}, a step's: {steps[name][-1]}")
        last = [runs[-1] for runs in whole.values()]
        mean = sum(run.tokens for run in last) // sum(run.sequences for run in last)
        learner.append(learner_seconds(model, longest + mean))
        memory = f"{limit / 2**20:,.0f} MiB of slots"
        lengths = f"prompts of at most {longest} tokens, completions of {sizes.least:,} to {sizes.most:,}"
        yield [
            table(whole, f"{memory}, {lengths}, {turn + 1} round(s)."),
            steps_table(steps, statistics.median(learner)),
        ]


def table(runs_of: dict[str, list[Run]], note: str) -> Table:
    """A cache each, beside the first."""
    rows, full = Table(TITLE, HEADER, note), next(iter(runs_of.values()))
    for name, runs in runs_of.items():
        ratio = median_ratio([run.rate for run in runs], [run.rate for run in full])
        rows.add(
            name, str(runs[0].slots), f"{runs[0].slots / full[0].slots:.1f}",
            f"{statistics.median(run.rate for run in runs):,.0f}", f"{ratio:.2f}",
            f"{3600 * statistics.median(run.sequences / run.seconds for run in runs):,.0f}",
            f"{statistics.median(run.tokens / run.sequences for run in runs):,.0f}",
            f"{runs[0].kv_bytes / 2**20:,.0f}",
        )  # fmt: skip
    return rows


def learner_seconds(model: PreTrainedModel, length: int) -> float:
    """Of the old log-probs, the forward and the backward pass of a sequence; the first time warms up."""
    ids = torch.randint(model.config.vocab_size, (1, length))
    mask = (torch.arange(length) > 0).expand(ids.shape)
    model.requires_grad_(True)
    for _ in range(2):
        start = time.perf_counter()
        with torch.no_grad():
            sequence_logprobs(model, ids, mask)
        sequence_logprobs(model, ids, mask)[0].sum().backward()  # type: ignore[no-untyped-call]  # torch's
        seconds = time.perf_counter() - start
        model.zero_grad()
    model.requires_grad_(False)
    return seconds


def steps_table(runs_of: dict[str, list[Run]], learner: float) -> Table:
    """Steps per hour by cache and by how many samples are learned from; each run draws a step's."""
    full = next(iter(runs_of.values()))
    drawn = full[0].sequences
    note = f"A step of {drawn} samples, all in flight where there are slots for them"
    rows = Table(STEPS_TITLE, STEPS_HEADER, f"{note}; the learner takes {learner:.1f} s a sequence, one at a time.")
    for learned in (drawn // share for share in ONE_OF):
        for name, runs in runs_of.items():
            steps = [[3600 / (run.seconds + learned * learner) for run in timed] for timed in (runs, full)]
            rollout = statistics.median(run.seconds for run in runs)
            rows.add(
                name, f"{rollout:,.0f}", f"{learned} of {drawn}", f"{learned * learner:,.0f}",
                f"{statistics.median(steps[0]):.1f}", f"{median_ratio(*steps):.2f}",
            )  # fmt: skip
    return rows


def main() -> None:
    """Measure, and print or save the table."""
    parser = options.parser(__doc__, "equal-memory-cpu.md", threads=2, rounds=2, quick=True)
    parser.add_argument("--policy", type=Path, default=REAL, help="default: that of make real-model")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    args = options.parsed(parser)
    if args.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {args.rounds}")
    model, tokenizer = load_pretrained(str(args.policy), args.dtype)
    prompts = encode_prompts(tokenizer, [row["prompt"] for row in Stories(num_words=20, num_train=64).train_rows()])
    for tables in measured(model, prompts, QUICK if args.quick else USUAL, args.rounds):
        text = f"{machine('cpu')}. {args.policy.name} in {args.dtype}.\n\n" + "\n\n".join(map(str, tables))
        save(args.save, "equal-memory-cpu", "benchmarks.equal_memory", text)
    print(text)


if __name__ == "__main__":
    main()
