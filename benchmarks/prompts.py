"""Prompts read once for all their samples beside separate sequences: forward and backward pass of the learner.

    python -m benchmarks.prompts [--rounds 3] [--threads 1] [--policy FOLDER] [--save docs]

The same tokens, weights and loss; both ways take turns, and the ratio is the median of the rounds'. "Allowed" is the
ratio of multiplications that both ways need: products for every token, causal attention, the head for completions.
``--save`` writes the table between its marks in design.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks import REAL
from benchmarks.common import options
from benchmarks.common.pages import insert, machine, mark, say
from benchmarks.common.tables import Table, median_ratio, met
from sparse_rl_lightning.logprobs import sequence_logprobs
from sparse_rl_lightning.policies.pretrained import load_pretrained
from sparse_rl_lightning.records import Rollout
from sparse_rl_lightning.replay.shared_prompts import shared_statistics

PAGE, BEGIN = "design.md", mark("benchmarks.prompts")
GOAL = 0.8  # of what is allowed
HEADER = ("prompt", "completion", "samples", "precision", "times as fast", "allowed", "share", f">= {GOAL:g}")


class Case(NamedTuple):
    """Samples of one prompt."""

    prompt: int
    completion: int
    samples: int

    def rollout(self, vocabulary: int) -> Rollout:
        """Random tokens."""
        ids = torch.randint(vocabulary, (self.samples, self.prompt + self.completion))
        ids[:, : self.prompt] = ids[0, : self.prompt]
        mask = (torch.arange(ids.shape[1]) >= self.prompt).expand(ids.shape)
        prompts, ended = torch.full((self.samples,), self.prompt), torch.ones(self.samples, dtype=torch.bool)
        return Rollout(ids, prompts, mask, ended, torch.zeros(ids.shape))

    def allowed(self, config: Any) -> float:
        """Multiplications of separate sequences over those of a prompt that is read once."""
        samples, p, c = self.samples, self.prompt, self.completion
        width, head = config.hidden_size, config.hidden_size // config.num_attention_heads
        kv = 2 * head * config.num_key_value_heads
        products = width * (2 * width + kv + 3 * config.intermediate_size) * config.num_hidden_layers
        pair = 2 * width * config.num_hidden_layers  # a query and a key, its logit and its value
        of_prompt, of_completion = products * p + pair * p * p / 2, products * c + pair * (c * p + c * c / 2)
        of_completion += width * config.vocab_size * c
        return samples * (of_prompt + of_completion) / (of_prompt + samples * of_completion)


CASES = (Case(64, 512, 8), Case(512, 256, 8), Case(1024, 256, 8))
QUICK = (Case(24, 8, 2),)


def seconds(policy: PreTrainedModel, forward: Callable[[], tuple[Tensor, Tensor]], mixed: bool) -> float:
    """Of a forward and a backward pass."""
    policy.zero_grad()
    start = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        loss = forward()[0].sum()
    loss.backward()  # type: ignore[no-untyped-call]  # torch's
    return time.perf_counter() - start


def measured(policy: PreTrainedModel, case: Case, mixed: bool, rounds: int) -> list[str]:
    """The cells of a row."""
    rollout = case.rollout(policy.config.vocab_size)
    ways: tuple[Callable[[], tuple[Tensor, Tensor]], ...] = (
        lambda: sequence_logprobs(policy, rollout.sequences, rollout.completion_mask),
        lambda: shared_statistics(policy, False, 1.0, 512, False, rollout),
    )
    times: list[list[float]] = [[], []]
    for turn in range(rounds + 1):
        for which in (0, 1) if turn % 2 else (1, 0):
            took = seconds(policy, ways[which], mixed)
            times[which] += [took] if turn else []  # the first warms up
    ratio, allowed = median_ratio(*times), case.allowed(policy.config)
    say(f"{case}, {'bfloat16' if mixed else 'float32'}: {ratio:.2f} of {allowed:.2f}")
    label = "bfloat16 autocast" if mixed else "float32"
    share = ratio / allowed
    return [*map(str, case), label, f"{ratio:.2f}", f"{allowed:.2f}", f"{100 * share:.0f} %", met(share, GOAL)]


def main() -> None:
    """Measure, and print or save the table."""
    parser = options.parser(__doc__, PAGE, threads=1, rounds=3, quick=True)
    parser.add_argument("--policy", type=Path, default=REAL, help="default: that of make real-model")
    args = options.parsed(parser)
    policy, _ = load_pretrained(str(args.policy), "float32")
    note = f"{machine('cpu')}. {args.policy.name}, medians of {args.rounds} rounds."
    table = Table("Prompts read once", HEADER, note)
    for mixed in (False, True):
        for case in QUICK if args.quick else CASES:
            table.add(*measured(policy, case, mixed, args.rounds))
    print(table)
    if args.save:
        insert(args.save / PAGE, table.untitled, BEGIN)


if __name__ == "__main__":
    main()
