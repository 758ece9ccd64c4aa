"""What keys and values of eight bits cost in precision: the sampler against its exact replay.

    python -m benchmarks.float8 [--stories FOLDER] [--save docs]

Under replay the learner sees what the sampler saw, unrounded, so what is left between the two is rounding. Beside it
stands what the compression itself costs, the dense policy against the sampler in float32. ``--save`` writes the table
between its markers in design.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import PreTrainedModel

from benchmarks.common import options
from benchmarks.common.pages import insert, machine, mark
from benchmarks.common.tables import Table
from benchmarks.compressors.texts import default_stories, load
from sparse_rl_lightning import Rollout, RolloutSampler, SamplingParams, replay_logprobs
from sparse_rl_lightning.compressors import SnapKV
from sparse_rl_lightning.corrections import consistency_log_ratio, mismatch_statistics
from sparse_rl_lightning.logprobs import sequence_logprobs
from sparse_rl_lightning.testing import tiny_model

PAGE, BEGIN = "design.md", mark("benchmarks.float8")
METHOD = SnapKV(budget=32, buffer=16, window=8)
KINDS = ("bfloat16", "float8_e4m3fn")
OPENINGS = ("Once upon a time, there was a little girl named Lily.", "Tom and his dog", "The sun was hot and")
Case = tuple[str, PreTrainedModel, list[list[int]], int]  # name, policy, prompts, completion length


def cases(stories: Path, length: int | None) -> Iterator[Case]:
    """Random weights always, the small Llama where it is."""
    prompts = [list(range(5, 5 + n)) for n in (3, 17, 9, 40, 1)]
    yield "random weights", tiny_model(initializer_range=0.1, eos_token_id=None), prompts, length or 60
    if (stories / "config.json").is_file():
        model, tokenizer = load(stories)
        yield stories.name, model, [tokenizer(text)["input_ids"] for text in OPENINGS], length or 120


def distance(logprobs: torch.Tensor, rollout: Rollout) -> list[str]:
    """k1 and k3 of these log-probs to the sampler's, and the 5th percentile of the ratio."""
    mask = rollout.completion_mask
    statistics = mismatch_statistics(consistency_log_ratio(logprobs, rollout.sampler_logprobs, mask), mask)
    k1, k3, p05 = (float(statistics[f"mismatch/{name}"]) for name in ("kl_k1", "kl_k3", "ratio_p05"))
    return [f"{k1:.2g}", f"{k3:.2g}", f"{p05:.3f}"]


@torch.no_grad()
def measured(case: Case, table: Table) -> None:
    """A row for each type of keys and values, and one for the compression."""
    name, policy, prompts, length = case
    params = SamplingParams(num_generations=8, max_completion_length=length, seed=5)
    for storage in (None, *KINDS):
        rollout = RolloutSampler(policy, METHOD, kv_dtype=storage).generate(prompts, params)
        tokens = f"{int(rollout.completion_mask.sum()):,}"
        if storage is None:
            dense = sequence_logprobs(policy, rollout.sequences, rollout.completion_mask)[0]
            table.add(name, tokens, "compression alone, float32", *distance(dense, rollout))
        else:
            table.add(name, tokens, storage, *distance(replay_logprobs(policy, rollout), rollout))


def main() -> None:
    """Measure, and print or save the table."""
    parser = options.parser(__doc__, PAGE)
    parser.add_argument("--stories", type=Path, default=default_stories(), help="a folder with stories260K")
    parser.add_argument("--length", type=int, help="completion tokens, for a quick look")
    args = options.parsed(parser)
    torch.set_num_threads(1)
    columns = ["model", "completion tokens", "keys and values", "k1", "k3", "P5"]
    table = Table("Eight bits", columns, f"{machine('cpu')}.")
    for case in cases(args.stories, args.length):
        measured(case, table)
    print(table)
    if args.save:
        insert(args.save / PAGE, table.untitled, BEGIN)


if __name__ == "__main__":
    main()
